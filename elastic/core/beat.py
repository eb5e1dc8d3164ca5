"""The beat page: one page of shared memory per worker, written by the worker, read by its agent.

Writing costs a few stores, so a worker may beat as often as it likes; the agent looks when it wants to know.
Each field is 8 bytes wide and aligned, so a reader never sees half of one. Instants are CLOCK_MONOTONIC,
which both ends share because they are on one host.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

PAGE_BYTES = 4096


class Doing(enum.IntEnum):
    """What the worker's main thread is at."""

    STARTING = 0  # imports, setup
    WAITING = 1  # for Form, or for the other ranks
    FORMING = 2
    SYNCING = 3  # state is on its way
    COMPUTING = 4  # the script's code runs; the other ranks will wait for this one
    EXCHANGING = 5  # everything this rank owes the step's all-reduce is handed over; it waits for the others
    APPLYING = 6  # inside the optimizer: state is dirty
    SAVING = 7  # copies its share of a snapshot
    QUIET = 8  # the script said that it will be long (`job.quiet`)
    DONE = 9


_DOING, _GENERATION, _STEP, _BEATS, _BEAT_AT_NS, _LOSS, _STEP_NS, _QUIET_UNTIL_NS, _RANK, _COMMITTED_IN = range(10)


@dataclass(frozen=True, slots=True)
class Beat:
    doing: Doing
    generation: int
    step: int
    """Steps committed on this rank."""
    beats: int
    beat_at_s: float
    """Monotonic instant of the last sign of progress."""
    loss: float
    """NaN until one is reported."""
    step_s: float
    """Duration of the last step; 0 before the first."""
    quiet_until_s: float
    rank: int
    committed_in: int
    """Generation of the last commit here."""


class BeatPage:
    """Reader and writer over any writable buffer of PAGE_BYTES (an mmap)."""

    def __init__(self, buffer: memoryview) -> None:
        if len(buffer) < PAGE_BYTES:
            raise ValueError(f"a beat page takes {PAGE_BYTES} bytes, got {len(buffer)}")
        self._ints = buffer[:PAGE_BYTES].cast("q")
        self._floats = buffer[:PAGE_BYTES].cast("d")

    def clear(self, now_s: float) -> None:
        self._floats[_LOSS] = float("nan")
        self._ints[_RANK] = -1
        self.write(Doing.STARTING, now_s)

    def write(self, doing: Doing, now_s: float) -> None:
        """One sign of progress."""
        self._ints[_DOING] = doing
        self._ints[_BEATS] += 1
        self._ints[_BEAT_AT_NS] = int(now_s * 1e9)

    def place(self, generation: int, rank: int) -> None:
        self._ints[_GENERATION] = generation
        self._ints[_RANK] = rank

    def committed(self, step: int, step_s: float, loss: float | None, now_s: float) -> None:
        self._ints[_STEP] = step
        self._ints[_COMMITTED_IN] = self._ints[_GENERATION]
        self._ints[_STEP_NS] = int(step_s * 1e9)
        if loss is not None:
            self._floats[_LOSS] = loss
        self.write(Doing.COMPUTING, now_s)

    def set_step(self, step: int) -> None:
        self._ints[_STEP] = step

    def quiet_until(self, until_s: float) -> None:
        self._ints[_QUIET_UNTIL_NS] = int(until_s * 1e9)

    def read(self) -> Beat:
        ints = self._ints
        return Beat(
            doing=Doing(ints[_DOING]),
            generation=ints[_GENERATION],
            step=ints[_STEP],
            beats=ints[_BEATS],
            beat_at_s=ints[_BEAT_AT_NS] / 1e9,
            loss=self._floats[_LOSS],
            step_s=ints[_STEP_NS] / 1e9,
            quiet_until_s=ints[_QUIET_UNTIL_NS] / 1e9,
            rank=ints[_RANK],
            committed_in=ints[_COMMITTED_IN],
        )
