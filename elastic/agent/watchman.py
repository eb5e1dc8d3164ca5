"""Looks at the workers' beat pages: progress for the recovery machine, hangs with their stacks."""

from __future__ import annotations

import math
import shutil
import statistics
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from ..core.beat import Beat, Doing
from ..core.events import Event, GroupStuck, Progress, StillBusy, WorkerSick
from ..core.health import STOPPED_STATE, judge, waits_too_long
from ..core.model import Agent, Stage
from ..core.spec import Hang
from ..core.witness import waits_for_others
from .pool import Pool, Process

QUICK_S, NATIVE_S = 1.0, 2.0
"""Longest look at one worker: at its Python frames from outside (0.1 s), and below them (0.5 s, more under load)."""
STOPPED_S = 1.0
"""A pause this long between two looks means that this process did not run."""
STACK_CHARS = 6000
UNINTERRUPTIBLE_STATE = "D"

log = structlog.get_logger()


@dataclass
class Watchman:
    """`look` is called on every tick, in the loop's thread; stacks are taken in a thread of their own."""

    pool: Pool
    rules: Hang
    post: Callable[[Event], None]
    save_stacks: Callable[[dict[str, str]], None]
    group_s: float = math.inf
    """The group's time-out: with NCCL nothing but this here ends a wait in which nobody is found to be the cause."""

    def __post_init__(self) -> None:
        self._seen: tuple[int, int] = (0, 0)
        self._step_times: deque[float] = deque(maxlen=8)
        self._looked_s = 0.0
        self._amnesty_s = 0.0
        self._accused: set[int] = set()
        self._stuck: dict[int, int] = {}
        """Life -> the beat after which it has been told to wait for too long."""
        self._excused: dict[int, float] = {}
        """Life -> until when its stack, which shows it waiting for other ranks, need not be looked at again."""

    def look(self, agent: Agent, now_s: float) -> Progress | None:
        """The steps that were committed since the last look, if any."""
        if now_s - self._looked_s > STOPPED_S and self._looked_s:
            # We were stopped ourselves, and with us perhaps the whole node: nobody could beat.
            self._amnesty_s = now_s + self.rules.floor_s
        self._looked_s = now_s
        beats: dict[int, Beat] = {}
        for worker in agent.workers.values():
            process = self.pool.processes.get(worker.life)
            if process is None or not process.pid:
                continue
            beat = process.page.read()
            # Before it was forked it could not beat.
            beat = replace(beat, beat_at_s=max(beat.beat_at_s, process.started_s))
            beats[worker.life] = beat
            if worker.stage in (Stage.KILLED, Stage.GONE) or worker.life in self._accused:
                continue
            if worker.stage in (Stage.LEAVING, Stage.YIELDING) and now_s < beat.quiet_until_s:
                self.post(StillBusy(worker.slot, worker.life))
            if now_s - beat.beat_at_s < min(self.rules.floor_s, self.rules.ceiling_s):
                continue  # nobody is sick so soon, whatever state its process is in
            state = _process_state(process.pid)
            if now_s < self._amnesty_s or (not agent.policy.managed and state != STOPPED_STATE):
                continue  # a script without elastic never beats
            sick = judge(beat, state, self.rules, now_s)
            stuck = waits_too_long(beat, self.group_s, now_s)
            if stuck and self._stuck.get(worker.life) != beat.beats:
                self._stuck[worker.life] = beat.beats
                self.post(GroupStuck(worker.slot, worker.life, f"rank of slot {worker.slot} {stuck}"))
            if sick and (state == STOPPED_STATE or now_s >= self._excused.get(worker.life, 0.0)):
                # Who waits for others is looked at again when its silence has doubled: a look holds it up.
                again_s = now_s + min(self.rules.ceiling_s, now_s - beat.beat_at_s)
                self._accuse(process, beats, agent, sick.evidence, again_s)
        return self._progress(agent, beats)

    def _progress(self, agent: Agent, beats: Mapping[int, Beat]) -> Progress | None:
        running = [
            beats[w.life]
            for w in agent.workers.values()
            if w.life in beats and w.stage in (Stage.RUNNING, Stage.YIELDING) and beats[w.life].step_s > 0
        ]
        if not running:
            return None
        newest = max(running, key=lambda beat: (beat.committed_in, beat.step))
        seen = (newest.committed_in, newest.step)
        if seen <= self._seen:
            return None
        self._seen = seen
        self._step_times.append(newest.step_s)  # one long step must not stretch everybody's patience
        return Progress(newest.committed_in, newest.step, statistics.median(self._step_times))

    def _accuse(self, process: Process, beats: Mapping[int, Beat], agent: Agent, evidence: str, again_s: float) -> None:
        self._accused.add(process.life)
        slots = {w.life: w.slot for w in agent.workers.values()}
        waiting = next(
            (life for life, b in beats.items() if life != process.life and b.doing is Doing.EXCHANGING), None
        )
        suspect, state = f"slot {process.slot} (hung)", _process_state(process.pid)
        witnesses = [(suspect, process.pid, state not in (STOPPED_STATE, UNINTERRUPTIBLE_STATE))]
        if waiting is not None:
            # Only a look from outside: it has done nothing wrong and is not to be held up.
            witnesses.append((f"slot {slots[waiting]} (waits for it)", self.pool.processes[waiting].pid, False))
        beats_then = process.page.read().beats
        log.warning("worker.silent", slot=process.slot, pid=process.pid, evidence=evidence)

        def testify() -> None:
            with ThreadPoolExecutor(len(witnesses)) as pool:
                stacks = {who: pool.submit(stack, pid, native) for who, pid, native in witnesses}
                told = {who: future.result() for who, future in stacks.items()}
            if process.page.read().beats != beats_then:
                log.info("worker.went_on", slot=process.slot, pid=process.pid)
            elif state != STOPPED_STATE and waits_for_others(told[suspect]):
                self._excused[process.life] = again_s
                log.info("worker.waits_for_others", slot=process.slot, pid=process.pid)
            else:
                log.warning("worker.hung", slot=process.slot, pid=process.pid, evidence=evidence)
                self.save_stacks(told)
                self.post(WorkerSick(process.slot, process.life, "hang", evidence))
            self._accused.discard(process.life)

        threading.Thread(target=testify, name="elastic-stacks", daemon=True).start()


def stack(pid: int, native: bool) -> str:
    """The stack of a process that may not move: Python's, and with `native` what lies below unless that takes too
    long, or shows it waiting for others. Ends within QUICK_S, with `native` NATIVE_S more."""
    tool = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if tool is None:
        return "py-spy is not installed"
    quick = _dump(tool, "--nonblocking", pid, QUICK_S)
    if native and not waits_for_others(quick):
        quick = _dump(tool, "--native", pid, NATIVE_S) or quick
    return quick or "no stack could be read"


def _dump(tool: str, option: str, pid: int, limit_s: float) -> str:
    argv = [tool, "dump", option, "--pid", str(pid)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=limit_s, check=False)
    except (subprocess.TimeoutExpired, OSError):  # no process or descriptor to be had: who hangs is still called hung
        return ""
    return done.stdout[:STACK_CHARS] if done.returncode == 0 else ""


def _process_state(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X"
    return stat.rpartition(")")[2].split()[0]
