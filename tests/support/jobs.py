"""Small views of a job, for tests of decisions: members, places, generations, views."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from elastic.contract.job.spec import JobSpec
from elastic.contract.records.decoding import Member
from elastic.contract.records.job_records import (
    BrokenRecord,
    GenerationNode,
    GenerationRecord,
    JobState,
    MemberRecord,
    Phase,
    SpecRecord,
)
from elastic.contract.timeouts import Timeouts
from elastic.recovery.facts.view import JobView
from elastic.recovery.machine.effects import Effect
from elastic.recovery.machine.events import Event, Tick
from elastic.recovery.machine.model import Agent, Policy
from elastic.recovery.recovery import step


def changed(agent: Agent, **fields: Any) -> Agent:
    """`agent` with other values of these fields, whichever of its parts they are in."""
    for name, value in fields.items():
        part = next(part for part in Agent.__struct_fields__ if hasattr(getattr(agent, part), name))
        agent = replace(agent, **{part: replace(getattr(agent, part), **{name: value})})
    return agent


def member(
    node: str,
    create_revision: int = 1,
    *,
    worker_id: int = 1,
    ready: tuple[int, ...] = (0,),
    draining: str | None = None,
    done: int = 0,
) -> Member:
    """`worker_id`: counts the agents of this node."""
    record = MemberRecord(
        node=node,
        incarnation=f"{node}.{worker_id}",
        host=node,
        port=1,
        slots=max(1, len(ready)),
        ready=ready,
        draining=draining,
        done=done,
    )
    return Member(record, create_revision)


def place(node: str, *slots: int, worker_id: int = 1) -> GenerationNode:
    return GenerationNode(node=node, incarnation=f"{node}.{worker_id}", host=node, slots=slots or (0,), port=1)


def generation(
    number: int,
    places: Iterable[GenerationNode],
    *,
    leader: str = "",
    at_step: int | None = None,
    restore: str = "newest",
    previous: int = 0,
    newcomers: tuple[str, ...] = (),
) -> GenerationRecord:
    """`leader`: whose agent hosts the store; by default the first."""
    placed = tuple(places)
    host = leader or placed[0].node
    return GenerationRecord(
        number=number,
        nodes=placed,
        store_host=host,
        store_port=1000 + number,
        leader=host,
        why="because",
        at_step=at_step,
        restore=restore,
        previous=previous,
        newcomers=newcomers,
    )


def broken(
    number: int, node: str = "a", *slots: int, kind: str = "exit", rollback: bool = False, charged: bool = True
) -> BrokenRecord:
    return BrokenRecord(
        generation=number, node=node, kind=kind, detail="planted", slots=slots, rollback=rollback, charged=charged
    )


def view(
    *members: Member,
    spec: JobSpec | None = None,
    formed: GenerationRecord | None = None,
    failed: BrokenRecord | None = None,
    phase: Phase = Phase.RUNNING,
    reason: str = "",
    excluded_nodes: tuple[str, ...] = (),
    saved_step: int = 0,
    saved_generation: int = 0,
    revision: int = 10,
) -> JobView:
    return JobView(
        spec=SpecRecord(spec=spec, submitted_wall_s=0.0, submitted_by="me") if spec else None,
        state=JobState(phase=phase, reason=reason, excluded_nodes=excluded_nodes),
        state_revision=2,
        members={m.record.node: m for m in members},
        generation=formed,
        generation_revision=5 if formed else 0,
        broken=failed,
        saved_step=saved_step,
        saved_generation=saved_generation,
        revision=revision,
    )


def policy(
    node: str = "a",
    *,
    spec: JobSpec | None = None,
    nodes: str = "1:1",
    slots: int = 1,
    managed: bool = True,
    **more: Any,
) -> Policy:
    """`nodes`: of a job that waits for no more nodes than the minimum, if there is no `spec`."""
    return Policy(
        node=node,
        incarnation=f"{node}.1",
        host=node,
        port=1,
        slots=slots,
        managed=managed,
        spec=spec or JobSpec(name="job", script="x.py", nodes=nodes, join_wait_s=0.0),
        timeouts=Timeouts(),
        **more,
    )


class Machine:
    """The recovery of an agent, on a clock that only `wait` moves."""

    def __init__(self, policy: Policy) -> None:
        self.agent = Agent(policy)
        self.now_s = 100.0

    def take(self, *events: Event) -> list[Effect]:
        effects: list[Effect] = []
        for event in events:
            self.agent, done = step(self.agent, event, self.now_s)
            effects += done
        return effects

    def wait(self, seconds: float, *events: Event) -> list[Effect]:
        self.now_s += seconds
        return self.take(*(events or (Tick(),)))
