"""What counts as a failed collective, and what NCCL versions are known to be bad."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from elastic.worker import group


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:94"),
        dist.DistNetworkError("The client socket has failed to connect"),
        dist.DistStoreError("wait timeout after 50ms"),
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
        RuntimeError("Timed out waiting 1000ms for recv operation to complete"),
        ValueError("Default process group has not been initialized, please make sure to call init_process_group."),
        group.LetGoError("generation 3 is broken"),
    ],
)
def test_communication_errors(error: Exception) -> None:
    assert group.is_communication_error(error)
    outer = KeyError("from a handler")
    outer.__context__ = error
    assert group.is_communication_error(outer)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), KeyError("gloo"), ZeroDivisionError(), ValueError("x")],
)
def test_the_users_own_errors(error: Exception) -> None:
    assert not group.is_communication_error(error)


def test_bad_nccl_versions_are_named() -> None:
    assert group.nccl_problems((2, 26, 2)) == []
    assert "NCCL 2.21.5 may hang" in group.nccl_problems((2, 21, 5))[0]


def test_torchruns_error_handling_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "nccl_problems", list)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.delenv("NCCL_ASYNC_ERROR_HANDLING", raising=False)
    with pytest.warns(UserWarning, match="TORCH_NCCL_ASYNC_ERROR_HANDLING=1 is set to 0"):
        group.prepare_nccl()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    group.prepare_nccl()


class FakeNccl:
    """ProcessGroupNCCL's documented calls: several aborts go between one group start and end."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log = log
        self.name = name

    def _group_start(self) -> None:
        self.log.append("start")

    def _group_end(self) -> None:
        self.log.append("end")

    def abort(self) -> None:
        self.log.append(self.name)
        if self.name == "broken":
            raise RuntimeError("NCCL error: unhandled system error")


class FakeGroup:
    def __init__(self, backend: FakeNccl | None) -> None:
        self.backend = backend

    def _get_backend(self, device: object) -> FakeNccl:
        if self.backend is None:
            raise RuntimeError("No backend type associated with device type cuda")
        return self.backend


@pytest.mark.parametrize(("names", "expected"), [([], []), (["a", "b"], ["start", "b", "a", "end"])])
def test_nccl_groups_are_aborted_together(
    names: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    groups = {FakeGroup(FakeNccl(log, name)): name for name in names} | {FakeGroup(None): "cpu"}
    monkeypatch.setattr(group.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(group.c10d, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(group.c10d._world, "_pg_names", groups, raising=False)
    monkeypatch.setattr(type(group.c10d._world), "pg_names", property(lambda self: groups))
    done: set[int] = set()
    group.abort_nccl(done)
    group.abort_nccl(done)
    assert log == expected


def test_a_failing_abort_still_ends_the_nccl_group_call_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    groups = {FakeGroup(FakeNccl(log, "broken")): "broken"}
    monkeypatch.setattr(group.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(group.c10d, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(type(group.c10d._world), "pg_names", property(lambda self: groups))
    made = group.Group(backend="nccl", rank=0, world=2, store_host="127.0.0.1", store_port=9, generation=1)
    made.abort("a rank died")
    made.close()
    assert log == ["start", "broken", "end"]
    assert made.why == "a rank died; its NCCL communicator could not be aborted: NCCL error: unhandled system error"
