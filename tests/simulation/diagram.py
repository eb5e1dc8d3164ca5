"""docs/states.md, drawn from the tables of transitions and of the leader's rules.

PYTHONPATH=tests python -m simulation.diagram > docs/states.md
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

from elastic.contract.records.phases import PHASES
from elastic.recovery.facts.membership import RULES
from elastic.recovery.facts.transitions import TABLE, Stage, Trigger

HEAD = """# States

Drawn from the tables of transitions in `elastic/recovery/facts/transitions.py` and
`elastic/contract/records/phases.py`: these are all there are, and another pair of stage and trigger raises.
`make test` fails when this file is out of date; `python -m simulation.diagram` (with `PYTHONPATH=tests`) draws it
again.
"""
MANAGED = """## A managed worker, as its agent knows it

Its script calls `elastic.run`; its process lives on over generations. Not drawn: from every stage with a process,
`process exited` leads to `gone`, and `signalled to end` to `killed`.
"""
PLAIN = """## A plain worker, as its agent knows it

Its script knows nothing of elastic: it is forked with its rank for each generation. In `ready` and `done` it has no
process. When its script calls `elastic.run`, it goes on in the diagram above.
"""
NEXT = """## The next generation

What the leader decides, from its view of the job and the newest generation ("it"): the first line that holds.
`RULES` in `elastic/recovery/facts/membership.py`.

| if | then |
|---|---|"""
PLAIN_ONLY = {
    Trigger.FORK_PLAIN,
    Trigger.GENERATION_OVER,
    Trigger.EXITED_PLAIN,
    Trigger.COMPLETED_PLAIN,
    Trigger.MANAGED,
}
PLAIN_TOO = {(Stage.RUNNING, Trigger.KILL), (Stage.RUNNING, Trigger.FAILED)}
NOT_DRAWN = {Trigger.EXITED, Trigger.KILL}


def draw(rows: Mapping[tuple[enum.StrEnum, enum.StrEnum], enum.StrEnum], first: str) -> Iterable[str]:
    """One arrow for each pair of states, labelled with all its triggers."""
    arrows: dict[tuple[str, str], set[str]] = {}
    for (start, trigger), end in rows.items():
        arrows.setdefault((start.value, end.value), set()).add(trigger.value)
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield f"    [*] --> {first}"
    for (start, end), triggers in sorted(arrows.items()):
        yield f"    {start} --> {end}: {', '.join(sorted(triggers))}"
    yield "```"
    yield ""


def text() -> str:
    """The file."""
    managed = {row: to for row, to in TABLE.items() if row[1] not in PLAIN_ONLY | NOT_DRAWN}
    plain = {row: to for row, to in TABLE.items() if row[1] in PLAIN_ONLY or row in PLAIN_TOO}
    lines = [HEAD, MANAGED, *draw(managed, "gone"), PLAIN, *draw(plain, "ready")]
    rules = [f"| {rule.condition} | {rule.answer} |" for rule in RULES]
    return "\n".join([*lines, "## A job", "", *draw(PHASES, "pending"), NEXT, *rules, ""])


if __name__ == "__main__":
    print(text(), end="")
