"""What is wrong with the cluster as this node sees it: the lines that `elasticctl status` lists. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticd.base import answers
from elasticd.cluster.published_state import Contact, Snapshot
from elasticd.machine import expiring

if TYPE_CHECKING:
    from .instant import Identity, Now

from .instant import plain_text

SILENT_S = 10.0
"""An agent rewrites its status once a second; if it is older than this, the agent is stopped or its disk is full."""

SHOWN_NODES = 8
"""At most this many nodes have a line each."""

LARGE_DATABASE_MB = 1600.0
"""Size of etcd's database that is reported: three quarters of its default quota."""

_ALARMS = {
    "NOSPACE": "etcd is out of space (alarm NOSPACE) and takes no writes: training goes on, a failure waits to be "
    "repaired; compact and defragment etcd, or raise its --quota-backend-bytes, then `etcdctl alarm disarm`",
    "CORRUPT": "etcd found its data corrupt (alarm CORRUPT) and takes no writes: replace the member that differs",
}


def problems_of(snapshot: Snapshot, identity: Identity, rows: list[answers.Node], now: Now) -> list[str]:
    """One line for each. `rows`: the nodes, as `views.nodes` shows them."""
    found = []
    if not snapshot.contact.connected:
        found.append("etcd cannot be reached: this is the last that was seen of it")
    found += [_ALARMS.get(alarm, f"etcd has raised the alarm {alarm}") for alarm in snapshot.contact.alarms]
    found += _member_problems(snapshot.contact)
    found += expiring.problems(snapshot.contact.certificates, now.wall_s)
    if snapshot.stays_out:
        found.append(f"this node stays out of the cluster: {snapshot.stays_out}")
    elif not snapshot.registered:
        found.append("this node is not registered in the cluster (yet)")
    if (foreign := snapshot.cluster.foreign) and not snapshot.stays_out:
        key = min(foreign)
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        found.append(f"etcd holds what this elasticd cannot read: {key}{more}: {foreign[key]}")
    if refused := snapshot.cluster.refused:
        key = min(refused)
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        found.append(f"etcd holds a record that is refused: {key}{more}: {refused[key]}")
    for agent in snapshot.agents.values():
        if agent.status and (silent_s := now.wall_s - agent.status.written_wall_s) > SILENT_S:
            found.append(f"the agent of {agent.job} on this node has said nothing for {silent_s:.0f} s")
        if agent.status and agent.status.why_fresh:
            found.append(
                f"workers of {agent.job} start seconds later on this node, as new processes, since the zygote is unfit "
                f"to fork: {agent.status.why_fresh}"
            )
    verbs = {"unhealthy": "is unhealthy: ", "no daemon": "has no daemon: ", "lost": "is lost "}
    ill = [f"{row.node} {verbs[row.state]}{row.reason}" for row in rows if row.state in verbs]
    found += ill[:SHOWN_NODES]
    if len(ill) > SHOWN_NODES:
        found.append(f"{len(ill) - SHOWN_NODES} more nodes are lost, unhealthy or without elasticd: elasticctl nodes")
    return found + plain_text(identity)


def _member_problems(contact: Contact) -> list[str]:
    members, good = contact.members, sum(member.ok for member in contact.members)
    well = "are well" if contact.connected else "were well when last asked"
    found = [
        f"etcd member {member.endpoint} is in trouble: {member.error}; {good} of {len(members)} {well}, "
        f"{len(members) // 2 + 1} are needed"
        for member in members
        if not member.ok
    ]
    large = [member for member in members if member.database_mb > LARGE_DATABASE_MB]
    return found + [
        f"etcd member {member.endpoint}: its database takes {member.database_mb:.0f} MB of the 2147 that etcd takes by "
        "default; compact and defragment it, or raise its --quota-backend-bytes"
        for member in large
    ]
