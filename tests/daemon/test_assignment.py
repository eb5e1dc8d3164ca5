"""Which node works for which job: the rules one by one, then thousands of random clusters."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import msgspec
import pytest

from elastic.contract.job.spec import JobSpec
from elastic.contract.records.decoding import Member
from elastic.contract.records.job_records import (
    GenerationNode,
    GenerationRecord,
    JobState,
    MemberRecord,
    Phase,
    SpecRecord,
)
from elastic.contract.records.node_records import CordonRecord, DrainRecord, NodeRecord
from elastic.contract.records.reasons import Code, Reason, codes, listed, reason, reasons
from elasticd.cluster.assignment import Assignment, plan
from elasticd.cluster.cluster import Cluster, Job, Node
from elasticd.cluster.reconcile import Silent


def node(name: str, slots: int = 2, create_revision: int = 0, **record: object) -> Node:
    facts = {"node": name, "hostname": name, "address": name, "slots": slots, "gpus": 0, "version": "1", "pid": 1}
    return Node(msgspec.convert(facts | {"started_wall_s": 0.0} | record, NodeRecord), create_revision or ord(name[-1]))


def job(
    name: str, nodes: str = "1:1", workers: int | str = 2, submitted: int = 0, backend: str = "auto", spare: int = 0,
    **state: object,
) -> Job:  # fmt: skip
    told = {"name": name, "script": "t.py", "nodes": nodes, "workers_per_node": workers, "backend": backend}
    spec = msgspec.convert(told | {"spare_nodes": spare}, JobSpec)
    return Job(
        name=name,
        spec=SpecRecord(spec=spec, submitted_wall_s=0.0, submitted_by="x"),
        submitted=submitted or ord(name[-1]),
        state=msgspec.convert({"phase": "pending"} | state, JobState),
    )


def member(name: str, slots: int = 2, create_revision: int = 0) -> Member:
    record = MemberRecord(node=name, incarnation="i", host=name, port=1, slots=slots)
    return Member(record, create_revision or ord(name[-1]))


def cluster(nodes: list[Node], jobs: list[Job]) -> Cluster:
    return Cluster(nodes={n.name: n for n in nodes}, jobs={j.name: j for j in jobs})


def where(made: Assignment) -> dict[str, list[str]]:
    return {name: list(nodes) for name, nodes in made.places.items()}


def test_a_node_without_an_agent_after_a_minute_comes_last() -> None:
    """The record of one that is switched off, put back into etcd: a new job does not wait for it."""
    there = cluster([node("a"), node("b")], [job("j1")])
    silent, places = Silent(), {"j1": {"a": 2}}
    assert not silent.look(places, there, {}, "b", 0.0)
    assert not silent.look(places, there, {}, "b", 59.0)
    assert silent.look(places, there, {}, "b", 60.0) == {("j1", "a")}
    assert silent.look({"j1": {"b": 2}}, there, {}, "b", 61.0) == {("j1", "a")}, "it does not come back at once"
    assert not silent.look({"j1": {"b": 2}}, there, {"j1"}, "b", 661.0)
    assert where(plan(there, {}, "b", silent={("j1", "a")})) == {"j1": ["b"]}
    assert where(plan(cluster([node("a")], [job("j1")]), {}, "b", silent={("j1", "a")})) == {"j1": ["a"]}


def test_a_place_of_a_job_that_etcd_has_lost_is_no_silence() -> None:
    silent = Silent()
    for now_s in (0.0, 100.0):
        assert not silent.look({"j1": {"a": 2}}, cluster([node("a")], []), {}, "b", now_s)


@pytest.mark.parametrize("there", [node("a", jobs=("j1",)), node("a")])
def test_an_agent_that_starts_or_is_a_member_is_no_silence(there: Node) -> None:
    one = job("j1") if there.record.jobs else replace(job("j1"), members={"a": member("a")})
    silent = Silent()
    for now_s in (0.0, 100.0):
        assert not silent.look({"j1": {"a": 2}}, cluster([there], [one]), {}, "b", now_s)


def no_slots(node: str, total: int, needs: int) -> Reason:
    return reason(Code.NO_SLOTS, node=node, free=0, total=total, needs=needs)


def test_the_oldest_job_is_served_first() -> None:
    made = plan(cluster([node("a")], [job("j2"), job("j1")]), {}, "a")
    assert where(made) == {"j2": [], "j1": ["a"]}
    assert no_slots("a", 2, 2) in reasons(made.waiting["j2"])


def test_the_oldest_nodes_come_first() -> None:
    made = plan(cluster([node("c"), node("a"), node("b")], [job("j1", "1:2")]), {}, "a")
    assert where(made) == {"j1": ["a", "b"]}


def test_two_small_jobs_share_a_node() -> None:
    made = plan(cluster([node("a", 3)], [job("j1", workers=1), job("j2", workers=2), job("j3", workers=1)]), {}, "a")
    assert made.of("a") == {"j1": 1, "j2": 2}


def test_a_job_gets_no_more_slots_than_there_are_gpus() -> None:
    """NCCL refuses two ranks on one GPU, and a slot without one would take a device that does not exist."""
    made = plan(cluster([node("a", 4, gpus=2)], [job("j1", workers=3)]), {}, "a")
    assert where(made) == {"j1": []}
    assert made.waiting["j1"] == listed(
        reason(Code.NEVER, needs="3 workers on 1 node", capacity="2 GPUs on 1 node"),
        reason(Code.NO_GPUS, node="a", free=2, total=2, needs=3, fix="set slots = 2 on a"),
    )
    assert where(plan(cluster([node("a", 4, gpus=2)], [job("j1", workers=3, backend="gloo")]), {}, "a")) == {
        "j1": ["a"]
    }


def test_gpus_that_another_job_has_are_not_handed_out_again() -> None:
    jobs = [job("j1", workers=2), job("j2", workers=1, backend="nccl"), job("j3", workers=2, backend="gloo")]
    made = plan(cluster([node("a", 4, gpus=2)], jobs), {}, "a")
    assert where(made) == {"j1": ["a"], "j2": [], "j3": ["a"]}
    assert reason(Code.NO_GPUS, node="a", free=0, total=2, needs=1, fix="set slots = 2 on a") in reasons(
        made.waiting["j2"]
    )


def test_nccl_by_name_takes_no_node_without_a_gpu() -> None:
    both = [node("a"), node("b", gpus=2)]
    assert where(plan(cluster(both, [job("j1", backend="nccl", nodes="1:2")]), {}, "a")) == {"j1": ["b"]}
    made = plan(cluster(both, [job("j1", backend="nccl", nodes="2:2")]), {}, "a")
    assert where(made) == {"j1": []}
    assert reason(Code.HAS_NO_GPU, node="a", who="the job asks for backend nccl") in reasons(made.waiting["j1"])


def test_nodes_with_and_without_gpus_do_not_share_a_job() -> None:
    """Ranks with NCCL and ranks without never form one group: each forming would end by its time-out."""
    both = [node("a"), node("b", gpus=2), node("c", gpus=2)]
    assert where(plan(cluster(both, [job("j1", "1:3")]), {}, "a")) == {"j1": ["b", "c"]}
    made = plan(cluster(both, [job("j1", "3:3")]), {}, "a")
    assert reason(Code.HAS_NO_GPU, node="a", who="other nodes have") in reasons(made.waiting["j1"])
    assert where(plan(cluster(both, [job("j1", "3:3", backend="gloo")]), {}, "a")) == {"j1": ["a", "b", "c"]}


def test_a_job_does_not_train_on_cpus_because_all_gpus_are_taken() -> None:
    jobs = [job("j1"), job("j2")]
    made = plan(cluster([node("a"), node("b", gpus=2)], jobs), {}, "a")
    assert where(made) == {"j1": ["b"], "j2": []}
    assert {Code.HAS_NO_GPU, Code.NO_SLOTS} < codes(made.waiting["j2"])


def test_a_job_that_trains_on_cpus_takes_no_node_with_gpus_that_comes_later() -> None:
    running = replace(job("j1", "2:2", phase="running"), members={"a": member("a")})
    made = plan(cluster([node("a"), node("b", gpus=2)], [running]), {}, "a")
    assert where(made) == {"j1": ["a"]}
    assert reason(Code.OTHERS_ON_CPUS, node="b") in reasons(made.waiting["j1"])


@pytest.mark.parametrize("slots", [-1000, 10**12])
def test_slots_that_no_agent_can_have_neither_free_nor_fill_a_node(slots: int) -> None:
    """A job's user can write its member records."""
    strange = replace(job("j1", workers=1), members={"a": member("a", slots), "gone": member("gone", slots)})
    made = plan(cluster([node("a", 4)], [strange, job("j2", workers=3), job("j3", workers=3)]), {}, "a")
    assert made.of("a") == {"j1": 1, "j2": 3}
    assert made.places["j1"]["gone"] == 1
    assert no_slots("a", 4, 3) in reasons(made.waiting["j3"])


