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
