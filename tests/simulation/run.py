"""``make simulate MINUTES=…``: random histories for as long as asked, on two processes; a failing one is shrunk."""

from __future__ import annotations

import argparse
import functools
import logging
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import structlog

from .histories import History, Outcome, draw, play, shrink

PROCESSES = 2
CHUNK = 50


def silent() -> None:
    """The agents' own log lines are not wanted here."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def _play_seed(drawn: Callable[[int], History], seed: int) -> Outcome:
    return play(drawn(seed))


def many(seeds: Iterable[int], drawn: Callable[[int], History] = draw, processes: int = PROCESSES) -> Iterator[Outcome]:
    """The outcome of each seed's history, in no order. With one process it is the caller's, which is to be `silent`."""
    if processes == 1:
        yield from map(functools.partial(_play_seed, drawn), seeds)
        return
    # Not forked: gRPC is imported here, and tests have threads.
    with multiprocessing.get_context("spawn").Pool(processes, initializer=silent) as pool:
        yield from pool.imap_unordered(functools.partial(_play_seed, drawn), seeds, chunksize=CHUNK)


def explain(outcome: Outcome) -> str:
    """A failing history, as short as it gets."""
    silent()
    try:
        small = shrink(outcome.history)
        failure = play(small).failure
    finally:
        structlog.reset_defaults()  # the tests after this one read log lines
    return f"seed {outcome.history.setting.seed}: {failure}\nshortest history that fails:\n{small}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None, help="first seed; default: at random")
    options = parser.parse_args(argv)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**9)
    end_s = time.monotonic() + 60 * options.minutes
    print(f"first seed: {seed}", flush=True)
    histories = events = steps = 0
    while time.monotonic() < end_s:
        for outcome in many(range(seed, seed + 10 * CHUNK)):
            histories, events, steps = histories + 1, events + outcome.events, steps + outcome.steps
            if outcome.failure:
                print(explain(outcome))
                return 1
        seed += 10 * CHUNK
    print(f"{histories} histories, {events} events, {steps} steps: every promise kept")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
