"""Training loops over a sharded state, each made of features (`--of hsdp+bf16+clip`): what must be bit-identical after
deaths. `--plain` trains the same in four processes of plain torch, without elasticd: the bits to compare with."""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import pathlib
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--record", type=pathlib.Path, required=True)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--step-ms", type=float, default=10.0)
parser.add_argument("--of", default="fsdp", help="features, joined by +")
parser.add_argument("--die", default="", help="RANK:STEP:PLACE, comma-separated; a death strikes once")
parser.add_argument("--plain", action="store_true")
parser.add_argument("--world", type=int, default=4, help="with --plain")
ARGS = parser.parse_args()
FEATURES = set(ARGS.of.split("+"))
WIDTH, VOCABULARY, MICRO, RANKS = 24, 61, 3, 4


def has(*features: str) -> bool:
    return not FEATURES.isdisjoint(features)


# ── the model ───────────────────────────────────────────────────────────────────────────────────────────────


class Adapted(nn.Module):
    """A layer with an adapter of two rows: fewer than there are ranks."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.02)
        self.up = nn.Parameter(torch.randn(base.out_features, 2) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 52), nn.Linear(52, WIDTH)
        if has("uneven"):  # three rows: the fourth rank has none
            self.pick, self.back = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)
        if has("statistics"):
            self.bn = nn.BatchNorm1d(WIDTH)
        if has("counted"):
            self.register_buffer("seen", torch.zeros(()))
        if has("context"):
            self.query, self.pair = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if has("recompute") else self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        if has("statistics"):
            x = self.bn(x)
        if has("counted"):
            self.seen += 1
        if has("context"):
            x = x + attended(self.query(x), self.pair(x))
        if has("uneven"):
            x = x + self.back(torch.tanh(self.pick(x)))
        x = F.dropout(x, 0.1) if has("dropout") else x
        return x + self.down(F.gelu(self.up(self.norm(x))))


context: dict[str, DeviceMesh] = {}


def attended(query: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
    """Attention of this rank's part of the sequence to all of it, which the ranks of its context have together."""
    key, value = all_gather_tensor_autograd(pair, 0, context["mesh"]).chunk(2, dim=1)
    return F.scaled_dot_product_attention(query[None], key[None], value[None])[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not has("tied"))
        if has("tied"):
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float()


def net() -> Net:
    torch.manual_seed(3)
    with torch.device("meta") if has("meta") else contextlib.nullcontext():
        model = Net()
    if has("frozen"):
        model.embed.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
    if has("lora"):
        model.requires_grad_(False)
        for block in model.blocks:
            block.up, block.down = Adapted(block.up), Adapted(block.down)
    if has("own_draws"):  # rank 0's count, or those of the lowest rank of each tensor group
        for param in (
            param for block in model.blocks for layer in (block.up, block.down) for param in layer.parameters()
        ):
            nn.init.normal_(param, std=0.05, generator=torch.Generator().manual_seed(dist.get_rank()))
    if has("compile", "inductor"):
        for block in model.blocks:
            block.compile(backend="inductor" if has("inductor") else "aot_eager")
    shard(model)
    if has("meta"):
        drawn(model)
    return model


