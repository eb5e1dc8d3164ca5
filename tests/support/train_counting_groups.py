"""train_recorded.py, where each process group that torch makes is written down: a line in record/groups-PID."""

from __future__ import annotations

import os
import pathlib
import runpy
import sys
from typing import Any

import torch.distributed as dist

init_process_group = dist.init_process_group


def counting(*args: Any, **options: Any) -> None:
    with open(f"record/groups-{os.getpid()}", "a") as made:
        made.write(f"{sorted(options)}\n")
    init_process_group(*args, **options)


if __name__ == "__main__":
    dist.init_process_group = counting
    sys.argv += ["--record", "record"]
    runpy.run_path(str(pathlib.Path(__file__).with_name("train_recorded.py")), run_name="__main__")
