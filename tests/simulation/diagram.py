"""docs/states.md: what a worker's agent has seen it go through in the golden scenarios, drawn.

PYTHONPATH=tests python -m simulation.diagram > docs/states.md
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic.core.effects import Effect
from elastic.core.events import Event
from elastic.core.model import Agent

from .node import Node
from .player import FILES, Player
from .run import silent

Moves = dict[tuple[str, str], set[str]]
"""(from, to) -> the events that did it."""

HEAD = """# States

Drawn from what happens in the golden scenarios (`tests/scenarios/`): each arrow was gone along there, and its label
names the events that did it. `make test` fails when this file is out of date; `python -m simulation.diagram` (with
`PYTHONPATH=tests`) draws it again.
"""


class Observer(Player):
    """Plays, and notes each change of a worker's stage and of the job's phase."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: Moves = {}
        self.phases: Moves = {}
        self._before: dict[str, Agent] = {}

    def _listen(self, node: Node, event: Event, effects: tuple[Effect, ...]) -> None:
        after = node.agent
        before = self._before.get(node.incarnation)
        if after is None:
            return
        self._before[node.incarnation] = after
        name = type(event).__name__
        for slot, worker in after.workers.items():
            old = before.workers.get(slot) if before else None
            start = old.stage.value if old else "[*]"
            if start != worker.stage.value:
                self.stages.setdefault((start, worker.stage.value), set()).add(name)
        if before is not None and before.view.state.phase is not after.view.state.phase:
            move = (before.view.state.phase.value, after.view.state.phase.value)
            self.phases.setdefault(move, set()).add(after.view.state.reason.split(":")[0][:40])


def collect() -> tuple[Moves, Moves]:
    stages: Moves = {}
    phases: Moves = {}
    for path in FILES:
        observer = Observer()
        observer.play(path.read_text())
        for mine, theirs in ((stages, observer.stages), (phases, observer.phases)):
            for move, events in theirs.items():
                mine.setdefault(move, set()).update(events)
    return stages, phases


def draw(moves: Moves, labels: bool) -> Iterable[str]:
    yield "```mermaid"
    yield "stateDiagram-v2"
    for (start, end), events in sorted(moves.items()):
        label = f": {', '.join(sorted(events))}" if labels else ""
        yield f"    {start} --> {end}{label}"
    yield "```"


def text() -> str:
    """The file."""
    stages, phases = collect()
    lines = [HEAD, "## A worker, as its agent knows it", "", *draw(stages, labels=True), ""]
    lines += ["## A job", "", *draw(phases, labels=False), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    silent()
    print(text(), end="")
