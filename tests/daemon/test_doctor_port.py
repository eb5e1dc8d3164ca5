"""`elasticctl doctor` has other nodes connect to a port that a firewall lets through, one of `ports`, and measures."""

from __future__ import annotations

import socket
import threading

import pytest

from elasticd.machine import reach
from elasticd.machine.doctor import ERROR, OK, WARNING


def test_the_port_is_the_first_free_one_of_the_range() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        with reach.listener("127.0.0.1", (first, first + 7)) as listening:
            assert first < int(listening.rpartition(":")[2]) <= first + 7
        with reach.listener("127.0.0.1", (first, first)) as listening:
            assert listening == ""


def test_without_a_range_it_is_any_port() -> None:
    with (
        reach.listener("127.0.0.1", (0, 0)) as listening,
        socket.create_connection(("127.0.0.1", _port(listening)), 5.0),
    ):
        pass


def test_bandwidth_is_measured_on_the_way_to_the_listener() -> None:
    with reach.listener("127.0.0.1", (0, 0)) as listening:
        for _ in range(2):  # one turn after another
            why, mbit_s = reach.try_it(listening, {"127.0.0.1"})
            assert why == ""
            assert mbit_s is not None
            assert mbit_s > 1
        assert reach.try_it(listening, {"10.0.0.1"}) == ("127.0.0.1 is no node's address", None)
    assert reach.try_it(listening, {"127.0.0.1"}) == ("Connection refused", None)


def test_a_listener_that_gives_no_turn_is_reached_and_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "MEASURED", 0)
    with reach.listener("127.0.0.1", (0, 0)) as listening:
        assert reach.try_it(listening, {"127.0.0.1"}) == ("", None)


def test_a_stranger_that_sends_nothing_ends_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "TURN_S", 0.05)
    with reach.listener("127.0.0.1", (0, 0)) as listening, socket.create_connection(("127.0.0.1", _port(listening))):
        monkeypatch.setattr(reach, "SEND_S", 0.02)
        assert reach.try_it(listening, {"127.0.0.1"})[0] == ""


def test_a_slow_link_is_named_with_its_cure() -> None:
    unreached = {"a": "", "b": "", "c": "", "d": "No route to host", "e": ""}
    rates = {"a": 9400.0, "b": 9300.0, "c": 940.0, "e": 9000.0}
    found = {f.node: f for f in reach.judge("me", "10.0.0.1:29400", unreached, rates)}
    assert {node: f.level for node, f in found.items()} == {"a": OK, "b": OK, "c": WARNING, "d": ERROR, "e": OK}
    assert "940 Mbit/s; the median of the nodes is 9.2 Gbit/s" in found["c"].text
    assert all(f.fix for f in found.values() if f.level != OK)
    (slow,) = reach.judge("me", "10.0.0.1:29400", {"a": ""}, {"a": 95.0})
    assert (slow.level, "95 Mbit/s" in slow.text) == (WARNING, True)
    (unknown,) = reach.judge("me", "10.0.0.1:29400", {"a": ""}, {})
    assert (unknown.level, "not measured" in unknown.text) == (OK, True)


def _port(listening: str) -> int:
    return int(listening.rpartition(":")[2])


def test_at_a_limit_of_threads_there_is_no_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuses)
    with reach.listener("127.0.0.1", (0, 0)) as listening:
        assert listening == ""
