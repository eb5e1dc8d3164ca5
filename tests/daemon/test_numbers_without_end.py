"""TOML and Python have infinity and NaN, records in JSON have neither: they are refused, and not written."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from elasticd.access.authority import UNKNOWN, Authority, Peer
from elasticd.api.actions import Actions
from elasticd.api.routes import routes
from elasticd.base import config
from elasticd.base.errors import InvalidConfig, Refused


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"hang": {"ceiling_s": math.inf}}, "hang.ceiling_s = inf: a finite number is needed"),
        ({"stop_grace_s": math.inf}, "stop_grace_s = inf: a finite number is needed"),
    ],
)
def test_job_with_infinite_or_nan_numbers_is_refused(field: dict[str, Any], words: str) -> None:
    actions = Actions(None, None, None, None, None, None)  # type: ignore[arg-type]  # it does not get to them
    with pytest.raises(Refused, match=words) as refused:
        actions.submit({"name": "j", "script": "/t.py", **field}, UNKNOWN, UNKNOWN)
    assert refused.value.status == 400


@pytest.mark.parametrize("deadline_s", [math.inf, math.nan, -1])
def test_drain_with_infinite_or_nan_deadline_is_refused(deadline_s: float) -> None:
    class Request:
        service = SimpleNamespace(authority=Authority(0))

        def peer(self) -> Peer:
            return Peer(0, 0, "root")

        def body(self) -> dict[str, Any]:
            return {"deadline_s": deadline_s}

    with pytest.raises(Refused, match=r"deadline_s = .*: a number from 0 to 1000000000"):
        routes.post_drain(Request(), {}, "a")  # type: ignore[arg-type]


def test_no_time_out_is_for_ever() -> None:
    with pytest.raises(InvalidConfig, match=r"timeouts.group_s = inf: a finite number of seconds"):
        config.load(None, {}, {"timeouts.group_s": "inf"})
