"""What the marks cost that show where a step's time goes: the time of all of one step, on the beat page and around the
batches, without a training step.

    python benchmarks/step_marks.py [--quick]

Prints the time of a step's marks, and of those the part that came with the measurement of a step's parts (the sums on
the page and the two clocks around `next`); then that part's share of a step of 1, 10 and 100 ms. The target is 0.1 % of
a step of 10 ms.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import time
from collections.abc import Callable, Iterator

from _harness import SMOKE

from elastic.contract.worker import beat
from elastic.contract.worker.beat import PAGE_BYTES, BeatPage, Doing

MARKS = (Doing.EXCHANGING, Doing.COMPUTING, Doing.APPLYING, Doing.EXCHANGING, Doing.COMPUTING)
"""Of one step with DDP on gloo and a checkpoint scheduler, beside the commit."""


class Before(BeatPage):
    """The page without the sums."""

    def write(self, doing: Doing, now_s: float) -> None:
        ints, now_ns = self._ints, int(now_s * 1e9)
        if doing is Doing.EXCHANGING:
            ints[beat._EXCHANGES] += 1
        if ints[beat._DOING] not in beat.WITH_OTHERS:
            ints[beat._GAP_NS] = max(ints[beat._GAP_NS], now_ns - (ints[beat._BEAT_AT_NS] or now_ns))
        ints[beat._DOING] = doing
        ints[beat._BEATS] += 1
        ints[beat._BEAT_AT_NS] = now_ns


def plain(steps: int) -> Iterator[int]:
    yield from range(steps)


def timed(steps: int, page: BeatPage) -> Iterator[int]:
    """As `Job._timed` does around the batches."""
    loaded = plain(steps)
    while True:
        began_s = time.monotonic()
        batch = next(loaded, None)
        page.waited(data_s=time.monotonic() - began_s)
        if batch is None:
            return
        yield batch


def per_step_s(page: BeatPage, batches: Callable[[int], Iterator[int]], steps: int) -> float:
    began_s = time.perf_counter()
    for step in batches(steps):
        for doing in MARKS:
            page.write(doing, time.monotonic())
        page.committed(step, 0.01, 0.5, time.monotonic())
    return (time.perf_counter() - began_s) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--smoke", action="store_true", help=SMOKE)
    options = parser.parse_args()
    steps, rounds = (100, 1) if options.smoke else (20_000, 5) if options.quick else (50_000, 15)
    now = BeatPage(memoryview(mmap.mmap(-1, PAGE_BYTES)))
    before = Before(memoryview(mmap.mmap(-1, PAGE_BYTES)))
    for page in (now, before):
        page.clear(time.monotonic())
    pairs = [(per_step_s(before, plain, steps), per_step_s(now, lambda n: timed(n, now), steps)) for _ in range(rounds)]
    all_us = statistics.median(b for _, b in pairs) * 1e6
    more_us = statistics.median(b - a for a, b in pairs) * 1e6
    print(f"marks of a step {all_us:.2f} us, of which for the parts {more_us:.2f} us")
    shares = {f"{ms} ms": round(more_us / 10 / ms, 4) for ms in (1, 10, 100)}
    print(json.dumps({"marks_us": round(all_us, 2), "for_parts_us": round(more_us, 2), "percent_of_a_step": shares}))


if __name__ == "__main__":
    main()
