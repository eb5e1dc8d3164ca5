"""The incident of a node that was left out names it, and whether it is gone or only out of reach."""

from __future__ import annotations

import msgspec
import pytest
from support.jobs import generation, member, place, view

from elastic.agent.incidents import Incidents
from elastic.core.membership import Limits
from elastic.core.model import Agent, Policy
from elastic.core.records import IncidentRecord
from elastic.core.spec import JobSpec
from elastic.core.timeouts import Timeouts
from elastic.core.view import JobView, Member

SPEC = JobSpec(name="job", script="train.py", nodes="1:3")
THREE = generation(1, [place("a"), place("b"), place("c")])
TWO = generation(2, [place("a"), place("b")])


def agent(picture: JobView, settled: int) -> Agent:
    policy = Policy(
        node="a", incarnation="a.1", host="a", port=1, slots=1, limits=Limits(1, 3, 0.0), shrink=False, standbys=0,
        managed=True, spec=SPEC, timeouts=Timeouts(),
    )  # fmt: skip
    return Agent(policy, view=picture, generation=picture.generation, settled=settled)


def recorded(after: JobView) -> IncidentRecord:
    """What a's leader writes when TWO has followed THREE and steps."""
    incidents = Incidents()
    before = agent(view(member("a", 1), member("b", 2), member("c", 3), spec=SPEC, formed=THREE), 1)
    formed, stepping = agent(after, 1), agent(after, 2)
    assert incidents.turn(before, formed, None, lambda: 7, lambda: True, 10.0, 0.0) is None
    record = incidents.turn(formed, stepping, None, lambda: 8, lambda: True, 11.0, 0.0)
    assert record is not None
    return record


def complains(of: str) -> Member:
    plain = member("b", 2)
    return Member(msgspec.structs.replace(plain.record, unreachable=(of,)), 2)


@pytest.mark.parametrize(
    ("members", "kind"),
    [
        ([member("a", 1), complains("c"), member("c", 3)], "unreachable"),
        ([member("a", 1), member("b", 2)], "lost"),  # its lease ran out
        ([member("a", 1), member("b", 2), member("c", 9, life=2)], "lost"),  # its agent was started anew
    ],
    ids=["cut_off", "gone", "restarted"],
)
def test_it_names_who_was_left_out(members: list[Member], kind: str) -> None:
    record = recorded(view(*members, spec=SPEC, formed=TWO))
    assert (record.kind, record.node) == (kind, "c")
    assert (record.world_before, record.world_after) == (3, 2)
