"""Which agents watch the members of a large job, and what an agent decides on a view without them."""

from __future__ import annotations

import dataclasses

import pytest
from support import says
from support.jobs import broken, generation, member, place, policy, view

from elastic.contract.job.spec import JobSpec
from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import GenerationRecord, SpecRecord, encode
from elastic.contract.timeouts import Timeouts
from elastic.etcd.client import KV
from elastic.recovery.facts.membership import leader, watch_list
from elastic.recovery.facts.view import JobReader, JobView
from elastic.recovery.machine.effects import Publish
from elastic.recovery.machine.events import (
    Drain,
    Joined,
    PeerDead,
    Progress,
    Start,
    Tick,
    Viewed,
)
from elastic.recovery.machine.model import Agent
from elastic.recovery.observers.watch_scope import FORMING_LEASES, GRACE_S, WAVE_S, watches_members
from elastic.recovery.recovery import step

NAMES = tuple("abcdefgh")
SPEC = JobSpec(name="job", script="train.py", nodes="1:8")
FORMED = generation(1, [place(n) for n in NAMES])
MEMBERS = [member(n, i + 1) for i, n in enumerate(NAMES)]
WHOLE = view(*MEMBERS, spec=SPEC, formed=FORMED)
TTL_S = Timeouts().lease_ttl_s
LIMIT_S = TTL_S + GRACE_S
KEYS = ClusterKeys("c").job("job")


def head(formed: GenerationRecord | None, revision: int = 20) -> JobView:
    """What an agent reads that follows the head alone."""
    records = {KEYS.spec: SpecRecord(spec=SPEC, submitted_wall_s=0.0, submitted_by="test")}
    kvs = {key: KV(key, encode(record), 1, 1, 0) for key, record in records.items()}
    if formed is not None:
        kvs[KEYS.generation] = KV(KEYS.generation, encode(formed), 2, 2, 0)
    return JobReader(KEYS).read(kvs, revision, has_all_members=False)


class Machine:
    """The agent of one node, of a job in which more than 3 nodes are a crowd, and 2 are leader_candidates."""

    def __init__(self, node: str = "e", *, managed: bool = True) -> None:
        self.agent = Agent(policy(node, spec=SPEC, managed=managed, crowd=3, leader_candidates=2))
        self.now_s = 100.0
        self.published: list[Publish] = []
        self.take(Start(), Joined(), says.ready(0, 1))

    def take(self, *events: object) -> None:
        for event in events:
            self.agent, effects = step(self.agent, event, self.now_s)  # type: ignore[arg-type]
            self.published += [e for e in effects if isinstance(e, Publish)]

    def steps(self, at_step: int = 8) -> None:
        self.take(says.synced(0, 1, 1, at_step), Progress(1, at_step, 0.1))

    def sees(self, narrow_for_s: float | None = None) -> bool:
        return watches_members(self.agent, self.now_s, narrow_for_s)


def running(node: str = "e") -> Machine:
    machine = Machine(node)
    machine.take(Viewed(WHOLE, True))
    machine.steps()
    return machine


@pytest.mark.parametrize(("node", "sees"), [("a", True), ("b", True), ("c", False), ("h", False)])
def test_while_all_step_the_first_few_see_the_members(node: str, sees: bool) -> None:
    machine = running(node)
    assert machine.sees() is sees
    assert machine.sees(1.0) is sees


def test_agent_watches_all_members_until_the_first_step() -> None:
    machine = Machine()
    machine.take(Viewed(WHOLE, True))
    assert machine.sees()
    machine.steps()
    assert not machine.sees()
    machine.take(Viewed(view(*MEMBERS, spec=SPEC, formed=FORMED, failed=broken(1, "a", 0)), True))
    assert machine.sees()


def test_agent_watching_the_head_only_continues_so_over_a_planned_change() -> None:
    machine = running()
    machine.take(Viewed(head(FORMED), True), Viewed(head(generation(2, [place(n) for n in NAMES[1:]]), 21), True))
    machine.now_s += LIMIT_S
    assert not machine.sees(60.0)


