"""What the NCCL path costs on one GPU: recovery from a killed rank, the optimizer guard, a snapshot, a broadcast.

    python benchmarks/nccl.py --quick
    python benchmarks/nccl.py --part recovery       the full length, one part at a time; or guard, snapshot, broadcast
    ELASTIC_GPU_SMOKE=1 python benchmarks/nccl.py --quick       on a CPU, for typos: the numbers mean nothing

Real processes and real NCCL groups, two to four ranks on one GPU, which talk over loopback because each takes itself
for a host of its own. No agents and no etcd: what is timed is the group, its communicator and the replacement, which
waits with torch imported, as a fork of the zygote does. Beside it torchrun with the same script on the same card.
`own` is what is left of a recovery without the replacement's CUDA context and the forming of the communicator.
Instants are CLOCK_MONOTONIC, which all processes share. The last line is JSON; without a GPU it says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported: connections are cut on purpose

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu"), str(ROOT / "tests")]

import cards  # noqa: E402 - the path is set up above
import smoke  # noqa: E402
import wheels  # noqa: E402

wheels.find()
if smoke.ON:
    smoke.install()

DEADLINE_S = 120.0
GENERATIONS_S = 0.2
"""Steps before the kill."""

_TORCHRUN = """
import os, sys, time
os.environ["NCCL_HOSTID"] = "rank-" + os.environ["RANK"]
import torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl")
values = torch.ones(1 << 16, device="cuda")
for step in range(10**9):
    dist.all_reduce(values)
    torch.cuda.synchronize()
    with open(sys.argv[1] + "." + os.environ["RANK"], "a") as log:
        log.write(f"{os.getpid()} {time.monotonic()}\\n")
    time.sleep(0.02)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        rank, world_size, port, generation = map(int, args.child)
        _rank(rank, world_size, port, generation)
        return
    if not torch.cuda.is_available():
        print(json.dumps({"skipped": "no GPU"}))
        return
    found: dict[str, Any] = {"hardware": hardware(), "quick": args.quick}
    for name in args.part:
        print(f"── {name}", flush=True)
        found |= PARTS[name](args.quick)
        print(json.dumps(found), flush=True)
    print(json.dumps(found))


def hardware() -> dict[str, str]:
    """What a number is worth nothing without. Asked in a process of its own: this one stays off the card."""
    if smoke.ON:
        return {"card": "none, a smoke run", "torch": torch.__version__}
    code = "import torch; print(torch.cuda.get_device_name(0)); print('.'.join(map(str, torch.cuda.nccl.version())))"
    card, nccl = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )[:2]
    driver = pathlib.Path("/proc/driver/nvidia/version")
    version = driver.read_text().splitlines()[0] if driver.exists() else "not known"
    return {"card": card, "driver": version, "torch": torch.__version__, "nccl": nccl, "cuda": str(torch.version.cuda),
            "python": platform.python_version(), "cores": str(os.cpu_count()),
            "date": datetime.now(UTC).date().isoformat()}  # fmt: skip


# ── recovery ────────────────────────────────────────────────────────────────────────────────────────────────────────


