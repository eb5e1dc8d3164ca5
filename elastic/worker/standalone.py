"""``elastic.run`` without an agent: under stock torchrun, or as a plain ``python train.py``."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from elastic.checkpoint.interval import IntervalRule
from elastic.checkpoint.stored.find import newest_generation
from elastic.contract.origin import Origin
from elastic.worker.job.job import Job, Setup, Train, build
from elastic.worker.link.link import Link
from elastic.worker.snapshots.checkpoint_scheduler import CheckpointScheduler, RankPosition
from elastic.worker.snapshots.local_snapshots import LocalSnapshots
from elastic.worker.state.handover.restore import Disk
from elastic.worker.state.handover.sync import Handover

from .comm.kept_group import group_is_over, kept_group
from .state.state import State

FINISH_S = 600.0
"""How long the last checkpoint waits for the previous one to be written: there is one buffer only."""


def run_standalone(setup: Setup, train: Train, checkpoint_dir: str, rule: IntervalRule) -> State:
    """Form torchrun's group if there is one, restore, train, save. Returns the final state."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    grouped = "RANK" in os.environ and not dist.is_initialized()
    if grouped:
        if cuda:
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    job = Job(name=_name(), device=device, local_rank=local_rank, link=Link())
    job.rank, job.world_size = rank, world_size
    try:
        state = build(setup, job)
        state.to(device)
        _train(job, state, train, Disk(checkpoint_dir, job.name) if checkpoint_dir else None, rule)
        if world_size > 1:
            dist.barrier()
    finally:
        if grouped:
            dist.destroy_process_group()
            group_is_over(first=rank == 0)
    return state


def _name() -> str:
    """The job name of the checkpoints: stable over restarts, unlike the random run id of `torchrun --standalone`."""
    return os.environ.get("ELASTIC_JOB") or os.path.splitext(os.path.basename(sys.argv[0] or "job"))[0].lower()


def _train(job: Job, state: State, train: Train, disk: Disk | None, rule: IntervalRule) -> None:
    generation = _restore(job, state, disk)
    state.forget_gradients()
    backend = scheduler = None
    if disk is not None:
        place = {"rank": job.rank, "world_size": job.world_size}
        backend = LocalSnapshots(disk.directory, disk.job, generation=generation, **place)
        scheduler = CheckpointScheduler(backend, rule, shared=True, finish_s=FINISH_S)
        scheduler.enter(RankPosition(job.rank, job.world_size, job.local_rank, 1), state.step)
    job.enter(
        rank=job.rank, world_size=job.world_size, generation=generation, checkpoint_scheduler=scheduler, state=state
    )
    state.begin()
    try:
        with kept_group():
            train(job, state)
        job.left(state)
        if scheduler is not None and backend is not None:
            scheduler.finish(state)
            backend.wait()
    finally:
        if backend is not None:
            backend.close()


def _restore(job: Job, state: State, disk: Disk | None) -> int:
    """Bring all ranks to the newest state. Returns the generation of this run: above that of every checkpoint."""
    synced = Handover(
        state,
        rank=job.rank,
        world_size=job.world_size,
        restore="newest",
        saved=disk.saved if disk else None,
        load=(lambda *_: disk.load(state)) if disk else None,
    ).run()
    if synced.origin is Origin.CHECKPOINT and job.rank == 0:
        print(f"elastic: resumed from {synced.source}", flush=True)
    # Above all that are there: this run shares no shard with what earlier runs have left unfinished.
    number = torch.tensor([1 + newest_generation(disk.directory, disk.job) if disk else 1])
    if job.world_size > 1:
        dist.all_reduce(number, dist.ReduceOp.MAX)
    return int(number)
