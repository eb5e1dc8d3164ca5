"""The line of why of each job and node, from views of a cluster."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import plain_views
from support.snapshots import job, progress, row, snapshot

from elastic.contract.agent_files import AgentStatus
from elastic.contract.job.spec import Checkpoint
from elastic.contract.records.decoding import Member
from elastic.contract.records.job_records import Failure, IncidentRecord, JobState, MemberRecord, Phase
from elastic.contract.records.node_records import AgentRow, CordonRecord, DrainRecord, NodeRecord
from elastic.contract.records.reasons import Code, reason
from elastic.contract.records.standings import Stillness
from elastic.contract.step_parts import StepParts
from elasticd.api.doctor import older_agents
from elasticd.api.views.instant import Identity, Now
from elasticd.base import phrases
from elasticd.cluster import reconcile
from elasticd.cluster.assignment import Assignment
from elasticd.cluster.cluster import Cluster, Job, Node
from elasticd.cluster.published_state import Contact, LocalAgent, Snapshot

NOW = Now(monotonic_s=100.0, wall_s=1000.0)
IDENTITY = Identity("main", "a", "0.1", 7, 40.0, ("127.0.0.1:2379",), False, "")
PENDING = job(state=JobState(since_wall_s=986.0), generation=None, progress=None, incidents=(), members={})


def seen(*jobs: Job, nodes: tuple[Node, ...] = (), **facts: object) -> Snapshot:
    base = snapshot(*jobs)
    all_ = {**base.cluster.nodes, **{n.name: n for n in nodes}}
    more = {key: facts.pop(key) for key in ("foreign", "refused") if key in facts}
    cluster = replace(base.cluster, nodes=all_, **more)  # type: ignore[arg-type]
    return replace(base, cluster=cluster, **facts)  # type: ignore[arg-type]


def node(
    name: str = "a", cordon: CordonRecord | None = None, drain: DrainRecord | None = None, **facts: object
) -> Node:
    base = {"node": name, "hostname": "h", "address": "10.0.0.1", "slots": 2, "gpus": 0, "version": "0.1", "pid": 1}
    return Node(msgspec.convert(base | {"started_wall_s": 5.0} | facts, NodeRecord), 1, cordon, drain)


def of_job(*jobs: Job, **facts: Any) -> str:
    return str(plain_views.status(seen(*jobs, **facts), IDENTITY, NOW)["jobs"][0]["why"])


def of_node(*nodes: Node, job: Job | None = None, name: str = "a", **facts: Any) -> str:
    rows = plain_views.status(seen(*([job] if job else []), nodes=nodes, **facts), IDENTITY, NOW)["nodes"]
    return str(next(row["why"] for row in rows if row["node"] == name))


def member(name: str, **facts: object) -> Member:
    return Member(MemberRecord(node=name, incarnation="i", host="h", port=1, slots=2, **facts), 1)  # type: ignore[arg-type]


def clock(wall_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(wall_s))


IMPORTS = node(agents=[["train", "importing torch", 986.0]])
LOST = Contact(False, 40.0, "etcdserver: authentication failed")
SHUT = {"/elastic/main/jobs/train/head/spec": "speaks protocol 9"}
STILL = {"since_wall_s": 940.0, "because": "it is computing in step 41", "rank": 2, "node": "b"}


@pytest.mark.parametrize(
    ("why", "facts"),
    [
        ("running: step 40, 9.88 steps/s", {}),
        ("failed 16 s ago: loop", {"state": JobState(phase=Phase.FAILED, since_wall_s=984.0, reason="loop")}),
        ("waiting: node b is gone", {"state": JobState(phase=Phase.WAITING, reason="node b is gone")}),
        ("succeeded 2 min ago", {"state": JobState(phase=Phase.SUCCEEDED, since_wall_s=880.0)}),
        ("stopping (by ada): the workers on a, b end", {"state": JobState(phase=Phase.STOPPING, reason="by ada")}),
        ("waiting for its agents to write its description back to etcd", {"spec": None}),
        ("waiting for: slot 1 of b to start", {"progress": progress(waiting_for="slot 1 of b to start")}),
        (f"no progress since {clock(940.0)} (60 s), probably rank 2 on b: it is computing in step 41",
         {"progress": progress(still=STILL)}),
        ("running: no step yet, 3 ranks", {"progress": progress(0, managed=True)}),
        ("running: 3 ranks of a script that has not called elastic.run: its steps are not known",
         {"progress": progress(0, managed=False)}),
        ("running: step 40, 9.88 steps/s; the newest checkpoint failed: disk full",
         {"progress": progress(checkpoint_error="disk full")}),
        ("running: step 40, 9.88 steps/s; b is unreachable by a",
         {"members": {"a": member("a", unreachable=("b",)), "b": member("b")}}),
        (f"running: step 40, 9.88 steps/s; b is excluded until about {clock(1550.0)}, because workers of train failed "
         "there once",
         {"state": JobState(phase=Phase.RUNNING, excluded_nodes=("b",),
                            failures=(Failure(wall_s=950.0, generation=1, node="b", fingerprint="x"),))}),
    ],
)  # fmt: skip
def test_why_of_a_job(why: str, facts: dict[str, object]) -> None:
    assert of_job(job(**{"incidents": ()} | facts)) == why


def test_a_job_that_is_over_names_the_agents_that_still_end_and_may_write_its_last_checkpoint() -> None:
    state, here = JobState(phase=Phase.SUCCEEDED, since_wall_s=997.0), node(jobs=("train",))
    spec = job().spec
    assert spec is not None
    saves = msgspec.structs.replace(spec, spec=msgspec.structs.replace(spec.spec, checkpoint=Checkpoint(dir="/c")))
    assert of_job(job(state=state), nodes=(here,)) == "succeeded 3 s ago (agents on a still end)"
    assert of_job(job(state=state, spec=saves)) == "succeeded 3 s ago"
    assert of_job(job(state=state, spec=saves), nodes=(here,)) == (
        "succeeded 3 s ago (agents on a still end; the last checkpoint may not be complete)"
    )


def test_a_job_that_is_told_to_stop_stops_whatever_its_user_writes() -> None:
    state = JobState(phase=Phase.STOPPING, reason="by ada")
    forged = {"/elastic/main/jobs/train/head/state": "it is not signed"}
    assert of_job(job(state=state), refused=forged) == "stopping (by ada): the workers on a, b end"


def test_job_that_recovers_names_the_cause_and_what_it_waits_for() -> None:
    outage = msgspec.structs.replace(job().incidents[0], open=True)
    waits = job(incidents=(outage,), progress=progress(waiting_for="node c"))
    assert of_job(waits) == (
        "recovering for 10 s from node: rank 1 on a: killed by SIGKILL from outside; waits for node c"
    )


def test_job_without_room_names_the_nodes_in_place_of_what_broke_its_generation() -> None:
    state, lacks = JobState(phase=Phase.WAITING, since_wall_s=940.0), "1 of at least 2 nodes; b is draining: by root"
    noise = msgspec.convert({"since_wall_s": 940.0, "because": "comm on a: Connection reset by peer"}, Stillness)
    stands = progress(still=noise, waiting_for="comm on a: Connection reset by peer")
    shown = plain_views.status(
        seen(job(state=state, progress=stands), plan=Assignment({}, {}, {"train": lacks})), IDENTITY, NOW
    )
    assert (shown["jobs"][0]["why"], shown["jobs"][0]["waiting_for"]) == (f"waiting for: {lacks}", lacks)


def test_job_that_starts_says_what_each_agent_does_and_for_how_long() -> None:
    assert of_job(PENDING) == "waiting for a node"
    assert of_job(PENDING, plan=Assignment(places={"train": {"a": 2}})) == "waiting for a to start an agent, for 14 s"
    assert of_job(PENDING, nodes=(IMPORTS,)) == "a is importing torch for 14 s"
    short = Assignment(waiting={"train": "0 of at least 1 nodes; a has 0 of 2 slots free"})
    assert of_job(PENDING, plan=short) == "waiting for: 0 of at least 1 nodes; a has 0 of 2 slots free"
    there = replace(PENDING, members={"a": member("a")})
    setting_up = {"waiting_for": reason(Code.WORKERS_START, slots="0", node="a")}
    assert of_job(replace(there, progress=progress(**setting_up)), nodes=(IMPORTS,)) == "a is importing torch for 14 s"
    assert of_job(replace(there, progress=progress(**setting_up))) == "waiting for: slot 0 of a to start"
    for_more = progress(waiting_for="node c to start")
    assert of_job(replace(there, progress=for_more), nodes=(IMPORTS,)).startswith("waiting for: node c to start; a is")
    assert of_job(there) == "waiting for the first generation: agents are there on a"


def test_an_agent_that_runs_beside_the_daemon_is_asked_itself() -> None:
    """The record of its node said for seconds that it imports torch, while its workers ran."""
    base = {"pid": 3, "incarnation": "i", "job": "train", "node": "a", "phase": "running", "reason": ""}
    base |= {"leader": False, "generation": 2, "etcd_ok": True, "written_wall_s": 999.0}
    forms = job(incidents=(), progress=progress(0, managed=True))

    def why(status: dict[str, object] | None) -> tuple[str, str]:
        said = None if status is None else msgspec.convert(base | status, AgentStatus)
        agents = {"train": LocalAgent("train", 3, 2, said, None)}
        return of_job(forms, nodes=(IMPORTS,), agents=agents), of_node(IMPORTS, job=forms, agents=agents)

    assert why(None) == ("a is importing torch for 14 s", "train is importing torch for 14 s")
    setting_up = {"doing": "running setup in slot 0", "doing_since_wall_s": 997.0}
    assert why(setting_up) == ("a is running setup in slot 0 for 3 s", "train is running setup in slot 0 for 3 s")
    assert why({}) == ("running: no step yet, 3 ranks", "ready: 2 of 2 slots used")
    assert why({"node": "b"})[0] == "a is importing torch for 14 s", "of another node"


def test_what_a_lost_agent_said_last_is_told_as_that_until_it_is_there_again() -> None:
    """Its node's record stays in etcd until the lease ends."""
    cause = {"generation": 2, "node": "a", "kind": "lost", "detail": "its port refuses connections"}
    outage = msgspec.convert(
        msgspec.to_builtins(job().incidents[0]) | {"open": True, "wall_s": 997.0, "causes": [cause]}, IncidentRecord
    )
    lost = job(incidents=(outage,), progress=progress(0, managed=True))

    def why(lost: Job, *agents: list[object]) -> tuple[str, str]:
        there = node(agents=agents)
        return of_job(lost, nodes=(there,)).rpartition("; ")[2], of_node(there, job=lost)

    imports, again = ["train", "importing torch", 986.0], ["train", "starting", 998.0]
    silent = "silent for 3 s, last said: importing torch"
    assert why(lost, imports) == (f"a is {silent}", f"train is {silent}")
    assert why(replace(lost, members={}), imports) == (f"a is {silent}", f"train is {silent}"), (
        "its own lease has ended"
    )
    assert why(lost)[1] == "the agent of train is silent for 3 s"
    assert why(lost, again)[0] == "a is starting for 2 s", "its daemon lives"
    anew = {"a": Member(MemberRecord(node="a", incarnation="j", host="h", port=1, slots=2), 1)}
    assert why(replace(lost, members=anew), imports)[0] == "a is importing torch for 14 s"
    heard = replace(lost, incidents=(msgspec.structs.replace(outage, wall_s=989.0),))
    assert why(heard, imports)[0] == "a is importing torch for 14 s", "no lease is so long"
    over = msgspec.structs.replace(outage, open=False)
    assert why(replace(lost, incidents=(over,)), imports)[0] == "a is importing torch for 14 s"