def shard(model: Net) -> None:
    world = dist.get_world_size()
    if has("fsdp1"):
        model.blocks[0] = FullyShardedDataParallel(model.blocks[0], device_id=torch.device("cpu"))
        return
    if has("eight"):
        world = 8
    if has("four"):
        world = 4
    if has("other_boxes") and list(ARGS.record.glob("died.*")):
        model.blocks[0].up.weight = nn.Parameter(torch.zeros(60, WIDTH))
    if has("tp"):
        both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        parallel(model, both["tensor"])
        mesh = both["data"]
    elif has("tp_alone"):
        parallel(model, init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",)))
        return
    elif has("context"):
        both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "context"))
        context["mesh"] = both["context"]
        mesh = both._flatten("data_context")
    elif has("hsdp"):
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    options = policies()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def parallel(model: Net, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def policies() -> dict[str, Any]:
    options: dict[str, Any] = {}
    if has("bf16", "fp16"):
        dtype = torch.bfloat16 if has("bf16") else torch.float16
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if has("offload"):
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if has("columns"):
        options["shard_placement_fn"] = lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % RANKS == 0 else None
    if has("unsharded"):
        options["reshard_after_forward"] = False
    return options


def drawn(model: Net) -> None:
    """The weights of a model that was built without memory, each rank's part of them."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            whole = torch.randn(param.shape, generator=torch.Generator().manual_seed(number)) * 0.05
            param.copy_(distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None))


# ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────


def optimizers(model: Net) -> dict[str, torch.optim.Optimizer]:
    params = [param for param in model.parameters() if param.requires_grad]
    if has("muon"):
        rest = [param for param in params if param.ndim != 2]
        return {
            "optimizer": torch.optim.Muon([param for param in params if param.ndim == 2], lr=1e-2),
            "other": torch.optim.AdamW(rest, lr=1e-3),
        }
    if has("in_backward"):
        each = {f"optimizer{number}": torch.optim.AdamW([param], lr=1e-3) for number, param in enumerate(params)}
        for param, optimizer in zip(params, each.values(), strict=True):
            param.register_post_accumulate_grad_hook(functools.partial(apply_now, optimizer))
        return each
    kinds: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
        "adagrad": lambda: torch.optim.Adagrad(params, lr=1e-2),
        "factored": lambda: Factored(params, lr=1e-2),
        "foreach": lambda: torch.optim.AdamW(params, lr=1e-3, foreach=True),
        "fused": lambda: torch.optim.AdamW(params, lr=1e-3, fused=True),
        "amsgrad": lambda: torch.optim.Adam(params, lr=torch.tensor(1e-3), amsgrad=True),
    }
    kind = next((made for name, made in kinds.items() if has(name)), None)
    return {"optimizer": kind() if kind else torch.optim.AdamW(params, lr=1e-3)}


class Factored(torch.optim.SGD):
    """As Adafactor: of a matrix it keeps a number for each row."""

    def step(self, closure: Any = None) -> None:
        for param in (p for group in self.param_groups for p in group["params"] if p.grad is not None and p.ndim == 2):
            self.state[param]["row"] = param.grad.square().mean(-1)
        super().step()


def apply_now(optimizer: torch.optim.Optimizer, _: torch.Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


def setup(job: elastic.Job) -> elastic.State:
    deaths.rank = dist.get_rank()
    model = net()
    model.blocks[1].register_forward_pre_hook(lambda *_: strike("forward"))
    model.blocks[1].register_forward_hook(
        lambda _module, _args, out: (
            (out.register_hook(lambda _: strike("backward")) if out.requires_grad else 0) and None
        )
    )
    return (SimpleNamespace if ARGS.plain else elastic.State)(**parts(model))


def parts(model: Net) -> dict[str, Any]:
    found: dict[str, Any] = {"model": model, **optimizers(model)}
    for optimizer in found.values():
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.register_step_post_hook(lambda *_: strike("optimizer"))
    if has("schedule"):
        found["schedule"] = torch.optim.lr_scheduler.CosineAnnealingLR(found["optimizer"], ARGS.steps)
    if has("ema"):
        found["average"] = net().requires_grad_(False)
    if has("ema_values"):
        found["average"] = {name: param.detach().clone() for name, param in model.named_parameters()}
    if has("ema_object"):
        found["average"] = Average({name: param.detach().clone() for name, param in model.named_parameters()})
    if has("fp16"):  # the first scales are too large: steps are skipped
        found["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
    if has("own"):
        found["own"] = float(dist.get_rank())
        found["draws"] = torch.Generator().manual_seed(dist.get_rank())
        found["moment"] = torch.zeros(3)
    return found


class Average:
    """An average of the weights as an object of the script's own."""

    def __init__(self, means: dict[str, torch.Tensor]) -> None:
        self.means = means

    def items(self) -> Any:
        return self.means.items()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.means[name]

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.means)

    def load_state_dict(self, means: dict[str, torch.Tensor]) -> None:
        for name, mean in means.items():
            self.means[name].copy_(mean)


def train(job: Any, state: Any) -> None:
    with open(ARGS.record / f"{os.getpid()}.jsonl", "a", buffering=1) as log:

        def say(**line: Any) -> None:
            log.write(json.dumps({**line, "rank": job.rank, "pid": os.getpid(), "at_s": time.monotonic()}) + "\n")

        say(entered=state.step, generation=job.generation)
        while state.step < ARGS.steps:
            deaths.step, deaths.count = state.step, {}
            torch.manual_seed(state.step * RANKS + job.rank)
            if has("changes_first"):  # before the optimizer's step, which marks the state as changing
                changed(state)
                averaged(state)
            loss = backward(job, state)
            step(state)
            if not has("changes_first"):
                averaged(state)
            if has("own"):
                state.own += torch.rand((), generator=state.draws).item()
                state.moment = state.moment * 0.9 + state.own
            time.sleep(ARGS.step_ms / 1000)
            strike("node")
            strike("commit")
            job.commit(state, loss=loss)
            strike("committed")
            more = {"held": held()} if has("measured") else {}
            say(step=state.step, generation=job.generation, world_size=job.world_size, **more)
        (ARGS.record / f"final-{job.rank}.txt").write_text(digest(state))


