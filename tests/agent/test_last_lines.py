"""The last lines of a worker's log, from its file to the incident."""

from __future__ import annotations

from pathlib import Path

from elastic.agent.workers.worker_error import LAST_LINES, LINE_CHARS, last_lines
from elastic.contract.records.incident_account import IncidentAccount
from elastic.contract.records.incident_fold import incidents
from elastic.contract.records.job_records import BrokenRecord
from elastic.recovery.facts.evidence import merged


def test_last_lines_end_before_the_traceback_and_are_bounded(tmp_path: Path) -> None:
    log = tmp_path / "slot0.log"
    log.write_text(
        "".join(f"step {i}\n\n" for i in range(50)) + "y" * 999 + "\nTraceback (most recent call last):\n  x\n"
    )
    lines = last_lines(str(log))
    assert len(lines) == LAST_LINES
    assert lines[-2:] == ("step 49", "y" * LINE_CHARS)
    log.write_bytes(b"\0\0ok\xff\n")
    assert last_lines(str(log)) == ("ok\ufffd",)
    assert last_lines(str(tmp_path / "absent")) == ()


def test_what_a_library_says_before_it_aborts_is_kept_beside_a_long_stack(tmp_path: Path) -> None:
    log = tmp_path / "slot0.log"
    stack = "".join(f'  File "t.py", line {i} in f\n' for i in range(50))
    said = "terminate called after throwing an instance of 'std::bad_alloc'\n"
    log.write_text(
        "step 40\n" * 20 + said + "Fatal Python error: Aborted\n\nCurrent thread (most recent first):\n" + stack
    )
    lines = last_lines(str(log))
    assert len(lines) == LAST_LINES
    assert lines[5:8] == (said.strip(), "Fatal Python error: Aborted", "Current thread (most recent first):")
    assert lines[-1] == '  File "t.py", line 3 in f'


def test_incident_has_the_last_lines_of_the_first_report_that_has_any() -> None:
    comm = BrokenRecord(generation=1, node="a", kind="comm", detail="closed")
    death = BrokenRecord(
        generation=1, node="b", kind="exit", detail="killed by SIGSEGV", slots=(0,), ranks=(1,), last_lines=("bye",)
    )
    told = IncidentAccount(first=1, last=1)
    assert incidents((told,), (merged(comm, death),))[0].last_lines == ("bye",)
