"""What an agent publishes in etcd: its membership, failure reports, and records that etcd has lost."""

from __future__ import annotations

from elastic.contract.records.incident_account import COMM
from elastic.contract.records.job_records import BrokenRecord, GenerationRecord, MemberRecord
from elastic.contract.records.reasons import Code, Text, reason
from elastic.contract.structs import replace
from elastic.contract.texts import one_line
from elastic.recovery.facts.evidence import bad_numbers, merged
from elastic.recovery.facts.transitions import HOLDS, Stage
from elastic.recovery.machine.effects import PutBroken, PutMember, Restore
from elastic.recovery.machine.model import Worker
from elastic.recovery.machine.turn import Turn

SUSPICION_S = 0.3
"""From a collective that failed without a known cause until the generation is reported broken for it: time for the
agent that has the cause to report it first."""

IDLE_S = 1.0
"""How long a worker may stay outside the group of a generation that is not broken, with nothing to wait for."""

LACKING_TRIES = 3
"""After so many failures in a row to start a worker, the node is excluded for what it lacks."""

SAVE_S = 600.0
"""The same while a draining node waits for the checkpoint at which all ranks have stopped, or three times as long as
the last one took to write. If it fails they would stand still for as long as the drain lasts."""


def member_record(turn: Turn) -> MemberRecord:
    """Our member record as it should be now."""
    policy = turn.policy
    before = turn.etcd.published.ready if turn.etcd.published else ()
    standing = tuple(s for s, w in sorted(turn.local.workers.items()) if _stands(turn, w))
    # A node that has shrunk to no slots returns with all of them at once; but one that has ranks in the generation
    # offers the slots it has, so that it is not passed over meanwhile.
    takes_part = any(slot in turn.my_ranks() for slot in standing)
    if policy.shrink and policy.managed and (before or takes_part):
        ready = standing
    else:
        ready = tuple(range(policy.slots)) if before or len(standing) == policy.slots else ()
    lacking = {slot: worker for slot, worker in turn.local.workers.items() if worker.lacks}
    number = turn.formed.generation.number if turn.formed.generation else 0
    holders = _held(turn)
    return MemberRecord(
        node=policy.node,
        incarnation=policy.incarnation,
        host=policy.host,
        port=policy.port,
        slots=policy.slots,
        ready=tuple(slot for slot in ready if slot not in lacking),
        draining=turn.drain.draining,
        done=number if turn.saved_here() else 0,
        unreachable=tuple(sorted({node for node, _ in turn.peers.unreachable})),
        standings=turn.local.standings,
        managed=policy.managed,
        lacks=next((worker.lacks for worker in lacking.values() if worker.crashes >= LACKING_TRIES), ""),
        code=policy.code,
        held_generation=max((w.synced for w in holders), default=0),
        held_consistent=max((w.synced for w in holders if w.consistent and w.stage is Stage.READY), default=0),
    )


def _held(turn: Turn) -> list[Worker]:
    """The workers that may hand older state over: of a node without a place, also if it drains and has not left yet.
    Those still in their group count, too: the next one may fail before they have left it."""
    generation = turn.formed.generation
    if generation is None or turn.drain.leaving is not None:
        return []
    if generation.node_of(turn.policy.node, turn.policy.incarnation) is not None:
        return []
    # What is older than a generation that went back to a snapshot may be the state that the job has gone back from.
    went_back = [
        g.number for g in (generation, turn.formed.last_committed) if g is not None and g.restore == "snapshot"
    ]
    since = max(went_back, default=0)
    return [
        worker
        for worker in turn.local.workers.values()
        if worker.stage in HOLDS
        and worker.synced > since
        and (worker.step > 0 or turn.progress.settled >= worker.synced)
    ]


def _stands(turn: Turn, worker: Worker) -> bool:
    """Whether the worker's slot can be given a rank, or has one that the worker will take."""
    if worker.stage is Stage.STARTING:
        current = turn.formed.generation
        return current is not None and worker.seat == current.number and not turn.is_broken()
    if worker.stage is Stage.READY and not turn.policy.managed and not worker.worker_id:
        return turn.etcd.view.revision > 0  # the first view may show that the job's workers are managed
    return worker.stage not in (Stage.GONE, Stage.KILLED)