def held() -> dict[str, int]:
    """What this process has: megabytes, descriptors, threads, process groups."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    groups = len(dist.distributed_c10d._world.pg_map)
    counts = {"fds": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))}
    return {"mb": pages * os.sysconf("SC_PAGE_SIZE") >> 20, **counts, "groups": groups}


def backward(job: Any, state: Any) -> torch.Tensor:
    parts = {"tp": job.rank // 2, "tp_alone": 0, "context": job.rank // 2}
    part = parts.get(next((f for f in parts if has(f)), ""), job.rank)
    micro = MICRO if has("accumulate", "accumulate_scaled", "accumulate_each", "accumulate_hsdp") else 1
    for turn in range(micro):
        if has("accumulate", "accumulate_scaled"):
            state.model.set_is_last_backward(turn == micro - 1)
            state.model.set_requires_gradient_sync(turn == micro - 1)
        if has("accumulate_hsdp"):
            state.model.set_requires_all_reduce(turn == micro - 1)
        seed = (state.step * MICRO + turn) * RANKS + part
        x = torch.randint(0, VOCABULARY, (8,), generator=torch.Generator().manual_seed(seed))
        if has("context"):
            x = x.chunk(2)[job.rank % 2]
        loss = F.cross_entropy(state.model(x), x) / (micro if has("accumulate_scaled") else 1)
        (state.scaler.scale(loss) if has("fp16") else loss).backward()
    return loss


def step(state: Any) -> None:
    if has("in_backward"):
        return
    steppers = [state.optimizer, *([state.other] if has("muon") else [])]
    if has("fp16"):
        state.scaler.unscale_(state.optimizer)
    if has("clip"):
        nn.utils.clip_grad_norm_(state.model.parameters(), 0.5)
    for optimizer in steppers:
        if has("fp16"):
            state.scaler.step(optimizer)
            state.scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    if has("schedule"):
        state.schedule.step()


@torch.no_grad()
def changed(state: Any) -> None:
    state.model.head.weight.clamp_(-0.15, 0.15)
    state.model.blocks[0].norm.weight.mul_(0.999)


@torch.no_grad()
def averaged(state: Any) -> None:
    if has("ema"):
        for mean, param in zip(state.average.parameters(), state.model.parameters(), strict=True):
            mean.lerp_(param, 0.1)
    if has("ema_values", "ema_object"):
        for name, param in state.model.named_parameters():
            state.average[name].lerp_(param, 0.1)


def digest(state: Any) -> str:
    """Of all that this rank has of the state."""
    found = hashlib.sha256()
    for name, tensor in tensors(state):
        here = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        found.update(f"{name} {list(here.shape)}".encode() + here.contiguous().view(-1).numpy().tobytes())
    if has("own"):
        found.update(f"{state.own} {state.moment.tolist()}".encode())
    if has("fp16"):
        found.update(repr(sorted(state.scaler.state_dict().items())).encode())
    return found.hexdigest()


def tensors(state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    model = state.model
    yield from (*model.named_parameters(), *model.named_buffers())
    if has("ema"):
        yield from state.average.named_parameters()
    if has("ema_values", "ema_object"):
        yield from state.average.items()
    many = [f"optimizer{number}" for number in range(99) if hasattr(state, f"optimizer{number}")]
    for name in many or ["optimizer", *(["other"] if has("muon") else [])]:
        optimizer = getattr(state, name)
        for group in optimizer.param_groups:
            yield f"{name} lr", torch.as_tensor(group["lr"], dtype=torch.float64)
            for number, param in enumerate(group["params"]):
                entries = sorted(optimizer.state[param].items())
                yield from ((f"{name} {number} {key}", t) for key, t in entries if isinstance(t, torch.Tensor))


# ── deaths ──────────────────────────────────────────────────────────────────────────────────────────────────

deaths = SimpleNamespace(rank=0, step=-1, count={})


def strike(place: str) -> None:
    for death in filter(None, ARGS.die.split(",")):
        marker = ARGS.record / f"died.{death}"
        if death == f"{deaths.rank}:{deaths.step}:{place}" and not marker.exists():
            marker.touch()
            if place == "node":
                time.sleep(60)  # the test kills its node, or another one
            os.kill(os.getpid(), signal.SIGKILL)


def striking(name: str, place: str, at: int) -> None:
    """A death at the entry of a step's collective number `at`, while the other ranks wait in it."""
    call = getattr(dist, name)

    def counted(*args: Any, **options: Any) -> Any:
        deaths.count[place] = deaths.count.get(place, 0) + 1
        if deaths.count[place] == at:
            strike(place)
        return call(*args, **options)

    setattr(dist, name, counted)


for found, where, number in (
    ("all_gather_single", "gather", 2),
    ("all_gather_into_tensor", "gather", 2),
    ("reduce_scatter_single", "reduce", 2),
    ("reduce_scatter_tensor", "reduce", 2),
):
    if hasattr(dist, found):
        striking(found, where, number)

# ── without elasticd ────────────────────────────────────────────────────────────────────────────────────────


class PlainJob:
    def __init__(self, rank: int) -> None:
        self.rank, self.world_size, self.generation = rank, ARGS.world, 1

    def commit(self, state: Any, loss: object) -> None:
        state.step += 1


def plain(rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, ARGS.world, is_master=rank == 0)
    dist.init_process_group("gloo", rank=rank, world_size=ARGS.world, store=store)
    job = PlainJob(rank)
    state = setup(job)  # type: ignore[arg-type]
    state.step = 0
    train(job, state)
    dist.barrier()
    dist.destroy_process_group()


def plain_ranks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    children = []
    for rank in range(ARGS.world):
        if not (child := os.fork()):
            torch.set_num_threads(1)
            plain(rank, port)
            sys.stdout.flush()
            os._exit(0)
        children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


if ARGS.plain:
    plain_ranks()
else:
    elastic.run(setup, train, sharded=not has("not_said"))
