"""Runs a training script, unchanged, with faults in it.

    torchrun --nproc-per-node 2 -m elastic.testing --faults plan.json train.py ...

The plan's path may also stand in ELASTIC_TESTING. A module in place of the script: -m package.train.
"""

from __future__ import annotations

import os
import sys

from .faults import BadFaultError, Plan
from .history import PLAN_ENV


def main(argv: list[str]) -> None:
    """Raises SystemExit with the reason for a plan or a command line that cannot be."""
    from elastic.worker.boot.bootstrap import run_as_main

    from .injection import install

    if argv[:1] == ["--faults"]:
        os.environ[PLAN_ENV] = os.path.abspath(argv[1]) if len(argv) > 1 else ""
        argv = argv[2:]
    if not os.environ.get(PLAN_ENV) or not argv or argv == ["-m"]:
        raise SystemExit(f"usage: python -m elastic.testing --faults PLAN [-m] SCRIPT ...; or {PLAN_ENV}=PLAN")
    try:
        Plan.read(os.environ[PLAN_ENV])
    except (BadFaultError, OSError) as error:
        raise SystemExit(f"elastic.testing: {error}") from error
    install()
    run_as_main(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