def test_auto_takes_the_whole_node() -> None:
    made = plan(cluster([node("a", 3)], [job("j1", workers="auto"), job("j2", workers=1)]), {}, "a")
    assert made.of("a") == {"j1": 3}


def test_assignment_places_the_next_job_if_an_older_one_does_not_fit() -> None:
    made = plan(cluster([node("a")], [job("j1", workers=4), job("j2")]), {}, "a")
    assert where(made) == {"j1": [], "j2": ["a"]}


def test_assignment_keeps_a_running_job_while_an_older_one_waits() -> None:
    younger = replace(job("j2"), members={"a": member("a")})
    made = plan(cluster([node("a")], [job("j1"), younger]), {}, "a")
    assert where(made) == {"j1": [], "j2": ["a"]}


def test_assignment_counts_the_local_agent_before_it_is_a_member() -> None:
    made = plan(cluster([node("a"), node("b")], [job("j1")]), {"j1": 2}, "b")
    assert where(made) == {"j1": ["b"]}


@pytest.mark.parametrize(
    "sick",
    [
        replace(node("a"), cordon=CordonRecord(reason="r", since_wall_s=0)),
        replace(node("a"), drain=DrainRecord(reason="r", since_wall_s=0)),
        node("a", draining="r"),
        node("a", healthy=False, reason="r"),
    ],
)
def test_a_node_out_of_order_takes_no_new_job_but_keeps_its_old_one(sick: Node) -> None:
    assert where(plan(cluster([sick], [job("j1")]), {}, "a")) == {"j1": []}
    standing = replace(job("j1"), members={"a": member("a")})
    assert where(plan(cluster([sick], [standing]), {}, "a")) == {"j1": ["a"]}


