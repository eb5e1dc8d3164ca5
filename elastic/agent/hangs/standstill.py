"""How far the ranks have got while a job makes no step: reports of other agents, and the cause shown in the status."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from elastic.contract.job.spec import Hang
from elastic.contract.records.decoding import Member
from elastic.contract.records.job_records import ProgressRecord
from elastic.contract.records.reasons import Code, reason
from elastic.contract.records.standings import Standing, Stillness
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.hangs.stillness import StillRank, explain, still_s
from elastic.recovery.machine.model import Agent


class Others:
    """Standings that the other nodes' agents report of their ranks, with instants on this host's clock."""

    def __init__(self) -> None:
        self._members: Mapping[str, Member] = {}
        self._known: tuple[StillRank, ...] = ()

    def known(self, agent: Agent, now_s: float) -> tuple[StillRank, ...]:
        """Standings of the ranks of other nodes. To be called often: the first sight of a standing sets its instant."""
        members = agent.etcd.view.members
        if not agent.etcd.view.has_all_members or members == self._members:
            return self._known
        before = {(k.node, k.standing): k for k in self._known}
        ranks = []
        for node, member in members.items():
            if node == agent.policy.node:
                continue
            for standing in member.record.standings:
                known = before.get((node, standing))
                ranks.append(known or StillRank(node, standing, now_s - standing.silent_s))
        self._members, self._known = members, tuple(ranks)
        return self._known


def local(node: str, standings: Sequence[Standing], now_s: float) -> list[StillRank]:
    return [StillRank(node, standing, now_s - standing.silent_s) for standing in standings]


def with_stillness(
    record: ProgressRecord, agent: Agent, known: Collection[StillRank], rules: Hang, now_s: float, wall_s: float
) -> ProgressRecord:
    """`record`, with since when and why no step is made, if none is. `known`: ranks of this node and of others."""
    generation = agent.formed.generation
    if (
        generation is None
        or not agent.policy.managed
        or agent.drain.leaving is not None
        or agent.etcd.view.state.phase.over
    ):
        return record
    workers = [w for w in agent.local.workers.values() if w.slot in generation.ranks(agent.policy.node)]
    if not workers:  # none of the ranks is here: repeat what their agents report
        said = agent.etcd.view.progress
        return replace(record, still=said.still) if said and said.generation == generation.number else record
    since_s = max(
        agent.progress.stepped_at_s,
        agent.formed.formed_at_s if agent.progress.step_s <= 0 else agent.progress.stepped_at_s,
    )
    if now_s - since_s < still_s(agent.progress.step_s, rules) or all(w.stage is Stage.DONE for w in workers):
        return record
    since_wall_s = round(wall_s - (now_s - since_s), 3)
    if agent.formed.broken >= generation.number:
        broken = agent.formed.broken_record
        why = reason(Code.NOT_FORMED, broken.detail if broken else "", number=generation.number)
        return replace(record, still=Stillness(since_wall_s, why))
    nodes = {rank: place.node for place in generation.nodes for rank in generation.ranks(place.node).values()}
    return replace(record, still=explain(known, nodes, generation.number, since_wall_s))
