"""Which agents of a large job watch its members in etcd. Pure.

If N agents were each notified of every other's joining and leaving, that would be N² messages, and all but the leader's
would be useless. So in a large job an agent whose workers step watches only the *head*: the job's spec and state, the
generation and its failure report. The members are watched by the leader candidates, the first few living nodes of the
generation (before there is one: the oldest members), and by each agent without a part in a generation that steps, since
then those candidates may be gone.
"""

from __future__ import annotations

from elastic.recovery.facts.membership import by_preference
from elastic.recovery.machine.model import Agent

GRACE_S = 2.0
"""Added to the lease TTL: without a step for longer than that, the leader candidates may be gone."""
WAVE_S = 0.25
"""After that, another `leader_candidates` agents start to watch the members at this interval: not all at once."""
FORMING_LEASES = 3
"""Before the first generation: after how many lease TTLs (up to twice as many, different for each agent) an agent
checks again whether it has become one of the oldest members."""


def watches_members(agent: Agent, now_s: float, narrow_for_s: float | None) -> bool:
    """Whether the agent is to watch the members. narrow_for_s: for how long it has watched only the head; None: it
    does not, or no longer."""
    policy, formed = agent.policy, agent.formed.generation
    if narrow_for_s is None and not agent.etcd.view.has_all_members:
        return True  # the members are still being read
    if agent.drain.draining is not None:
        return True  # when it may leave depends on how many others stay
    if formed is None:
        return _first(agent, narrow_for_s)
    if len(formed.nodes) <= policy.crowd or not policy.managed:
        return True
    if agent.formed.ranks[0] != formed.number or not agent.formed.ranks[1] or _deputy(agent):
        return True
    quiet_s = now_s - max(agent.progress.stepped_at_s, agent.formed.formed_at_s)
    limit_s = policy.timeouts.lease_ttl_s + GRACE_S
    if narrow_for_s is None:
        return not (agent.progress.settled >= formed.number > agent.formed.broken and quiet_s <= limit_s)
    at = formed.at(policy.node)
    assert at is not None  # it has ranks there
    return quiet_s > limit_s + WAVE_S * (at // policy.leader_candidates)


def _first(agent: Agent, narrow_for_s: float | None) -> bool:
    policy, view = agent.policy, agent.etcd.view
    if narrow_for_s is not None:
        own = 1.0 + int.from_bytes(policy.node.encode()[-4:], "big") * 2654435761 % 2**32 / 2**32
        return narrow_for_s >= FORMING_LEASES * policy.timeouts.lease_ttl_s * own
    if len(view.members) <= policy.crowd:
        return True
    me = view.members.get(policy.node)
    return (
        me is None
        or sum(m.create_revision < me.create_revision for m in view.members.values()) < policy.leader_candidates
    )


def _deputy(agent: Agent) -> bool:
    ahead = 0
    assert agent.formed.generation is not None
    for place in by_preference(agent.formed.generation):
        if place.node == agent.policy.node or ahead >= agent.policy.leader_candidates:
            break
        ahead += (place.node, place.incarnation) not in agent.peers.dead
    return ahead < agent.policy.leader_candidates
