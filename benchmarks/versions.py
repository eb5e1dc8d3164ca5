"""Recovery with several versions of torch, side by side: this environment, and those that `make venv TORCH=…` has made.

    python benchmarks/versions.py [--quick]

In turn, so that all see the same load: rounds of `recovery.py --only ours` (a worker of 2 × 2 is killed), then
`reform.py` (the group alone, beside torch's `reconfigure` where it has that).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
from typing import Any

from _harness import HERE, machine, spread

LIMIT_S = 600.0


def environments() -> list[pathlib.Path]:
    """Interpreters, this one first."""
    mine = pathlib.Path(sys.executable)
    found = sorted(HERE.parent.glob(".venv-[0-9]*/bin/python"))
    return [mine, *(path for path in found if path.parent != mine.parent)]


def run(python: pathlib.Path, *argv: str) -> Any:
    """What a benchmark prints last."""
    command = [str(python), str(HERE / argv[0]), *argv[1:]]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 rounds of 6 kills for each version instead of 5")
    quick = parser.parse_args().quick
    pythons = environments()
    print(machine())
    kills: dict[pathlib.Path, list[float]] = {python: [] for python in pythons}
    lost: dict[pathlib.Path, int] = dict.fromkeys(pythons, 0)
    for number in range(2 if quick else 5):
        for python in pythons if number % 2 == 0 else pythons[::-1]:
            found = run(python, "recovery.py", "--only", "ours", "--quick", "--seed", str(number))
            kills[python] += found["kill_seconds"]
            lost[python] += found["steps_lost"]
    result: dict[str, Any] = {}
    for python in pythons:
        formed = run(python, "reform.py", *(["--quick"] if quick else []))
        print(f"torch {formed['torch']}: recovery {spread(kills[python])} s, {lost[python]} steps lost")
        ways = {way: formed[way] for way in ("ours", "reconfigure") if way in formed}
        for way, figures in ways.items():
            print(f"  {way}: {figures}")
        median_s = round(statistics.median(kills[python]), 3)
        result[formed["torch"]] = {"kill_median_s": median_s, "steps_lost": lost[python], **ways}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
