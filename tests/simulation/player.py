"""Plays a scenario: prose (#), a setting and commands (> faults at instants, as in `cluster`), and below each command
what the agents' machines saw from there on and what they asked for. An event without effects is not shown."""

from __future__ import annotations

from pathlib import Path

from elastic.contract.records.job_records import BrokenRecord, GenerationRecord, IncidentRecord, MemberRecord
from elastic.contract.structs import replace
from elastic.contract.worker import messages
from elastic.recovery.machine import effects as does
from elastic.recovery.machine import events

from .cluster import Cluster, Setting
from .node import Node

FILES = sorted((Path(__file__).parent.parent / "scenarios").glob("*.txt"))


class Player:
    """Plays one file; `lines` is the file as it should be."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.cluster: Cluster | None = None

    def play(self, text: str) -> str:
        for line in text.splitlines():
            if line.startswith("#") or not line.strip():
                self.lines.append(line)
            elif line.startswith("> "):
                self.lines.append(line)
                self._command(line[2:].split())
        assert self.cluster is not None
        self.lines.append(self._end(self.cluster))
        return "\n".join(self.lines) + "\n"

    def _command(self, words: list[str]) -> None:
        if words[0] == "setting":
            given = dict(word.split("=") for word in words[1:])
            self.cluster = Cluster(Setting(calm=True, **{k: _value(v) for k, v in given.items()}))  # type: ignore[arg-type]
            self.cluster.listener = self._listen
            return
        assert self.cluster is not None, "a setting first"
        self.cluster.run(float(words[0].removeprefix("t=")))
        if len(words) > 1:
            getattr(self.cluster, words[1])(*map(_value, words[2:]))

    def _listen(self, node: Node, event: events.Event, effects: tuple[does.Effect, ...]) -> None:
        if effects and self.cluster is not None:
            self.lines.append(f"t={self.cluster.clock.now_s:.2f} {node.name} {_event(event)}")
            self.lines += [f"  {_effect(effect)}" for effect in effects]

    def _end(self, cluster: Cluster) -> str:
        record, top = cluster.record(), cluster.judge.top
        formed = _generation(record) if record else "no generation"
        return f"= {cluster.state().phase.value}, {formed}, step {top[1]} committed in generation {top[0]}"


def _value(text: str) -> object:
    if text in ("True", "False"):
        return text == "True"
    return float(text) if "." in text else int(text)


def _generation(record: GenerationRecord) -> str:
    places = ", ".join(f"{p.node}{list(p.slots)}" for p in record.nodes)
    return f"generation {record.number}: {places}"


def _member(record: MemberRecord) -> str:
    said = f"{record.node} ready {list(record.ready)}"
    said += f", draining: {record.draining}" if record.draining else ""
    said += f", holds generation {record.held_generation}" if record.held_generation else ""
    return said + (f", done {record.done}" if record.done else "")


def _broken(record: BrokenRecord) -> str:
    lost = f", slots {list(record.slots)} lost" if record.slots else ""
    return f"generation {record.generation}: {record.kind}, {record.detail}{lost}"


def _incident(record: IncidentRecord) -> str:
    lost = "unknown" if record.steps_lost is None else record.steps_lost
    bound = record.steps_lost_at_most
    lost = lost if record.steps_lost == bound else f"{lost} to {'?' if bound is None else bound}"
    how = "open" if record.open else f"over: {lost} steps lost, from {record.restored_from or 'nothing'}"
    return f"{record.kind} on {record.node or 'no node'}, ranks {list(record.ranks)}: {record.text}; {how}"


def _event(event: events.Event) -> str:
    match event:
        case events.Viewed(view, connected):
            if not connected:
                return "Viewed: etcd is away"
            number = view.generation.number if view.generation else "none"
            broken = ", broken" if view.broken else ""
            members = ", ".join(sorted(view.members)) or "nobody"
            return f"Viewed: {view.state.phase.value}, generation {number}{broken}, members {members}"
        case events.WorkerExited(slot, worker_id, cause):
            return f"WorkerExited slot {slot} worker_id {worker_id}: {cause}"
        case events.WorkerSaid(slot, worker_id, messages.GroupClosed() | messages.CollectiveFailed() as message):
            error = f", {message.error}" if isinstance(message, messages.CollectiveFailed) else ""
            at = f"generation {message.generation}, step {message.step}"
            return f"WorkerGroupClosed slot {slot} worker_id {worker_id}: {at}{error}"
        case events.WorkerSaid(slot, worker_id, message):
            return f"Worker{type(message).__name__}(slot={slot}, worker_id={worker_id})"
        case events.Drain(reason):
            return f"Drain: {reason}"
        case _:
            return repr(event)


def _message(message: messages.Message) -> str:
    match message:
        case messages.Form():
            return f"Form generation {message.generation} as rank {message.rank} of {message.world_size}"
        case messages.StopAtStep():
            return f"StopAtStep after step {message.at_step} ({message.why})"
        case messages.AbortGroup():
            return f"AbortGroup ({message.why})"
        case _:
            return repr(message)


def _effect(effect: does.Effect) -> str:
    match effect:
        case does.Send(slot, _, message):
            return f"Send slot {slot}: {_message(message)}"
        case does.Publish(number, change, _, at_step, _, charged):
            places = ", ".join(f"{p.node}{list(p.slots)}" for p in change.nodes)
            more = f" after step {at_step}" if at_step is not None else ""
            return f"Publish generation {number}: {places}{more} ({change.why})" + (", charged" if charged else "")
        case does.Kill(why=why):
            return repr(replace(effect, why=str(why)))
        case does.SaveNow(reason):
            return repr(replace(effect, reason=str(reason)))
        case does.Leave(why):
            return f"Leave: {why}"
        case does.PutMember(record):
            return f"PutMember {_member(record)}"
        case does.Rejoin(record):
            return f"Rejoin {_member(record)}"
        case does.PutBroken(record):
            return f"PutBroken {_broken(record)}"
        case does.Restore(generation):
            return f"Restore {_generation(generation)}" if generation else "Restore the spec"
        case does.PutState(state):
            return f"PutState {state.phase.value}" + (state.reason and f": {state.reason}")
        case does.PutIncident():
            return f"PutIncident {_incident(effect.record)}"
        case _:
            return repr(effect)
