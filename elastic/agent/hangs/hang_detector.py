"""Reads the workers' beat pages: reports progress to the recovery state machine, and hangs with stack dumps."""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import structlog

from elastic.agent.workers.descendants import state as state_of
from elastic.agent.workers.pool import Pool, Process
from elastic.agent.workers.stacks import UNSEEN, is_in_part, stack
from elastic.contract.job.spec import Hang
from elastic.contract.records.reasons import Code, Text, listed, reason
from elastic.contract.records.standings import Standing
from elastic.contract.worker.beat import WITH_OTHERS, Beat, Doing
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.hangs import hang_rules
from elastic.recovery.hangs.collective_frames import is_blocked_in_collective, place_in_train
from elastic.recovery.hangs.stillness import StillRank, all_ahead, standing, worth_telling
from elastic.recovery.machine.events import Event, GroupStuck, Progress, RanksStill, StillBusy, WorkerUnhealthy
from elastic.recovery.machine.model import Agent, Worker
from elastic.util.processes import is_ending

from .standstill import Others, local

STOPPED_S = 1.0
"""A longer gap between two looks means that the agent itself was suspended."""
ENDING_S = 60.0
"""A worker that was killed or exits is left to the kernel for this long: only its exit tells of what it died."""
TELL_S = 1.0
"""Minimum interval between reports to the other agents of how far the local workers have got."""
RETRY_S = 1.0
"""Pause after a thread that dumps stacks could not be started."""
UNINTERRUPTIBLE_STATE = "D"
WITHOUT_PROCESS = (Stage.KILLED, Stage.GONE)

log = structlog.get_logger()


class LastBeat(msgspec.Struct, frozen=True):
    """State of a worker at one look."""

    worker: Worker
    process: Process
    beat: Beat
    state: str
    in_collective: float | None
    """Since when its stack has shown it in a collective that the script itself issued; None: it has not."""


