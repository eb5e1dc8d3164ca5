"""Real NCCL groups, several ranks on one GPU: aborted, and formed again in the same processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import cards
import pytest
import torch
import torch.distributed as dist

from elastic.worker.comm import nccl
from elastic.worker.comm.group import Group, GroupAborted

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(240)]

FREED_S = 2.0
"""From an abort until the main thread is free: the agent's own limit (`timeouts.abort_s`)."""


def make(rank: int, world_size: int, port: int, generation: int, **options: Any) -> Group:
    return Group(
        backend="nccl", rank=rank, world_size=world_size, store_host="127.0.0.1", store_port=port,
        generation=generation,
        device=torch.device("cuda", 0), **options,
    )  # fmt: skip


def summed(world_size: int) -> bool:
    ones = torch.ones(1 << 16, device="cuda")
    dist.all_reduce(ones)
    return bool((ones == world_size).all())


def abort_later(group: Group, after_s: float) -> list[float]:
    at_s: list[float] = []

    def act() -> None:
        at_s.append(time.monotonic())
        group.abort("a rank died")
        at_s.append(time.monotonic())

    threading.Timer(after_s, act).start()
    return at_s


# ── what two ranks on one card need ───────────────────────────────────────────────────────────────────────────


def forms(rank: int, world_size: int, port: int) -> Any:
    group = make(rank, world_size, port, 1, timeout_s=20.0, form_timeout_s=20.0)
    group.form()
    whole = summed(world_size)
    group.close()
    return whole


