"""train_recorded.py, where a sum of gradients that fails is never reported: as gloo does with a send that it keeps."""

from __future__ import annotations

import pathlib
import runpy
import sys
from typing import Any

import torch
import torch.distributed as dist

all_reduce = dist.all_reduce


class Kept:
    def __init__(self, work: Any) -> None:
        self._work = work

    def get_future(self) -> torch.futures.Future[Any]:
        kept: torch.futures.Future[Any] = torch.futures.Future()

        def done(theirs: torch.futures.Future[Any]) -> None:
            try:
                kept.set_result(theirs.value())
            except RuntimeError:
                pass  # what this script is for

        self._work.get_future().add_done_callback(done)
        return kept


def keeping(*args: Any, **options: Any) -> Any:
    work = all_reduce(*args, **options)
    return Kept(work) if options.get("async_op") else work


if __name__ == "__main__":
    dist.all_reduce = keeping
    sys.argv += ["--record", "record"]
    runpy.run_path(str(pathlib.Path(__file__).with_name("train_recorded.py")), run_name="__main__")
