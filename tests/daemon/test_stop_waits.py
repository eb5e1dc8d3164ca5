"""`elasticctl stop --wait`: for as long as it says, though one answer of the daemon's takes a minute at most."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from elasticd.ctl.jobs import lifecycle as ctl


class Client:
    """A daemon whose job ends during the third time that it is waited for."""

    def __init__(self) -> None:
        self.waited: list[float] = []

    def post(self, path: str, body: object) -> dict[str, Any]:
        return {"job": "j", "phase": "stopping"}

    def get(self, path: str, query: dict[str, float] | None = None, timeout_s: float = 0.0) -> dict[str, Any]:
        if query is None:
            return {"job": "j", "phase": "running"}
        self.waited.append(query["wait_over_s"])
        assert timeout_s > query["wait_over_s"]
        return {"job": "j", "phase": "stopped" if len(self.waited) == 3 else "stopping"}


def test_stop_wait_polls_until_its_time_is_up() -> None:
    client = Client()
    done = CliRunner().invoke(ctl.stop, ["j", "--wait", "--timeout", "150"], obj=client)
    assert done.output == "j is stopped\n"
    assert len(client.waited) == 3
    assert max(client.waited) <= 60.0


def test_stop_without_wait_returns_at_once() -> None:
    client = Client()
    done = CliRunner().invoke(ctl.stop, ["j"], obj=client)
    assert done.output == "j is stopping\n"
    assert client.waited == []


@pytest.mark.parametrize(("wait", "said"), [("0.001s", "0.001 s"), ("0.002", "0.002 s")])
def test_a_stop_that_outlasts_its_wait_is_not_called_done(wait: str, said: str) -> None:
    client = Client()
    client.get = lambda path, query=None, timeout_s=0.0: {"job": "j", "phase": "stopping"}  # type: ignore[method-assign]
    done = CliRunner().invoke(ctl.stop, ["j", "--wait", "--timeout", wait], obj=client)
    assert (done.exit_code, done.output) == (1, f"j is still stopping after {said}; the stop goes on\n")
