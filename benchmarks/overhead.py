"""What elastic costs where the work itself is small: many small tensors, small samples, short steps.

    per_tensor_us               state from a survivor to a new process, over loopback between two ranks: the time for
                                40,000 tensors beyond that for as many bytes in few, by tensor. Also: the time on a
                                core of both ranks together, which a busy machine does not change; the same over
                                sockets, the way between hosts; a snapshot (once its buffers are laid out); the newest
                                snapshot read back
    batches_over_dataloader_64  `job.batches` with 64 samples a batch over torch's DataLoader with the same dataset,
                                shuffled, in this process; also with 8
    api_us_per_step             `job.commit` and the hooks of one optimizer's step, with an agent's beat page and a
                                scheduler that has nothing to do; its rounds lie between those of the batches
    snapshots_on_over_off       time of a step with snapshots as they come by default, over that without: two ranks
                                under elasticd, a state of 75 MB; the steps beside each snapshot are those without.
                                Also: how often one was taken, what it cost, and what the job itself has measured
    idle_pss_mb                 memory (proportional set size) of elasticd, agent and zygote for one idle job of two
                                workers; and of each. Other processes of the same installation make it less

`--quick` takes less than two minutes on a quiet machine. The last line is JSON. What is compared takes turns, in
rounds that a disturbance hits alike. per_tensor_us, per_tensor_sockets_us and their times on a core: the median of the
rounds with many tensors less that of the rounds with few. batches_over_dataloader_*: the median of the rounds' ratios,
either side first in every second round; a round is one epoch of 200 batches each, from the making of the iterator to
its end, and ours includes what it does beyond loading, such as the seeds of three generators for each step and what a
commit does for the batch.
api_us_per_step: the median of rounds that are spread over the same time. per_tensor_us, per_tensor_sockets_us and
snapshots_on_over_off are by the clock on the wall; the others are by the time on a core, the snapshot and its reading
the best of several turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _harness import SMOKE
from _overhead_node import IDLE_S, idle_pss_mb, snapshots_on_over_off

from elastic.checkpoint.interval import IntervalRule
from elastic.contract.worker.beat import PAGE_BYTES
from elastic.contract.worker.messages import CopyState
from elastic.worker.job.job import Job
from elastic.worker.link.agent_link import AgentLink
from elastic.worker.link.session import Session
from elastic.worker.snapshots.agent_snapshots import SnapshotPart
from elastic.worker.snapshots.checkpoint_scheduler import CheckpointScheduler, RankPosition
from elastic.worker.state.handover import pull
from elastic.worker.state.handover.sync import Handover
from elastic.worker.state.state import State

ELEMENTS = 12
"""Of each small tensor: 40,000 of them are 2 MB."""
LIMIT_S = 300.0
SMALLEST = 1, 4, 50, 1, 4.0, 64, 0.0
QUICK = 40, 200, 10_000, 7, 45.0, 1024, IDLE_S
FULL = 100, 200, 10_000, 15, 300.0, 1024, IDLE_S
"""Rounds, batches of each, parameters, turns; seconds with snapshots, of layers this wide; seconds before the memory is
measured."""


class Many(torch.nn.Module):
    """`count` parameters of `elements` each."""

    def __init__(self, count: int, elements: int) -> None:
        super().__init__()
        self.held = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(elements)) for _ in range(count)])


def build(count: int, elements: int, *, stepped: bool) -> State:
    model = Many(count, elements)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    state = State(model=model, optimizer=optimizer)
    if stepped:
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        state.committed(1)
    return state


def rounds(acts: dict[str, Callable[[], object]], count: int) -> dict[str, list[float]]:
    """Seconds of this process on a core for each of `acts` in each round; every second round in the reverse order. One
    round before them is not counted."""
    found: dict[str, list[float]] = {name: [] for name in acts}
    for number in range(count + 1):
        for name in list(acts)[:: 1 if number % 2 else -1]:
            began_s = time.process_time()
            acts[name]()
            found[name].append(time.process_time() - began_s)
    return {name: times[1:] for name, times in found.items()}


def best(act: Callable[[], object], turns: int) -> float:
    """Seconds of this process on a core, in the quickest of `turns`: all of it is this process's own work, and what
    else runs on the machine is not counted."""
    times = []
    for _ in range(turns):
        began_s = time.process_time()
        act()
        times.append(time.process_time() - began_s)
    return min(times)


# ── many tensors ────────────────────────────────────────────────────────────────────────────────────────────


def core_s(before_s: float) -> float:
    return time.process_time() - before_s


def hand_over(rank: int, port: int, shapes: list[tuple[int, int]], turns: int, sockets: bool, out: Any) -> None:
    """One rank's part; it puts (rank, median seconds on the wall and on a core for each shape) into `out`. The shapes
    take turns. The state of rank 1 is new in each."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if sockets:
        pull.can_read = lambda window: False
    dist.init_process_group("gloo", rank=rank, world_size=2)
    sources = [build(*shape, stepped=True) for shape in shapes] if rank == 0 else []
    times: list[list[tuple[float, float]]] = [[] for _ in shapes]
    for _ in range(turns):
        for number, shape in enumerate(shapes):
            state = sources[number] if sources else build(*shape, stepped=False)
            dist.barrier()
            began_s, before = time.perf_counter(), time.process_time()
            Handover(state, rank=rank, world_size=2, generation=1).run()
            dist.barrier()
            times[number].append((time.perf_counter() - began_s, core_s(before)))
    out.put((rank, [tuple(map(statistics.median, zip(*each, strict=True))) for each in times]))
    dist.barrier()
    dist.destroy_process_group()


