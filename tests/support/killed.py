"""A training script, run in this process and killed at its n-th place: before a statement, or in a commit.

The rank is then the survivor of a lost peer, which returns to its last commit, or the replacement, which is built anew
and receives the state of that commit. Its weights must be those of the undisturbed run.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.link.session import GenerationEnded
from elastic.worker.state.state import State

Copy = tuple[Any, dict[str, Any], list[torch.Tensor]]
"""(table, extra, tensors)"""


class Killer(Link):
    """Kills at a place, and counts them."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.places = 0
        self.where = ""

    def check(self, step: int) -> None:
        self.place("commit")

    def place(self, where: object) -> None:
        self.places += 1
        if self.places - 1 == self.at:
            self.at, self.where = None, str(where)
            raise GenerationEnded(self.where)


PLACE = "_place"


def compiled(text: str, names: dict[str, Any]) -> dict[str, Any]:
    """The names that `text` defines, which calls names["_place"] before each of its statements."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list) and not isinstance(node, ast.Module):
            for block in (body, getattr(node, "orelse", [])):
                block[:] = [each for statement in block for each in (_at(statement), statement)]
    exec(compile(ast.fix_missing_locations(tree), "docs", "exec"), names)
    return names


def _at(statement: ast.stmt) -> ast.stmt:
    return ast.parse(f"{PLACE}('line {statement.lineno}')").body[0]


def copied(state: State) -> Copy:
    extra: dict[str, Any] = {}
    held = state.tensors(extra)
    return [info for info, _ in held], json.loads(json.dumps(extra)), [tensor.detach().clone() for _, tensor in held]


def received(setup: Callable[[Job], State], job: Job, copy: Copy) -> State:
    """What a replacement has: built by `setup`, with the state of a source."""
    state = made(setup, job)
    table, extra, tensors = copy
    for place, tensor in zip(state.adopt(tuple(table), extra), tensors, strict=True):
        place.copy_(tensor)
    state.filled()
    return state


def made(setup: Callable[[Job], State], job: Job) -> State:
    state = setup(job)
    state.watch_optimizers(job.guard())
    return state


def run(
    setup: Callable[[Job], State], names: dict[str, Any], *, at: int | None = None, replaced: bool = False
) -> tuple[str, Killer]:
    """(hash of the final state, the killer that was there). `names`: of `compiled`, with `train`."""
    killer = Killer(at)
    names[PLACE] = killer.place
    job = Job(name="job", device=torch.device("cpu"), local_rank=0, link=killer)
    state = made(setup, job)
    newest = copied(state)

    def committed(step: int, step_s: float, loss: float | None) -> None:
        nonlocal newest
        if killer.at is not None:  # it is still to come
            newest = copied(state)

    killer.committed = committed  # type: ignore[method-assign]
    for generation in range(1, 4):
        job.enter(rank=0, world_size=1, generation=generation, checkpoint_scheduler=None, state=state)
        state.forget_gradients()
        state.begin()
        try:
            names["train"](job, state)
            job.left(state)
            break
        except GenerationEnded:
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(987)  # as a process that has done something else
            if replaced or not state.clean() or state.rewind() is not None:
                state = received(setup, job, newest)
    return digest(state), killer


def digest(state: State) -> str:
    extra: dict[str, Any] = {}
    found = hashlib.sha256()
    for info, tensor in state.tensors(extra):
        found.update(info.name.encode() + tensor.detach().numpy().tobytes())
    found.update(json.dumps([extra["parts"], state.step], sort_keys=True).encode())
    return found.hexdigest()
