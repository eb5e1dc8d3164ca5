"""What workers say on their way into a group may be taken in one turn or in one each: the same comes of it."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace
from support.jobs import Machine, changed, generation, member, place, policy, view
from support.says import formed, group_closed, ready, stepping, synced

from elastic.recovery.machine.effects import Effect, PutIncident
from elastic.recovery.machine.events import ENTERING, Joined, Start, Viewed, WorkerSaid, WorkersEnter, WorkerStarted
from elastic.recovery.machine.model import Agent

FIRST, SECOND = (generation(number, [place("a", 0, 1), place("b", 0, 1)]) for number in (1, 2))
SAID = [[said(slot, slot + 1, 2, *rest) for said, *rest in ((formed,), (synced, 7), (stepping, 8))] for slot in (0, 1)]


def forming() -> Machine:
    """Node a: the next generation has just come, in an incident, and its two workers are forming it."""
    machine = Machine(policy(nodes="1:2", slots=2))
    members = member("a", 1, ready=(0, 1)), member("b", 2, ready=(0, 1))
    machine.take(Start(), Joined(), Viewed(view(*members, formed=FIRST), True))
    for slot in (0, 1):
        machine.take(WorkerStarted(slot, slot + 1), ready(slot, slot + 1))
        machine.take(formed(slot, slot + 1, 1), synced(slot, slot + 1, 1, 6), stepping(slot, slot + 1, 1, 7))
    machine.wait(1.0, Viewed(view(*members, formed=SECOND), True))
    machine.take(*(group_closed(slot, slot + 1, 1, 7) for slot in (0, 1)))
    return machine


def without_times(machine: Machine, effects: list[Effect]) -> tuple[Agent, list[Effect]]:
    """One turn sees more ranks ready than the first of several, and so has further marks in its timeline."""
    last = machine.agent.incidents.last
    if last is not None:
        last = replace(last, incident=replace(last.incident, timeline_s=()))
        machine.agent = changed(machine.agent, last=last)
    told = [replace(e, account=replace(e.account, timeline_s={})) if isinstance(e, PutIncident) else e for e in effects]
    return machine.agent, told


def test_no_worker_is_told_anything_for_them() -> None:
    assert all(isinstance(said.message, ENTERING) for of_one in SAID for said in of_one)
    machine = forming()
    assert [type(effect) for effect in machine.take(*SAID[0], *SAID[1])] == [PutIncident]


@pytest.mark.parametrize("cut", range(7))
def test_one_turn_for_all_of_it_is_worth_one_for_each(cut: int) -> None:
    orders = {tuple(order) for order in itertools.permutations([0, 0, 0, 1, 1, 1])}
    assert len(orders) == 20
    for order in orders:
        left = [list(of_one) for of_one in SAID]
        said: list[WorkerSaid] = [left[slot].pop(0) for slot in order]
        each, together = forming(), forming()
        batches = [WorkersEnter(tuple(some)) for some in (said[:cut], said[cut:]) if some]
        agent, effects = without_times(each, each.take(*said))
        assert without_times(together, together.take(*batches)) == (agent, effects)
        assert together.wait(0.1) == each.wait(0.1)
        assert agent.progress.settled == 2
        assert agent.incidents.last is not None
        assert [sync.resumed for sync in agent.incidents.last.incident.syncs] == [7]
