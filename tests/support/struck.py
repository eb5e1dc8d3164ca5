"""What tests add to an example: importing it has workers killed, each once, as KILL says, and writes the hash of each
committed state to RECORD_DIR.

KILL is "call:rank:step,…", where the call is one of the job's, commit or evaluate; or it is step: when an optimizer has
made so many steps in this process, for scripts without a job.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import signal
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from elastic.worker.job.job import Job
from elastic.worker.state.state import State

from .killed import digest

FOLDER = pathlib.Path(os.environ["RECORD_DIR"])
KILLS = os.environ["KILL"].split(",")
_commit, _evaluate = Job.commit, Job.evaluate
_steps = itertools.count(1)


def strike(call: str, rank: int, step: int) -> None:
    if (kill := f"{call}:{rank}:{step}") in KILLS:
        try:
            (FOLDER / kill).touch(exist_ok=False)
        except FileExistsError:  # this is the replacement
            return
        os.kill(os.getpid(), signal.SIGKILL)


def commit(job: Job, state: State, *args: Any, **named: Any) -> None:
    strike("commit", job.rank, state.step)
    _commit(job, state, *args, **named)
    line = {"pid": os.getpid(), "rank": job.rank, "step": state.step, "hash": digest(state)}
    with (FOLDER / f"{os.getpid()}.jsonl").open("a") as log:
        log.write(json.dumps(line) + "\n")


def evaluate(job: Job, state: State, *args: Any, **named: Any) -> dict[str, float]:
    strike("evaluate", job.rank, state.step)
    return _evaluate(job, state, *args, **named)


def stepped(*_: object) -> None:
    strike("step", int(os.environ["RANK"]), next(_steps))


Job.commit, Job.evaluate = commit, evaluate  # type: ignore[method-assign]
if any(kill.startswith("step:") for kill in KILLS):
    register_optimizer_step_post_hook(stepped)
