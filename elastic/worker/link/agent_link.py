"""What the training loop tells the agent: a step, what this rank does, what it found; through the beat page mostly."""

from __future__ import annotations

import time
from collections.abc import Sequence

from elastic.contract.worker import messages
from elastic.contract.worker.beat import Doing
from elastic.worker.torch_internals.device_marks import DeviceMarks

from .link import Link
from .session import GenerationEnded, Session


class AgentLink(Link):
    """Reports this worker's progress to the agent: mostly through the beat page, which costs next to nothing."""

    def __init__(self, session: Session, *, backward_waits: bool) -> None:
        """`backward_waits`: a backward returns only when its all-reduce is complete on this rank (gloo, not NCCL)."""
        self._session = session
        self._backward_waits = backward_waits
        self.generation = 0
        self._first = True
        self._between = False
        """A step was committed, and nothing was asked since."""
        self.device: DeviceMarks | None = None
        """Marks on the GPU as well; None: there is none."""

    def enter(self, generation: int, step: int) -> None:
        self.generation, self._first, self._between = generation, True, False
        self._session.step = step
        self._session.page.set_step(step)
        if self.device is not None:
            self.device.enter()

    def entered(self) -> None:
        self._mark(Doing.COMPUTING)

    def contributed(self) -> None:
        self._mark(Doing.EXCHANGING)

    def _mark(self, doing: Doing) -> None:
        self._session.beat(doing)
        if self.device is not None:
            self.device.mark(doing)

    def applying(self, *, complete: bool = False) -> None:
        # Gradients that may come from an interrupted all-reduce must not be applied. Otherwise the step is finished:
        # the rank that died may be one that has already committed it.
        if not complete and self._session.over(self.generation) and not self._backward_waits:
            raise GenerationEnded(self._session.why)
        self._mark(Doing.APPLYING)

    def quiet(self, limit_s: float) -> None:
        self._session.page.quiet_until(time.monotonic() + limit_s if limit_s else 0.0)
        self._session.beat(Doing.QUIET if limit_s else Doing.COMPUTING)

    def waited(self, data_s: float) -> None:
        self._session.page.waited(data_s=data_s)

    def committed(self, step: int, step_s: float, loss: float | None) -> None:
        self._between = True
        now_s = time.monotonic()
        self._session.step, self._session.step_s = step, step_s
        self._session.committed_in, self._session.committed_s = self.generation, now_s
        self._session.page.committed(step, step_s, loss, now_s)
        if self.device is not None:
            self.device.committed()
        if self._first:
            self._first = False
            self._session.send(messages.Stepping(generation=self.generation, step=step))

    def bad_numbers(self, step: int, kind: str, detail: str, ranks: tuple[int, ...]) -> None:
        self._session.send(
            messages.BadNumbers(generation=self.generation, step=step, kind=kind, detail=detail, ranks=ranks)
        )

    def sampled(self, sample: messages.GradientSample) -> None:
        self._session.send(sample)

    def logged(self, begun: int, rows: Sequence[messages.LoggedRow], repeated: bool) -> None:
        self._session.send(
            messages.Logged(
                generation=self.generation, begun=begun, rows=tuple(row.as_json() for row in rows), repeated=repeated
            )
        )

    def stops_after(self, step: int) -> bool:
        return self._session.stops_after(self.generation, step)

    def check(self, step: int) -> None:
        # Right after a commit. Where a loop asks for its next batch, another one may be in the middle of a step.
        between, self._between = self._between, False
        self._session.check(self.generation, step, between=between)