def test_what_is_older_than_its_interval_has_its_age() -> None:
    base = {
        "pid": 3,
        "incarnation": "i",
        "job": "train",
        "node": "a",
        "phase": "running",
        "reason": "",
        "leader": False,
    }
    base |= {"generation": 2, "etcd_ok": True, "doing": "importing torch", "doing_since_wall_s": 960.0}
    said = msgspec.convert(base | {"written_wall_s": 980.0}, AgentStatus)
    agents = {"train": LocalAgent("train", 3, 2, said, None)}
    assert of_job(PENDING, nodes=(IMPORTS,), agents=agents) == "a is silent for 20 s, last said: importing torch"
    late = job(incidents=(), progress=progress(wall_s=990.0))
    assert of_job(late) == "running: step 40 as of 10 s ago, 9.88 steps/s"


def test_start_of_an_agent_is_not_shown_once_its_generation_has_stepped() -> None:
    """The record of its node is seconds old. A new agent on that node, or one outside the generation, does start."""
    stepped = job(incidents=(), progress=progress(stepped_in=2))
    assert of_job(stepped, nodes=(IMPORTS,)) == "running: step 40, 9.88 steps/s"
    assert "importing" not in of_node(IMPORTS, job=stepped)
    before = replace(stepped, progress=progress(stepped_in=1))
    for starts in (
        before,
        replace(stepped, members={"b": member("b")}),
        replace(stepped, members={"a": Member(MemberRecord(node="a", incarnation="j", host="h", port=1, slots=2), 1)}),
    ):
        some = "" if len(starts.members) == 2 else ", on 1 of at most 2 nodes"
        steps = "" if starts is before else f"running: step 40, 9.88 steps/s{some}; "  # without the agent that starts
        assert of_job(starts, nodes=(IMPORTS,)) == f"{steps}a is importing torch for 14 s"
        assert "train is importing torch for 14 s" in of_node(IMPORTS, job=starts)


