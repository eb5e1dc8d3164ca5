"""`setup`, run again because all state was lost, fails while the generation is over already."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from elastic.contract.worker import messages
from elastic.contract.worker.worker_config import WorkerConfig
from elastic.worker import run
from elastic.worker.job.job import Job, build
from elastic.worker.state.state import State
from elastic.worker.state.state_source import StateLostError


def test_setup_that_fails_the_second_time_is_named_also_where_the_generation_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session, tries = MagicMock(), []
    session.over.return_value = True  # another rank has died meanwhile

    def setup(job: Job) -> State:
        tries.append(job)
        if len(tries) > 1:
            raise ValueError("the data is gone")
        return State()

    def lost(*_: Any, **__: Any) -> None:
        raise StateLostError("no rank has a state")

    monkeypatch.setattr(run, "Handover", lost)
    monkeypatch.setattr(run, "_announce", lambda *_: None)
    settings = WorkerConfig(job="j", backend="gloo", form_timeout_s=1.0, snapshots="off")
    worker = run.ManagedWorker(session, setup, lambda job, state: None, settings)
    monkeypatch.setattr(worker, "_group_kind", MagicMock())
    job = Job(name="j", device=torch.device("cpu"), local_rank=0, link=worker._link)
    worker._state = build(worker._setup, job)
    worker._state.establish(1)
    form = messages.Form(
        generation=1, rank=0, world_size=2, local_rank=0, local_world_size=2, group_rank=0, group_world_size=1,
        store_host="127.0.0.1", store_port=1, timeout_s=1.0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="the data is gone"):
        worker._one_generation(job, form)
