"""A GPU that is lost to one process: the error sticks, so the process ends, whatever it looks like at first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic.contract.worker import messages
from elastic.contract.worker.worker_config import WorkerConfig
from elastic.worker import run
from elastic.worker.comm import group
from elastic.worker.run import ManagedWorker
from elastic.worker.state.state import State

DEVICE = torch.device("cuda", 0)


class Stream:
    """As CUDA: whether all is done, at once; once a kernel has failed, that error and no other."""

    def __init__(self, failed: str) -> None:
        self.failed = failed

    def query(self) -> bool:
        if self.failed:
            raise RuntimeError(f"{self.failed}\nCUDA kernel errors might be reported at some other call")
        return False  # kernels are still queued: no matter

    def synchronize(self) -> None:
        raise AssertionError("nobody waits for the device here")


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream("")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return stream


def test_a_busy_device_is_well(stream: Stream) -> None:
    assert group.cuda_failure(DEVICE) == ""


def test_an_error_that_sticks_is_said_in_a_line(stream: Stream) -> None:
    stream.failed = "CUDA error: an illegal memory access was encountered"
    assert group.cuda_failure(DEVICE) == "CUDA error: an illegal memory access was encountered"
    assert group.cuda_failure(torch.device("cpu")) == ""


def test_cuda_is_not_started_to_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: pytest.fail("it was"))
    assert group.cuda_failure(DEVICE) == ""


class Session:
    """One generation, which nobody calls off."""

    def __init__(self) -> None:
        self.sent: list[messages.Message] = []
        self.page = self
        self.step = 0
        self.committed_in, self.committed_s = 0, 0.0

    def on(self, *_: Any) -> None: ...
    def beat(self, *_: Any) -> None: ...
    def place(self, *_: Any) -> None: ...
    def set_step(self, *_: Any) -> None: ...
    def holds(self, *_: Any) -> None: ...

    def over(self, generation: int) -> bool:
        return False

    def send(self, message: messages.Message) -> None:
        self.sent.append(message)


class NoGroup:
    """NCCL's word for whatever CUDA says to it."""

    def __init__(self, **_: Any) -> None: ...
    def abort(self, why: str) -> None: ...
    def close(self) -> None: ...

    def form(self, interrupted: Any) -> None:
        raise dist.DistBackendError("NCCL error: ncclUnhandledCudaError: Call to CUDA function failed.")


@pytest.mark.parametrize("failed", ["", "CUDA error: unspecified launch failure"])
def test_worker_exits_on_a_peer_error_if_cuda_has_failed(
    failed: str, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.failed = failed
    monkeypatch.setattr(run, "Group", NoGroup)
    session = Session()
    settings = WorkerConfig(job="j", backend="nccl", form_timeout_s=1.0, snapshots="off")
    worker = ManagedWorker(session, lambda job: State(), lambda job, state: None, settings)  # type: ignore[arg-type]
    worker._state = State()
    job = run.Job(name="j", device=DEVICE, local_rank=0, link=worker._link)
    form = messages.Form(
        generation=1, rank=0, world_size=2, local_rank=0, local_world_size=2, group_rank=0, group_world_size=1,
        store_host="127.0.0.1", store_port=1, timeout_s=1.0,
    )  # fmt: skip
    if failed:
        with pytest.raises(RuntimeError, match="this process cannot use its GPU any more: CUDA error: unspecified"):
            worker._one_generation(job, form)
        assert session.sent == []
    else:
        worker._one_generation(job, form)
        assert [type(message) for message in session.sent] == [messages.CollectiveFailed]
