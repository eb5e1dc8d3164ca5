"""An agent whose peers do not answer: what it says, when it believes the others, what the one that is left out does."""

from __future__ import annotations

import msgspec
import pytest
from support import says
from support.jobs import Machine, broken, generation, member, place, policy, view

from elastic.contract.job.spec import JobSpec
from elastic.contract.records.decoding import Member
from elastic.contract.records.job_records import BrokenRecord, MemberRecord, Phase, decode, encode
from elastic.contract.records.reasons import Code, listed, reason, reasons
from elastic.recovery.facts.view import JobView
from elastic.recovery.leading import DISPUTE_S
from elastic.recovery.machine.effects import Effect, Publish, PutMember, PutState
from elastic.recovery.machine.events import (
    Event,
    Joined,
    PeerDead,
    PeerReachable,
    PeerUnreachable,
    Progress,
    Start,
    Viewed,
)
from elastic.recovery.machine.turn import STALL_S

SPEC = JobSpec(name="job", script="train.py", nodes="1:3")
FORMED = generation(1, [place("a"), place("b"), place("c")])


def complaining(node: str, create_revision: int, *of: str) -> Member:
    plain = member(node, create_revision)
    return Member(msgspec.structs.replace(plain.record, unreachable=of), create_revision)


def job_view(
    *complaints: str, spec: JobSpec = SPEC, phase: Phase = Phase.RUNNING, failed: BrokenRecord | None = None
) -> JobView:
    """a, b and c, the oldest first; 'ab': a complains of b."""
    said = {node: tuple(pair[1] for pair in complaints if pair[0] == node) for node in "abc"}
    members = [complaining(node, i, *said[node]) for i, node in enumerate("abc")]
    return view(*members, spec=spec, formed=FORMED, phase=phase, failed=failed)


class Stepping(Machine):
    """The agent of `node`, whose worker steps in FORMED."""

    def __init__(self, node: str = "a", spec: JobSpec = SPEC) -> None:
        super().__init__(policy(node, spec=spec))
        self.take(Start(), Joined(), says.ready(0, 1), Viewed(job_view(spec=spec), True))
        self.take(says.synced(0, 1, 1, 7), says.stepping(0, 1, 1, 8), Progress(1, 8, 0.1))

    def said(self, *events: Event) -> list[tuple[str, ...]]:
        """The unreachable nodes in each record that it then writes."""
        return [e.record.unreachable for e in self.take(*events) if isinstance(e, PutMember)]


def published(effects: list[Effect]) -> list[str]:
    return ["".join(p.node for p in e.change.nodes) for e in effects if isinstance(e, Publish)]


# ── what it says ────────────────────────────────────────────────────────────────────────────────────────────


def test_agent_reports_unreachable_peers_and_their_return() -> None:
    machine = Stepping()
    assert machine.said(PeerUnreachable("c", "c.1", "no answer")) == [("c",)]
    assert machine.said(PeerUnreachable("c", "c.1", "no answer")) == []
    assert machine.said(PeerUnreachable("b", "b.1", "no answer")) == [("b", "c")]
    assert machine.said(PeerReachable("c", "c.1")) == [("b",)]
    assert machine.said(PeerReachable("b", "b.1")) == [()]


@pytest.mark.parametrize(("node", "incarnation"), [("c", "c.0"), ("x", "x.1")])
def test_agent_does_not_report_absent_peers_unreachable(node: str, incarnation: str) -> None:
    assert Stepping().said(PeerUnreachable(node, incarnation, "no answer")) == []


def test_unreachable_report_is_withdrawn_when_the_peer_is_gone() -> None:
    machine = Stepping()
    machine.take(PeerUnreachable("c", "c.1", "no answer"))
    left = view(member("a", 0), member("b", 1), spec=SPEC, formed=FORMED)
    assert machine.said(Viewed(left, True)) == [()]
    machine = Stepping()
    machine.take(PeerUnreachable("c", "c.1", "no answer"))
    successor = view(member("a", 0), member("b", 1), member("c", 9, worker_id=2), spec=SPEC, formed=FORMED)
    assert machine.said(Viewed(successor, True)) == [()]


