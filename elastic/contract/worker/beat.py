"""The beat page: one page of shared memory per worker, written by the worker, read by its agent.

Writing costs a few stores, so a worker may beat at any rate; the agent polls. Each field is 8 bytes wide and aligned,
so a reader never sees a torn value. Instants are CLOCK_MONOTONIC, which both processes share on one host.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

PAGE_BYTES = 4096

PULSE_S = 0.5
"""How often a thread of the worker signals that the process runs Python."""


class Doing(enum.IntEnum):
    """What the worker's main thread is doing."""

    STARTING = 0  # imports, setup; with a generation: a setup within the formed group
    WAITING = 1  # for Form, or for the other ranks
    FORMING = 2
    SYNCING = 3  # state is being received or sent
    COMPUTING = 4  # the script's code runs; the other ranks will wait for this one
    EXCHANGING = 5  # this rank has contributed all it has to the step's all-reduce; it waits for the others
    APPLYING = 6  # inside the optimizer: state is inconsistent
    SAVING = 7  # copies its part of a snapshot
    QUIET = 8  # the script has declared a span without steps (`job.quiet`)
    DONE = 9
    FINISHING = 10  # `train` has returned here; the last save, then the barrier of all ranks


WITH_OTHERS = frozenset({Doing.WAITING, Doing.FORMING, Doing.SYNCING, Doing.EXCHANGING, Doing.FINISHING, Doing.DONE})
"""No other rank waits for this one: it waits for them."""

(_DOING, _GENERATION, _STEP, _BEATS, _BEAT_AT_NS, _LOSS, _STEP_NS, _QUIET_UNTIL_NS, _RANK, _COMMITTED_IN,
 _EXCHANGES, _GAP_NS, _LAST_GAP_NS, _PULSE_NS, _MARK_NS, _DATA_NS, _STALL_NS, _LEFT_NS) = range(18)  # fmt: skip
_SPENT_NS = 32
"""From here on one field for each `Doing`: how long it has lasted, all together."""
_DEVICE_STEPS = 63
_DEVICE_NS = 64
"""The same on a GPU, over so many steps."""
_DOINGS = {doing.value: doing for doing in Doing}
_FIELDS = _DEVICE_NS + len(_DOINGS)