def settle_member(turn: Turn) -> None:
    wanted = member_record(turn)
    if turn.etcd.joined and wanted != turn.etcd.published:
        turn.etcd = replace(turn.etcd, published=wanted)
        turn.do(PutMember(wanted))


def failure(turn: Turn, kind: str, detail: Text, slots: tuple[int, ...] = ()) -> BrokenRecord:
    """A failure report of the newest generation, in which the workers of `slots` are lost."""
    generation, ranks = turn.formed.generation, turn.my_ranks()
    return BrokenRecord(
        generation=generation.number if generation else 0,
        node=turn.policy.node,
        kind=kind,
        detail=detail,
        slots=slots,
        ranks=tuple(ranks[slot] for slot in slots if slot in ranks),
    )


def worker_failure(turn: Turn, worker: Worker, kind: str, detail: Text) -> BrokenRecord:
    """A failure report of the newest generation, in which `worker` is lost."""
    return replace(failure(turn, kind, detail, (worker.slot,)), step=worker.step, step_in=worker.synced)


def uncharged(record: BrokenRecord) -> BrokenRecord:
    return replace(record, charged=False)


def add_evidence(turn: Turn, record: BrokenRecord) -> None:
    """Report a failure of a generation that is broken already, or was left as planned, unless it is known already."""
    reported = turn.formed.broken_record
    if turn.is_over():
        return
    if reported is not None and reported.generation == record.generation:
        if (more := merged(reported, record)) == reported:
            return
        turn.formed = replace(turn.formed, broken_record=more)
    if incident := turn.incidents.incident:
        earlier = next((r for r in incident.reports if r.generation == record.generation), None)
        turn.incidents = replace(
            turn.incidents, incident=incident.with_report(merged(earlier, record) if earlier else record)
        )
    turn.do(PutBroken(record))


def report_failure(turn: Turn, record: BrokenRecord) -> None:
    """Report the newest generation as broken; if it is already, report what `record` adds."""
    generation = turn.formed.generation
    if generation is None or turn.is_over():
        return
    if turn.is_broken():
        add_evidence(turn, record)
        return
    turn.formed = replace(turn.formed, broken=generation.number, broken_record=record, broken_at_s=turn.now_s)
    turn.local = replace(turn.local, suspicious_since_s=None)
    turn.etcd = replace(turn.etcd, asked={**turn.etcd.asked, f"broken {generation.number}": turn.now_s})
    member = None
    if turn.policy.shrink and (wanted := member_record(turn)) != turn.etcd.published:
        member = wanted
        turn.etcd = replace(turn.etcd, published=wanted)
    turn.do(PutBroken(record, member))


def adopt(turn: Turn) -> None:
    """Adopt a newer generation; restore what etcd has lost."""
    if turn.is_taken():
        return
    seen, adopted, spec = turn.etcd.view.generation, turn.formed.generation, turn.etcd.view.spec
    older = adopted is not None and (seen is None or seen.number < adopted.number)
    if seen is not None and (adopted is None or seen.number > adopted.number):
        # A planned change is made of a generation that steps, also where the progress record does not show it yet.
        steps = adopted is not None and seen.at_step is not None and seen.before == adopted.number
        if adopted is not None and turn.policy.managed and (steps or _has_stepped(turn, adopted)):
            turn.formed = replace(turn.formed, last_committed=adopted)
        turn.formed = replace(turn.formed, generation=seen, formed_at_s=turn.now_s)
        turn.local = replace(turn.local, suspicious_since_s=None)
        turn.lead = replace(turn.lead, publishing=0)
        _carry_over(turn, adopted, seen)
    elif turn.etcd.state.phase.over:
        pass  # its records were removed while this agent leaves, or another job has taken its name
    elif turn.etcd.connected and (spec is None or older):  # etcd was wiped, or restored to an older revision
        if adopted is None and turn.now_s < turn.etcd.absence_ignored_until_s:
            return  # agents that hold a generation restore first: without the spec no agent forms another one
        turn.ask(Restore(adopted, turn.etcd.state, turn.etcd.spec), "restore")
    record = turn.formed.broken_record
    if record and adopted and seen == adopted and record.generation == adopted.number and not turn.etcd.view.broken:
        turn.ask(PutBroken(record), f"broken {adopted.number}")


