"""What a GPU does to a process: memory runs out, an error sticks, and how soon the dead leave the card."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import cards
import pytest
import torch

from elastic.worker.comm.group import cuda_failure, is_communication_error

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(180)]

GONE_S = 10.0
"""timeouts.respawn_s"""


def out_of_memory(rank: int, world_size: int, port: int) -> Any:
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        taken_for_a_lost_peer = is_communication_error(error) or bool(cuda_failure(torch.device("cuda", 0)))
    return [taken_for_a_lost_peer, float(torch.ones(10, device="cuda").sum())]


def test_running_out_of_memory_is_the_scripts_own_error_and_does_not_stick() -> None:
    assert cards.run(out_of_memory, world_size=1) == [[False, 10.0]]


def sticky(rank: int, world_size: int, port: int) -> Any:
    said = []
    values = torch.zeros(4, device="cuda")
    wild = torch.tensor([1 << 30], device="cuda")
    for _ in range(2):
        try:
            values[wild].sum().item()
            torch.cuda.synchronize()
        except RuntimeError as error:
            said.append([is_communication_error(error), str(error)[:120]])
    try:
        torch.ones(4, device="cuda").sum().item()
    except RuntimeError as error:
        said.append([is_communication_error(error), str(error)[:120]])
    return {"said": said, "for_good": cuda_failure(torch.device("cuda", 0))}


def test_an_illegal_access_sticks_so_the_process_has_to_go(measured: dict[str, object]) -> None:
    (found,) = cards.run(sticky, world_size=1)
    measured |= found
    said = found["said"]
    assert found["for_good"]
    assert len(said) == 3, "a later call of the same process worked"
    assert not any(communication for communication, _ in said)  # the worker ends by it, and is replaced


_HOLD = """
import sys, torch
held = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").fill_(1)
torch.cuda.synchronize()
if sys.argv[1] == "kernel":
    for _ in range(1000):
        torch.cuda._sleep(10**9)
print("holds", flush=True)
torch.cuda.synchronize() if sys.argv[1] == "kernel" else sys.stdin.read()
"""


@pytest.mark.parametrize("where", ["idle", "kernel"])
def test_the_dead_leave_the_card_soon(where: str, measured: dict[str, object]) -> None:
    """Also one that was killed while its kernels ran."""
    nvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=cards.environment(0)
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"holds\n"
        used = nvml.nvmlDeviceGetMemoryInfo(handle).used
        listed = [p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        begun_s = time.monotonic()
        holder.send_signal(signal.SIGKILL)
        holder.wait(30.0)
        reaped_s = time.monotonic() - begun_s
        while nvml.nvmlDeviceGetMemoryInfo(handle).used > used - (4 << 30) + (64 << 20):
            assert time.monotonic() - begun_s < GONE_S, "its memory is still held"
            time.sleep(0.005)
        measured |= {
            "nvml_lists_our_pids": holder.pid in listed,
            "reaped_s": round(reaped_s, 3),
            "memory_free_s": round(time.monotonic() - begun_s, 3),
        }
    finally:
        if holder.poll() is None:
            holder.kill()
            holder.wait(30.0)
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.close()
        holder.stdout.close()
        nvml.nvmlShutdown()


def test_the_self_test_passes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "elastic.agent.workers.gpu_selftest"],
        env=cards.environment(0), cwd=cards.ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"cuda:0"' in done.stdout


def fork_then_cuda(rank: int, world_size: int, port: int) -> Any:
    """As the zygote does: torch and the driver's library loaded, CUDA not started; the child starts it."""
    from elastic.worker.boot import fork_safety, zygote

    begun_s = time.monotonic()
    zygote._load_cuda_libraries({"CUDA_VISIBLE_DEVICES": "0"})
    loaded_s = time.monotonic() - begun_s
    zygote._warm()
    unfit = fork_safety.unfit()
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        begun_s = time.monotonic()
        ones = torch.ones(8, device="cuda", requires_grad=True)
        ones.sum().backward()
        total = float(ones.grad.sum())
        os.write(writing, f"{total} {time.monotonic() - begun_s}".encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        total, context_s = map(float, pipe.read().split())
    os.waitpid(pid, 0)
    torch.ones(8, device="cuda")
    return {"unfit": unfit, "total": total, "load_libcuda_s": loaded_s, "context_s": context_s,
            "unfit_when_started": fork_safety.unfit()}  # fmt: skip


def test_a_fork_of_a_warm_process_can_start_cuda(measured: dict[str, object]) -> None:
    pytest.importorskip("msgspec", reason="the zygote needs msgspec")
    (found,) = cards.run(fork_then_cuda, world_size=1)
    measured |= {k: round(found[k], 3) for k in ("load_libcuda_s", "context_s")}
    assert found["unfit"] == ""
    assert found["total"] == 8.0
    assert "CUDA was started in it" in found["unfit_when_started"]  # the check would have noticed


def nccl_times(rank: int, world_size: int, port: int) -> Any:
    from test_nccl_groups import make, summed

    times = {}
    begun_s = time.monotonic()
    torch.ones(1, device="cuda").item()
    times["context_s"] = time.monotonic() - begun_s
    for name in ("first_form_s", "second_form_s"):
        begun_s = time.monotonic()
        group = make(rank, world_size, port, len(times))
        group.form()
        times[name] = time.monotonic() - begun_s
        begun_s = time.monotonic()
        summed(world_size)
        times[name.replace("form", "collective")] = time.monotonic() - begun_s
        group.close()
    return times


def test_start_up_times(measured: dict[str, object]) -> None:
    for rank in cards.run(nccl_times, world_size=2):
        for name, value in rank.items():
            measured[name] = max(float(str(measured.get(name, 0))), round(value, 3))
