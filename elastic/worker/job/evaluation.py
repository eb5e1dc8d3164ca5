"""`Job.evaluate`: sums over a dataset, shared out to the ranks, that are the same for any world size.

The dataset is cut into batches of a fixed size, whatever the world size; nothing is padded, so no sample counts twice.
Each rank evaluates a contiguous range of them. The sums of every batch are exchanged in float64 and added without
rounding in between (`math.fsum`), so the result depends neither on the number of ranks nor on the order.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from elastic.worker.comm.in_flight import complete
from elastic.worker.comm.p2p import control_device
from elastic.worker.data.arguments import plan_of
from elastic.worker.data.batches import Batch, MapDataset
from elastic.worker.data.containers import moved
from elastic.worker.data.reading import Reader, loaded
from elastic.worker.data.seeds import seed_everything
from elastic.worker.data.sharding import rank_range
from elastic.worker.link.misuse import MisuseTypeError, MisuseValueError

Measure = Callable[[Batch], Mapping[str, "torch.Tensor | float"]]
"""A batch -> sums over its samples, by name: tensors of one element, or numbers."""

COUNT = "count"
"""Name under which the number of samples is returned."""


def evaluate(
    dataset: MapDataset,
    measure: Measure,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    step: int,
    device: torch.device,
    agree: Callable[[list[str]], list[str]],
    seed: int = 0,
    num_workers: int = 0,
    collate: Callable[[list[Any]], Any] | None = None,
    pin_memory: bool = False,
) -> dict[str, float]:
    """See `Job.evaluate`; raises TypeError also as `batches` does. `agree` returns rank 0's argument on every rank.
    Random numbers drawn in `dataset[i]` or `measure` depend on the seed and the batch only, if `num_workers` is 0."""
    plan = plan_of(dataset, batch_size)
    numbers = range(*rank_range(0, plan.steps_per_epoch, rank, world_size))
    reader = Reader(dataset, collate or default_collate, seed=seed, plan=plan)
    names: list[str] | None = None
    rows: list[torch.Tensor] = []
    with loaded(reader, numbers, num_workers, pin_memory) as found:
        for number, (indices, data) in zip(numbers, found, strict=True):
            batch = Batch(
                data=moved(data, device),
                indices=indices,
                step=step,
                epoch=0,
                global_size=plan.at(number).size,
            )
            seed_everything(seed, 2, number)
            sums = measure(batch)
            if names is None:
                names = _checked(sums)
            if sorted(sums) != names:
                raise MisuseValueError(f"job.evaluate: measure returned {sorted(sums)} for a batch, and {names} before")
            rows.append(_row(sums, names, device))
    agreed = agree(names or [])  # rank 0 always has a batch
    table = torch.zeros(plan.steps_per_epoch + 1, len(agreed), dtype=torch.float64)
    if names not in (None, agreed):
        table[-1] = 1.0
    elif rows:
        table[numbers.start : numbers.stop] = torch.stack(rows).cpu()
    if world_size > 1:
        table = table.to(control_device())
        complete(dist.all_reduce(table, async_op=True), table.device)
    if bool(table[-1].any()):
        raise MisuseValueError(
            f"job.evaluate: measure returned {agreed} on rank 0 and other names elsewhere (here: {names})"
        )
    columns = table[:-1].t().tolist()
    return {name: exact_sum(column) for name, column in zip(agreed, columns, strict=True)} | {COUNT: plan.samples}


def exact_sum(values: Sequence[float]) -> float:
    """Their sum, rounded once; NaN or infinite if any of them is."""
    if all(map(math.isfinite, values)):
        with contextlib.suppress(OverflowError):
            return math.fsum(values)
    return sum(values)


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """Generators and gradients' mode are as before after the span."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices, device_type="cuda"), torch.no_grad():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _checked(sums: object) -> list[str]:
    """Names of the metrics, validated. Raises TypeError."""
    if not isinstance(sums, Mapping) or not all(isinstance(name, str) for name in sums):
        raise MisuseTypeError(
            f"job.evaluate: measure returned {type(sums).__name__}: return sums by name, such as "
            '{"loss": F.mse_loss(model(batch.x), batch.y, reduction="sum")}'
        )
    if COUNT in sums:
        raise MisuseValueError(
            f"job.evaluate: {COUNT!r} is the number of samples, which is added by itself; rename yours"
        )
    return sorted(sums)


def _row(sums: Mapping[str, Any], names: Sequence[str], device: torch.device) -> torch.Tensor:
    """On `device`, so that the host need not wait for each batch."""
    values = []
    for name in names:
        value = sums[name]
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise MisuseTypeError(
                f"job.evaluate: {name!r} has shape {list(value.shape)}: return one number, the sum over the batch"
            )
        values.append(torch.as_tensor(value, dtype=torch.float64, device=device).reshape(()).detach())
    return torch.stack(values) if values else torch.zeros(0, dtype=torch.float64, device=device)