def test_job_shows_the_refusal_of_etcd_in_the_words_of_etcd() -> None:
    assert of_job(job(incidents=()), contact=LOST).endswith(
        "; etcd unreachable: etcdserver: authentication failed (training goes on, a recovery waits for etcd)"
    )
    assert of_job(job(spec=None), foreign=SHUT) == (
        "a record of it in etcd cannot be used: /elastic/main/jobs/train/head/spec: speaks protocol 9"
    )


DRAIN = DrainRecord(reason="b", since_wall_s=995.0)


@pytest.mark.parametrize(
    ("why", "made"),
    [
        ("ready: idle", node()),
        ("train is importing torch for 14 s", IMPORTS),
        ("takes no work: GPU 3: XID 79", node(healthy=False, reason="GPU 3: XID 79")),
        ("cordoned for 12 s: new disk", node(cordon=CordonRecord(reason="new disk", since_wall_s=988.0))),
        ("draining for 5 s: b; nothing runs here any more", node(draining="b", drain=DRAIN)),
        ("draining for 5 s: b; its elasticd has yet to see that", node(drain=DRAIN)),
        ("draining: GPU 0; nothing runs here any more", node(draining="GPU 0")),
    ],
)  # fmt: skip
def test_why_of_a_node(why: str, made: Node) -> None:
    assert of_node(made) == why