def test_agents_watch_all_members_in_waves_when_steps_stop() -> None:
    machine = running("g")
    machine.take(Viewed(head(FORMED), True))
    machine.now_s += LIMIT_S + 3 * WAVE_S
    assert not machine.sees(60.0)
    machine.now_s += 0.01
    assert machine.sees(60.0)
    machine.steps(9)
    assert not machine.sees(60.0)


def test_agent_watches_all_members_when_the_leader_candidates_before_it_are_dead() -> None:
    machine = running("d")
    machine.take(Viewed(head(FORMED), True), PeerDead("a", "a.1", "refused"))
    assert not machine.sees(1.0)
    machine.take(PeerDead("b", "b.1", "refused"))
    assert machine.sees(1.0)


def test_spare_drained_and_plain_script_agents_watch_all_members() -> None:
    spare = Machine("z")
    spare.take(Viewed(head(FORMED), True))
    assert spare.sees(1.0)
    drained = running()
    drained.take(Drain("maintenance", 1e6))
    assert drained.sees(1.0)
    plain = Machine(managed=False)
    plain.take(Viewed(WHOLE, True))
    assert plain.sees()


def test_in_a_small_generation_all_see_all() -> None:
    small = generation(1, [place(n) for n in "cde"])
    machine = Machine()
    machine.take(Viewed(view(*MEMBERS, spec=SPEC, formed=small), True))
    machine.steps()
    assert machine.sees()
    assert machine.sees(1.0)


def test_before_the_first_generation_the_oldest_see_all_and_others_look_again() -> None:
    few = view(*MEMBERS[:3], spec=SPEC)
    many = view(*MEMBERS, spec=SPEC)
    for node, sees in (("a", True), ("b", True), ("c", False), ("z", True)):  # z is not among them yet
        machine = Machine(node)
        machine.take(Viewed(few, True))
        assert machine.sees()
        machine.take(Viewed(many, True))
        assert machine.sees() is sees
    late = Machine("c")
    late.take(Viewed(head(None), True))
    assert not late.sees(FORMING_LEASES * TTL_S - 0.1)
    assert late.sees(2 * FORMING_LEASES * TTL_S)


def test_agent_watches_all_members_until_a_full_view_arrives() -> None:
    machine = running()
    machine.take(Viewed(head(FORMED), True))
    assert machine.sees(None), "it watches all again, and no job_view of it has come"


# ── the job_view without members ─────────────────────────────────────────────────────────────────────────────────────


def test_head_view_derives_members_from_the_places() -> None:
    job_view = head(FORMED)
    assert not job_view.has_all_members
    assert list(job_view.members) == list(NAMES)
    assert len(job_view.members) == len(NAMES)
    shown = job_view.members["c"]
    assert (shown.id, shown.record.host, shown.record.port, shown.record.ready) == (("c", "c.1"), "c", 1, (0,))
    assert leader(job_view, frozenset(), FORMED) == "a"
    assert leader(job_view, frozenset({("a", "a.1")}), FORMED) == "b"
    assert [m.record.node for m in watch_list(job_view, frozenset(), FORMED, "e")] == [n for n in NAMES if n != "e"]
    assert head(None).members == {}


def test_agent_without_a_full_view_does_not_publish() -> None:
    machine = running("a")
    failed = broken(1, "c", 0)
    machine.take(Viewed(dataclasses.replace(head(FORMED), broken=failed), True), Tick())
    assert machine.published == []
    machine.take(Viewed(view(*MEMBERS, spec=SPEC, formed=FORMED, failed=failed, revision=30), True))
    assert len(machine.published) == 1


def test_restarted_watch_without_contact_keeps_the_last_view() -> None:
    machine = running()
    machine.take(Viewed(JobView(), False))
    assert not machine.agent.etcd.connected
    assert machine.agent.etcd.view == WHOLE
