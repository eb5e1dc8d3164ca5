"""What a checkpoint costs training, how fast it is safe, and how fast the state comes back.

    python benchmarks/state.py            2 GB of state, about five minutes
    python benchmarks/state.py --quick    256 MB, under two minutes

Everything it is compared with is measured in the same run, interleaved. The last line is one JSON object of ratios.
The parts are modules beside this one, each with `run(options) -> ratios`: `_state_save`, `_state_broadcast`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import os
import platform
import sys
from dataclasses import dataclass

import torch

PARTS = ("_state_save", "_state_broadcast")


@dataclass(frozen=True)
class Options:
    nbytes: int
    """Size of the state: fp32 parameters and Adam's two moments."""
    runs: int
    """Medians are over this many."""
    dir: str
    """Where files go; a folder on the disk that is to be measured."""
    quick: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--gb", type=float, help="size of the state in 10^9 bytes")
    parser.add_argument("--runs", type=int)
    parser.add_argument("--dir", default="/var/tmp", help="a folder on the disk to measure")
    parser.add_argument("--part", choices=[part.removeprefix("_state_") for part in PARTS])
    args = parser.parse_args()
    options = Options(
        nbytes=int((args.gb or (0.256 if args.quick else 2.0)) * 1e9),
        runs=args.runs or (5 if args.quick else 7),
        dir=args.dir,
        quick=args.quick,
    )
    print(
        f"{options.nbytes / 1e9:g} GB, medians of {options.runs}; {datetime.date.today()}; {os.cpu_count()} CPUs, "
        f"load {os.getloadavg()[0]:.1f}, Linux {platform.release()}, torch {torch.__version__}",
        flush=True,
    )
    ratios: dict[str, float] = {}
    for part in PARTS:
        if args.part not in (None, part.removeprefix("_state_")):
            continue
        if importlib.util.find_spec(part) is None:
            print(f"{part} is not there: skipped")
            continue
        ratios |= importlib.import_module(part).run(options)
    print(json.dumps({name: round(value, 3) for name, value in ratios.items()}))


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    main()
