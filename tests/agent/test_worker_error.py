"""Why a worker ended: from the files that its process was forked with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic.agent.workers.pool import Exited
from elastic.agent.workers.worker_error import MESSAGE_CHARS, TRACEBACK_CHARS, read_error
from elastic.contract.records.reasons import Code, reason


def test_the_error_file_of_the_process_itself_is_read(tmp_path: Path) -> None:
    """A standby that took a slot keeps the files that it had."""
    said = {
        "message": "ValueError: bad batch 7",
        "extraInfo": {"py_callstack": 'File "train.py", line 9, in step', "timestamp": "1"},
    }
    (tmp_path / "standby.error.json").write_text(json.dumps({"message": said}))
    ended = Exited(5, 1, None, 3, str(tmp_path / "standby.error.json"), str(tmp_path / "standby.log"))
    _, error, fingerprint = read_error(ended, node="n", slot=2, rank=6, step=3)
    assert error is not None
    assert (error.message, error.rank, error.step) == ("ValueError: bad batch 7", 6, 3)
    assert fingerprint == "ValueError at train.py:9"


def test_of_a_long_message_and_traceback_both_ends_are_kept(tmp_path: Path) -> None:
    """The script's own frame comes before the message, and what failed in a data loader's process is at the end."""
    message = "RuntimeError: first\n" + "x\n" * 12_500 + "ValueError: sample 7"
    library = '  File "library.py", line 1, in call\n' * 60
    trace = f'Traceback (most recent call last):\n{library}  File "train.py", line 9, in step\n{library}a.{message}\n'
    said = {"message": message, "extraInfo": {"py_callstack": trace}}
    (tmp_path / "error.json").write_text(json.dumps({"message": said}))
    ended = Exited(5, 1, None, 3, str(tmp_path / "error.json"), str(tmp_path / "log"))
    _, error, _ = read_error(ended, node="n", slot=0, rank=0, step=3)
    assert error is not None
    assert error.message.startswith("RuntimeError: first\n")
    assert error.message.endswith("ValueError: sample 7")
    assert f'File "train.py", line 9, in step\n{library}a.RuntimeError: first' in error.traceback
    assert error.traceback.endswith("ValueError: sample 7\n")
    assert "left out here" in error.traceback
    assert (len(error.message), len(error.traceback) <= TRACEBACK_CHARS) == (MESSAGE_CHARS, True)


def test_worker_error_falls_back_to_the_log_tail(tmp_path: Path) -> None:
    log = tmp_path / "slot0.log"
    log.write_text("x" * 9000 + "\nlast words\n")
    _, error, fingerprint = read_error(
        Exited(5, 4, None, 3, str(tmp_path / "absent"), str(log)), node="n", slot=0, rank=0, step=3
    )
    assert error is not None
    assert (error.message, fingerprint) == ("exit code 4: last words", "exit code 4")
    assert error.traceback.endswith("last words\n")
    assert len(error.traceback) == 4000


def test_what_elastic_has_refused_is_known_even_if_the_script_has_handled_it(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("last words\n")
    files = str(tmp_path / "error.json"), str(tmp_path / "log")
    for code in (0, 3):
        ended = Exited(5, code, None, 3, *files, misuse="MisuseRuntimeError: state.seen was changed")
        _, error, _ = read_error(ended, node="n", slot=2, rank=6, step=3)
        assert error is not None
        assert (error.misuse, error.message) == (True, "MisuseRuntimeError: state.seen was changed")
    (tmp_path / "error.json").write_text(json.dumps({"message": {"message": "KeyError: 'x'"}}))
    _, error, _ = read_error(Exited(5, 1, None, 3, *files), node="n", slot=2, rank=6, step=3)
    assert error is not None
    assert not error.misuse


def test_a_rank_that_found_no_state_is_known_by_the_type_of_its_exception(tmp_path: Path) -> None:
    for message, no_state in (("NoStateError: nothing to resume from", True), ("StateLostError: gone", False)):
        (tmp_path / "error.json").write_text(json.dumps({"message": {"message": message}}))
        ended = Exited(5, 1, None, 3, str(tmp_path / "error.json"), str(tmp_path / "log"))
        _, error, _ = read_error(ended, node="n", slot=2, rank=6, step=3)
        assert error is not None
        assert error.no_state is no_state


def test_a_killed_worker_says_nothing() -> None:
    assert read_error(Exited(5, None, "SIGKILL", 3), node="n", slot=0, rank=0, step=3) == (
        reason(Code.KILLED, signal="SIGKILL"),
        None,
        "SIGKILL",
    )


@pytest.mark.parametrize("code", [0, 3])
def test_a_sigterm_that_the_script_has_turned_into_an_exit_code_is_named(tmp_path: Path, code: int) -> None:
    (tmp_path / "log").write_text("bye\n")
    files = str(tmp_path / "error.json"), str(tmp_path / "log")
    _, error, _ = read_error(Exited(5, code, None, 3, *files, terminated=True), node="n", slot=0, rank=0, step=3)
    assert error is not None
    assert (error.message, error.exit_code, error.signal) == (f"exit code {code} after SIGTERM: bye", code, "SIGTERM")
