"""Limits how often an agent processes views of a job that is still gathering: each new node sends one to all agents."""

from __future__ import annotations

from elastic.etcd.client import View

CROWD = 64
"""With up to this many keys every view is processed."""

PAUSE_S = 0.001
"""Above that: seconds per key until the next view. With 1,000 nodes one per second, rather than two per new node."""


class ViewThrottle:
    """Holds views back, keeping the newest only, until a generation is formed or the pause is over."""

    def __init__(self, generation_key: str) -> None:
        self._generation_key = generation_key
        self._held_back: View | None = None
        self._next_s = 0.0

    @property
    def due_s(self) -> float:
        """When the held-back view may be processed; inf: there is none."""
        return self._next_s if self._held_back is not None else float("inf")

    def pick(self, newest: View | None, formed: bool, now_s: float) -> View | None:
        """The view to process now, if any. `newest`: the one received since the last call; `formed`: whether the agent
        is in a generation, which a delay could harm."""
        view = newest or self._held_back
        self._held_back = None
        if view is None:
            return None
        crowd = len(view.kvs) > CROWD and not formed and self._generation_key not in view.kvs
        if crowd and now_s < self._next_s:
            self._held_back = view
            return None
        self._next_s = now_s + PAUSE_S * len(view.kvs)
        return view