def recovery(quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for world_size in (2,) if quick else (2, 3, 4):
        rounds = [_recover(world_size) for _ in range(3 if quick else 7)]
        for key in rounds[0]:
            found[f"recovery_{world_size}_{key}"] = round(statistics.median(r[key] for r in rounds), 3)
    with contextlib.suppress(TimeoutError):
        found["torchrun_2_s"] = round(statistics.median(_torchrun() for _ in range(1 if quick else 3)), 3)
    return found


class _Child:
    def __init__(self, rank: int, world_size: int, port: int, generation: int) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "TORCH_NCCL_"))}
        env |= cards.ONE_CARD | {"NCCL_HOSTID": f"slot-{rank}-{time.monotonic_ns()}", "GLOO_SOCKET_IFNAME": "lo"}
        argv = [sys.executable, __file__, "--child", str(rank), str(world_size), str(port), str(generation)]
        self.process = subprocess.Popen(
            argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def hear(self, wanted: str) -> dict[str, float]:
        """The numbers that come with the word."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, _, rest = line.partition(" ")
            if word.strip() == wanted:
                return dict(json.loads(rest or "{}"))
        raise RuntimeError(f"a rank ended before it said {wanted!r}")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def _recover(world_size: int) -> dict[str, float]:
    """Seconds from the SIGKILL of the last rank until all ranks have stepped again, and where they went."""
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    children = [_Child(rank, world_size, server.port, 1) for rank in range(world_size)]
    spare = _Child(world_size - 1, world_size, server.port, 2)
    try:
        spare.hear("parked")
        for child in children:
            child.hear("parked")
            child.tell("go")
        for child in children:
            child.hear("stepping")
        time.sleep(GENERATIONS_S)
        dead = children.pop()
        killed_s = time.monotonic()
        dead.process.kill()
        dead.process.wait()
        spare.tell("go")
        for child in children:
            child.tell("abort")
        parts = [child.hear("stepping") for child in [*children, spare]]
        dead.end()
    finally:
        for child in [*children, spare]:
            child.end()
    survivors, fresh = parts[:-1], parts[-1]
    forming_s = max(p["formed_s"] - p["began_forming_s"] for p in parts)
    total_s = max(p["stepped_s"] for p in parts) - killed_s
    return {
        "total_s": total_s,
        "own_s": total_s - fresh["context_s"] - forming_s,
        "abort_s": max(p["freed_s"] for p in survivors) - killed_s,
        "context_s": fresh["context_s"],
        "nccl_init_s": forming_s,
    }


def _rank(rank: int, world_size: int, port: int, generation: int) -> None:
    """One rank; a survivor is told to abort while it steps."""
    import threading

    from elastic.worker.comm.group import Group

    def listen() -> None:
        sys.stdin.readline()
        told.set()
        group.abort("a rank died")

    print("parked", flush=True)
    sys.stdin.readline()
    times: dict[str, float] = {}
    begun_s = time.monotonic()
    values = torch.ones(1 << 16, device="cuda")
    torch.cuda.synchronize()
    times["context_s"] = time.monotonic() - begun_s
    while True:
        told = threading.Event()
        group = Group(
            backend="nccl", rank=rank, world_size=world_size, store_host="127.0.0.1", store_port=port,
            generation=generation,
            device=torch.device("cuda", 0), form_timeout_s=DEADLINE_S, timeout_s=DEADLINE_S,
        )  # fmt: skip
        group._arrive(lambda: False)
        times["began_forming_s"] = time.monotonic()
        group._init()
        times["formed_s"] = time.monotonic()
        dist.all_reduce(values)
        torch.cuda.synchronize()
        times["stepped_s"] = time.monotonic()
        threading.Thread(target=listen, daemon=True).start()
        print("stepping", json.dumps(times), flush=True)
        try:
            while not told.is_set():
                dist.all_reduce(values)
                torch.cuda.synchronize()
        except RuntimeError:
            told.wait(DEADLINE_S)
        times["freed_s"] = time.monotonic()
        group.close()
        generation += 1


def _torchrun() -> float:
    """Seconds until both ranks of a new attempt have stepped. Raises TimeoutError."""
    with tempfile.TemporaryDirectory() as folder:
        script, log = pathlib.Path(folder, "train.py"), str(pathlib.Path(folder, "log"))
        script.write_text(_TORCHRUN if not smoke.ON else _on_cpu(_TORCHRUN))
        argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3"]
        argv += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--monitor-interval=0.1", str(script), log]
        env = {**os.environ, **cards.ONE_CARD, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        agent = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0)
        try:
            before = _pids(log, [])
            time.sleep(GENERATIONS_S)
            killed_s = time.monotonic()
            os.kill(int(before["1"][0]), signal.SIGKILL)
            after = _pids(log, [row[0] for row in before.values()])
            return max(float(row[1]) for row in after.values()) - killed_s
        finally:
            agent.terminate()
            try:
                agent.wait(45.0)
            except subprocess.TimeoutExpired:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()


def _on_cpu(script: str) -> str:
    without = script.replace("torch.cuda.set_device(0)\n", "").replace("    torch.cuda.synchronize()\n", "")
    return without.replace('"nccl"', '"gloo"').replace(', device="cuda"', "")


def _pids(log: str, old: list[str]) -> dict[str, list[str]]:
    """Rank -> (pid, instant) of the first step by a process that is not in `old`, once both ranks have one."""
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        found: dict[str, list[str]] = {}
        for rank in "01":
            with contextlib.suppress(FileNotFoundError):
                rows = [line.split() for line in pathlib.Path(f"{log}.{rank}").read_text().splitlines()]
                if new := [row for row in rows if len(row) == 2 and row[0] not in old]:
                    found[rank] = new[0]
        if len(found) == 2:
            return found
        time.sleep(0.01)
    raise TimeoutError


# ── guard ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def guard(quick: bool) -> dict[str, Any]:
    """What the wait in the optimizer's hook adds to a step: with and without it in turn, in one process.

    A group of one rank: what the guard costs is that the host no longer runs ahead of the card, whatever the world.
    """
    width, layers = (1024, 8) if not smoke.ON else (32, 1)  # 100 million parameters
    layer = torch.nn.TransformerEncoderLayer(width, 16, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    samples = torch.randn(8, 1024 if not smoke.ON else 8, width, device="cuda", dtype=torch.bfloat16)
    guarded = False

    def before(*_: Any) -> None:
        if guarded:
            done = torch.cuda.Event()
            done.record()
            done.synchronize()

    optimizer.register_step_pre_hook(before)

    def step() -> None:
        optimizer.zero_grad()
        model(samples).float().square().mean().backward()
        optimizer.step()

    rounds, steps = (1, 2) if smoke.ON else (4, 10) if quick else (12, 30)
    _timed(step, steps)
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for guarded in (False, True):
            times[guarded].append(_timed(step, steps))
    plain, with_guard = statistics.median(times[False]), statistics.median(times[True])
    parameters = sum(p.numel() for p in model.parameters())
    return {"guard_parameters": parameters, "step_ms": round(plain * 1e3, 3),
            "guard_share_of_step": round(with_guard / plain - 1, 4)}  # fmt: skip


def _timed(act: Callable[[], object], times: int = 1) -> float:
    torch.cuda.synchronize()
    begun_s = time.monotonic()
    for _ in range(times):
        act()
    torch.cuda.synchronize()
    return (time.monotonic() - begun_s) / times


# ── snapshot ────────────────────────────────────────────────────────────────────────────────────────────────────────


def snapshot(quick: bool) -> dict[str, Any]:
    """A snapshot into the arena beside a copy of as many bytes into pinned memory, in turn."""
    from elastic.checkpoint.format.layout import arena_nbytes
    from elastic.checkpoint.memory.arena import Arena
    from elastic.contract.worker.tensor_table import TensorInfo

    nbytes = (16 if smoke.ON else 256 if quick else 2000) * 1_000_000
    tensors = [torch.randn(nbytes // 4 // 100, device="cuda") for _ in range(100)]
    table = tuple(TensorInfo(f"t{i}", "F32", tuple(t.shape), t.nbytes) for i, t in enumerate(tensors))
    arena = Arena.create(arena_nbytes(table))
    arena.layout(table)
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    flat = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    registered_s = _timed(lambda: arena.fill(tensors).finish())
    copies, blocked, whole = [], [], []
    for _ in range(3 if quick else 9):
        copies.append(_timed(lambda: pinned.copy_(flat, non_blocking=True)))
        torch.cuda.synchronize()
        begun_s = time.monotonic()
        fill = arena.fill(tensors)
        blocked.append(time.monotonic() - begun_s)
        fill.finish()
        whole.append(time.monotonic() - begun_s)
    arena.close()
    copy_s, whole_s = statistics.median(copies), statistics.median(whole)
    return {"snapshot_gb": nbytes / 1e9, "snapshot_blocked_ms": round(statistics.median(blocked) * 1e3, 3),
            "snapshot_over_copy": round(copy_s / whole_s, 3), "copy_gb_s": round(nbytes / copy_s / 1e9, 1),
            "first_snapshot_s": round(registered_s, 3)}  # fmt: skip


# ── broadcast ───────────────────────────────────────────────────────────────────────────────────────────────────────


def broadcast(quick: bool) -> dict[str, Any]:
    """State from one rank to another, checked slice by slice, beside the card's own copies of as many bytes.

    Both ranks are on one card and talk over loopback: a lower bound for two cards with a link between them.
    """
    nbytes = (16 if smoke.ON else 256 if quick else 2000) * 1_000_000
    source, sink = cards.run(_relay, world_size=2, timeout_s=300.0, nbytes=nbytes, rounds=3 if quick else 9)
    return {"broadcast_gb": nbytes / 1e9, "broadcast_gb_s": round(nbytes / sink["relay_s"] / 1e9, 2),
            "pinned_copy_gb_s": round(nbytes / source["pinned_s"] / 1e9, 1),
            "device_copy_gb_s": round(nbytes / source["device_s"] / 1e9, 1),
            "broadcast_over_pinned_copy": round(source["pinned_s"] / sink["relay_s"], 3)}  # fmt: skip


def _relay(rank: int, world_size: int, port: int, nbytes: int, rounds: int) -> dict[str, float]:
    from elastic.worker.comm.group import Group
    from elastic.worker.state.handover import broadcast

    tensors = [torch.randn(nbytes // 4 // 20, device="cuda") for _ in range(20)]
    found: dict[str, float] = {}
    if rank == 0:
        flat, other = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
        pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        found["pinned_s"] = min(_timed(lambda: pinned.copy_(flat, non_blocking=True)) for _ in range(rounds))
        found["device_s"] = min(_timed(lambda: other.copy_(flat)) for _ in range(rounds))
        del flat, other, pinned
    group = Group(
        backend="nccl", rank=rank, world_size=world_size, store_host="127.0.0.1", store_port=port, generation=1,
        device=torch.device("cuda", 0), form_timeout_s=DEADLINE_S, timeout_s=DEADLINE_S,
    )  # fmt: skip
    group.form()
    previous, following = rank - 1 if rank else None, rank + 1 if rank + 1 < world_size else None
    times = [_timed(lambda: broadcast.relay(tensors, previous=previous, following=following)) for _ in range(rounds)]
    group.close()
    return {**found, "relay_s": statistics.median(times)}


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "recovery": recovery, "guard": guard, "snapshot": snapshot, "broadcast": broadcast,
}  # fmt: skip


if __name__ == "__main__":
    main()