class Beat(msgspec.Struct, frozen=True):
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
    exchanges: int = 0
    """How often this rank has begun to wait for others since its last commit: equal on all ranks of a step."""
    gap_s: float = 0.0
    """Longest time between two signs of progress in this step and the one before; waits for other ranks not counted."""
    pulse_s: float = 0.0
    """Monotonic instant at which the process last ran Python in any thread, to within PULSE_S; 0: not known."""

    left_s: float = 0.0
    """Instant at which the script was found to leave `train`, its group being over: from then on it runs its own code,
    such as `finally` blocks, and touches the group no more. 0: it was not, in this generation, or elastic has control
    again."""
    spent_s: tuple[float, ...] = ()
    """Seconds of this process in each `Doing`, up to the last mark. Never decrease."""
    data_s: float = 0.0
    """Of those in COMPUTING, until the next batch was there."""
    stall_s: float = 0.0
    """Of those in APPLYING, until the copy of a snapshot was complete."""
    device_steps: int = 0
    """Steps whose time on the GPU is in `device_s`: those that its events have passed; 0 without a GPU."""
    device_s: tuple[float, ...] = ()
    """Seconds of the GPU in each `Doing`, over those steps. Never decrease."""

    @property
    def settled(self) -> bool:
        """Whether the worker has committed a step in its current generation."""
        return 0 < self.generation == self.committed_in


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
        self._ints[_MARK_NS] = int(now_s * 1e9)
        self.write(Doing.STARTING, now_s)

    def write(self, doing: Doing, now_s: float) -> None:
        """One sign of progress."""
        ints, now_ns = self._ints, int(now_s * 1e9)
        was = ints[_DOING]
        if doing is Doing.EXCHANGING:
            ints[_EXCHANGES] += 1
        if was not in WITH_OTHERS and (since_ns := ints[_BEAT_AT_NS]) and now_ns - since_ns > ints[_GAP_NS]:
            ints[_GAP_NS] = now_ns - since_ns
        ints[_SPENT_NS + was] += now_ns - ints[_MARK_NS]
        ints[_MARK_NS] = now_ns
        ints[_DOING] = doing
        ints[_BEATS] += 1
        ints[_BEAT_AT_NS] = now_ns

    def waited(self, data_s: float = 0.0, stall_s: float = 0.0) -> None:
        """The main thread has waited for its next batch while COMPUTING, or for a snapshot while APPLYING."""
        if data_s:
            self._ints[_DATA_NS] += int(data_s * 1e9)
        if stall_s:
            self._ints[_STALL_NS] += int(stall_s * 1e9)

    def on_device(self, spent_s: Mapping[Doing, float]) -> None:
        """One more step has passed on the GPU."""
        for doing, seconds in spent_s.items():
            self._ints[_DEVICE_NS + doing] += int(seconds * 1e9)
        self._ints[_DEVICE_STEPS] += 1

    def copied(self, now_s: float) -> None:
        """The main thread has copied more bytes: a sign of progress, whatever it is doing."""
        self._ints[_BEATS] += 1
        self._ints[_BEAT_AT_NS] = int(now_s * 1e9)

    def pulse(self, now_s: float) -> None:
        """Some thread of the worker runs Python, which is no sign of progress of the main thread."""
        self._ints[_PULSE_NS] = int(now_s * 1e9)

    def left(self, now_s: float) -> None:
        """The script leaves `train`: see `Beat.left_s`."""
        self._ints[_LEFT_NS] = self._ints[_LEFT_NS] or int(now_s * 1e9)

    def returned(self) -> None:
        """It has left it: elastic's own code runs again."""
        self._ints[_LEFT_NS] = 0

    @property
    def doing(self) -> int:
        """A `Doing`."""
        return self._ints[_DOING]

    def place(self, generation: int, rank: int) -> None:
        self._ints[_GENERATION] = generation
        self._ints[_RANK] = rank
        self._ints[_EXCHANGES] = self._ints[_GAP_NS] = self._ints[_LAST_GAP_NS] = self._ints[_LEFT_NS] = 0

    def committed(self, step: int, step_s: float, loss: float | None, now_s: float) -> None:
        ints = self._ints
        ints[_STEP] = step
        ints[_COMMITTED_IN] = ints[_GENERATION]
        ints[_STEP_NS] = int(step_s * 1e9)
        if loss is not None:
            self._floats[_LOSS] = loss
        self.write(Doing.COMPUTING, now_s)
        ints[_EXCHANGES], ints[_LAST_GAP_NS], ints[_GAP_NS] = 0, ints[_GAP_NS], 0

    def set_step(self, step: int) -> None:
        self._ints[_STEP] = step

    def quiet_until(self, until_s: float) -> None:
        self._ints[_QUIET_UNTIL_NS] = int(until_s * 1e9)

    def read(self) -> Beat:
        ints = self._ints[:_FIELDS].tolist()  # one call for all fields: an agent reads every page on every tick
        return Beat(
            # A script that writes where it should not may have written here, and must not end its agent.
            doing=_DOINGS.get(ints[_DOING], Doing.COMPUTING),
            generation=ints[_GENERATION],
            step=ints[_STEP],
            beats=ints[_BEATS],
            beat_at_s=ints[_BEAT_AT_NS] / 1e9,
            loss=self._floats[_LOSS],
            step_s=ints[_STEP_NS] / 1e9,
            quiet_until_s=ints[_QUIET_UNTIL_NS] / 1e9,
            rank=ints[_RANK],
            committed_in=ints[_COMMITTED_IN],
            exchanges=ints[_EXCHANGES],
            gap_s=max(ints[_GAP_NS], ints[_LAST_GAP_NS]) / 1e9,
            pulse_s=ints[_PULSE_NS] / 1e9,
            left_s=ints[_LEFT_NS] / 1e9,
            spent_s=_seconds(ints[_SPENT_NS : _SPENT_NS + len(_DOINGS)]),
            data_s=ints[_DATA_NS] / 1e9,
            stall_s=ints[_STALL_NS] / 1e9,
            device_steps=ints[_DEVICE_STEPS],
            device_s=_seconds(ints[_DEVICE_NS:]),
        )


def _seconds(fields_ns: list[int]) -> tuple[float, ...]:
    return tuple([ns / 1e9 for ns in fields_ns])
