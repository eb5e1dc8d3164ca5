"""What the daemon logs on a terminal; elsewhere it is JSON, which the tests of the daemon read."""

from __future__ import annotations

from elasticd.base.log import as_text


def test_a_line_on_a_terminal_is_text_without_control_characters() -> None:
    event = {"timestamp": "2026-11-22T10:41:07.1Z", "level": "warning", "event": "job.state", "node": "a"}
    said = as_text(None, "", event | {"reason": "\x1b[2J[/x]\nb", "slots": 4})
    assert said == "10:41:07 warning job.state reason=\\x1b[2J[/x]\\nb slots=4"


def test_a_traceback_stands_below_its_line() -> None:
    event = {"timestamp": "T10:00:00", "level": "error", "event": "e", "exception": "Traceback\n  boom\x07"}
    assert as_text(None, "", event) == "10:00:00 error   e\nTraceback\n  boom\\x07"