def test_node_says_who_cannot_reach_it_and_which_jobs_exclude_it() -> None:
    cut = job(members={"a": member("a"), "b": member("b", unreachable=("a",))})
    assert of_node(job=cut) == "unreachable by b (train)"
    aside = job(state=JobState(phase=Phase.RUNNING, excluded_nodes=("a",), no_agent={"a": "torch?"}))
    assert of_node(job=aside) == "excluded for train for at most 10 min, because train cannot be started there: torch?"
    late = job(state=JobState(phase=Phase.RUNNING, excluded_nodes=("a",)))
    assert of_node(job=late) == "excluded for train for at most 10 min, because workers of train failed there"
    failures = (Failure(wall_s=950.0, generation=1, node="a", fingerprint="x"),)
    failing = job(state=JobState(phase=Phase.RUNNING, excluded_nodes=("a",), failures=failures))
    assert of_node(job=failing) == (
        f"excluded for train until about {clock(1550.0)}, because workers of train failed there once"
    )
    assert of_node(job=job()) == "ready: 2 of 2 slots used"
    down = "elasticd does not answer there; its agents of train have not lost their leases"
    assert of_node(job=job(), name="b") == down
    apart = seen(job())
    drained = replace(apart, cluster=replace(apart.cluster, drains={"b": DrainRecord(reason="x", since_wall_s=1.0)}))
    rows = plain_views.status(drained, IDENTITY, NOW)["nodes"]
    assert [row["why"] for row in rows if row["node"] == "b"] == [f"{down}; its drain waits for elasticd"]
    assert of_node(contact=LOST) == (
        "etcd unreachable from here: etcdserver: authentication failed; what runs here goes on"
    )
    assert of_node(trouble={"train": "exit code 1"}) == "no agent of train runs: exit code 1"
    again = LocalAgent("train", 3, 2, None, None)
    assert of_node(trouble={"train": "exit code 1"}, agents={"train": again}) == "ready: idle", "it was started again"


