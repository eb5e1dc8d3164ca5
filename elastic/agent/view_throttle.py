"""How often an agent looks at a job that gathers: every newcomer makes a new picture for everybody."""

from __future__ import annotations

from ..etcd import View

CROWD = 64
"""Up to so many keys every picture is looked at."""

PAUSE_S = 0.001
"""Beyond: seconds per key until the next is. With 1,000 nodes one a second, instead of two for each newcomer."""


class ViewThrottle:
    """Holds pictures back, the newest only, until a generation stands or the pause is over."""

    def __init__(self, generation_key: str) -> None:
        self._generation_key = generation_key
        self._held_back: View | None = None
        self._next_s = 0.0

    @property
    def due_s(self) -> float:
        """When what is held back may be looked at."""
        return self._next_s if self._held_back is not None else float("inf")

    def pick(self, newest: View | None, formed: bool, now_s: float) -> View | None:
        """The picture to look at now, if any. `newest`: what came since the last call; `formed`: whether the agent
        has a generation, and so something to lose by waiting."""
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
