"""Bad numbers in a job's training: a loss that is not finite, or replicas that differ.

The loss of one rank becomes that of all others a step later, and a rank may report that before the first one's report
arrives: the report of the earliest step names the cause, whichever comes first.
"""

from __future__ import annotations

from elastic.contract.records.job_records import BrokenRecord, Loss, Phase, WorkerError
from elastic.contract.records.phases import PhaseTrigger, after
from elastic.contract.records.reasons import Code, reason
from elastic.contract.structs import replace
from elastic.contract.worker.messages import BadNumbers
from elastic.recovery.facts.evidence import BAD_NUMBERS, bad_numbers, merged
from elastic.recovery.machine.effects import PutBroken, PutState
from elastic.recovery.machine.model import Worker
from elastic.recovery.machine.turn import Turn

from .announce import add_evidence, failure, report_failure


def take_bad_numbers(turn: Turn, worker: Worker, message: BadNumbers) -> None:
    """Stop the job, take it back to a snapshot, or go on, as `on_bad_numbers` says, and report them."""
    mode = turn.policy.spec.on_bad_numbers
    if mode == "ignore" or message.generation != worker.generation:
        return
    ranks = ", ".join(map(str, message.ranks)) or "?"
    detail = reason(Code.BAD_NUMBERS, message.detail, kind=message.kind, ranks=ranks, step=message.step)
    error = WorkerError(node=turn.policy.node, slot=worker.slot, rank=-1, message=str(detail), step=message.step)
    record = replace(
        failure(turn, message.kind, detail),
        generation=message.generation,
        ranks=message.ranks,
        step=message.step,
        step_in=message.generation,
        fingerprint=message.kind,
        error=error,
    )
    state, revision = turn.etcd.view.state, turn.etcd.view.state_revision
    if mode == "stop" and state.phase is not Phase.RUNNING:
        # The job waits, is being stopped or has ended: that decision came first. But it may be a consequence.
        _add_cause(turn, record)
        return
    if mode == "stop":
        # The phase first, so that no leader forms another generation; then the failure report, for the incident.
        turn.do(PutState(after(state, PhaseTrigger.FAILED, detail, turn.wall_s), revision))
    formed = turn.formed.generation
    if formed is not None and formed.number > message.generation and formed.restore == "snapshot":
        # The job goes back already, and its new generation does not have these numbers: they belong to the old one.
        add_evidence(turn, replace(record, rollback=True))
    elif formed is not None:
        report_failure(turn, replace(record, generation=formed.number, rollback=mode == "rollback"))


def _add_cause(turn: Turn, cause: BrokenRecord) -> None:
    """Report `found` though the job has failed, if it names the cause of the bad numbers that have failed it."""
    report = turn.formed.broken_record
    if turn.etcd.view.state.phase is not Phase.FAILED or report is None or report.generation != cause.generation:
        return
    more = merged(report, cause)
    if report.kind in BAD_NUMBERS and more.node == cause.node and more.step == cause.step:
        turn.formed = replace(turn.formed, broken_record=more)
        turn.do(PutBroken(cause))


def correct_reason(turn: Turn) -> None:
    """Give the job's end the reason that came first, if a consequence of it was reported earlier."""
    state, report = turn.etcd.view.state, turn.formed.broken_record
    if state.phase is not Phase.FAILED or report is None or (first := bad_numbers(report)) is None:
        return
    ends: tuple[BrokenRecord | Loss, ...] = (report, *report.also)
    later = {end.detail for end in ends if end.kind == first.kind and end is not first}
    if state.reason in later and state.reason != first.detail:
        turn.ask(PutState(replace(state, reason=first.detail), turn.etcd.view.state_revision), "reason")