def test_assignment_adds_the_replacement_before_a_draining_node_leaves() -> None:
    draining = replace(node("a"), drain=DrainRecord(reason="r", since_wall_s=0))
    standing = replace(job("j1"), members={"a": member("a")})
    assert where(plan(cluster([draining, node("b")], [standing]), {}, "b")) == {"j1": ["a", "b"]}


def test_assignment_replaces_an_excluded_node_and_tells_it_to_leave() -> None:
    standing = replace(job("j1", excluded_nodes=["a"]), members={"a": member("a")})
    made = plan(cluster([node("a"), node("b")], [standing]), {}, "a")
    assert where(made) == {"j1": ["a", "b"]}
    assert made.leaving("a")["j1"].code is Code.EXCLUDED


def test_assignment_keeps_an_excluded_node_while_there_is_no_other() -> None:
    standing = replace(job("j1", excluded_nodes=["a"]), members={"a": member("a")})
    assert plan(cluster([node("a")], [standing]), {}, "a").leaving("a") == {}


def test_assignment_scale_down_drops_nodes_outside_the_generation_then_the_youngest() -> None:
    places = tuple(GenerationNode(node=n, incarnation="i", host=n, slots=(0,)) for n in ("b", "c"))
    generation = GenerationRecord(number=1, nodes=places, store_host="", store_port=1, leader="b", why="")
    members = {n: member(n) for n in ("a", "b", "c")}
    standing = replace(job("j1", "1:1"), members=members, generation=generation)
    made = plan(cluster([node("a"), node("b"), node("c")], [standing]), {}, "a")
    assert set(made.surplus["j1"]) == {"a", "c"}
    assert made.surplus["j1"]["c"] == reason(Code.SURPLUS, nodes="1:1")


