"""The optimizer guard on a GPU: groups are aborted at any moment, and the weights stay those of an undisturbed run.

BatchNorm's statistics too, with a real momentum: a forward that is never committed moves them, and on NCCL an aborted
broadcast may leave anything in them.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
from typing import Any

import cards
import pytest
import smoke
import torch
import torch.distributed as dist

for needed in ("msgspec", "xxhash", "numpy"):
    pytest.importorskip(needed, reason=f"the job needs {needed}")

from elastic.worker.link.link import Link  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 2000 if not smoke.ON else 40
"""More than the rounds can take."""
GROUP_S = 600.0 if not smoke.ON else 5.0
"""On gloo an abort may miss a collective that is posted in that very moment (docs/gpu.md)."""
ROUNDS = int(os.environ.get("ELASTIC_GPU_ROUNDS", "40" if not smoke.ON else "3"))


class FakeLink(Link):
    """As the agent's: the flag is set before the abort begins."""

    def __init__(self) -> None:
        self.aborted = False

    def applying(self) -> None:
        if self.aborted:
            from elastic.worker.link.session import GenerationEnded

            raise GenerationEnded("told to abort the group")

    def check(self, step: int) -> None:
        self.applying()


class Training:
    """A small model whose step is a function of (weights, step, rank) alone."""

    def __init__(self, job: Any) -> None:
        torch.manual_seed(1)
        self.job = job
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 256), *self.between(), torch.nn.ReLU(),
            torch.nn.Linear(256, 256), torch.nn.Linear(256, 8),
        ).cuda()  # fmt: skip
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, foreach=True)
        self.step = 0
        self.one(self.model)  # so that the momentum exists
        self.step = 0
        self.watch()

    def between(self) -> list[torch.nn.Module]:
        return []

    def watch(self) -> None:
        self.optimizer.register_step_pre_hook(lambda *_: self.job.guard()())

    def begin(self) -> None: ...

    def settle(self) -> None:
        """The generation has ended, perhaps in the middle of a step."""

    def tensors(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *(s["momentum_buffer"] for s in self.optimizer.state.values())]

    def digest(self) -> str:
        torch.cuda.synchronize()
        found = hashlib.blake2b(digest_size=8)
        for tensor in self.tensors():
            found.update(tensor.detach().cpu().numpy().tobytes())
        return found.hexdigest()

    def one(self, wrapped: Any) -> None:
        generator = torch.Generator().manual_seed(self.step * 64 + self.job.rank)
        samples = torch.randn(64, 64, generator=generator).cuda()
        self.optimizer.zero_grad()
        wrapped(samples).square().mean().backward()
        self.optimizer.step()
        self.step += 1

    def catch_up(self) -> None:
        """The newest state wins."""
        mine = torch.tensor([self.step])
        rows = [torch.zeros_like(mine) for _ in range(self.job.world_size)]
        dist.all_gather(rows, mine)
        steps = [int(row) for row in rows]
        source = steps.index(max(steps))
        if min(steps) < max(steps):
            self.receive(source, max(steps))

    def receive(self, source: int, step: int) -> None:
        for tensor in self.tensors():
            dist.broadcast(tensor.data, source)
        self.step = step


class WithBuffers(Training):
    """In a state as the product keeps it, whose steps are committed."""

    state: Any = None

    def between(self) -> list[torch.nn.Module]:
        return [torch.nn.BatchNorm1d(256, momentum=0.1)]

    def watch(self) -> None:
        import elastic

        self.state = elastic.State(model=self.model, optimizer=self.optimizer)
        self.state.watch_optimizers(self.job.guard())

    def begin(self) -> None:
        self.state.begin()

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for _, tensor in self.state.tensors()]

    def one(self, wrapped: Any) -> None:
        super().one(wrapped)
        if self.state is not None:
            self.job.commit(self.state)

    def settle(self) -> None:
        assert self.state.rewind() is None
        assert self.state.clean()
        assert self.state.step == self.step

    def receive(self, source: int, step: int) -> None:
        self.state.adopt(self.state.table(), self.state.extra() | {"step": step})
        super().receive(source, step)
        self.state.filled()


