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
LATE_S, LATE_LOOK_S = 60.0, 5.0
"""How long after it was due an answer is late; how often that is looked at."""
REASON_CHARS = 300
PACKAGE = "see the log of elasticd, and the package that has the check"
UNANSWERED = "see what its look() waits for, or take it out of health_checks and restart elasticd"


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
        self._told_late = False
        self.due_s = time.monotonic()
        if own:
            self.turn()

    @property
    def late_s(self) -> float:
        """How long ago the answer was due; negative: how long until then."""
        return time.monotonic() - self.due_s

    @property
    def says(self) -> Text:
        """`answer`; while the first one is late, that. The time is doubled, since each change is a write to etcd."""
        if self._answered or (late_s := self.late_s) < LATE_S:
            return self.answer
        over_s = LATE_S * 2 ** int(math.log2(late_s / LATE_S))
        return reason(Code.HEALTH_CHECK, f"has not answered for over {over_s:.0f} s: {UNANSWERED}", check=self.name)

    @property
    def late(self) -> str:
        """That the answer is late; empty: it is not."""
        if self.late_s < LATE_S:
            return ""
        counts = "its last answer counts" if self._answered else "the node takes no work until it has answered"
        return f"health check {self.name}: no answer for {self.late_s:.0f} s after it was due; {counts}"

    def tell_late(self) -> None:
        """Log that the answer is late, once until it is there."""
        if (late := self.late) and not self._told_late:
            self._log.error("node.health_late", check=self.name, why=late)
        self._told_late = bool(late)

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
        threads.repeat("health-late", self.tell_late, LATE_S)

    def tell_late(self) -> float:
        """Returns the pause to the next time."""
        for watch in self.watches:
            watch.tell_late()
        return LATE_LOOK_S

    @property
    def reason(self) -> Text:
        """Why the node should take no work; empty: it may."""
        return next((said for watch in self.watches if (said := watch.says)), "")

    def leaves(self, *, gpus: bool) -> Reason | None:
        """Why a job that runs here should leave; None: it need not. `gpus`: whether it uses GPUs."""
        for watch in self.watches:
            if (answer := watch.answer) and watch.leave and (gpus or not watch.of_gpus):
                return reason(Code.GPU_FAULTY, answer) if isinstance(answer, str) else answer
        return None

    def findings(self) -> Iterator[Finding]:
        for watch in self.watches:
            if said := watch.says:
                fix = "fix what it names; the node takes work again once the check has nothing to say"
                yield Finding(check="health", level=ERROR, text=str(said), fix=fix)
            failed = f"{watch.failed}; its last answer counts" if watch.failed else ""
            if what := failed or (watch.late if said is watch.answer else ""):  # a late first one says so itself
                yield Finding(check="health", level=WARNING, text=what, fix=PACKAGE)
            elif not said:
                yield Finding(check="health", text=f"health check {watch.name}: nothing to say")
