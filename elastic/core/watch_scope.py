"""Who sees what of a large job. Pure.

That N agents each hear of every other's coming and going is N² messages, of which all but the leader's are for nothing.
So in a large job an agent whose workers step follows only the *head*: the job's spec and state, the generation and its
end. The members are seen by those who may have to lead, the first few living of the generation (before any: the
oldest), and by whoever has no part in a generation that steps, since then those few may be gone.
"""

from __future__ import annotations

from .model import Agent

GRACE_S = 2.0
"""Beyond the lease's time-to-live: for how long there may be no step before its leader_candidates may be gone."""
WAVE_S = 0.25
"""Then as many agents more look for themselves every so often: not all at once."""
FORMING_LEASES = 3
"""Before the first generation, how many times-to-live (up to twice as many, each agent its own) pass until one looks
again whether it has become one of the oldest."""


def watches_members(agent: Agent, now_s: float, narrow_for_s: float | None) -> bool:
    """narrow_for_s: for how long it has followed the head alone; None: it does not, or not any more."""
    policy, formed = agent.policy, agent.generation
    if narrow_for_s is None and not agent.view.whole:
        return True  # the members are still to come
    if agent.draining is not None:
        return True  # whether enough others stay decides when it may go
    if formed is None:
        return _first(agent, narrow_for_s)
    if len(formed.places) <= policy.crowd or not policy.managed:
        return True
    if agent.ranks[0] is not formed or not agent.ranks[1] or _deputy(agent):
        return True
    quiet_s = now_s - max(agent.stepped_at_s, agent.formed_at_s)
    limit_s = policy.timeouts.lease_ttl_s + GRACE_S
    if narrow_for_s is None:
        return not (agent.settled >= formed.number > agent.broken and quiet_s <= limit_s)
    at = formed.at(policy.node)
    assert at is not None  # it has ranks there
    return quiet_s > limit_s + WAVE_S * (at // policy.leader_candidates)


def _first(agent: Agent, narrow_for_s: float | None) -> bool:
    policy, view = agent.policy, agent.view
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
    assert agent.generation is not None
    for place in agent.generation.places:
        if place.node == agent.policy.node or ahead >= agent.policy.leader_candidates:
            break
        ahead += (place.node, place.incarnation) not in agent.dead
    return ahead < agent.policy.leader_candidates
