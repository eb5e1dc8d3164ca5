"""A `Peers` whose events are handed to one function for deaths and one for reachability."""

from __future__ import annotations

import socket
from collections.abc import Callable

from elastic.agent.peers.peers import Peers
from elastic.recovery.machine.events import PeerDead, PeerReachable, PeerUnreachable

Heard = Callable[[tuple[str, str, str]], object]
"""Takes (node, incarnation, evidence); evidence '': it is reachable again."""


def watching(
    incarnation: str,
    on_dead: Heard = lambda heard: None,
    on_reach: Heard = lambda heard: None,
    listener: socket.socket | None = None,
) -> Peers:
    def post(event: PeerDead | PeerUnreachable | PeerReachable) -> None:
        if isinstance(event, PeerReachable):
            on_reach((event.node, event.incarnation, ""))
        else:
            take = on_dead if isinstance(event, PeerDead) else on_reach
            take((event.node, event.incarnation, event.evidence))

    return Peers(incarnation, post, listener)