@dataclass
class HangDetector:
    """`look` is called on every tick, in the loop's thread; stacks are dumped in a separate thread."""

    pool: Pool
    rules: Hang
    post: Callable[[Event], None]
    group_s: float = math.inf
    """The process group's time-out: with NCCL nothing else ends a wait in which no rank is found to be the cause."""

    def __post_init__(self) -> None:
        self.known: tuple[StillRank, ...] = ()
        """Ranks that show no progress and how far they have got: local ones, and those that other agents report."""
        self._others = Others()
        self._told_s = -math.inf
        self._seen: tuple[int, int] = (0, 0)
        self._step_times: deque[float] = deque(maxlen=8)
        self._looked_s = 0.0
        self._grace_until_s = 0.0
        self._set_up_s = 0.0
        """Longest set-up of a local worker so far, in seconds."""
        self._retry_s = 0.0
        """No thread is started before this instant: the last attempt failed."""
        self._starting: set[int] = set()
        self._being_examined: set[int] = set()
        self._stuck: dict[int, int] = {}
        """Worker id -> the beat after which it was reported as waiting for too long (GroupStuck)."""
        self._cleared_until_s: dict[int, float] = {}
        """Worker id -> until when an uncertain suspicion is ignored, as its stack shows a wait for other ranks."""
        self._unexamined_until_s: dict[int, float] = {}
        """Worker id -> until when its stack is not dumped again without a suspicion."""
        self._stopped_s: dict[int, float] = {}
        """Worker id of a stopped plain script -> since when every look has found its process stopped."""
        self._ending_s: dict[int, float] = {}
        """Worker id of a process that was killed or exits -> when that was seen first."""
        self._hung_at: dict[tuple[int, str], set[int]] = {}
        """(rank, place in `train`) -> ids of its workers that were found to be hung there."""
        self._in_collective: dict[int, tuple[int, float]] = {}
        """Worker id -> the beat after which its stack showed it in a collective, and when."""

    def look(self, agent: Agent, now_s: float, beats: Mapping[int, Beat]) -> Progress | None:
        """`beats`: worker id -> what its page shows. Returns the newest committed step, None if none was committed
        since the last look."""
        if now_s - self._looked_s > STOPPED_S and self._looked_s:
            # The agent was suspended, perhaps with the whole node: the workers may not have been able to beat.
            self._grace_until_s = now_s + self.rules.floor_s
            self._stopped_s.clear()
        self._looked_s = now_s
        seen = self._see(agent, now_s, beats)
        self._learn_set_up(seen, now_s)
        here = [self._standing(one, now_s) for one in seen]
        self.known = (*local(agent.policy.node, here, now_s), *self._others.known(agent, now_s))
        for one in seen:
            self._consider(agent, one, seen, now_s)
        progress = self._progress({one.worker.worker_id: one for one in seen})
        self._tell(agent, here, now_s)
        return progress

    def _see(self, agent: Agent, now_s: float, beats: Mapping[int, Beat]) -> list[LastBeat]:
        found = []
        for worker in agent.local.workers.values():
            process = self.pool.processes.get(worker.worker_id)
            if process is None or not process.pid:
                continue
            beat = beats[worker.worker_id]
            if beat.beat_at_s < process.started_s:  # a worker cannot beat before it is forked
                beat = msgspec.structs.replace(beat, beat_at_s=process.started_s)
            soon = now_s - beat.beat_at_s < min(self.rules.floor_s, self.rules.ceiling_s) / 2
            state = "" if soon else state_of(process.pid)
            then, since_s = self._in_collective.get(worker.worker_id, (-1, 0.0))
            found.append(LastBeat(worker, process, beat, state, since_s if then == beat.beats else None))
        return found

    def _learn_set_up(self, seen: list[LastBeat], now_s: float) -> None:
        starting = {one.worker.worker_id for one in seen if one.worker.stage is Stage.STARTING}
        for one in seen:
            if one.worker.worker_id in self._starting - starting:
                self._set_up_s = max(self._set_up_s, now_s - one.process.started_s)
        self._starting = starting
        self._stopped_s = {
            worker_id: s
            for worker_id, s in self._stopped_s.items()
            if any(o.worker.worker_id == worker_id for o in seen)
        }

    def _standing(self, one: LastBeat, now_s: float) -> Standing:
        return standing(one.beat, one.state, one.in_collective, now_s)

    def _waits(self, agent: Agent, one: LastBeat) -> list[hang_rules.RankWait]:
        """Waits of ranks that this worker may be holding up."""
        if one.worker.stage is Stage.STARTING:
            past = agent.formed.generation is not None or any(
                w.stage not in (Stage.STARTING, *WITHOUT_PROCESS) for w in agent.local.workers.values()
            )
            return [hang_rules.RankWait(hang_rules.FARTHEST, 0.0, self._set_up_s)] if past else []
        return [wait for k in self._not(agent, one) if (wait := k.wait()) is not None]

    def _not(self, agent: Agent, one: LastBeat) -> list[StillRank]:
        me = agent.policy.node, one.beat.rank
        return [k for k in self.known if (k.node, k.standing.rank) != me]

    def _consider(self, agent: Agent, one: LastBeat, seen: list[LastBeat], now_s: float) -> None:
        worker, beat = one.worker, one.beat
        if worker.stage in WITHOUT_PROCESS or worker.worker_id in self._being_examined:
            return
        if worker.stage in (Stage.ABORTING, Stage.STOPPING_AT_STEP) and hang_rules.busy(beat, self.rules, now_s):
            self.post(StillBusy(worker.slot, worker.worker_id))
        silent_s = now_s - beat.beat_at_s
        if silent_s < min(self.rules.floor_s, self.rules.ceiling_s) or now_s < self._grace_until_s:
            return  # too early to suspect it, whatever its process state
        if not agent.policy.managed:
            self._consider_plain(one, seen, now_s)
            return
        stuck = hang_rules.waits_too_long(worker.slot, beat, self.group_s, now_s)
        if stuck and self._stuck.get(worker.worker_id) != beat.beats:
            self._stuck[worker.worker_id] = beat.beats
            self.post(GroupStuck(worker.slot, worker.worker_id, stuck))
        world_size = agent.formed.generation.world_size if agent.formed.generation else 0
        here = hang_rules.position(beat, one.in_collective is not None)
        sick = hang_rules.judge(
            beat, one.state, self._waits(agent, one), self.rules, now_s,
            alone=_alone(agent),
            in_collective=one.in_collective is not None,
            all_ahead=world_size > 1 and all_ahead(here, self._not(agent, one), world_size),
        )  # fmt: skip
        if sick and (sick.certain or now_s >= self._cleared_until_s.get(worker.worker_id, 0.0)):
            self._examine(one, seen, sick, now_s)
        elif sick is None and self._may_wait_unseen(agent, one, now_s):
            self._examine(one, seen, None, now_s)

    def _consider_plain(self, one: LastBeat, seen: list[LastBeat], now_s: float) -> None:
        """A script without `elastic.run` never beats, so how long it has been stopped is measured across looks."""
        if one.state != hang_rules.STOPPED_STATE:
            self._stopped_s.pop(one.worker.worker_id, None)
            return
        for_s = now_s - self._stopped_s.setdefault(one.worker.worker_id, now_s)
        if for_s >= min(self.rules.floor_s, self.rules.ceiling_s):
            self._examine(one, seen, hang_rules.stopped(for_s), now_s)

    def _may_wait_unseen(self, agent: Agent, one: LastBeat, now_s: float) -> bool:
        """Whether to dump its stack without a suspicion: it may be waiting in a collective that the script itself
        issued, which the beat page does not show."""
        beat = one.beat
        return (
            one.worker.stage is Stage.RUNNING
            and not _alone(agent)
            and beat.doing not in WITH_OTHERS
            and one.in_collective is None
            and one.state != hang_rules.STOPPED_STATE
            and now_s >= beat.quiet_until_s
            and now_s - beat.beat_at_s >= hang_rules.patience_s(beat, self.rules)
            and now_s >= self._unexamined_until_s.get(one.worker.worker_id, 0.0)
        )

    def _tell(self, agent: Agent, here: list[Standing], now_s: float) -> None:
        """Report to the other agents how far the local workers that show no progress have got."""
        if agent.formed.generation is None or len(agent.formed.generation.nodes) < 2 or now_s - self._told_s < TELL_S:
            return
        step_s = statistics.median(self._step_times) if self._step_times else 0.0
        number = agent.formed.generation.number
        stopped = any(
            k.standing.stopped and k.standing.position[0] == number and k.standing.position[1] >= self._seen[1] - 1
            for k in self.known
        )  # the agent of the stopped rank requires only that another rank waits
        silent_s = max(self.rules.floor_s, 0.0 if stopped else self.rules.factor * step_s) / 2
        still = tuple(s for s in here if s.silent_s >= silent_s and s.position[0] == number)
        at = agent.formed.generation.at(agent.policy.node)
        crowd = len(agent.formed.generation.nodes) > agent.policy.crowd and (
            at is None or at >= agent.policy.leader_candidates
        )
        if (news := worth_telling(still, agent.local.standings, crowd=crowd)) is not None:
            self._told_s = now_s
            self.post(RanksStill(news))

    def _progress(self, seen: Mapping[int, LastBeat]) -> Progress | None:
        running = [
            one.beat
            for one in seen.values()
            if one.worker.stage in (Stage.RUNNING, Stage.STOPPING_AT_STEP) and one.beat.step_s > 0
        ]
        if not running:
            return None
        newest = max(running, key=lambda beat: (beat.committed_in, beat.step))
        reached = (newest.committed_in, newest.step)
        if reached <= self._seen:
            return None
        self._seen = reached
        self._step_times.append(newest.step_s)  # a median: one long step must not raise every rank's patience
        return Progress(newest.committed_in, newest.step, statistics.median(self._step_times))

    def _examine(self, one: LastBeat, seen: list[LastBeat], sick: hang_rules.Unhealthy | None, now_s: float) -> None:
        """Dump its stack, and post WorkerUnhealthy unless the stack clears it. Without `sick`, only dump it."""
        process, state = one.process, one.state
        if now_s < self._retry_s or self._is_ending(process, now_s):
            return
        self._being_examined.add(process.worker_id)
        # A cleared worker is examined again when its silence has doubled: dumping the stack may pause it.
        silent_s, beats_then = now_s - one.beat.beat_at_s, one.beat.beats
        again_s = now_s + min(self.rules.ceiling_s, silent_s)
        suspect = f"slot {process.slot} (hung)"
        targets = [(suspect, process.pid, state not in (hang_rules.STOPPED_STATE, UNINTERRUPTIBLE_STATE))]
        waiting = next((o for o in seen if o is not one and o.beat.doing is Doing.EXCHANGING), None)
        if waiting is not None and sick is not None:
            # Without native frames: this worker is not suspected and must not be paused.
            targets.append((f"slot {waiting.worker.slot} (waits for it)", waiting.process.pid, False))
        if sick is not None:
            log.warning("worker.silent", slot=process.slot, pid=process.pid, evidence=sick.evidence)

        def examine() -> None:
            stacks = _stacks(targets)
            self._unexamined_until_s[process.worker_id] = again_s
            resumed = state == hang_rules.STOPPED_STATE and state_of(process.pid) != hang_rules.STOPPED_STATE
            if resumed or process.page.read().beats != beats_then:
                self._unexamined_until_s.pop(process.worker_id)
                log.info("worker.went_on", slot=process.slot, pid=process.pid)
            elif self._is_ending(process, now_s):  # killed meanwhile
                self._unexamined_until_s.pop(process.worker_id)
            elif not (sick and sick.certain) and is_blocked_in_collective(stacks[suspect]):
                self._cleared_until_s[process.worker_id] = again_s
                self._in_collective[process.worker_id] = beats_then, now_s
                log.info("worker.is_blocked_in_collective", slot=process.slot, pid=process.pid)
            elif sick is not None and self._waits_as_it_says(one, sick, stacks[suspect], now_s):
                self._cleared_until_s[process.worker_id] = again_s
                log.info("worker.not_seen_in_collective", slot=process.slot, pid=process.pid)
            elif sick and not sick.certain and stacks[suspect].startswith(UNSEEN) and silent_s < self.rules.ceiling_s:
                # What fills the process table is about to fail, too.
                self._cleared_until_s[process.worker_id] = now_s + RETRY_S
                log.warning("worker.not_looked_at", slot=process.slot, pid=process.pid, why=stacks[suspect])
            elif sick is not None and (longer_s := self._more_patience_s(one, sick, stacks[suspect], now_s)):
                self._cleared_until_s[process.worker_id] = one.beat.beat_at_s + longer_s
                log.info("worker.takes_long_there", slot=process.slot, pid=process.pid, patience_s=longer_s)
            elif sick is not None:
                evidence: Text = sick.evidence
                if (since_s := self._ending_s.get(process.worker_id)) is not None:
                    evidence = listed(evidence, reason(Code.ENDS_SLOWLY, for_s=round(now_s - since_s)))
                log.warning("worker.hung", slot=process.slot, pid=process.pid, evidence=evidence)
                self.post(WorkerUnhealthy(process.slot, process.worker_id, "hang", evidence, stacks))

        def examine_or_retry() -> None:
            try:
                examine()
            finally:
                self._being_examined.discard(process.worker_id)

        try:
            threading.Thread(target=examine_or_retry, name="elastic-stacks", daemon=True).start()
        except RuntimeError as error:  # no thread can be started: retried later, and the agent keeps running
            log.error("worker.not_looked_at", slot=process.slot, pid=process.pid, why=str(error))
            self._retry_s = now_s + RETRY_S
            self._being_examined.discard(process.worker_id)

    def _waits_as_it_says(self, one: LastBeat, sick: hang_rules.Unhealthy, dump: str, now_s: float) -> bool:
        """Whether nothing speaks against its page, by which it waits in an exchange: a busy machine has no time for its
        stack, and after a node is lost the others are not equally far. Not for longer than the ceiling."""
        silent_s = now_s - one.beat.beat_at_s
        waits = one.beat.doing in hang_rules.IN_EXCHANGE and silent_s < self.rules.ceiling_s
        return is_in_part(dump) and waits and not sick.certain

    def _more_patience_s(self, one: LastBeat, sick: hang_rules.Unhealthy, dump: str, now_s: float) -> float:
        """How long the worker may be silent, if that is longer than it was: its rank was found to be hung at the same
        place before. 0: it is hung; counted."""
        found = self._hung_at.setdefault((one.beat.rank, place_in_train(dump)), set())
        longer_s = hang_rules.patience_there_s(one.beat, self.rules, len(found - {one.worker.worker_id}))
        if not sick.certain and now_s - one.beat.beat_at_s < longer_s:
            return longer_s
        found.add(one.worker.worker_id)
        return 0.0

    def _is_ending(self, process: Process, now_s: float) -> bool:
        """Whether the kernel is about to show its exit, which tells the cause and the last step: that is no hang."""
        if not is_ending(process.pid):
            return False
        if process.worker_id not in self._ending_s:
            self._ending_s[process.worker_id] = now_s
            log.info("worker.ends_slowly", slot=process.slot, pid=process.pid)
        return now_s - self._ending_s[process.worker_id] < ENDING_S


def _stacks(targets: list[tuple[str, int, bool]]) -> dict[str, str]:
    """Stack by name, for each (name, pid, whether to include native frames); in parallel where threads can start."""
    try:
        with ThreadPoolExecutor(len(targets)) as pool:
            stacks = {name: pool.submit(stack, pid, native) for name, pid, native in targets}
            return {name: future.result() for name, future in stacks.items()}
    except RuntimeError:
        return {name: stack(pid, native) for name, pid, native in targets}


def _alone(agent: Agent) -> bool:
    """Whether the job has one rank only."""
    if agent.formed.generation is not None:
        return agent.formed.generation.world_size == 1
    return agent.policy.slots == 1 and agent.policy.limits.max_nodes == 1
