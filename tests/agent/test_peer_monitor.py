"""When an agent lays its lines to others anew: at once, and in a large job not with all others in one moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from support.jobs import changed, generation, member, place, policy, view

from elastic.agent.peers.peers import CONNECTIONS_PER_S, PeerMonitor
from elastic.recovery.machine.model import Agent

NODES = [f"n{i}" for i in range(200)]
POLICY = policy("n150", nodes="1:200")


class Seen:
    def __init__(self) -> None:
        self.watched: list[set[str]] = []

    def watch(self, wanted: Mapping[tuple[str, str], tuple[str, int]], known: Callable[[], frozenset[str]]) -> None:
        self.watched.append({node for node, _ in wanted})
        self.known = known()


def agent(*nodes: str) -> Agent:
    formed = generation(1, [place(node) for node in nodes])
    return changed(Agent(POLICY), view=view(*(member(node, 1) for node in nodes), formed=formed), generation=formed)


def test_peer_monitor_with_full_view_updates_watches_at_once_and_only_on_change() -> None:
    seen, before = Seen(), Agent(POLICY)
    peer_monitor, there = PeerMonitor(seen), agent(*NODES)  # type: ignore[arg-type]
    peer_monitor.after_turn(before, there, True, 10.0)
    assert len(seen.watched) == 1
    assert {"n149", "n151", "n0"} <= seen.watched[0]
    assert seen.known == {f"{node}.1" for node in NODES}, "any of them may connect"
    for now_s in (10.1, 20.0, 30.0):
        peer_monitor.after_turn(there, there, True, now_s)
    assert len(seen.watched) == 1
    found = changed(there, dead=frozenset({("n151", "n151.1")}))
    peer_monitor.after_turn(there, found, True, 31.0)
    assert "n151" not in seen.watched[-1]


def test_peer_monitors_of_a_large_job_stagger_their_connections() -> None:
    limit_s = len(NODES) / CONNECTIONS_PER_S
    there = agent(*NODES)
    begun = [(PeerMonitor(seen), seen) for seen in (Seen() for _ in range(60))]  # type: ignore[arg-type]
    for peer_monitor, _ in begun:
        peer_monitor.after_turn(Agent(POLICY), there, False, 10.0)
    at_once = sum(len(seen.watched) for _, seen in begun)
    for peer_monitor, _ in begun:
        peer_monitor.after_turn(there, there, False, 10.0 + limit_s / 2)
    half = sum(len(seen.watched) for _, seen in begun)
    for peer_monitor, _ in begun:
        peer_monitor.after_turn(there, there, False, 10.0 + limit_s)
    assert at_once < 5
    assert 5 < half < 55
    assert all(len(seen.watched) == 1 for _, seen in begun)
