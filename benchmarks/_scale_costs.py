"""What one agent has to do in a job of many nodes, as CPU time: its share of the work, without etcd and the network.

python benchmarks/scale.py --costs
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import MappingProxyType

import msgspec

from elastic.contract.job.spec import JobSpec
from elastic.contract.keys import ClusterKeys
from elastic.contract.records.generation_delta import GenerationReader, written
from elastic.contract.records.job_records import (
    GenerationNode,
    GenerationRecord,
    JobState,
    MemberRecord,
    Phase,
    ProgressRecord,
    Record,
    SpecRecord,
    decode,
    encode,
)
from elastic.contract.timeouts import Timeouts
from elastic.contract.worker.messages import Ready
from elastic.etcd.client import KV
from elastic.recovery.facts.view import JobReader, JobView
from elastic.recovery.machine.events import Joined, Progress, Start, Tick, Viewed, WorkerSaid
from elastic.recovery.machine.model import Agent, Policy
from elastic.recovery.recovery import step

KEYS = ClusterKeys("scale").job("job")
SLOTS = tuple(range(8))
ROUNDS = 20


class Costs(msgspec.Struct):
    """Milliseconds, best of ROUNDS."""

    nodes: int
    generation_kb: float
    decode_generation_ms: float
    read_next_ms: float
    """The next generation, without one node, by a reader of the one before."""
    read_whole_ms: float
    read_changed_ms: float
    """One key in the picture has changed."""
    leader_turn_ms: float
    """When a member has changed."""
    leader_tick_ms: float
    other_turn_ms: float


def best_ms(act: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        act()
        times.append(time.perf_counter() - began_s)
    return round(1000 * min(times), 3)


class Picture:
    """The keys of a job of `nodes` nodes that runs."""

    def __init__(self, nodes: int) -> None:
        self.kvs: dict[str, KV] = {}
        self.revision = 1
        self.spec = JobSpec(name="job", script="none.py", nodes=f"{nodes // 2}:{nodes}", workers_per_node=len(SLOTS))
        self.put(KEYS.spec, SpecRecord(spec=self.spec, submitted_wall_s=0.0, submitted_by="benchmark"))
        self.put(KEYS.state, JobState(phase=Phase.RUNNING))
        for index in range(nodes):
            self.put_member(index)
        places = tuple(
            GenerationNode(node=m.node, incarnation=m.incarnation, host=m.host, slots=m.ready, port=m.port)
            for m in map(member, range(nodes))
        )
        self.generation = GenerationRecord(
            number=1, nodes=places, store_host=places[0].host, store_port=29500, leader=places[0].node, why="forming"
        )
        self.put(KEYS.generation, self.generation)

    def put(self, key: str, record: Record) -> None:
        self.revision += 1
        before = self.kvs.get(key)
        created = before.create_revision if before else self.revision
        self.kvs[key] = KV(key, encode(record), created, self.revision, 0)

    def put_member(self, index: int) -> None:
        self.put(KEYS.member(member(index).node), member(index))

    def taken(self) -> MappingProxyType[str, KV]:
        return MappingProxyType(dict(self.kvs))


def member(index: int) -> MemberRecord:
    node = f"node{index:05d}"
    return MemberRecord(
        node=node, incarnation=f"{index:014x}", host=f"{node}.example", port=40000, slots=len(SLOTS), ready=SLOTS
    )


def agent_at(index: int, picture: Picture, view: JobView, now_s: float) -> Agent:
    """The agent of node `index`, in a generation that steps."""
    me = member(index)
    policy = Policy(
        node=me.node, incarnation=me.incarnation, host=me.host, port=me.port, slots=me.slots, managed=True,
        spec=picture.spec, timeouts=Timeouts(),
    )  # fmt: skip
    agent, _ = step(Agent(policy), Start(), now_s)
    for event in (Joined(), Viewed(view, True)):
        agent, _ = step(agent, event, now_s)
    for slot, worker in agent.local.workers.items():
        agent, _ = step(agent, WorkerSaid(slot, worker.worker_id, Ready()), now_s)
    agent, _ = step(agent, Progress(1, 5, 1.0), now_s + 100.0)
    return agent


def followers(formed: GenerationRecord) -> Iterator[bytes]:
    """The generations that follow as one node after the other is lost."""
    reader, raw = GenerationReader(), encode(formed)
    for lost in range(ROUNDS):
        formed = reader.read(raw)
        assert reader.base is not None
        middle = len(formed.nodes) // 2 + lost
        nodes = formed.nodes[:middle] + formed.nodes[middle + 1 :]
        after = msgspec.structs.replace(formed, number=formed.number + 1, nodes=nodes)
        raw = encode(written(after, formed, reader.base, True).generation)
        yield raw


def measure(nodes: int) -> Costs:
    picture = Picture(nodes)
    raw, reader = encode(picture.generation), JobReader(KEYS)
    view = reader.read(picture.taken(), picture.revision)
    now_s = 1000.0
    leader, other = (agent_at(index, picture, view, now_s) for index in (0, nodes // 2))
    now_s += 100.5
    leader, _ = step(leader, Tick(), now_s)
    whole = picture.taken()
    decode_ms = best_ms(lambda: decode(GenerationRecord, raw))
    generations = GenerationReader()
    generations.read(raw)
    after = iter(tuple(followers(picture.generation)))
    next_ms = best_ms(lambda: generations.read(next(after)))
    whole_ms = best_ms(lambda: JobReader(KEYS).read(whole, picture.revision))
    changed = []
    for count in range(ROUNDS):
        progress = ProgressRecord(generation=1, world_size=1, step=count, steps_per_s=1.0, loss=None, wall_s=0.0)
        picture.put(KEYS.progress, progress)
        changed.append(picture.taken())
    pictures = iter(changed)
    changed_ms = best_ms(lambda: reader.read(next(pictures), picture.revision))
    views = []
    for index in range(ROUNDS):
        picture.put_member(nodes // 2 + index)
        views.append(Viewed(reader.read(picture.taken(), picture.revision), True))
    events = iter(views)
    return Costs(
        nodes=nodes,
        generation_kb=round(len(raw) / 1e3, 1),
        decode_generation_ms=decode_ms,
        read_next_ms=next_ms,
        read_whole_ms=whole_ms,
        read_changed_ms=changed_ms,
        leader_turn_ms=best_ms(lambda: step(leader, next(events), now_s)),
        leader_tick_ms=best_ms(lambda: step(leader, Tick(), now_s)),
        other_turn_ms=best_ms(lambda: step(other, Tick(), now_s)),
    )