def _has_stepped(turn: Turn, generation: GenerationRecord) -> bool:
    """As far as is known here; an agent that had no rank in `generation` has only the progress record."""
    progress = turn.etcd.view.progress
    return turn.progress.settled >= generation.number or (
        progress is not None and progress.stepped_in >= generation.number and progress.step > 0
    )


def _carry_over(turn: Turn, adopted: GenerationRecord | None, seen: GenerationRecord) -> None:
    """Report a failure again for the next generation, if that was published while this node reported it for the one
    before: a planned change, for which there was no step boundary, and a node that was to leave may be the only one
    that holds the state; or one that goes on from the state from which this node wants to go back."""
    record = turn.formed.broken_record
    if adopted is None or record is None or seen.before != adopted.number or record.generation != adopted.number:
        return
    here = seen.node_of(turn.policy.node, turn.policy.incarnation) is not None
    slots = tuple(sorted(record.lost(turn.policy.node)))
    if slots and here and seen.at_step is not None:
        again = failure(turn, record.kind, record.detail, slots)
        report_failure(
            turn,
            replace(
                again,
                step=record.step,
                step_in=record.step_in,
                fingerprint=record.fingerprint,
                error=record.error,
                charged=record.charged,
            ),
        )
    bad = bad_numbers(record, turn.policy.node)
    if bad is not None and here and seen.restore != "snapshot":
        again = replace(
            failure(turn, bad.kind, bad.detail),
            ranks=bad.ranks,
            step=bad.step,
            step_in=bad.step_in,
            fingerprint=bad.kind,
            error=record.error,
            rollback=turn.policy.spec.on_bad_numbers == "rollback",
        )
        report_failure(turn, again)


def check_suspicion(turn: Turn) -> None:
    """Report a failed collective whose cause no agent has reported in time."""
    since = turn.local.suspicious_since_s
    if since is None or turn.now_s - since < SUSPICION_S:
        return
    turn.local = replace(turn.local, suspicious_since_s=None)
    suspicion = turn.local.suspicion
    group_failed(turn, one_line(suspicion) if isinstance(suspicion, str) else suspicion)


def group_failed(turn: Turn, detail: Text, kind: str = COMM) -> None:
    """The generation is broken, and no worker is known to be the cause."""
    # A generation that broke before its first step may do so forever: it counts against the restart budget, and the
    # next ones are tried ever more slowly.
    generation, progress, record = turn.formed.generation, turn.progress, failure(turn, kind, detail)
    if generation is not None and progress.settled < generation.number:
        report_failure(turn, replace(record, step=progress.step, step_in=progress.step_in))
    else:
        report_failure(turn, uncharged(record))


def check_idle(turn: Turn) -> None:
    """Report a generation whose worker has left the group though it is not broken: the reason was called off, say."""
    current = turn.formed.generation
    if current is None or turn.is_broken() or not turn.policy.managed:
        return
    if not turn.etcd.view.has_all_members:
        return  # whether a node drains is not known; without a step this agent soon watches the members, too
    ranks = turn.my_ranks()
    left = (w for w in turn.local.workers.values() if w.stage is Stage.READY and w.generation == current.number)
    since_s = min((w.since_s for w in left if w.slot in ranks), default=turn.now_s)
    if turn.now_s - since_s < IDLE_S:
        return
    members = turn.etcd.view.members.values()
    stay = sum(1 for m in members if m.record.ready and m.record.draining is None)
    if any(m.record.draining is not None for m in members) and stay < turn.limits().min_nodes:
        # It waits for the draining node to leave, and the job for a replacement.
        progress = turn.etcd.view.progress
        write_s = progress.checkpoint_write_s if progress is not None else None
        if turn.now_s - since_s < max(SAVE_S, 3 * (write_s or 0.0)):
            return
    report_failure(turn, uncharged(failure(turn, "idle", reason(Code.LEFT_GROUP))))
