"""Every signal that can end a process has a name that leads back to it."""

from __future__ import annotations

import signal

from elastic.util.processes import signal_name, signal_number


def test_every_signal_has_a_name_that_leads_back_to_it() -> None:
    for number in range(1, signal.SIGRTMAX + 1):
        assert signal_number(signal_name(number)) == number
    assert [signal_name(n) for n in (9, 34, 40)] == ["SIGKILL", "SIGRTMIN", "SIGRTMIN+6"]
