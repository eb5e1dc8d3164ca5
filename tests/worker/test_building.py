"""What `setup` builds that a replicated state cannot hold is refused by name, with the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elastic.worker.job.job import Job, build
from elastic.worker.link.link import Link
from elastic.worker.state.state import State

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")


def job() -> Job:
    return Job(name="j", device=torch.device("cpu"), local_rank=0, link=Link())


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process group of one rank, as under stock torchrun, which has it before `setup`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def zero(_: Job) -> State:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Linear(2, 2)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    return State(model=model, optimizer=optimizer)


def fsdp2(_: Job) -> State:
    model = nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return State(model=model)


def fsdp2_alone(_: Job) -> State:
    """`fully_shard` makes a mesh over all ranks, and for that a process group."""
    return State(model=fully_shard(nn.Linear(2, 2)))


def mesh(_: Job) -> State:
    init_device_mesh("cpu", (1,))
    raise AssertionError


def collective(_: Job) -> State:
    dist.all_reduce(torch.ones(1))
    raise AssertionError


@pytest.mark.parametrize(
    ("setup", "said"), [(zero, "ZeroRedundancyOptimizer keeps"), (fsdp2_alone, "fully_shard"), (mesh, "DeviceMesh")]
)
def test_sharding_without_a_group_is_named(setup: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TypeError, match=rf"{said}.*job\.ddp"):
        build(setup, job())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("setup", "said"), [(zero, "ZeroRedundancyOptimizer keeps a part"), (fsdp2, "FSDPModule")])
def test_sharding_with_a_group_is_named(setup: Any, said: str) -> None:
    with pytest.raises(TypeError, match=rf"{said}.*job\.ddp"):
        build(setup, job())


def test_a_collective_in_setup_is_sent_to_train() -> None:
    with pytest.raises(RuntimeError, match=r"move this to train\(\), where job\.broadcast\(\)"):
        build(collective, job())


def test_other_errors_of_setup_are_raised_as_they_are() -> None:
    def broken(_: Job) -> State:
        raise ValueError("no such file")

    with pytest.raises(ValueError, match=r"^no such file$"):
        build(broken, job())
    with pytest.raises(TypeError, match="setup returned int"):
        build(lambda _: 3, job())  # type: ignore[arg-type,return-value]