def test_the_dead_is_not_complained_of_any_more() -> None:
    machine = Stepping()
    machine.take(PeerUnreachable("c", "c.1", "no answer"))
    assert machine.said(PeerDead("c", "c.1", "refused")) == [()]


def test_a_record_of_before_reads_well() -> None:
    old = msgspec.json.decode(encode(member("a").record))
    del old["unreachable"]
    assert decode(MemberRecord, msgspec.json.encode(old)).unreachable == ()


# ── what it believes ────────────────────────────────────────────────────────────────────────────────────────


def test_a_cut_is_acted_upon_when_steps_stop_and_all_have_spoken() -> None:
    machine = Stepping()
    assert published(machine.wait(5.0, Viewed(job_view("ca"), True))) == []  # a or c?
    assert published(machine.wait(0.9 * DISPUTE_S, Viewed(job_view("ca", "bc"), True))) == []
    assert published(machine.wait(0.9 * DISPUTE_S)) == []
    assert machine.agent.lead.reason == reason(Code.CHECKING)
    assert published(machine.wait(0.2 * DISPUTE_S)) == ["ab"]


def test_fewer_complaints_are_no_reason_to_wait_longer() -> None:
    machine = Stepping()
    machine.wait(5.0, Viewed(job_view("ca", "cb", "ab"), True))
    assert published(machine.wait(1.1 * DISPUTE_S, Viewed(job_view("ca", "cb"), True))) == ["ab"]


def test_while_steps_advance_nothing_is_torn() -> None:
    machine = Stepping()
    machine.take(Viewed(job_view("ca", "cb"), True))
    for at in range(9, 40):
        assert published(machine.wait(STALL_S * 0.9, Progress(1, at, 0.1))) == []
    assert machine.agent.lead.reason == reason(Code.UNREACHED, node="c", others="a, b")
    assert published(machine.wait(STALL_S * 1.1)) == ["ab"]


def test_unreachable_node_is_left_out_of_the_generation_after_a_failure() -> None:
    machine = Stepping()
    machine.wait(0.1, Viewed(job_view("ca", "cb"), True))
    failed = broken(1, "b", kind="hang")
    machine.wait(2.0, Progress(1, 9, 0.1))
    assert published(machine.wait(0.1, Viewed(job_view("ca", "cb", failed=failed), True))) == ["ab"]


def test_leader_is_the_next_node_when_the_leader_is_unreachable() -> None:
    machine = Stepping("b")
    machine.wait(5.0, Viewed(job_view("ab", "ac"), True))
    assert published(machine.wait(1.1 * DISPUTE_S)) == ["bc"]


def test_unreachable_leader_publishes_nothing_and_states_why_it_waits() -> None:
    machine = Stepping("a")
    machine.wait(5.0, Viewed(job_view("ba", "ac"), True))
    assert published(machine.wait(10.0)) == []
    unreached = reason(Code.UNREACHED, node="a", others="b, c")
    assert machine.agent.lead.reason == reason(Code.LEFT_OUT, unreached)
    machine.wait(0.1, Viewed(job_view(), True))
    assert unreached not in reasons(machine.agent.lead.reason)


def test_below_min_the_job_waits_and_runs_on_when_steps_do() -> None:
    """Nothing was formed meanwhile: the step that hung has gone through."""
    spec = msgspec.structs.replace(SPEC, nodes="3")
    machine = Stepping("a", spec)
    effects = machine.wait(5.0, Viewed(job_view("ac", "bc", spec=spec), True))
    (waits,) = [e for e in effects if isinstance(e, PutState)]
    assert waits.state.phase is Phase.WAITING
    unreached = reason(Code.UNREACHED, node="c", others="a, b")
    assert waits.state.reason == listed(unreached, reason(Code.TOO_FEW, count=2, least=3))
    waiting = job_view("ac", "bc", spec=spec, phase=Phase.WAITING)
    assert not [e for e in machine.wait(5.0, Viewed(waiting, True)) if isinstance(e, PutState)]
    effects = machine.wait(5.0, Progress(1, 9, 0.1))
    assert [e.state.phase for e in effects if isinstance(e, PutState)] == [Phase.RUNNING]
