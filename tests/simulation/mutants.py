"""Mistakes planted in the core, one at a time: each promise is shown to bite."""

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Mutant:
    name: str
    module: str
    """Under `elastic.core`, or `elastic.agent.registry`."""
    right: str
    wrong: str


MUTANTS = (
    Mutant("an expired lease condemns while steps advance", "core.membership",
           "or (member is None and not steps_advance)", "or member is None"),
    Mutant("survivors are not put first", "core.membership",
           "return not survivors, Place(", "return bool(survivors), Place("),
    Mutant("the dead slot counts as a survivor", "core.membership",
           "if (record.node, s) not in lost]", "if True]"),
    Mutant("a restarted agent is taken for its predecessor", "core.membership",
           "restarted = member is not None and member.record.incarnation != place.incarnation", "restarted = False"),
    Mutant("nobody who holds the state stays for the hand-over", "core.membership",
           "return [alive[holders[0]], *chosen]", "return chosen"),
    Mutant("who was set aside is not asked for the state", "core.leading",
           "former=agent.former", "former=None"),
    Mutant("absence right after a wipe proves death", "core.membership",
           "if absent and blind:", "if False:"),
    Mutant("what etcd has lost is not written back", "core.announce",
           "turn.ask(Restore(held, turn.agent.state, turn.agent.spec), \"restore\")", "pass"),
    Mutant("that a generation is broken is said only once", "core.announce",
           "turn.ask(PutBroken(record), f\"broken {held.number}\")", "pass"),
    Mutant("the state is kept as it was before the wipe", "core.knowledge",
           "turn.change(wiped_until_s=turn.agent.blind_until_s, publishing=0)", "pass"),
    Mutant("a worker that does not let go is left alone", "core.workers",
           "turn.kill(worker, \"did not let go in time\")\n        return", "return"),
    Mutant("a broken generation is formed all the same, and not let go of", "core.workers",
           "    if not older and not turn.is_broken():\n        return\n",
           "    if not older:\n        return\n"),
    Mutant("a lost publication is waited for, for ever", "core.knowledge",
           "if turn.agent.publishing == number:", "if False:"),
    Mutant("a planned change does not wait for its boundary", "core.leading",
           "at_step = agent.step + ahead if", "at_step = None if True or"),
    Mutant("the leaver hosts the next generation's store", "core.membership",
           "if member.record.draining is None and place.node not in view.state.avoid:", "if True:"),
    Mutant("a crash loop goes on for ever", "core.restarts",
           "if broken.error is not None and alike >= rules.same_failure and not", "if False and not"),
    Mutant("the newest state does not win", "core.source",
           "if best is None or key > best:", "if best is None or key < best:"),
    Mutant("one node's end is everybody's", "core.leading",
           "all(m.record.done == generation.number for m in there)", "any(m.record.ready for m in there)"),
    Mutant("a hang is nobody's business", "core.knowledge",
           "if worker.stage in IN_GROUP | {Stage.STARTING, Stage.READY}:", "if False:"),
    Mutant("who left for nothing waits for ever", "core.announce",
           "if not any(w.slot in ranks and turn.now_s - w.since_s >= IDLE_S for w in left):", "if True:"),
    Mutant("generations are not counted", "core.leading",
           "number = agent.generation.number + 1 if agent.generation else 1", "number = 1"),
    Mutant("a generation is published without compare-and-swap", "agent.registry",
           "guards.append(ModIs(self.keys.generation, expected) if expected else Absent(self.keys.generation))",
           "pass"),
    Mutant("who is no member any more publishes", "agent.registry",
           "return [state, Present(self.keys.member(self.policy.node))]", "return [state]"),
    Mutant("who holds no generation writes the spec back at once", "core.announce",
           "if held is None and turn.now_s < turn.agent.blind_until_s:", "if False:"),
    Mutant("an older generation replaces a newer one in etcd", "agent.registry",
           "elif decode(GenerationRecord, kv.value).number < generation.number:", "else:"),
    Mutant("an older generation is taken on", "core.announce",
           "seen.number > held.number", "seen.number != held.number"),
    Mutant("half a state is handed on", "core.source",
           "offer.clean and offer.established:", "offer.established:"),
)  # fmt: skip


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """While inside, the functions of the module are the wrong ones, for everyone who has imported them."""
    module = importlib.import_module(f"elastic.{mutant.module}")
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    if source.count(mutant.right) < 1:
        raise AssertionError(f"{mutant.name}: not found in {mutant.module}: {mutant.right!r}")
    wrong: dict[str, Any] = {"__name__": module.__name__, "__package__": module.__package__}
    exec(compile(source.replace(mutant.right, mutant.wrong), module.__file__, "exec"), wrong)
    changed: list[tuple[types.FunctionType, types.CodeType]] = []
    for function, other in _functions(vars(module), wrong):
        if function.__code__ != other.__code__:
            changed.append((function, function.__code__))
            function.__code__ = other.__code__
    assert changed, f"{mutant.name}: nothing is different"
    try:
        yield
    finally:
        for function, code in changed:
            function.__code__ = code


def _functions(
    right: dict[str, Any] | types.MappingProxyType[str, Any], wrong: dict[str, Any] | types.MappingProxyType[str, Any]
) -> Iterator[tuple[types.FunctionType, types.FunctionType]]:
    name = right.get("__name__", right.get("__module__"))
    for key, value in tuple(right.items()):
        other = wrong.get(key)
        if isinstance(value, staticmethod):
            value, other = value.__func__, getattr(other, "__func__", None)
        if isinstance(value, types.FunctionType) and isinstance(other, types.FunctionType):
            yield value, other
        elif isinstance(value, type) and isinstance(other, type) and value.__module__ == name:
            yield from _functions(vars(value), vars(other))
