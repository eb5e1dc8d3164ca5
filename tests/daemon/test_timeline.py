"""Events that follow from two views of the cluster, and how a daemon writes and trims them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from support.snapshots import job

from elastic.contract.keys import KEPT_EVENTS, ClusterKeys
from elastic.contract.records.job_records import JobState, Phase, encode
from elastic.contract.records.node_records import DrainRecord, EventRecord, NodeRecord
from elastic.etcd.client import MemberHealth, Put
from elasticd.api.routes import event_routes
from elasticd.base import answers
from elasticd.cluster.cluster import Cluster, Job, Node
from elasticd.ctl.show import course as ctl_events
from elasticd.diagnosis import timeline, verdict
from elasticd.diagnosis.timeline import Timeline, happened

KEYS = ClusterKeys("main")
NOW_S = 1000.0


def node(name: str, created: int = 1, **facts: object) -> Node:
    base = {"node": name, "hostname": f"h-{name}", "address": "10.0.0.1", "slots": 2, "gpus": 0, "version": "0.1"}
    return Node(msgspec.convert(base | {"pid": 1, "started_wall_s": 5.0} | facts, NodeRecord), created)


def cluster(*jobs: Job, nodes: Sequence[Node] = (node("a"),), **facts: object) -> Cluster:
    base = Cluster(nodes={n.name: n for n in nodes}, jobs={j.name: j for j in jobs}, revision=9)
    return replace(base, **facts)  # type: ignore[arg-type]


def events_of(before: Cluster, after: Cluster) -> list[tuple[str, str, str]]:
    return [(e.kind, e.job, e.node) for e in happened(before, after, NOW_S)]


def test_nothing_happens_between_equal_views() -> None:
    assert events_of(cluster(job()), cluster(job())) == []


def test_nodes_come_go_restart_and_fall_sick() -> None:
    a, b = node("a"), node("b", 2)
    assert events_of(cluster(nodes=[a]), cluster(nodes=[a, b])) == [("node.came", "", "b")]
    assert events_of(cluster(nodes=[a, b]), cluster(nodes=[a])) == [("node.gone", "", "b")]
    gone = happened(cluster(job(), nodes=[a, b]), cluster(job(), nodes=[a]), NOW_S)[0]
    assert gone.text == "its lease expired, those of its agents of train have not: node lost, or elasticd killed"
    assert events_of(cluster(nodes=[a]), cluster(nodes=[node("a", started_wall_s=6.0)])) == [
        ("node.restarted", "", "a")
    ]
    sick = node("a", healthy=False, reason="disk full")
    assert events_of(cluster(nodes=[a]), cluster(nodes=[sick])) == [("node.unhealthy", "", "a")]
    assert events_of(cluster(nodes=[sick]), cluster(nodes=[a])) == [("node.healthy", "", "a")]


def test_a_resume_from_saved_state_is_told_once() -> None:
    resumed = job(progress=msgspec.structs.replace(job().progress, resumed_step=40, resumed_from="checkpoint step 40"))  # type: ignore[type-var]
    (event,) = happened(cluster(job()), cluster(resumed), NOW_S)
    assert (event.kind, event.text) == ("job.resumed", "resumed from step 40: checkpoint step 40")
    assert events_of(cluster(resumed), cluster(resumed)) == []


def test_drain_by_a_user_is_told_by_the_request_alone() -> None:
    by_itself = node("a", draining="GPU 0: XID 79")
    assert events_of(cluster(), cluster(nodes=[by_itself])) == [("node.draining", "", "a")]
    asked = replace(by_itself, drain=DrainRecord(reason="x", since_wall_s=1.0))
    assert events_of(cluster(), cluster(nodes=[asked])) == []


def test_phases_generations_and_exclusions_of_a_job() -> None:
    before = job(state=JobState(phase=Phase.PENDING), generation=None, incidents=())
    formed = replace(before, state=JobState(phase=Phase.RUNNING), generation=job().generation)
    assert events_of(cluster(before), cluster(formed)) == [
        ("job.running", "train", ""),
        ("generation.formed", "train", ""),
    ]
    text = happened(cluster(before), cluster(formed), NOW_S)[1].text
    assert text == "generation 2: 3 ranks on a, b (exit on a: killed by SIGKILL)"
    assert formed.generation is not None
    alone = msgspec.structs.replace(formed.generation, nodes=formed.generation.nodes[1:])
    (event,) = happened(cluster(before), cluster(replace(before, generation=alone)), NOW_S)
    assert event.text.startswith("generation 2: 1 rank on b (")
    failed = replace(formed, state=JobState(phase=Phase.FAILED, reason="crash loop"))
    assert [e.text for e in happened(cluster(formed), cluster(failed), NOW_S)] == ["crash loop"]
    aside = replace(formed, state=JobState(phase=Phase.RUNNING, excluded_nodes=("b",)))
    assert events_of(cluster(formed), cluster(aside)) == [("node.excluded", "train", "b")]
    for no_agent, text in (({}, "the job's workers fail there more often"),
                           ({"b": "no torch"}, "the job cannot be started there: no torch")):  # fmt: skip
        state = msgspec.structs.replace(aside.state, no_agent=no_agent, reason="2 of at least 3 nodes")
        assert [e.text for e in happened(cluster(formed), cluster(replace(formed, state=state)), NOW_S)] == [text]
    assert events_of(cluster(aside), cluster(formed)) == [("node.readmitted", "train", "b")]


def test_submitted_job_is_told_by_the_request_alone() -> None:
    new = job(state=JobState(phase=Phase.PENDING), generation=None, incidents=())
    assert events_of(cluster(), cluster(new)) == []


def test_an_incident_is_told_once_its_cause_is_known() -> None:
    """Before that it would be told as a lost node, which it is not."""
    whole = job().incidents[0]
    opened = msgspec.structs.replace(whole, open=True, wall_s=990.003, generation=1, timeline_s={})
    bare = msgspec.structs.replace(opened, kind="lost", node="", ranks=(), detail="", causes=(), error=None)
    assert "node was lost" not in verdict.judge(bare).what
    calm, early, during = job(incidents=()), job(incidents=(bare,)), job(incidents=(opened,))
    assert happened(cluster(calm), cluster(early), NOW_S) == []
    (told,) = happened(cluster(early), cluster(during), NOW_S)
    assert (told.kind, told.text) == ("incident.opened", "node: rank 1 on a: killed by SIGKILL from outside")


def test_incident_is_told_when_it_opens_and_once_more_when_it_closes() -> None:
    whole = job().incidents[0]
    closed = msgspec.structs.replace(whole, ended_wall_s=990.144)
    opened = msgspec.structs.replace(whole, open=True, wall_s=990.003, generation=1, timeline_s={})
    calm, during, after = job(incidents=()), job(incidents=(opened,)), job(incidents=(closed,))
    first = happened(cluster(calm), cluster(during), NOW_S)
    assert [(e.kind, e.node, e.when_wall_s) for e in first] == [("incident.opened", "a", 990.003)]
    assert first[0].text == "node: rank 1 on a: killed by SIGKILL from outside"
    second = happened(cluster(during), cluster(after), NOW_S)
    assert [(e.kind, e.when_wall_s) for e in second] == [("incident.closed", 990.144)]
    both = happened(cluster(calm), cluster(after), NOW_S)
    assert [e.kind for e in both] == ["incident.opened", "incident.closed"], "the view skipped the time in between"


def test_wiped_etcd_is_one_event() -> None:
    assert events_of(cluster(job()), cluster(revision=3)) == [("etcd.replaced", "", "")]


def sent(line: Timeline) -> list[EventRecord]:
    puts: list[Put] = []
    line.send(lambda batch: not puts.extend(batch))
    return list(timeline.read({put.key: put.value for put in puts}))


def test_only_the_daemon_of_the_oldest_node_writes() -> None:
    a, b, c = node("a", 1), node("b", 2), node("c", 3)
    lines = {name: Timeline(KEYS, name) for name in "ab"}
    for line in lines.values():
        line.look(cluster(nodes=[a, b]), 1.0)
        line.look(cluster(nodes=[a, b, c]), 2.0)
    events = sent(lines["a"])
    assert [e.node for e in events] == ["c"]
    assert sent(lines["b"]) == []
    told = {KEYS.event(e.when_wall_s, "a", "x"): encode(e) for e in events}
    lines["b"].look(cluster(nodes=[b, c], events=told), 3.0)
    assert [(e.kind, e.node) for e in sent(lines["b"])] == [("node.gone", "a")]


def test_what_the_daemon_that_tells_events_took_with_it_is_told_by_the_next_one() -> None:
    """The daemon that tells events is lost with its node. Until its lease has ended no other daemon tells any, though
    all see what happens: the next one to tell makes up for that."""
    a, b = node("a", 1), node("b", 2)
    line = Timeline(KEYS, "b")
    line.look(cluster(job(incidents=()), nodes=[a, b]), 100.0)
    line.look(cluster(nodes=[a, b, node("c", 3)]), 101.0)  # long ago: it lived
    again = msgspec.structs.replace(job().generation, number=3)  # type: ignore[type-var]
    line.look(cluster(job(incidents=()), nodes=[a, b]), 199.0)
    line.look(cluster(job(incidents=(), generation=again), nodes=[a, b]), 200.0)
    assert sent(line) == []
    line.look(cluster(job(incidents=(), generation=again), nodes=[b]), 204.0)
    events = sent(line)
    assert [(e.kind, e.when_wall_s) for e in events][-2:] == [("generation.formed", 200.0), ("node.gone", 204.0)]
    assert not [e for e in events if e.when_wall_s < 150.0]


def test_generations_that_no_view_shows_are_told() -> None:
    """Several are formed in quick succession, and a view of etcd has the newest one alone."""
    formed = job().generation
    assert formed is not None
    texts = {}
    for number, previous in ((3, 0), (4, 0), (6, 0), (6, 2)):
        later = msgspec.structs.replace(formed, number=number, previous=previous)
        events = happened(cluster(job(incidents=())), cluster(job(incidents=(), generation=later)), NOW_S)
        texts[number, previous] = [event.text.partition(" (")[0] for event in events]
    newest = "3 ranks on a, b"
    assert texts[3, 0] == [f"generation 3: {newest}"]
    assert texts[4, 0] == ["generation 3: replaced by 4 before it was seen here", f"generation 4: {newest}"]
    assert texts[6, 0] == ["generations 3 to 5: replaced by 6 before it was seen here", f"generation 6: {newest}"]
    assert texts[6, 2] == [f"generation 6: {newest}"], "there were none: etcd had lost its data"


def test_event_that_etcd_did_not_take_is_sent_again_with_its_key() -> None:
    line, puts = Timeline(KEYS, "a"), list[str]()
    line.look(cluster(), 1.0)
    line.look(cluster(nodes=[node("a"), node("b", 2)]), 2.0)
    for taken in (False, True, True):
        line.send(lambda batch, taken=taken: puts.extend(p.key for p in batch) or taken)  # type: ignore[misc]
    assert len(puts) == 2
    assert puts[0] == puts[1]


def test_daemon_that_starts_tells_incidents_that_no_daemon_saw() -> None:
    whole = msgspec.structs.replace(job().incidents[0], ended_wall_s=990.144)
    line = Timeline(KEYS, "a")
    line.look(cluster(job(incidents=(whole,))), 1.0)
    assert [e.kind for e in sent(line)] == ["incident.opened", "incident.closed"]
    newer = EventRecord(when_wall_s=995.0, kind="node.came")
    line = Timeline(KEYS, "a")
    line.look(cluster(job(incidents=(whole,)), events={KEYS.event(995.0, "a", "x"): encode(newer)}), 1.0)
    assert sent(line) == []


def test_outage_of_etcd_is_told_at_its_end_with_both_times() -> None:
    line = Timeline(KEYS, "a")
    line.contact(False, "connection refused", 1.0)  # before the first contact: the start, not an outage
    line.look(cluster(), 2.0)
    line.contact(True, "", 2.0)
    assert sent(line) == []
    line.contact(False, "connection refused", 10.0)
    line.contact(False, "", 20.0)
    line.look(cluster(nodes=[]), 44.0)  # its own lease has ended meanwhile
    line.contact(True, "", 44.0)
    assert [(e.kind, e.when_wall_s, e.text) for e in sent(line)] == [
        ("etcd.lost", 10.0, "unreachable from a: connection refused"),
        ("etcd.back", 44.0, "reachable from a again after 34.0 s"),
    ]


def test_etcd_member_that_goes_down_is_an_event() -> None:
    line = Timeline(KEYS, "a")
    line.look(cluster(), 1.0)
    good = [MemberHealth(f"e{i}:2379", "3.5.21", True, "") for i in range(3)]
    line.members(good, 1.0)
    assert sent(line) == []
    line.members([MemberHealth("e0:2379", "", False, "refused"), *good[1:]], 2.0)
    assert [(e.kind, e.text) for e in sent(line)] == [("etcd.member_down", "e0:2379: refused; 2 of 3 members are up")]


def test_members_that_were_all_away_are_told_as_an_outage_alone() -> None:
    """The answer is some seconds old when etcd is back, and it would be told at that instant."""
    line = Timeline(KEYS, "a")
    line.look(cluster(), 1.0)
    good = [MemberHealth(f"e{i}:2379", "3.5.21", True, "") for i in range(3)]
    line.members(good, 1.0)
    line.contact(False, "refused", 2.0)
    line.contact(True, "", 9.0)
    line.members([MemberHealth(member.endpoint, "", False, "refused") for member in good], 9.0)
    line.members(good, 12.0)
    assert [e.kind for e in sent(line)] == ["etcd.lost", "etcd.back"]


@pytest.mark.parametrize(("extra", "deleted"), [(0, 0), (1, 1), (49, 49), (500, timeline.BATCH)])
def test_number_of_events_is_bounded(extra: int, deleted: int) -> None:
    raw = encode(EventRecord(when_wall_s=1.0, kind="x"))
    events = {KEYS.event(float(i), "a", "x"): raw for i in range(KEPT_EVENTS + extra)}
    line = Timeline(KEYS, "a")
    old = line.too_old(cluster(events=events))
    assert old == sorted(events)[:deleted]
    assert Timeline(KEYS, "b").too_old(cluster(events=events)) == []


def test_pending_events_are_bounded() -> None:
    line = Timeline(KEYS, "a")
    line.look(cluster(), 1.0)
    for i in range(3 * timeline.PENDING):
        line.look(cluster(nodes=[node("a", started_wall_s=float(i))]), float(i))
    batches: list[Any] = []
    for _ in range(100):
        line.send(lambda batch: not batches.extend(batch))
    assert len(batches) == timeline.PENDING


def test_events_are_chosen_by_job_node_and_time() -> None:
    made = [
        EventRecord(when_wall_s=10.0, kind="node.came", node="a"),
        EventRecord(when_wall_s=20.0, kind="incident.opened", job="train", node="a, b"),
        EventRecord(when_wall_s=30.0, kind="job.stopped", job="other", user="ada", uid=7, pid=3, text="done"),
    ]
    events = {KEYS.event(e.when_wall_s, "a", "x"): encode(e) for e in made} | {f"{KEYS.events}0": b"not a record"}
    seen = cluster(events=events)

    def found(job: str = "", node: str = "", since: float = 0.0, last: int = 0) -> list[float]:
        return [row.when_wall_s for row in event_routes.listed(seen, job, node, since, last)]

    assert found() == [10.0, 20.0, 30.0]
    assert found(job="train") == [20.0]
    assert found(node="a") == [10.0, 20.0]
    assert found(node="b") == [20.0]
    assert found(since=20.0, last=1) == [30.0]


def test_event_in_words_names_the_user_and_holds_no_control_characters() -> None:
    row = timeline.answer(
        EventRecord(when_wall_s=30.0, kind="job.stopped", job="j", user="ada", uid=7, pid=3, text="bye\x1b[2J")
    )
    said = ctl_events.in_words(answers.printable(row))
    assert said.endswith("job.stopped           j               bye\\x1b[2J (by ada, pid 3)")
    assert "(by" not in ctl_events.in_words(msgspec.structs.replace(row, user="", uid=None, pid=None))


def test_an_incident_that_cannot_be_told_keeps_no_other_job_untold() -> None:
    """Its record may be a user's own: the loop of each daemon of the cluster reads it."""
    record = job().incidents[-1]
    bad = msgspec.structs.replace(record, world_size_before=10**400, open=False)
    evil, good = replace(job(incidents=(bad,)), name="evil"), job(incidents=(record,))
    before = cluster(replace(evil, incidents=()), replace(good, incidents=()))
    after = cluster(evil, good)
    assert ("incident.opened", "train", record.node) in events_of(before, after)
    assert ("job.untold", "evil", "") in events_of(before, after)
    assert {event.job for event in timeline.missed(after)} == {"train"}


def test_an_incident_with_a_time_that_is_no_date_has_its_event() -> None:
    record = msgspec.structs.replace(job().incidents[-1], wall_s=1e306)
    line = Timeline(KEYS, "a")
    line.look(cluster(job(incidents=())), NOW_S)
    line.look(cluster(job(incidents=(record,))), NOW_S)
    sent: list[Put] = []
    line.send(lambda batch: not sent.extend(batch))
    assert len(sent) >= 1


def test_an_event_is_small_whatever_an_incident_calls_its_node() -> None:
    """etcd refuses a batch that is too large, and with it the events of the other jobs."""
    record = msgspec.structs.replace(job().incidents[-1], node="\0" * 250_000)
    events = timeline.happened(cluster(job(incidents=())), cluster(job(incidents=(record,))), NOW_S)
    assert [event.kind for event in events if event.node] == ["incident.opened"]
    assert max(len(encode(event)) for event in events) * timeline.BATCH < 1_500_000
