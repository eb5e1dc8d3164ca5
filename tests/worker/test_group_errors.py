"""What counts as a failed collective, and what NCCL versions are known to be bad."""

from __future__ import annotations

import os
import pathlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic.contract.records.reasons import Code, reason
from elastic.worker.comm import group, nccl
from elastic.worker.comm.errors import FormError, GroupAborted, is_communication_error

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
TORCH = pathlib.Path(torch.__file__).parent


def caught(source: str, place: str, **names: Any) -> Exception:
    """The error that `source` raises when it stands in the file `place`. ``torch.device`` raises from C++."""
    with pytest.raises((RuntimeError, ValueError, KeyError)) as info:
        exec(compile(source, str(place), "exec"), names)
    return info.value


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:94"),
        dist.DistNetworkError("The client socket has failed to connect"),
        dist.DistStoreError("wait timeout after 50ms"),
        GroupAborted("generation 3 is broken"),
        caught("raise RuntimeError(said)", str(TORCH / "distributed/distributed_c10d.py"), said=GLOO),
        caught("raise RuntimeError(said)", str(TORCH / "autograd/graph.py"), said=GLOO),
        caught("raise ValueError(said)", str(TORCH / "distributed/distributed_c10d.py"),
               said="Default process group has not been initialized, please make sure to call init_process_group."),
        caught("raise RuntimeError(said)", str(TORCH / "distributed/distributed_c10d.py"),
               said="[Rank 0]: Ranks 2 failed to pass monitoredBarrier in 5000 ms"),  # with wait_all_ranks
        caught("device(said)", "train.py", device=torch.device, said="gloo/pair.cc: closed"),
    ],
)  # fmt: skip
def test_communication_errors(error: Exception) -> None:
    assert is_communication_error(error)
    outer = KeyError("from a handler")
    outer.__context__ = error
    assert is_communication_error(outer)


@pytest.mark.parametrize(
    "error",
    [
        caught("raise RuntimeError('mat1 and mat2 shapes cannot be multiplied')", str(TORCH / "autograd/graph.py")),
        caught("raise RuntimeError('feature store: Connection refused')", "train.py"),
        caught("raise RuntimeError('feature store: Connection refused')", str(TORCH / "_utils.py")),  # the data loader
        caught("raise RuntimeError('no Gloo here, and no NCCL')", "train.py"),
        caught("device(said)", "train.py", device=torch.device, said="Connection refused"),
        caught("raise KeyError('gloo/')", str(TORCH / "distributed/distributed_c10d.py")),
        caught("raise out_of_memory(said)", str(TORCH / "autograd/graph.py"), out_of_memory=torch.OutOfMemoryError,
               said="CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"),
        caught("raise failed(said)", str(TORCH / "distributed/distributed_c10d.py"), failed=torch.AcceleratorError,
               said="CUDA error: an illegal memory access was encountered"),
        ZeroDivisionError(),
        ValueError("x"),
    ],
)  # fmt: skip
def test_the_users_own_errors(error: Exception) -> None:
    assert not is_communication_error(error)


def test_bad_nccl_versions_are_named() -> None:
    assert nccl.problems((2, 26, 2)) == []
    assert nccl.problems((2, 27, 5, "-cuda12.9")) == []  # as torch says it where NCCL's own version has more to it
    (said,) = nccl.problems((2, 21, 5))
    assert "NCCL 2.21.5 may hang" in said


def test_bad_torch_versions_are_named() -> None:
    assert nccl.problems((2, 27, 5), "2.10.0+cu130") == nccl.problems((2, 27, 5), "2.14.0a0+git1234") == []
    (said,) = nccl.problems((2, 27, 5), "2.9.1")
    assert "torch 2.9.1 is older than 2.10" in said


@pytest.mark.parametrize(("name", "value", "effect"), nccl.HARMFUL)
def test_settings_under_which_recovery_would_not_work_are_named(
    name: str, value: str, effect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    (said,) = nccl.problems((2, 27, 5))
    assert said.startswith(f"{name}={value} {effect}")


def test_torchruns_error_handling_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "problems", list)
    for name in (*nccl.QUIET_TORCH, *nccl.QUIET_NCCL):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.delenv("NCCL_ASYNC_ERROR_HANDLING", raising=False)
    with pytest.warns(UserWarning, match="TORCH_NCCL_ASYNC_ERROR_HANDLING=1 is set to 0"):
        nccl.prepare()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    nccl.prepare()


def unknown_host(timeout_s: float) -> group.Group:
    return group.Group(
        backend="gloo",
        rank=0,
        world_size=2,
        store_host="node7.invalid",
        store_port=2222,
        generation=3,
        timeout_s=60.0,
        form_timeout_s=timeout_s,
    )


def asked(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], Any]) -> list[str]:
    """`answer` takes the place of the name servers."""
    names: list[str] = []

    def getaddrinfo(host: str, port: int, **_: Any) -> Any:
        names.append(host)
        return answer()

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(group, "RESOLVE_AGAIN_S", 0.001)
    return names


def not_known() -> Any:
    raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


def test_a_name_server_that_fails_costs_the_generation_and_not_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    names = asked(monkeypatch, not_known)
    with pytest.raises(FormError) as caught:
        unknown_host(0.2).form()
    assert caught.value.why == reason(Code.STORE_UNKNOWN, node="node7.invalid", within_s=0.2)
    assert len(names) > 1


def test_group_forming_can_be_aborted_during_a_hung_name_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    asking = threading.Event()

    def hang() -> Any:
        asking.set()
        end.wait(60)
        return []

    asked(monkeypatch, hang)
    try:
        with pytest.raises(GroupAborted):
            unknown_host(60.0).form(asking.is_set)
    finally:
        end.set()