@given(phase=st.sampled_from(Phase), generation=st.booleans(), spec=st.booleans(), members=st.booleans(),
       step=st.none() | st.integers(0, 9), waits=st.sampled_from(["", "node c"]), away=st.booleans(),
       placed=st.booleans(), outage=st.booleans())  # fmt: skip
def test_every_job_and_node_has_one_line(
    phase: Phase, generation: bool, spec: bool, members: bool, step: int | None, waits: str, away: bool, placed: bool,
    outage: bool,
) -> None:  # fmt: skip
    base = job(state=JobState(phase=phase, since_wall_s=900.0))
    made = replace(
        base, generation=base.generation if generation else None, spec=base.spec if spec else None,
        members=base.members if members else {}, progress=None if step is None else progress(step, waiting_for=waits),
        incidents=tuple(msgspec.structs.replace(i, open=outage) for i in base.incidents),
    )  # fmt: skip
    plan = Assignment(places={"train": {"a": 1}} if placed else {})
    facts = {"contact": LOST} if away else {}
    said = plain_views.status(replace(seen(made, **facts), plan=plan), IDENTITY, NOW)
    for each in (*said["jobs"], *said["nodes"]):
        assert each["why"].strip(), each
        assert "\n" not in each["why"]


def test_rows_of_agents_in_a_node_record() -> None:
    assert IMPORTS.record.agents == (AgentRow("train", "importing torch", 986.0),)


def test_node_does_not_start_agents_of_a_job_that_is_over() -> None:
    """Its record is a few seconds older than the job's."""
    over = job(state=JobState(phase=Phase.SUCCEEDED, since_wall_s=999.0))
    assert "importing" not in of_node(IMPORTS, job=over)
    assert of_node(IMPORTS, job=PENDING) == "train is importing torch for 14 s"


@pytest.mark.parametrize("wall_s", [1e300, -1e300, float("inf"), float("nan")])
def test_a_time_that_is_none_breaks_no_line(wall_s: float) -> None:
    assert phrases.clock(wall_s) == "an unknown time"


def test_a_job_names_its_slow_rank_and_the_nodes_that_it_lacks() -> None:
    slow = [{"rank": 3, "node": "b", "ratio": 3.7}]
    parts = StepParts(step_s=0.1, data_s=0, compute_s=None, collectives_s=None, optimizer_s=None, snapshot_s=0)
    ranks = [msgspec.to_builtins(row(0, "a", 0, parts=parts))]
    fewer = job(incidents=(), members={"a": member("a")}, progress=progress(slow_ranks=slow, ranks=ranks))
    assert of_job(fewer) == (
        "running: step 40, 9.88 steps/s, on 1 of at most 2 nodes; rank 3 on b takes 3.7 times as long as the others"
    )


def test_agents_of_an_earlier_version_are_named_by_status_and_doctor() -> None:
    known = node(version="0.2", older={"train": "elasticd 0.1"})
    assert of_node(known) == "ready: idle; the agent of train still runs elasticd 0.1"
    (found,) = older_agents(Cluster(nodes={"a": known, "b": node("b")}))
    assert (found.node, found.level) == ("a", "warning")
    assert found.text == "agents of another elasticd than the node's 0.2: train (elasticd 0.1)"
    assert found.fix.startswith("elasticctl drain a --wait")
    said = AgentStatus(
        pid=3, incarnation="i", job="train", node="a", phase="running", reason="", leader=False, generation=2,
        etcd_ok=True, written_wall_s=0.0,
    )  # fmt: skip
    status = {"train": said, "new": msgspec.structs.replace(said, version="0.2"), "starts": None}
    assert reconcile.older_agents(status, "0.2") == {"train": "an earlier elasticd"}
