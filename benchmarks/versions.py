"""Recovery with several versions of torch, side by side: this environment, and those that `make venv TORCH=…` has made.

    python benchmarks/versions.py [--quick]

In turn, so that all see the same load: rounds of `recovery.py --only ours` (a worker of 2 × 2 is killed), with each
setting of `forming` that this torch has, then `reform.py` (the group alone).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
from typing import Any

from _harness import HERE, SMOKE, machine, spread

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


def formings(python: pathlib.Path) -> list[str]:
    asked = "from elastic.worker.torch_internals import torch_private; print(torch_private.RECONFIGURABLE)"
    can = subprocess.run([str(python), "-c", asked], stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
    return ["new", "reconfigure"] if can.stdout.strip() == "True" else ["new"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 rounds of 6 kills for each way instead of 5")
    parser.add_argument("--smoke", action="store_true", help=SMOKE)
    args = parser.parse_args()
    size = ["--smoke"] if args.smoke else ["--quick"]
    ways = [(python, forming) for python in environments() for forming in formings(python)]
    print(machine())
    kills: dict[tuple[pathlib.Path, str], list[float]] = {way: [] for way in ways}
    lost: dict[tuple[pathlib.Path, str], int] = dict.fromkeys(ways, 0)
    for number in range(1 if args.smoke else 2 if args.quick else 5):
        for python, forming in ways if number % 2 == 0 else ways[::-1]:
            wanted = ["--only", "ours", *size, "--seed", str(number), "--forming", forming]
            found = run(python, "recovery.py", *wanted)
            kills[python, forming] += found["kill_seconds"]
            lost[python, forming] += found["steps_lost"]
    result: dict[str, Any] = {}
    for python in dict.fromkeys(python for python, _ in ways):
        formed = run(python, "reform.py", *(size if args.quick or args.smoke else []))
        made: dict[str, Any] = {}
        for forming in (forming for each, forming in ways if each == python):
            seconds = kills[python, forming]
            print(
                f"torch {formed['torch']}, {forming}: recovery {spread(seconds)} s, {lost[python, forming]} steps lost"
            )
            made[forming] = {
                "kills": len(seconds),
                "kill_median_s": round(statistics.median(seconds), 3),
                "steps_lost": lost[python, forming],
            }
        for way in (way for way in formed if way != "torch"):
            print(f"  {way}: {formed[way]}")
        result[formed["torch"]] = {"recovery": made, "forming": formed}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