def per_tensor(params: int, turns: int) -> dict[str, float]:
    """Microseconds a tensor, beyond what the bytes take."""
    shapes = [(params, ELEMENTS), (4, params * ELEMENTS // 4)]
    tensors = 4 * params  # AdamW: two moments and a step each
    context = multiprocessing.get_context("spawn")
    figures: dict[str, float] = {}
    for name, sockets in (("per_tensor_us", False), ("per_tensor_sockets_us", True)):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        out = context.Queue()
        ranks = [context.Process(target=hand_over, args=(r, port, shapes, turns, sockets, out)) for r in range(2)]
        for process in ranks:
            process.start()
        try:
            told = dict(out.get(timeout=LIMIT_S) for _ in ranks)
        finally:
            for process in ranks:
                process.join(30.0)
                if process.is_alive():
                    process.kill()
        (many, _), (few, _) = told[0]
        figures[name] = 1e6 * (many - few) / tensors
        cores = sum(many - few for (_, many), (_, few) in told.values())
        figures[name.replace("_us", "_core_us")] = 1e6 * cores / tensors
    snapshots = [snapshot(*shape, turns) for shape in shapes]
    for index, name in enumerate(("per_tensor_snapshot_us", "per_tensor_restore_us")):
        figures[name] = 1e6 * (snapshots[0][index] - snapshots[1][index]) / tensors
    return figures


def snapshot(count: int, elements: int, turns: int) -> tuple[float, float]:
    """Seconds of a snapshot into memory that was used before, and of reading it back."""
    from elastic.checkpoint.format.layout import arena_nbytes
    from elastic.checkpoint.memory.arena import Arena
    from elastic.worker.state.handover.restore import HeldSnapshots

    state = build(count, elements, stepped=True)
    kept: list[SnapshotPart] = []

    class SnapshotBackend(Idle):
        def put(self, part: SnapshotPart) -> bool:
            if not kept:
                kept.append(part)
                arenas.append(Arena.create(arena_nbytes(part.table)))
            arenas[0].layout(part.table)
            arenas[0].fill(part.tensors).finish()
            arenas[0].seal(part.step, 1, part.extra)
            return True

    arenas: list[Arena] = []
    scheduler = CheckpointScheduler(SnapshotBackend(), IntervalRule(every_steps=1), shared=True)  # type: ignore[arg-type]
    scheduler.enter(RankPosition(0, 1, 0, 1), 0)
    scheduler._put(state, save=True)
    fill_s = best(lambda: scheduler._put(state, save=True), turns)
    newcomers = [build(count, elements, stepped=False) for _ in range(turns)]
    load_s = best(lambda: HeldSnapshots(arenas).load(newcomers.pop()), turns)
    arenas[0].close()
    return fill_s, load_s


class Idle:
    """A backend that is never given a snapshot."""

    durable_s = 0.0
    beside_s = 0.0
    copying = False

    def wanted(self) -> bool:
        return False

    def stops(self) -> bool:
        return False

    def free(self) -> bool:
        return True

    def wait(self, limit_s: float) -> None: ...

    def copied(self) -> tuple[CopyState, int]:
        return CopyState.REPLICAS, -1

    def failed(self, step: int) -> bool:
        return False

    def put(self, part: SnapshotPart) -> bool:
        return False

    def settle(self) -> None: ...

    def leave(self) -> None: ...

    def prepare(self, part: SnapshotPart) -> None: ...


# ── samples ─────────────────────────────────────────────────────────────────────────────────────────────────


class Samples(torch.utils.data.Dataset[Any]):
    """As cheap as a sample can be: a row of a tensor, and its label."""

    def __init__(self, count: int) -> None:
        self.x, self.y = torch.randn(count, 32), torch.arange(count)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def epochs(job: Job, state: State, batch_size: int, batches: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """(an epoch of ours, an epoch of the DataLoader's) over the same dataset."""
    dataset = Samples(batch_size * batches)
    # What a commit does for the batches, and no more of it: it counts the step, past the attribute's own check, and the
    # batch of the step is let go. Otherwise all batches of the epoch stay in memory.
    now, weight = vars(state), job._gradient_weight

    def ours() -> None:
        now["_step"] = 0
        for _ in job.batches(dataset, state, batch_size=batch_size):
            now["_step"] += 1
            weight.committed()

    def theirs() -> None:
        for _ in torch.utils.data.DataLoader(dataset, batch_size=batch_size, shuffle=True):
            pass

    return ours, theirs


def alone() -> tuple[Job, State]:
    page = memoryview(bytearray(PAGE_BYTES))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = AgentLink(Session(ours, page), backward_waits=True)
    job = Job(name="bench", device=torch.device("cpu"), local_rank=0, link=link)
    model = torch.nn.Linear(4, 4)
    state = State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    scheduler = CheckpointScheduler(Idle(), None, shared=True, snapshots=True)  # type: ignore[arg-type]
    scheduler.enter(RankPosition(0, 1, 0, 1), 0)
    link.enter(1, 0)
    job.enter(rank=0, world_size=1, generation=1, checkpoint_scheduler=scheduler)
    state.watch_optimizers(job.guard())
    job.keep_open = (ours, theirs)  # type: ignore[attr-defined]
    return job, state


def short_steps(count: int, batches: int, steps: int) -> dict[str, float]:
    """The figures of batches and commits, by `count` rounds."""
    acts: dict[str, Callable[[], object]] = {}
    for batch_size in (8, 64):
        ours, theirs = epochs(*alone(), batch_size, batches)
        acts |= {f"ours_{batch_size}": ours, f"theirs_{batch_size}": theirs}
    job, state = alone()
    loss = torch.tensor(0.5)

    def commits() -> None:
        """The hooks before the optimizer's step and the commit, without the optimizer itself."""
        for _ in range(steps):
            state.changing()
            job.commit(state, loss=loss)

    times = rounds(acts | {"commits": commits}, count)
    figures = {"api_us_per_step": 1e6 * statistics.median(times["commits"]) / steps}
    for batch_size in (8, 64):
        pairs = zip(times[f"ours_{batch_size}"], times[f"theirs_{batch_size}"], strict=True)
        figures[f"batches_over_dataloader_{batch_size}"] = statistics.median(ours / theirs for ours, theirs in pairs)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns; less than two minutes")
    parser.add_argument("--smoke", action="store_true", help=SMOKE)
    args = parser.parse_args()
    count, batches, params, turns, span_s, width, idle_s = SMALLEST if args.smoke else QUICK if args.quick else FULL
    figures = short_steps(count, batches, batches)
    figures |= per_tensor(params, turns)
    for name, value in figures.items():
        print(f"{name:28s} {value:.3f}", flush=True)
    printed = len(figures)
    figures |= snapshots_on_over_off(span_s, width)
    figures |= idle_pss_mb(idle_s)
    for name in list(figures)[printed:]:
        print(f"{name:28s} {figures[name]:.3f}", flush=True)
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