def test_a_job_holds_spare_nodes_beyond_its_maximum() -> None:
    standing, nodes = job("j1", "1:2", spare=1), [node(name) for name in "abcd"]
    assert where(plan(cluster(nodes, [standing]), {}, "a")) == {"j1": ["a", "b", "c"]}
    full = replace(standing, members={n: member(n) for n in "abcd"})
    assert set(plan(cluster(nodes, [full]), {}, "a").surplus["j1"]) == {"d"}


def test_a_job_without_its_minimum_takes_no_node_as_a_spare_one() -> None:
    assert where(plan(cluster([node("a")], [job("j1", "2:2", spare=1)]), {}, "a")) == {"j1": []}


@pytest.mark.parametrize("phase", ["succeeded", "failed", "stopped"])
def test_a_job_that_is_over_has_no_place(phase: str) -> None:
    over = replace(job("j1", phase=phase), members={"a": member("a")})
    made = plan(cluster([node("a")], [over, job("j2")]), {"j1": 2}, "a")
    assert where(made) == {"j2": ["a"]}


def test_a_job_that_stops_gets_no_new_node() -> None:
    assert where(plan(cluster([node("a")], [job("j1", phase="stopping")]), {}, "a")) == {"j1": []}


def test_a_job_wiped_from_etcd_keeps_its_agents() -> None:
    wiped = Job(name="j1", members={"a": member("a")})
    made = plan(cluster([node("a")], [wiped, job("j2")]), {"j1": 2}, "a")
    assert made.of("a") == {"j1": 2}


# ── random histories ────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class World:
    """Nodes whose daemons carry out their own part of the plan, each when its turn comes, each from what it sees."""

    rng: random.Random
    nodes: dict[str, Node] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    running: dict[tuple[str, str], int] = field(default_factory=dict)
    """(node, job) -> workers, of living agents; members of the job a little later."""
    clock: int = 0

    def cluster(self) -> Cluster:
        return Cluster(nodes=dict(self.nodes), jobs=dict(self.jobs))

    def mine(self, name: str) -> dict[str, int]:
        return {j: slots for (n, j), slots in self.running.items() if n == name}

    def change(self, name: str, **facts: object) -> None:
        self.jobs[name] = replace(self.jobs[name], **facts)  # type: ignore[arg-type]

    def event(self) -> None:
        self.clock += 1
        rng, some = self.rng, lambda d: self.rng.choice(sorted(d)) if d else None
        name, target = some(self.nodes), some(self.jobs)
        match rng.randrange(13):
            case 0 | 1:
                new = f"n{self.clock}"
                self.nodes[new] = node(new, rng.choice((1, 2, 4)), self.clock)
            case 2 | 3:
                low = rng.randint(1, 3)
                nodes = f"{low}:{low + rng.randint(0, 3)}"
                made = job(f"j{self.clock}", nodes, rng.choice((1, 1, 2, 4, "auto")), self.clock)
                self.jobs[made.name] = made
            case 4 if name:  # power off
                del self.nodes[name]
                for _, j in [key for key in self.running if key[0] == name]:
                    del self.running[name, j]
                    self.leave(name, j)
            case 5 if name:  # the daemon alone goes away and comes back younger: its agents stay
                self.nodes[name] = replace(self.nodes[name], create_revision=self.clock)
            case 6 if name:
                self.nodes[name] = replace(
                    self.nodes[name], cordon=rng.choice((None, CordonRecord(reason="", since_wall_s=0)))
                )
            case 7 if name:
                self.nodes[name] = replace(
                    self.nodes[name], drain=rng.choice((None, DrainRecord(reason="", since_wall_s=0)))
                )
            case 8 if target:
                spec = self.jobs[target].spec
                assert spec is not None
                scaled = msgspec.structs.replace(spec.spec, nodes=f"1:{rng.randint(1, 4)}")
                self.change(target, spec=msgspec.structs.replace(spec, spec=scaled))
            case 9 if target:
                phase = rng.choice((Phase.SUCCEEDED, Phase.STOPPING))
                self.change(target, state=msgspec.structs.replace(self.jobs[target].state, phase=phase))
            case 10 if target and name:
                self.change(target, state=msgspec.structs.replace(self.jobs[target].state, excluded_nodes=(name,)))
            case _:
                for each in rng.sample(sorted(self.nodes), min(len(self.nodes), rng.randint(1, 3))):
                    self.act(each)

    def leave(self, name: str, target: str) -> None:
        members = {n: m for n, m in self.jobs[target].members.items() if n != name}
        self.change(target, members=members)

    def act(self, name: str) -> None:
        """One turn of one daemon; agents become members, or leave when they are told to."""
        seen, me = self.cluster(), self.nodes[name]
        made = plan(seen, self.mine(name), name)
        for target, slots in made.of(name).items():
            gone = target in made.leaving(name) or bool(me.drain)
            if gone:
                if self.running.pop((name, target), None):
                    self.leave(name, target)
                continue
            fresh = (name, target) not in self.running
            if fresh and name not in self.jobs[target].members:
                assert not me.why_not
                assert name not in self.jobs[target].state.excluded_nodes
                assert self.jobs[target].state.phase is not Phase.STOPPING
            self.running[name, target] = slots
            if fresh:
                self.clock += 1
                joined = {**self.jobs[target].members, name: member(name, slots, self.clock)}
                self.change(target, members=joined)
        for _, target in [key for key in self.running if key[0] == name and self.jobs[key[1]].over]:
            del self.running[name, target]
            self.leave(name, target)

    def check(self) -> None:
        for name, me in self.nodes.items():
            assert sum(self.mine(name).values()) <= me.record.slots, f"{name} is overbooked"

    def settle(self) -> None:
        """Let every daemon act until nothing changes any more."""
        for _ in range(200):
            before = dict(self.running)
            for name in sorted(self.nodes):
                self.act(name)
                self.check()
            if self.running == before:
                return
        raise AssertionError("the cluster does not settle")

    def check_settled(self) -> None:
        """Every job has what it may have; no node idles that a job could use."""
        seen = self.cluster()
        used = {n: sum(self.mine(n).values()) for n in self.nodes}
        for target in seen.by_age():
            assert target.spec is not None
            members = [n for (n, j) in self.running if j == target.name]
            assert len(members) <= target.spec.spec.max_nodes or target.over, f"{target.name} has too many nodes"
            if target.over or target.state.phase is Phase.STOPPING or len(members) == target.spec.spec.max_nodes:
                continue
            idle = [
                name
                for name, me in self.nodes.items()
                if target.slots_on(me.record.slots) <= me.record.slots - used[name]
                and not me.why_not
                and name not in target.state.excluded_nodes
                and name not in members
            ]
            # A job that never formed begins with its minimum, or not at all.
            begins = target.generation or len(members) + len(idle) >= target.spec.spec.min_nodes
            assert not (idle and begins), f"{idle} idle though {target.name} could use them"


