"""Which agents this one keeps connections to (see `peers`), and when it updates them."""

from __future__ import annotations

import random

from elastic.recovery.facts.membership import watch_list
from elastic.recovery.machine.model import Agent

from .peers import Peers

LINES_PER_S = 100
"""In a large job, about so many agents per second update their connections after a change: not all at once."""


class PeerMonitor:
    """Used by the agent's loop only."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._due_s = float("inf")

    def turned(self, before: Agent, agent: Agent, whole: bool, now_s: float) -> None:
        """Called after each event, and so on every beat. whole: the agent's view has all members of the job."""
        if (
            agent.formed.generation is not before.formed.generation
            or agent.etcd.view.members is not before.etcd.view.members
            or agent.peers.dead != before.peers.dead
            or agent.peers.unreachable != before.peers.unreachable
        ):
            spread_s = (
                0.0 if whole or agent.formed.generation is None else len(agent.formed.generation.nodes) / LINES_PER_S
            )
            self._due_s = min(self._due_s, now_s + random.uniform(0.0, spread_s))
        if now_s >= self._due_s:
            self._due_s = float("inf")
            self._lay(agent)

    def _lay(self, agent: Agent) -> None:
        complaints = {node for node, _ in agent.peers.unreachable}
        formed = agent.formed.generation
        seen = watch_list(agent.etcd.view, agent.peers.dead, formed, agent.policy.node, complaints)
        # All of them may take this node for the leader, while it drains and takes another one for it.
        known = frozenset(place.incarnation for place in formed.nodes) if formed else frozenset()
        self._peers.watch({m.id: (m.record.host, m.record.port) for m in seen}, known)