VARIANTS: dict[str, tuple[bool, dict[str, str]]] = {
    "nothing": (False, {}),
    "host id": (True, {}),
    "host id, lo": (True, {"NCCL_SOCKET_IFNAME": "lo"}),
    "host id, lo, no P2P": (True, {"NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1"}),
    "host id, lo, no SHM": (True, {"NCCL_SOCKET_IFNAME": "lo", "NCCL_SHM_DISABLE": "1"}),
    "no host id, all else": (False, cards.ONE_CARD),
    "all": (True, cards.ONE_CARD),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_two_ranks_on_one_card_need(variant: str, measured: dict[str, object]) -> None:
    """Only the last one must work; what the others do is written down."""
    own_hosts, env = VARIANTS[variant]
    results = cards.run(forms, world_size=2, env=env, own_hosts=own_hosts, check=False, timeout_s=60.0)
    measured["works"] = results == [True, True]
    if results != [True, True]:
        measured["says"] = str(results)[-300:]
    assert variant != "all" or results == [True, True]


@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks_on_one_card(world_size: int) -> None:
    assert cards.run(forms, world_size=world_size) == [True] * world_size


# ── aborting ──────────────────────────────────────────────────────────────────────────────────────────────────


def block_in(what: str, groups: list[Any]) -> None:
    """Until an abort: collectives in which the last rank takes no part."""
    values = torch.ones(1 << 22, device="cuda")
    match what:
        case "all_reduce":
            dist.all_reduce(values)
            torch.cuda.synchronize()
        case "item":
            dist.all_reduce(values)
            values.sum().item()
        case "host ahead":  # the thread posts one more while torch's watchdog looks at those before it
            for _ in range(200):  # the product's own guard keeps the host within a step of the card
                dist.all_reduce(values)
            torch.cuda.synchronize()
        case "several groups":  # kernels of each are in flight, and none can end
            works = []
            for number, group in enumerate([None, *groups]):
                with torch.cuda.stream(torch.cuda.Stream()):
                    ones = torch.ones(1 << (20 + number), device="cuda")
                    works.append(dist.all_reduce(ones, group=group, async_op=True))
            for work in works:
                work.wait()
            torch.cuda.synchronize()
        case "gloo":
            dist.all_reduce(torch.ones(4))


def lose_one(rank: int, world_size: int, port: int, what: str, number: int) -> Any:
    group = make(rank, world_size, port, 1)
    begun_s = time.monotonic()
    group.form()
    formed_s = time.monotonic() - begun_s
    assert summed(world_size)
    # They exist before: making one needs all ranks.
    groups = [dist.new_group(list(range(world_size))) for _ in range(2)] if what == "several groups" else []
    for other in groups:
        dist.all_reduce(torch.ones(4, device="cuda"), group=other)
    torch.cuda.synchronize()
    if rank == world_size - 1:
        time.sleep(0.3)
        os.kill(os.getpid(), number)
        time.sleep(60.0)
    at_s = abort_later(group, 1.0)
    said = ""
    try:
        block_in(what, groups)
    except RuntimeError as error:  # not every wait raises: the device may just be free again
        said = str(error)[:200]
    while not at_s:  # the peer's end was noticed before the abort
        time.sleep(0.01)
    freed_s = time.monotonic() - at_s[0]
    begun_s = time.monotonic()
    group.close()
    closed_s = time.monotonic() - begun_s
    begun_s = time.monotonic()
    group = make(rank, world_size - 1, port, 2)
    group.form()
    whole = summed(world_size - 1)
    reformed_s = time.monotonic() - begun_s
    group.close()
    return {"whole": whole, "said": said, "first_s": formed_s, "freed_s": freed_s, "abort_s": at_s[-1] - at_s[0],
            "closed_s": closed_s, "reformed_s": reformed_s}  # fmt: skip


@pytest.mark.parametrize("what", ["all_reduce", "item", "host ahead", "several groups", "gloo"])
def test_survivors_of_a_kill_form_again_in_place(what: str, measured: dict[str, object]) -> None:
    *survivors, dead = cards.run(lose_one, world_size=3, what=what, number=int(signal.SIGKILL))
    assert dead == {"died": signal.SIGKILL}
    assert all(s["whole"] for s in survivors)
    measured |= {k: round(max(s[k] for s in survivors), 3) for k in survivors[0] if k.endswith("_s")}
    assert max(s["freed_s"] + s["closed_s"] for s in survivors) < FREED_S


def test_survivors_of_a_stopped_rank_form_again_in_place(measured: dict[str, object]) -> None:
    """No socket breaks: only the abort frees them."""
    results = cards.run(lose_one, world_size=3, what="all_reduce", number=int(signal.SIGSTOP), stops=1, timeout_s=60.0)
    survivors = results[:2]
    assert all(s.get("whole") for s in survivors), survivors
    measured |= {k: round(max(s[k] for s in survivors), 3) for k in survivors[0] if k.endswith("_s")}
    assert max(s["freed_s"] + s["closed_s"] for s in survivors) < FREED_S


def left_out(rank: int, world_size: int, port: int) -> Any:
    """A bug of the script's: one rank leaves out a collective, and nobody is lost."""
    group = make(rank, world_size, port, 1, timeout_s=10.0)
    group.form()
    assert summed(world_size)
    if rank == 1:
        time.sleep(30.0)
        return "waited"
    dist.all_reduce(torch.ones(4, device="cuda"))
    torch.cuda.synchronize()
    return "summed"


def test_a_collective_beyond_the_time_out_ends_the_process() -> None:
    first, second = cards.run(left_out, world_size=2, check=False)
    assert "a collective of generation 1 took longer than timeouts.group_s (10 s)" in first["raised"]
    assert second == "waited"


def stuck_in_the_making(rank: int, world_size: int, port: int, stuck: int) -> Any:
    """The other rank's gloo stands, and it never comes to make its NCCL communicator."""
    group = make(rank, world_size, port, 1)
    if rank != stuck:
        group._arrive(lambda: False)
        dist.init_process_group(
            f"cpu:gloo,cuda:{nccl.backend_name()}", store=group._store, rank=rank, world_size=world_size
        )
        time.sleep(12.0)
        return 0.0
    at_s = abort_later(group, 8.0)
    try:
        group.form()
    except GroupAborted:
        freed_s = time.monotonic() - at_s[0]
        group.close()
        alone = make(0, 1, port, 2)
        alone.form()
        assert summed(1)
        alone.close()
        before_s = time.process_time()
        time.sleep(2.0)
        return {"freed_s": freed_s, "idle_cpu_s": time.process_time() - before_s}
    raise AssertionError("it formed without the other")


@pytest.mark.parametrize("stuck", [0, 1])
def test_a_communicator_in_the_making_can_be_let_go_of(stuck: int, measured: dict[str, object]) -> None:
    found = cards.run(stuck_in_the_making, world_size=2, stuck=stuck)[stuck]
    measured |= {name: round(value, 3) for name, value in found.items()}
    assert found["freed_s"] < FREED_S
    assert found["idle_cpu_s"] < 0.5, "a thread of NCCL's spins on a socket that was shut"


def many_rounds(rank: int, world_size: int, port: int, rounds: int) -> Any:
    seen = []
    for generation in range(rounds):
        group = make(rank, world_size, port, generation)
        group.form()
        assert summed(world_size)
        if generation % 2:
            at_s = abort_later(group, 0.0)
            while len(at_s) < 2:
                time.sleep(0.001)
        group.close()
        torch.cuda.synchronize()
        free, _ = torch.cuda.mem_get_info()
        seen.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), free >> 20))
    return {"early": seen[4], "late": seen[-1]}


def test_rounds_leak_neither_descriptors_nor_threads_nor_device_memory(measured: dict[str, object]) -> None:
    results = cards.run(many_rounds, world_size=2, rounds=30, timeout_s=200.0)
    measured["rank 0: (descriptors, threads, free MB)"] = results[0]
    for result in results:
        (fds, threads, free_mb), (late_fds, late_threads, late_free_mb) = result["early"], result["late"]
        assert late_fds <= fds + 4
        assert late_threads <= threads + 2
        assert late_free_mb >= free_mb - 64
