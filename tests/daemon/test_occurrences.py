"""What is notified: each occurrence once, by one daemon of the cluster, with its outcome and its verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import snapshots

from elastic.contract.origin import Origin
from elastic.contract.records.job_records import Failure, IncidentRecord, JobState, Phase
from elasticd.api.notify.occurrences import FAILED_SETTLE_S, KEPT, REPEAT_S, SETTLE_S, Memory, Occurrence, as_json, look
from elasticd.api.views.instant import Now
from elasticd.base.settings import NotifySettings
from elasticd.cluster.cluster import Job, Node
from elasticd.cluster.published_state import Contact, Snapshot

ALL = NotifySettings()
BEGAN_S = 1000.0
"""Wall clock at the daemon's start; the tests' monotonic clock is the wall clock."""


def crash(wall_s: float = 1010.0, **facts: Any) -> IncidentRecord:
    """By default its beginning identifies it."""
    said = {"id": f"{wall_s:.3f}", "step": 40} | facts
    return msgspec.structs.replace(snapshots.job().incidents[0], wall_s=wall_s, **said)


def running(*incidents: IncidentRecord) -> Job:
    return snapshots.job(incidents=incidents)


def in_phase(phase: Phase, since_wall_s: float = 1010.0, reason: str = "", *incidents: IncidentRecord) -> Job:
    return snapshots.job(state=JobState(phase=phase, since_wall_s=since_wall_s, reason=reason), incidents=incidents)


def seen(*jobs: Job, nodes: Sequence[str] = "a", connected: bool = True) -> Snapshot:
    """`nodes`: the oldest one first."""
    base = snapshots.snapshot(*jobs)
    record = base.cluster.nodes["a"].record
    there = {n: Node(msgspec.structs.replace(record, node=n), i) for i, n in enumerate(nodes, 1)}
    contact = base.contact if connected else Contact(False, 99.5, "no answer")
    return replace(base, cluster=replace(base.cluster, nodes=there), contact=contact)


@dataclass
class Daemon:
    """Looks at one snapshot after another."""

    me: str = "a"
    settings: NotifySettings = ALL
    began_wall_s: float = BEGAN_S

    def __post_init__(self) -> None:
        self.memory = Memory(self.began_wall_s)
        self.sent: list[Occurrence] = []

    def sees(self, snapshot: Snapshot, at_s: float) -> list[tuple[str, str]]:
        self.memory, found = look(self.memory, snapshot, self.me, self.settings, Now(at_s, at_s))
        self.sent += found
        return [(o.event, o.job) for o in found]


INCIDENT, FAILED, WAITING = ("incident", "train"), ("job_failed", "train"), ("job_waiting", "train")


# ── what is told, and when ──────────────────────────────────────────────────────────────────────────────────


def test_incident_is_told_once_when_it_is_over_with_its_outcome() -> None:
    daemon = Daemon()
    assert daemon.sees(seen(running()), 1009.0) == []
    assert daemon.sees(seen(running(crash(1010.0, id="2", open=True))), 1010.1) == []
    assert daemon.sees(seen(running(crash(1010.003, id="2"))), 1010.5) == [INCIDENT]
    assert daemon.sees(seen(running(crash(1011.4, id="2"))), 1011.5) == [], "whatever its beginning is said to be"
    told = daemon.sent[0]
    assert (told.node, told.wall_s) == ("a", 1010.003)
    assert told.why.startswith("rank 1 on a: killed by SIGKILL from outside; rank 1 replaced")
    assert told.verdict is not None
    assert set(told.verdict) == {"class", "cause", "person", "fix"}
    assert (told.verdict["class"], told.verdict["person"]) == ("node", False)


def test_incident_that_lasts_is_told_before_it_is_over_and_not_again_then() -> None:
    daemon = Daemon()
    lasts = seen(running(crash(open=True)))
    assert daemon.sees(lasts, 1010.1) == []
    assert daemon.sees(lasts, 1010.0 + SETTLE_S) == []
    assert daemon.sees(lasts, 1010.1 + SETTLE_S) == [INCIDENT]
    assert "the recovery is under way" in daemon.sent[0].why
    assert daemon.sees(seen(running(crash())), 1300.0) == []


def test_two_incidents_and_a_late_exit_are_three() -> None:
    daemon = Daemon()
    three = running(crash(), crash(1010.2, kind="late exit"), crash(1012.0))
    assert daemon.sees(seen(three), 1013.0) == [INCIDENT] * 3
    assert len({o.id for o in daemon.sent}) == 3


def test_incident_just_before_a_known_one_does_not_take_its_place() -> None:
    daemon = Daemon()
    daemon.sees(seen(running(crash(1010.4))), 1011.0)
    assert daemon.sees(seen(running(crash(1010.1), crash(1010.4))), 1012.0) == [INCIDENT]
    assert [o.wall_s for o in daemon.sent] == [1010.4, 1010.1]


def test_an_incident_of_the_next_job_of_this_name_is_another_one() -> None:
    daemon = Daemon()
    daemon.sees(seen(running(crash(1010.0, id="2"))), 1011.0)
    spec = msgspec.structs.replace(snapshots.job().spec, submission="another")
    assert daemon.sees(seen(replace(running(crash(1012.0, id="2")), spec=spec)), 1013.0) == [INCIDENT]


def test_nothing_is_told_anew_of_a_job_whose_spec_etcd_has_lost_for_a_while() -> None:
    daemon, job = Daemon(), running(crash())
    assert daemon.sees(seen(job), 1011.0) == [INCIDENT]
    assert daemon.sees(seen(replace(job, spec=None)), 1012.0) == []
    assert daemon.sees(seen(job), 1013.0) == []


def test_planned_change_is_not_told() -> None:
    daemon = Daemon()
    planned = crash(kind="planned", detail="b: drained by ada (leaves)", ranks=())
    assert daemon.sees(seen(running(planned)), 1011.0) == []
    assert daemon.sees(seen(running(planned, crash(1012.0))), 1013.0) == [INCIDENT]


def test_failed_checkpoint_is_an_event_of_its_own() -> None:
    failed = crash(kind="checkpoint", detail="step 40: [Errno 28] No space left on device", ranks=(), node="b")
    daemon = Daemon()
    assert daemon.sees(seen(running(failed)), 1011.0) == [("checkpoint_failed", "train")]
    told = daemon.sent[0]
    assert told.node == "b"
    assert told.verdict is not None
    assert told.verdict["class"] == "storage"
    assert "No space left on device" in told.why


def test_failed_job_is_told_with_the_verdict_of_its_last_incident() -> None:
    daemon = Daemon(settings=NotifySettings(on=("job_failed",)))
    ended = in_phase(Phase.FAILED, 1010.0, "RuntimeError: boom, 4 times")
    assert daemon.sees(seen(ended), 1010.1) == []
    ended = replace(ended, incidents=(crash(1009.9, origin=Origin.NOTHING),))
    assert daemon.sees(seen(ended), 1010.2 + FAILED_SETTLE_S) == [FAILED]
    told = daemon.sent[0]
    assert told.why == "RuntimeError: boom, 4 times"
    assert told.verdict is not None
    assert (told.verdict["class"], told.verdict["person"]) == ("node", True)
    assert told.node == "a"


def test_failed_job_without_incident_or_reason_is_told_all_the_same() -> None:
    daemon = Daemon()
    for at_s in (1010.0, 1013.0, 1014.0):
        daemon.sees(seen(in_phase(Phase.FAILED)), at_s)
    assert [(o.event, o.verdict) for o in daemon.sent] == [("job_failed", None)]
    assert daemon.sent[0].why


def test_verdict_of_a_recovered_incident_is_not_that_of_the_jobs_end() -> None:
    daemon = Daemon(settings=NotifySettings(on=("job_failed",)))
    ended = in_phase(Phase.FAILED, 1010.0, "x", crash(1005.0))
    daemon.sees(seen(ended), 1010.0)
    daemon.sees(seen(ended), 1013.0)
    assert [o.verdict for o in daemon.sent] == [None]


@pytest.mark.parametrize("phase", [Phase.PENDING, Phase.WAITING])
def test_waiting_job_is_told_after_its_time_and_once_for_each_wait(phase: Phase) -> None:
    daemon = Daemon(settings=NotifySettings(job_waiting_s=60.0))
    assert daemon.sees(seen(in_phase(phase)), 1069.9) == []
    assert daemon.sees(seen(in_phase(phase)), 1070.0) == [WAITING]
    assert daemon.sees(seen(in_phase(phase)), 1500.0) == []
    assert daemon.sees(seen(in_phase(phase, 1600.0)), 1660.0) == [WAITING]
    assert all(o.why for o in daemon.sent)


def queue(snapshot: Snapshot, *jobs: str) -> Snapshot:
    return replace(snapshot, plan=replace(snapshot.plan, queue=jobs))


def test_a_queued_job_is_not_told_and_waits_anew_once_it_has_left_the_queue() -> None:
    daemon, waits = Daemon(settings=NotifySettings(job_waiting_s=60.0)), seen(in_phase(Phase.PENDING))
    for at_s in (1070.0, 2000.0, 5000.0):
        assert daemon.sees(queue(waits, "other", "train"), at_s) == []
    assert daemon.sees(waits, 5001.0) == [], "it has just been given its nodes, and starts"
    assert daemon.sees(waits, 5059.9) == []
    assert daemon.sees(waits, 5060.0) == [WAITING], "its agents do not start it"
    assert daemon.sees(waits, 5500.0) == []


def test_a_job_that_can_never_run_and_one_that_has_lost_nodes_are_told() -> None:
    never = seen(in_phase(Phase.PENDING))
    assert Daemon().sees(replace(never, plan=replace(never.plan, never=frozenset({"train"}))), 1130.0) == [WAITING]
    assert Daemon().sees(queue(seen(in_phase(Phase.WAITING)), "train"), 1130.0) == [WAITING]


@pytest.mark.parametrize("phase", [p for p in Phase if p not in (Phase.PENDING, Phase.WAITING, Phase.FAILED)])
def test_other_phases_are_not_told(phase: Phase) -> None:
    daemon = Daemon()
    for at_s in (1010.0, 1020.0, 5000.0):
        assert daemon.sees(seen(in_phase(phase)), at_s) == []


def test_job_whose_state_etcd_has_lost_does_not_wait_since_1970() -> None:
    assert Daemon().sees(seen(in_phase(Phase.PENDING, 0.0)), 1010.0) == []


@pytest.mark.parametrize("event", ALL.on)
def test_only_what_is_asked_for_is_told(event: str) -> None:
    every = [
        replace(in_phase(Phase.FAILED), name="f"),
        replace(in_phase(Phase.WAITING), name="w"),
        replace(running(crash(), crash(kind="checkpoint")), name="r"),
    ]
    daemon = Daemon(settings=NotifySettings(on=(event,)))
    daemon.sees(seen(*every), 1130.0)
    daemon.sees(seen(*every), 1133.0)
    assert [o.event for o in daemon.sent] == [event]


# ── what was before, and another daemon ─────────────────────────────────────────────────────────────────────


def test_what_happened_before_the_daemon_started_is_not_told() -> None:
    old, recent = BEGAN_S - REPEAT_S - 1, BEGAN_S - REPEAT_S + 1
    daemon = Daemon()
    jobs = [
        replace(running(crash(old), crash(recent)), name="r"),
        replace(in_phase(Phase.FAILED, old), name="f"),
        replace(in_phase(Phase.WAITING, old - ALL.job_waiting_s), name="w"),
    ]
    for at_s in (1000.5, 1005.0, 2000.0):
        daemon.sees(seen(*jobs), at_s)
    assert [(o.job, o.wall_s) for o in daemon.sent] == [("r", recent)]


def test_what_comes_back_after_etcd_was_wiped_is_not_new() -> None:
    daemon = Daemon()
    daemon.sees(seen(running(crash())), 1011.0)
    daemon.sees(seen(), 1012.0)
    assert daemon.sees(seen(running(crash())), 1013.0) == []


def test_memory_of_what_is_gone_is_bounded() -> None:
    daemon = Daemon()
    many = tuple(crash(1001.0 + i, kind="planned", detail="joins") for i in range(KEPT + 10))
    daemon.sees(seen(running(*many)), 9000.0)
    daemon.sees(seen(), 9001.0)
    assert len(daemon.memory.known) == KEPT
    assert max(key[3] for key in daemon.memory.known) == many[-1].id


def test_only_the_daemon_of_the_oldest_node_tells() -> None:
    a, b = Daemon("a"), Daemon("b")
    both = seen(running(crash()), nodes="ab")
    assert [d.sees(both, 1011.0) for d in (a, b)] == [[INCIDENT], []]


def test_next_daemon_tells_what_came_due_when_the_oldest_was_gone_already() -> None:
    b = Daemon("b")
    b.sees(seen(nodes="ab"), 1020.0)
    b.sees(seen(running(crash(1015.0)), nodes="ab"), 1021.0)
    lost = running(crash(1015.0), crash(1021.5 + REPEAT_S))
    assert b.sees(seen(lost, nodes="ab"), 1022.0 + REPEAT_S) == [], "a is to tell it"
    assert b.sees(seen(lost, nodes="b"), 1022.5 + REPEAT_S) == [INCIDENT], "not the one long told by a"
    assert b.sent[0].wall_s == 1021.5 + REPEAT_S
    assert b.sees(seen(lost, nodes="b"), 1023.5 + REPEAT_S) == []


def test_nothing_is_told_while_etcd_is_away_and_once_when_it_is_back() -> None:
    daemon = Daemon()
    daemon.sees(seen(running(crash())), 1011.0)
    more = running(crash(), crash(1030.0))
    assert daemon.sees(seen(more, connected=False), 1031.0) == []
    assert daemon.sees(seen(more), 1032.0) == [INCIDENT]
    assert daemon.sees(seen(more), 1033.0) == []


def test_daemon_that_is_not_registered_tells_nothing() -> None:
    assert Daemon("z").sees(seen(running(crash())), 1011.0) == []


# ── the body ────────────────────────────────────────────────────────────────────────────────────────────────


def test_body_is_json_with_one_line_of_text() -> None:
    daemon = Daemon()
    daemon.sees(seen(running(crash(1010.0))), 1011.0)
    body = as_json(daemon.sent[0], "main", "a")
    assert json.loads(json.dumps(body)) == body
    assert {k: body[k] for k in ("schema", "event", "cluster", "job", "node", "time", "sender")} == {
        "schema": 1, "event": "incident", "cluster": "main", "job": "train", "node": "a",
        "time": "1970-01-01T00:16:50+00:00", "sender": "a",
    }  # fmt: skip
    assert body["text"].startswith("main: incident: train: rank 1 on a: killed by SIGKILL from outside; ")
    assert body["id"] == "train/incident/1010.000"


def test_cure_is_in_the_text_if_a_person_is_needed() -> None:
    verdict = {"class": "node", "cause": "x", "person": True, "fix": "replace it"}
    told = Occurrence("i", "job_failed", "train", "n1", 1.0, "boom", verdict)
    assert as_json(told, "main", "a")["text"] == "main: job failed: train on n1: boom. To do: replace it"
    calm = replace(told, verdict=verdict | {"person": False})
    assert as_json(calm, "main", "a")["text"] == "main: job failed: train on n1: boom."


def test_text_from_a_job_is_one_short_line_without_passwords() -> None:
    daemon = Daemon()
    ended = in_phase(Phase.FAILED, 1010.0, "cannot reach http://ada:secret@db/x\n\x00next " + "x" * 5000)
    daemon.sees(seen(ended), 1010.0)
    daemon.sees(seen(ended), 1020.0)
    why = daemon.sent[0].why
    assert "secret" not in why
    assert "\n" not in why
    assert len(why) <= 500


@pytest.mark.parametrize("wall_s", [-5.0, 1e300])
def test_time_that_is_no_date_ends_nothing(wall_s: float) -> None:
    told = Occurrence("i", "incident", "train", "", wall_s, "x", None)
    assert as_json(told, "main", "a")["time"][:4] in ("1970", "9999")


def test_time_on_record_that_is_no_date_ends_nothing() -> None:
    failure = Failure(wall_s=1e300, generation=1, node="a", fingerprint="x")
    waiting = in_phase(Phase.WAITING)
    state = msgspec.structs.replace(waiting.state, excluded_nodes=("a",), failures=(failure,), reason="1 of 2 nodes")
    daemon = Daemon()
    assert daemon.sees(seen(replace(waiting, state=state)), 1200.0) == [WAITING]
    assert daemon.sent[0].why.startswith("waiting: 1 of 2 nodes; a is excluded until about an unknown time, ")


# ── any sequence of views ───────────────────────────────────────────────────────────────────────────────────

VIEWS = st.lists(
    st.tuples(
        st.dictionaries(st.integers(0, 4), st.tuples(st.booleans(), st.integers(-9, 9)), max_size=4),
        st.sampled_from([Phase.RUNNING, Phase.WAITING, Phase.FAILED]),
        st.sampled_from(["ab", "ba", "b"]),
        st.booleans(),
        st.integers(0, 40),
    ),
    max_size=12,
)
"""Each: incidents (number -> open, milliseconds by which its beginning is off), the job's phase, the nodes, whether
etcd can be reached, and seconds since the view before."""


def _played(views: Any, *daemons: Daemon) -> None:
    at_s = BEGAN_S
    for incidents, phase, nodes, connected, pause_s in views:
        at_s += pause_s
        found = sorted(incidents.items())
        records = [crash(1000.0 + 10 * n + ms / 1000, id=f"{n}", open=is_open) for n, (is_open, ms) in found]
        snapshot = seen(in_phase(phase, 1001.0, "x", *records), nodes=nodes, connected=connected)
        for daemon in daemons:
            daemon.sees(snapshot, at_s)


@given(VIEWS)
def test_one_daemon_tells_each_occurrence_at_most_once(views: Any) -> None:
    daemon = Daemon("b")
    _played(views, daemon)
    told = [(o.event, round(o.wall_s, 1)) for o in daemon.sent]
    assert len(told) == len(set(told))


@given(VIEWS)
def test_daemons_tell_each_occurrence_once_while_the_oldest_node_stays(views: Any) -> None:
    a, b = Daemon("a"), Daemon("b")
    _played([(i, p, "ab", c, s) for i, p, _, c, s in views], a, b)
    assert b.sent == []
    told = [(o.event, round(o.wall_s, 1)) for o in a.sent]
    assert len(told) == len(set(told))


@given(VIEWS)
def test_each_occurrence_that_stays_is_told(views: Any) -> None:
    daemon = Daemon("a")
    _played([(i, p, "a", c, s) for i, p, _, c, s in views], daemon)
    last = seen(in_phase(Phase.FAILED, 1002.5, "x", *(crash(1000.0 + 10 * n, id=f"{n}") for n in range(5))))
    for at_s in (5000.0, 5000.0 + FAILED_SETTLE_S):
        daemon.sees(last, at_s)
    told = {(o.event, round(o.wall_s)) for o in daemon.sent}
    assert {("incident", 1000 + 10 * n) for n in range(5)} <= told
    assert any(o.event == "job_failed" for o in daemon.sent)
