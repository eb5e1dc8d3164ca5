"""What an agent tells the others through etcd: that it is there, that a generation is broken, what etcd has lost."""

from __future__ import annotations

from .effects import PutBroken, PutMember, Restore
from .model import Stage
from .records import BrokenRecord, MemberRecord, WorkerError
from .restarts import COMM, summary
from .turn import Turn

SUSPICION_S = 0.3
"""From a collective that failed for no known reason until the generation is called broken for it: time for
the one who knows the reason to say so first."""

IDLE_S = 1.0
"""A worker outside of the generation that it was in, with nothing to wait for, is not left there for longer."""


def member_record(turn: Turn) -> MemberRecord:
    """What the others are to know of us, as it stands."""
    agent, policy = turn.agent, turn.policy
    before = agent.published.ready if agent.published else ()
    starting = (Stage.STARTING, Stage.GONE, Stage.KILLED)
    standing = tuple(s for s, w in sorted(agent.workers.items()) if w.stage not in starting)
    # Who came to shrink to nothing comes back whole; but whoever takes part is not to be passed over meanwhile.
    takes_part = any(slot in turn.my_ranks() for slot in standing)
    if policy.shrink and policy.managed and (before or takes_part):
        ready = standing
    else:
        ready = tuple(range(policy.slots)) if before or len(standing) == policy.slots else ()
    number = agent.generation.number if agent.generation else 0
    return MemberRecord(
        node=policy.node,
        incarnation=policy.incarnation,
        host=policy.host,
        port=policy.port,
        slots=policy.slots,
        ready=ready,
        draining=agent.draining,
        done=number if turn.done_here() else 0,
        unreachable=tuple(sorted({node for node, _ in agent.unreachable})),
    )


def settle_member(turn: Turn) -> None:
    wanted = member_record(turn)
    if turn.agent.joined and wanted != turn.agent.published:
        turn.change(published=wanted)
        turn.do(PutMember(wanted))


def broken_record(
    turn: Turn,
    generation: int,
    kind: str,
    detail: str,
    slots: tuple[int, ...],
    *,
    ranks: tuple[int, ...] | None = None,
    step: int | None = None,
    fingerprint: str = "",
    error: WorkerError | None = None,
    charged: bool = True,
    rollback: bool = False,
) -> BrokenRecord:
    """`ranks`: whose doing it was; by default those of `slots`, which are lost."""
    mine = turn.my_ranks()
    return BrokenRecord(
        generation=generation,
        node=turn.policy.node,
        kind=kind,
        detail=detail,
        slots=slots,
        ranks=tuple(mine[s] for s in slots if s in mine) if ranks is None else ranks,
        error=error,
        fingerprint=fingerprint,
        step=step,
        charged=charged,
        rollback=rollback,
    )


def call_broken(turn: Turn, kind: str, detail: str, slots: tuple[int, ...], **more: object) -> None:
    """Say once that the newest generation is broken."""
    generation = turn.agent.generation
    if generation is None or turn.is_broken() or turn.is_over():
        return
    record = broken_record(turn, generation.number, kind, detail, slots, **more)  # type: ignore[arg-type]
    turn.change(broken=generation.number, broken_record=record, broken_at_s=turn.now_s, suspicious_since_s=None)
    turn.change(asked={**turn.agent.asked, f"broken {generation.number}": turn.now_s})
    member = None
    if turn.policy.shrink and (wanted := member_record(turn)) != turn.agent.published:
        member = wanted
        turn.change(published=wanted)
    turn.do(PutBroken(record, member))


def adopt(turn: Turn) -> None:
    """Take on a newer generation; write back what etcd has lost."""
    seen, held, spec = turn.agent.view.generation, turn.agent.generation, turn.agent.view.spec
    older = held is not None and (seen is None or seen.number < held.number)
    if seen is not None and (held is None or seen.number > held.number):
        if held is not None and turn.policy.managed and turn.agent.settled >= held.number:
            turn.change(former=held)
        turn.change(generation=seen, formed_at_s=turn.now_s, suspicious_since_s=None, publishing=0)
    elif turn.agent.connected and (spec is None or older):  # it was wiped or set back
        if held is None and turn.now_s < turn.agent.blind_until_s:
            return  # those who hold a generation come first: without the spec nobody forms another one
        turn.ask(Restore(held, turn.agent.state, turn.agent.spec), "restore")
    record = turn.agent.broken_record
    if record and held and seen == held and record.generation == held.number and not turn.agent.view.broken:
        turn.ask(PutBroken(record), f"broken {held.number}")


def check_suspicion(turn: Turn) -> None:
    """A collective has failed, and still nobody says why."""
    since = turn.agent.suspicious_since_s
    if since is None or turn.now_s - since < SUSPICION_S:
        return
    turn.change(suspicious_since_s=None)
    group_failed(turn, summary(turn.agent.suspicion))


def group_failed(turn: Turn, detail: str) -> None:
    """The generation is broken, and no worker is known to be the cause."""
    agent = turn.agent
    # One that broke before its first step may break like this for ever: it is booked, and tried again ever slower.
    in_vain = agent.generation is not None and agent.settled < agent.generation.number
    call_broken(turn, COMM, detail, (), charged=in_vain, step=agent.step if in_vain else None)


def check_idle(turn: Turn) -> None:
    """A worker has let go of a generation that stands: what it left for was called off, or never came."""
    current = turn.agent.generation
    if current is None or turn.is_broken() or not turn.policy.managed:
        return
    ranks = turn.my_ranks()
    left = (w for w in turn.agent.workers.values() if w.stage is Stage.READY and w.generation == current.number)
    if not any(w.slot in ranks and turn.now_s - w.since_s >= IDLE_S for w in left):
        return
    members = turn.agent.view.members.values()
    stay = sum(1 for m in members if m.record.ready and m.record.draining is None)
    if any(m.record.draining is not None for m in members) and stay < turn.limits().min_nodes:
        return  # it waits for the one who leaves, and the job for a node in its place
    call_broken(turn, "idle", "left its group, and nothing followed", (), charged=False)
