"""`elasticctl doctor` has other nodes connect to a port that a firewall lets through: one of `ports`."""

from __future__ import annotations

import socket

from elasticd.api.doctor_routes import _listener


def test_the_port_is_the_first_free_one_of_the_range() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        with _listener("127.0.0.1", (first, first + 7)) as listening:
            assert first < int(listening.rpartition(":")[2]) <= first + 7
        with _listener("127.0.0.1", (first, first)) as listening:
            assert listening == ""


def test_without_a_range_it_is_any_port() -> None:
    with _listener("127.0.0.1", (0, 0)) as listening, socket.create_connection(("127.0.0.1", _port(listening)), 5.0):
        pass


def _port(listening: str) -> int:
    return int(listening.rpartition(":")[2])
