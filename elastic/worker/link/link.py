"""What receives a worker's progress."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.contract.worker.messages import GradientSample, LoggedRow


class Link:
    """Receiver of this worker's progress: an agent, or (this class) none."""

    def entered(self) -> None:
        """The script's own code runs."""

    def contributed(self) -> None:
        """This rank has contributed to the current collective: it can now only wait for the other ranks."""

    def applying(self, *, complete: bool = False) -> None:
        """An optimizer is about to change the state. Raises GenerationEnded where the gradients may be of an all-reduce
        that was interrupted; not if they are `complete` on all ranks."""

    def quiet(self, limit_s: float) -> None:
        """No sign of progress is expected for `limit_s` seconds; 0 ends the span."""

    def waited(self, data_s: float) -> None:
        """The script has waited so long for its next batch."""

    def committed(self, step: int, step_s: float, loss: float | None) -> None:
        """A step is committed, which has taken `step_s`."""

    def bad_numbers(self, step: int, kind: str, detail: str, ranks: tuple[int, ...]) -> None:
        """Numbers of these ranks are wrong at `step`. Raises FloatingPointError where there is no agent to decide."""
        raise FloatingPointError(f"{kind} at step {step} on rank {', '.join(map(str, ranks))}: {detail}")

    def sampled(self, sample: GradientSample) -> None:
        """Norms of the gradients of a step."""

    def logged(self, begun: int, rows: Sequence[LoggedRow], repeated: bool) -> None:
        """Rows of `job.log`; see `messages.Logged`."""

    def stops_after(self, step: int) -> bool:
        """Whether all ranks stop after `step`, by plan."""
        return False

    def check(self, step: int) -> None:
        """Raises GenerationEnded if this generation is over, or is to stop at `step`."""
