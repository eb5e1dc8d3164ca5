"""What an agent of a large job does from a node's loss to the next step does not grow with the number of nodes: all of
them do it at once."""

from __future__ import annotations

import itertools
import sys
from types import FrameType
from typing import Any

from support import says
from support.jobs import member, place, policy, view

from elastic.agent.hangs.standstill import Others
from elastic.contract.job.spec import JobSpec
from elastic.contract.keys import ClusterKeys
from elastic.contract.records.generation_delta import GenerationReader, written
from elastic.contract.records.job_records import GenerationRecord, SpecRecord, encode
from elastic.etcd.client import KV
from elastic.recovery.facts.view import JobReader
from elastic.recovery.machine.events import Event, Joined, Progress, Start, Tick, Viewed
from elastic.recovery.machine.model import Agent
from elastic.recovery.recovery import step

KEYS = ClusterKeys("c").job("job")
ME = "n005"


class Follower:
    """The agent of a node that follows the head of the job alone, of `count` nodes that step."""

    def __init__(self, count: int) -> None:
        self.count, self.called = count, 0
        self.spec = JobSpec(name="job", script="train.py", nodes=f"2:{count}")
        self.agent = Agent(policy(ME, spec=self.spec, crowd=3, leader_candidates=2))
        self.others = Others()
        self.reader = JobReader(KEYS)
        nodes = [f"n{i:03}" for i in range(count)]
        self.first = GenerationRecord(
            number=1, nodes=tuple(map(place, nodes)), store_host="n000", store_port=1, leader="n000", why="forming"
        )
        everyone = view(*(member(n, i + 1) for i, n in enumerate(nodes)), spec=self.spec, formed=self.first)
        self.take(Start(), Joined(), says.ready(0, 1), Viewed(everyone, True), *self.stepped(1))
        self.take(self.head(encode(self.first), 20), Tick())

    def head(self, generation: bytes, revision: int) -> Viewed:
        spec = encode(SpecRecord(spec=self.spec, submitted_wall_s=0.0, submitted_by="test"))
        kvs = {
            KEYS.spec: KV(KEYS.spec, spec, 1, 1, 0),
            KEYS.generation: KV(KEYS.generation, generation, 2, revision, 0),
        }
        return Viewed(self.reader.read(kvs, revision, has_all_members=False), True)

    def stepped(self, generation: int) -> tuple[Event, ...]:
        return says.formed(0, 1, generation), says.synced(0, 1, generation, 8), says.stepping(0, 1, generation, 9)

    def take(self, *events: Event) -> None:
        for event in events:
            self.agent, _ = step(self.agent, event, 100.0)
            self.others.known(self.agent, 100.0)

    def lose(self, *lost: int) -> None:
        """Those nodes are gone in the next generation, and this one steps in it."""
        nodes = tuple(node for i, node in enumerate(self.first.nodes) if i not in lost)
        base = GenerationReader()
        base.read(encode(self.first))
        assert base.base is not None
        after = GenerationRecord(number=2, nodes=nodes, store_host="n000", store_port=2, leader="n000", why="lost")
        raw = encode(written(after, self.first, base.base, True).generation)
        sys.setprofile(self._count)
        try:
            self.take(self.head(raw, 21), says.group_closed(0, 1, 1, 9), *self.stepped(2), Progress(2, 9, 1.0))
        finally:
            sys.setprofile(None)

    def _count(self, frame: FrameType, what: str, argument: Any) -> None:
        self.called += what == "call"


def test_a_loss_costs_a_follower_as_much_in_a_large_job_as_in_a_small_one() -> None:
    called = []
    for count in (200, 400, 800):
        follower = Follower(count)
        follower.lose(count // 2)
        assert follower.agent.progress.settled == 2
        assert follower.agent.incidents.incident is None
        assert follower.agent.incidents.last is not None
        called.append(follower.called)
    assert all(after - before < 20 for before, after in itertools.pairwise(called)), called
