"""A worker that calls `elastic.run` makes its job a managed one, whatever stage the others are in."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from support import says
from support.jobs import generation, member, place, policy, view

from elastic.contract.job.spec import JobSpec
from elastic.contract.records.decoding import Member
from elastic.contract.records.job_records import ProgressRecord
from elastic.contract.worker import messages
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.facts.view import JobView
from elastic.recovery.machine.effects import (
    Effect,
    ForkPlain,
    ForkWorker,
    Kill,
    PutBroken,
    PutIncident,
    PutMember,
    Rejoin,
    Send,
)
from elastic.recovery.machine.events import (
    Event,
    Joined,
    Start,
    Tick,
    Viewed,
    WorkerExited,
    WorkerStarted,
)
from elastic.recovery.machine.model import Agent
from elastic.recovery.recovery import step

FORMED = generation(1, [place("b", 0, 1), place("a", 0, 1)])
"""We are a, and b leads."""
A, B = member("a", 1, ready=(0, 1)), member("b", 2, ready=(0, 1))


class Machine:
    def __init__(self, **fields: object) -> None:
        self.spec = JobSpec(name="job", script="train.py", nodes="1:2", workers_per_node=2, **fields)  # type: ignore[arg-type]
        self.agent = Agent(policy(spec=self.spec, slots=2, managed=False))
        self.now_s = 100.0

    def take(self, *events: Event) -> list[Effect]:
        effects: list[Effect] = []
        for event in events:
            self.now_s += 0.01
            self.agent, done = step(self.agent, event, self.now_s)
            effects += done
        return effects

    def see(self, *members: Member, **more: object) -> list[Effect]:
        job_view: JobView = view(*members, spec=self.spec, **more)  # type: ignore[arg-type]
        return self.take(Viewed(job_view, True))

    def stages(self) -> list[Stage]:
        return [worker.stage for _, worker in sorted(self.agent.local.workers.items())]


def started(**fields: object) -> Machine:
    """Both workers were forked into generation 1 and have said nothing yet."""
    machine = Machine(**fields)
    machine.take(Start(), Joined())
    effects = machine.see(A, B, formed=FORMED)
    assert [e.slot for e in effects if isinstance(e, ForkPlain)] == [0, 1]
    return machine


def forms(effects: list[Effect]) -> list[tuple[int, int]]:
    return [(e.slot, e.message.rank) for e in effects if isinstance(e, Send) and isinstance(e.message, messages.Form)]


def test_agent_is_ready_once_it_knows_that_the_job_is_plain_on_other_nodes() -> None:
    machine = Machine()
    (joins,) = machine.take(Start(), Joined())
    assert isinstance(joins, Rejoin)
    assert joins.record.ready == ()
    (put,) = [e for e in machine.see(A, B) if isinstance(e, PutMember)]
    assert put.record.ready == (0, 1)
    assert not put.record.managed


def test_worker_calling_run_keeps_its_process_and_forms_its_generation() -> None:
    machine = started()
    effects = machine.take(says.managed(0, 1))
    assert machine.agent.policy.managed
    assert machine.stages() == [Stage.STARTING, Stage.STARTING], "the other one has still to say so"
    (put,) = [e for e in effects if isinstance(e, PutMember)]
    assert put.record.managed
    assert put.record.ready == (0, 1), "they have their ranks"
    assert forms(machine.take(says.ready(0, 1))) == [(0, 2)]
    assert forms(machine.take(says.managed(1, 2), says.ready(1, 2))) == [(1, 3)]


def test_workers_in_setup_stay_ready_when_the_job_may_shrink() -> None:
    machine = started(on_loss="shrink")
    (put,) = [e for e in machine.take(says.managed(0, 1)) if isinstance(e, PutMember)]
    assert put.record.ready == (0, 1)


def test_worker_in_setup_keeps_its_process_when_the_generation_breaks() -> None:
    machine = started()
    machine.take(says.managed(0, 1))
    effects = machine.take(WorkerExited(1, 2, "killed by SIGKILL"))
    (broken,) = [e for e in effects if isinstance(e, PutBroken)]
    assert broken.record.slots == (1,)
    second = generation(2, FORMED.nodes)
    effects = machine.see(A, B, formed=second)
    assert not [e for e in effects if isinstance(e, Kill)], "its process is kept"
    assert forms(machine.take(says.ready(0, 1))) == [(0, 2)]
    assert machine.agent.local.workers[1].worker_id == 3, "and the other one is replaced"


def test_worker_that_exited_cleanly_is_forked_again_when_the_job_becomes_managed() -> None:
    machine = started()
    machine.take(WorkerExited(1, 2, "exit code 0", 0))
    assert machine.stages()[1] is Stage.DONE
    effects = machine.take(says.managed(0, 1))
    assert [e.slot for e in effects if isinstance(e, ForkWorker)] == [1]


def test_new_agent_of_a_managed_job_sets_up_its_workers_before_it_is_ready() -> None:
    managed = Member(msgspec.structs.replace(B.record, managed=True), B.create_revision)
    machine = Machine()
    machine.take(Start(), Joined())
    effects = machine.see(member("a", 9), managed, formed=generation(1, [place("b", 0, 1)]))
    assert [e.slot for e in effects if isinstance(e, ForkWorker)] == [0, 1]
    assert not [e for e in effects if isinstance(e, ForkPlain)]
    assert machine.agent.etcd.published is not None
    assert machine.agent.etcd.published.ready == ()
    machine.take(says.managed(0, 1), says.ready(0, 1))
    (put,) = [e for e in machine.take(says.ready(1, 2)) if isinstance(e, PutMember)]
    assert put.record.ready == (0, 1)


def test_where_all_agents_died_before_a_second_generation_the_steps_on_record_tell() -> None:
    """The first generation is published before its workers have called `elastic.run`."""
    progress = ProgressRecord(generation=1, world_size=2, step=7, steps_per_s=1.0, loss=None, wall_s=0.0)
    machine, fresh = Machine(), Machine()
    for each, seen in ((machine, progress), (fresh, msgspec.structs.replace(progress, step=0))):
        each.take(Start(), Joined())
        job_view = view(member("a", 9, worker_id=2), spec=each.spec, formed=generation(1, FORMED.nodes))
        each.take(Viewed(replace(job_view, progress=seen), True))
    assert machine.agent.policy.managed
    assert not fresh.agent.policy.managed


def test_where_no_member_is_left_the_generation_tells() -> None:
    machine = Machine()
    machine.take(Start(), Joined())
    formed = msgspec.structs.replace(generation(3, FORMED.nodes), managed=True)
    effects = machine.see(member("a", 9, worker_id=2), formed=formed)
    assert [e.slot for e in effects if isinstance(e, ForkWorker)] == [0, 1]


def test_an_incident_of_a_plain_script_is_open_until_the_new_processes_run() -> None:
    """The zygote may have died too: then the workers of the next generation wait for one that imports for seconds."""
    machine = Machine()
    machine.take(Start(), Joined())
    machine.see(A, formed=(first := generation(1, [place("a", 0, 1)])))
    effects = machine.take(WorkerStarted(0, 1), WorkerStarted(1, 2), WorkerExited(0, 1, "killed by SIGKILL"))
    effects += machine.see(A, formed=generation(2, first.nodes))
    effects += machine.take(WorkerExited(1, 2, "killed by SIGKILL"), Tick(), WorkerStarted(0, 3), Tick())
    assert [e.record.open for e in effects if isinstance(e, PutIncident)] == [True]
    effects = machine.take(WorkerStarted(1, 4), Tick())
    assert [(e.record.open, "stepping" in e.record.timeline_s) for e in effects if isinstance(e, PutIncident)] == [
        (False, True)
    ]
