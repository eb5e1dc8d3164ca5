"""`make soak [CASES=300] [SEED=1] [CASE="117 118"] [SHRINK=1]`: a line per case, and a summary.

Exit code 1 when a case came out wrong; its script and records stay in build/soak.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import pathlib
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator

from .grammar import PLAIN, Case, draw
from .judge import Verdict
from .runner import Soak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--case", type=int, nargs="*", default=[], help="these numbers instead")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=2, help="cases that run side by side")
    parser.add_argument("--shrink", action="store_true", help="find the simplest script that still comes out wrong")
    parser.add_argument("--keep", type=pathlib.Path, default=pathlib.Path("build/soak"))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    args.keep.mkdir(parents=True, exist_ok=True)
    numbers = args.case or range(args.first, args.first + args.cases)
    cases = [draw(number, args.seed) for number in numbers]
    told: Counter[str] = Counter()
    wrong: list[Case] = []
    began_s = time.monotonic()
    with Soak(keep=args.keep) as soak:
        with _ending(concurrent.futures.ThreadPoolExecutor(args.at_once)) as pool:
            for case, verdict, took_s in pool.map(lambda case: _one(soak, case), cases):
                told[_kind(verdict)] += 1
                sign = "ok   " if verdict.right else "WRONG"
                print(f"{sign} {took_s:5.1f} s  {case}\n        {verdict.said}", flush=True)
                if not verdict.right:
                    wrong.append(case)
                    alone = f"make soak CASE={case.number} SEED={args.seed}"
                    print(f"        {args.keep}/case{case.number}/train.py; alone: {alone}", flush=True)
        if args.shrink:
            for case in wrong:
                print(f"simplest: {shrink(soak, case)}", flush=True)
    took_s = time.monotonic() - began_s
    print(f"{len(cases)} cases in {took_s:.0f} s: {', '.join(f'{n} {what}' for what, n in told.most_common())}")
    if wrong:
        print(f"wrong: {' '.join(str(case.number) for case in wrong)}")
    return 1 if wrong else 0


@contextlib.contextmanager
def _ending(pool: concurrent.futures.ThreadPoolExecutor) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """When the run is interrupted, the cases that have not begun do not begin."""
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def shrink(soak: Soak, case: Case) -> str:
    """Set one field of the script after the other to its plainest value, as long as it still comes out wrong."""
    for name, value in PLAIN.items():
        have = getattr(case.script, name)
        simpler = [tuple(x for x in have if x == one) for one in have] if isinstance(value, tuple) else []
        for tried in [value, *simpler] if have != value else []:
            candidate = dataclasses.replace(case, script=dataclasses.replace(case.script, **{name: tried}))
            if not soak.run(candidate).right:
                case = candidate
                break
    return f"{case}\n        {soak.run(case).said}"


def _one(soak: Soak, case: Case) -> tuple[Case, Verdict, float]:
    began_s = time.monotonic()
    verdict = soak.run(case)
    return case, verdict, time.monotonic() - began_s


def _kind(verdict: Verdict) -> str:
    if not verdict.right:
        return "wrong"
    if verdict.said.startswith("refused"):
        return "refused"
    return "exact, steps lost and told" if verdict.lost else "exact"


if __name__ == "__main__":
    sys.exit(main())
