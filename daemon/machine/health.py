"""Why this node should take no work: its health checks, each looked at in a thread of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping

from elastic.contract.records.reasons import Code, Reason, Text, reason
from elasticd.base.answers import Finding
from elasticd.base.entry_points import Guard
from elasticd.base.errors import PluginFailed
from elasticd.base.log import Log
from elasticd.base.safe_text import line
from elasticd.base.threads import Threads
from elasticd.plugins import HealthCheck

from .doctor import ERROR, WARNING

LEAST_EVERY_S, AGAIN_S = 0.1, 5.0
"""Shortest pause between two looks; the pause after one that failed."""
LATE_S = 60.0
"""How long after it was due the doctor calls an answer late."""
REASON_CHARS = 300


class Watch:
    """One check. Its attributes may be read from any thread; the thread that executes `turn` writes them."""

    def __init__(self, name: str, check: HealthCheck, log: Log, *, own: bool) -> None:
        """`own`: elasticd's own, whose words say where they come from, and whose first answer comes at once."""
        self.name, self._check, self._log, self._own = name, check, log, own
        self._guard = Guard(f"health check {name}", log)
        self._answered = False
        self.answer: Text = "" if own else reason(Code.HEALTH_CHECK, "has not answered yet", check=name)
        """Why the node should take no work; empty: it may."""
        self.leave = False
        self.of_gpus = bool(getattr(check, "of_gpus", False))
        """Whether it concerns only jobs that use GPUs."""
        self.failed = ""
        self.due_s = time.monotonic()
        if own:
            self.turn()

    def turn(self) -> float:
        """Returns the pause to the next look."""
        answer, pause_s, self.failed = self.answer if self._answered else "", AGAIN_S, ""
        try:
            with self._guard.call():
                answer, self.leave = self._read(self._check.look()), bool(getattr(self._check, "leave", False))
                if not math.isfinite(every_s := float(self._check.every_s)):
                    raise ValueError(f"every_s = {every_s}")
                pause_s = max(LEAST_EVERY_S, every_s)
        except PluginFailed as error:
            self.failed = str(error)
        if answer != self.answer and (answer or self._answered):
            (self._log.error if answer else self._log.info)("node.health", check=self.name, why=str(answer))
        self.answer, self._answered, self.due_s = answer, True, time.monotonic() + pause_s
        return pause_s

    def _read(self, said: Text) -> Text:
        if self._own:
            return said
        if not isinstance(said, str):
            raise TypeError(f"look() has returned {type(said).__name__}, no str")
        return reason(Code.HEALTH_CHECK, line(said.strip(), REASON_CHARS), check=self.name) if said.strip() else ""


class Health:
    """Of this node, by its checks. May be read from any thread."""

    def __init__(self, own: Mapping[str, HealthCheck], log: Log) -> None:
        self._log = log
        self.watches = [Watch(name, check, log, own=True) for name, check in own.items()]

    def add(self, name: str, check: HealthCheck) -> None:
        self.watches.append(Watch(name, check, self._log, own=False))

    def start(self, threads: Threads) -> None:
        for watch in self.watches:
            threads.repeat(f"health-{watch.name}", watch.turn)

    @property
    def reason(self) -> Text:
        """Why the node should take no work; empty: it may."""
        return next((answer for watch in self.watches if (answer := watch.answer)), "")

    def leaves(self, *, gpus: bool) -> Reason | None:
        """Why a job that runs here should leave; None: it need not. `gpus`: whether it uses GPUs."""
        for watch in self.watches:
            if (answer := watch.answer) and watch.leave and (gpus or not watch.of_gpus):
                return reason(Code.GPU_FAULTY, answer) if isinstance(answer, str) else answer
        return None

    def findings(self) -> Iterator[Finding]:
        for watch in self.watches:
            if answer := watch.answer:
                fix = "fix what it names; the node takes work again once the check has nothing to say"
                yield Finding(check="health", level=ERROR, text=str(answer), fix=fix)
            late_s = time.monotonic() - watch.due_s
            if watch.failed or late_s > LATE_S:
                what = watch.failed or f"health check {watch.name}: no answer for {late_s:.0f} s after it was due"
                yield Finding(check="health", level=WARNING, text=f"{what}; its last answer counts",
                              fix="see the log of elasticd, and the package that has the check")  # fmt: skip
            elif not watch.answer:
                yield Finding(check="health", text=f"health check {watch.name}: nothing to say")