@pytest.mark.parametrize("seed", range(100))
def test_random_clusters_settle_and_are_never_overbooked(seed: int) -> None:
    world = World(random.Random(seed))
    for _ in range(60):
        world.event()
        world.check()
    world.settle()
    world.check_settled()


@pytest.mark.parametrize("seed", range(25))
def test_every_daemon_makes_the_same_plan(seed: int) -> None:
    world = World(random.Random(1000 + seed))
    for _ in range(60):
        world.event()
    world.settle()
    plans = [plan(world.cluster(), world.mine(name), name) for name in world.nodes]
    assert all(made == plans[0] for made in plans)


def test_job_is_not_assigned_to_a_node_that_does_not_run_jobs_of_its_user() -> None:
    picky = node("a", refuses={"j1": "there is no user 'alice' on this machine"})
    made = plan(cluster([picky, node("b")], [job("j1"), job("j2")]), {}, "a")
    assert where(made) == {"j1": ["b"], "j2": ["a"]}
    made = plan(cluster([picky], [job("j1")]), {}, "a")
    refuses = reason(Code.REFUSES, "there is no user 'alice' on this machine", node="a")
    assert made.waiting["j1"] == listed(reason(Code.TOO_FEW, count=0, least=1), refuses)


def test_running_job_stays_on_a_node_that_no_longer_knows_its_user() -> None:
    made = plan(cluster([node("a", refuses={"j1": "there is no user"})], [job("j1")]), {"j1": 2}, "a")
    assert where(made) == {"j1": ["a"]}
