"""A script that fails while its last snapshot is being copied: the buffer is given to a standby at once."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from elastic.contract.worker.worker_config import WorkerConfig
from elastic.worker import run
from elastic.worker.state.state import State


@pytest.mark.parametrize("error", [ValueError("bad batch"), SystemExit(3)])
def test_the_copy_ends_before_the_error_leaves_the_worker(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = WorkerConfig(job="j", backend="gloo", form_timeout_s=1.0)
    worker = run.ManagedWorker(MagicMock(), lambda job: State(), lambda job, state: None, settings)
    ended: list[str] = []

    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(worker, "_one_generation", fails)
    monkeypatch.setattr(worker._checkpoint_scheduler, "leave", lambda: ended.append("copy"))
    with pytest.raises(type(error)):
        worker.run()
    assert ended == ["copy"]
