"""Log lines in incidents are for those who may read the job's logs; what failed, and why, is for all."""

from __future__ import annotations

import json

import pytest
from support.pictures import job, snapshot

from elastic.contract.records import IncidentRecord, JobState, Phase, WorkerError
from elasticd import log_privacy
from elasticd.api import views
from elasticd.masking import MASK

LINE = "Epoch 3: the customers' names are Ada and Grace"
NOW = views.Now(100.0, 1000.0)


def failed(error: WorkerError) -> views.Json:
    record = IncidentRecord(
        generation=2, kind="exit", node="a", ranks=(1,), detail="ValueError: boom", wall_s=990.0, error=error,
        last_lines=(LINE,),
    )  # fmt: skip
    one = job(state=JobState(phase=Phase.FAILED, error=error), incidents=(record,))
    return views.job_detail(snapshot(one), one, NOW)


def an_error(traceback: str, message: str = "ValueError: boom") -> WorkerError:
    return WorkerError(node="a", slot=1, rank=1, message=message, traceback=traceback, last_lines=(LINE,), exit_code=1)


@pytest.mark.parametrize("traceback", [f"{LINE}\nTraceback (most recent call last):\n  boom", f"{LINE}\n{LINE}", ""])
def test_log_lines_are_hidden_and_what_failed_stays(traceback: str) -> None:
    whole = failed(an_error(traceback))
    assert LINE in json.dumps(whole)
    shown = log_privacy.job(whole)
    assert LINE not in json.dumps(shown)
    assert MASK in json.dumps(shown)
    assert shown["error"]["message"] == "ValueError: boom"
    assert ("  boom" in shown["error"]["traceback"]) is ("boom" in traceback)
    assert shown["last_incident"]["verdict"]["cause"] == whole["last_incident"]["verdict"]["cause"]
    assert shown.keys() == whole.keys()


def test_a_job_without_incidents_is_shown_as_it_is() -> None:
    one = job(incidents=())
    whole = views.job_detail(snapshot(one), one, NOW)
    assert log_privacy.job(whole) == whole