def alone(job: Any, buffers: bool) -> Training:
    job.rank, job.world_size = 0, 1  # the set-up is the same on every rank
    return (WithBuffers if buffers else Training)(job)


def undisturbed(job: Any, rank: int, world_size: int, port: int, steps: int, buffers: bool) -> list[str]:
    """Digest of the state after each step."""
    from test_nccl_groups import make

    training = alone(job, buffers)
    group = make(rank, world_size, port, 0)
    group.form()
    job.enter(rank=rank, world_size=world_size, generation=0, checkpoint_scheduler=None)
    training.begin()
    wrapped = job.ddp(training.model)
    digests = [training.digest()]
    for _ in range(steps):
        training.one(wrapped)
        digests.append(training.digest())
    del wrapped
    group.close()
    return digests


def disturbed_round(training: Training, group: Any, link: FakeLink, after_s: float, steps: int) -> str:
    """Train until the abort; returns how this rank came to leave."""
    from elastic.worker.link.session import GenerationEnded

    def aborted() -> None:
        link.aborted = True
        group.abort("a rank died")

    training.begin()
    wrapped = training.job.ddp(training.model)
    timer = threading.Timer(after_s, aborted)
    timer.start()
    try:
        while training.step < steps:
            training.one(wrapped)
        left = "at the end"
    except GenerationEnded:
        left = "by the guard"
    except RuntimeError as error:  # what a call on an aborted group raises
        left = f"by an error: {str(error)[:100]}"
    timer.join()
    training.optimizer.zero_grad()
    return left


def train(rank: int, world_size: int, port: int, rounds: int, steps: int, buffers: bool) -> Any:
    from test_nccl_groups import make

    from elastic.worker.job.job import Job

    torch.use_deterministic_algorithms(True)
    link = FakeLink()
    job = Job(name="j", device=torch.device("cuda:0"), local_rank=0, link=link)  # type: ignore[arg-type]
    reference = undisturbed(job, rank, world_size, port, steps, buffers)
    training = alone(job, buffers)
    pauses = random.Random(rank)
    wrong, left = [], []
    for generation in range(1, rounds + 1):
        link.aborted = False
        group = make(rank, world_size, port, generation, timeout_s=GROUP_S)
        group.form()
        job.enter(rank=rank, world_size=world_size, generation=generation, checkpoint_scheduler=None)
        training.catch_up()
        left.append(disturbed_round(training, group, link, 0.02 + pauses.random() * 0.2, steps))
        group.close()
        training.settle()
        if training.digest() != reference[training.step]:
            wrong.append([generation, training.step])
    by_guard = sum(how == "by the guard" for how in left)
    return {"wrong": wrong, "by_guard": by_guard, "step": training.step, "left": sorted(set(left))[:6]}


def exact(measured: dict[str, object], *, buffers: bool) -> None:
    env = {**cards.ONE_CARD, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    results = cards.run(
        train, world_size=2, env=env, rounds=ROUNDS, steps=STEPS, buffers=buffers, timeout_s=360.0, check=smoke.ON
    )
    # An abort beside a call in progress may end a process (docs/gpu.md): it is told by its name.
    if ended := {rank: r["died"] for rank, r in enumerate(results) if isinstance(r, dict) and "died" in r}:
        measured["ended by a signal"] = ended
    assert not ended, f"ended by a signal, in a call that an abort struck: {results}"
    assert not [r for r in results if "raised" in r], results
    measured["ranks"] = [{k: v for k, v in r.items() if k != "wrong"} for r in results]
    assert [r["wrong"] for r in results] == [[], []]
    assert smoke.ON or sum(r["by_guard"] for r in results) > 0, "no abort fell between a backward and its step"


def test_weights_stay_exact_through_aborts_at_any_moment(measured: dict[str, object]) -> None:
    exact(measured, buffers=False)


def test_buffers_stay_exact_through_aborts_at_any_moment(measured: dict[str, object]) -> None:
    exact(measured, buffers=True)
