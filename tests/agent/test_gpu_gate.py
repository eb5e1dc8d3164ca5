"""GPUs without a GPU: a replacement waits for its card, a sick card empties its node, and the self-test sees damage."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import importlib.util
import inspect
import json
import os
import selectors
import socket
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from structlog.testing import capture_logs
from support.fake_nvml import (
    FakeNvml,
    NVMLError,
    NVMLError_FunctionNotFound,
    NVMLError_GpuIsLost,
    NVMLError_NoPermission,
    NVMLError_NotSupported,
    NVMLError_ResetRequired,
)
from support.wait import eventually, holds

from elastic.agent.workers import gpu_gate, gpu_selftest, worker_env
from elastic.agent.workers.gpu_gate import Gate
from elastic.agent.workers.pool import Pool
from elastic.contract.agent_files import AgentConfig, EtcdAccess
from elastic.contract.job.spec import JobSpec
from elastic.contract.records.reasons import Code, Text, codes, reason
from elastic.contract.worker.messages import Preload
from elastic.worker.boot import fork_safety, zygote
from elasticd.machine import host
from elasticd.machine.gpus import GpuCheck, _same, self_test
from elasticd.machine.health import Health


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/nvidiactl" or exists(path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


# ── the stand-in ────────────────────────────────────────────────────────────────────────────────────────────────────


def real_nvml(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """nvidia-ml-py: installed, or as `make gpu-bundle` fetched it. To import it needs no driver."""
    bundled = Path(__file__).parents[2] / ".wheels" / f"cp{sys.version_info[0]}{sys.version_info[1]}" / "pynvml.py"
    if importlib.util.find_spec("pynvml"):
        return importlib.import_module("pynvml")
    if not bundled.exists():
        pytest.skip("needs nvidia-ml-py: pip install nvidia-ml-py, or make gpu-bundle")
    spec = importlib.util.spec_from_file_location("real_pynvml", bundled)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "real_pynvml", module)  # it looks itself up there
    spec.loader.exec_module(module)
    return module


def test_the_stand_in_has_the_real_ones_names_numbers_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    real, fake = real_nvml(monkeypatch), FakeNvml()
    names = [name for name in vars(FakeNvml) if name.lower().startswith("nvml")]
    assert len(names) > 20
    for name in names:
        mine, theirs = getattr(fake, name), getattr(real, name)
        if isinstance(mine, int):
            assert mine == theirs, name
        elif isinstance(mine, type):
            assert issubclass(theirs, real.NVMLError), name
        else:
            assert len(inspect.signature(mine).parameters) == len(inspect.signature(theirs).parameters), name
    assert str(real.NVMLError_ResetRequired()) == str(NVMLError_ResetRequired())
    fields = {name for name, _ in real.c_nvmlEventData_t._fields_}
    assert {"device", "eventType", "eventData"} <= fields


def test_nvml_handles_of_the_same_device_compare_equal() -> None:
    """The real handles are pointers, a new one with each event."""
    struct = type("Device", (ctypes.Structure,), {})
    pointer = ctypes.POINTER(struct)
    first, again, other = (ctypes.cast(address, pointer) for address in (0x1000, 0x1000, 0x2000))
    assert _same(first, again)
    assert not _same(first, other)


# ── the gate ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_gpu_gate_stays_closed_until_the_dead_process_has_left_the_gpu(nvml: FakeNvml) -> None:
    nvml.processes = {3: {700: 5 << 30}}
    gate = gpu_gate.gate((2, 3), 10.0)
    gate.died(700, now_s=100.0)
    assert not gate.closed(0, 100.0)  # the other slot's card is free
    assert gate.closed(1, 100.0)
    assert gate.closed(1, 105.0)
    nvml.processes = {3: {}}
    assert not gate.closed(1, 105.1)


def test_a_zombie_is_waited_for_to_the_deadline_and_reported_once(nvml: FakeNvml) -> None:
    nvml.processes = {0: {700: 5 << 30}}
    gate = gpu_gate.gate((0,), 10.0)
    gate.died(700, now_s=100.0)
    with capture_logs() as logs:
        assert gate.closed(0, 109.9)
        assert not gate.closed(0, 110.0)
        assert not gate.closed(0, 111.0)
    assert logs == [
        {"event": "gpu.zombie", "gpu": 0, "pid": 700, "held_mb": 5120, "dead_for_s": 10.0, "log_level": "warning"}
    ]


def test_gpu_gate_ignores_living_processes_on_the_gpu(nvml: FakeNvml) -> None:
    nvml.processes = {0: {1: 1 << 30}}
    gate = gpu_gate.gate((0,), 10.0)
    gate.died(700, now_s=100.0)
    assert not gate.closed(0, 100.0)
    assert not gate.closed(-1, 100.0)  # a standby is on no card yet


def test_a_number_that_the_kernel_gives_anew_is_no_zombie(nvml: FakeNvml) -> None:
    gate = gpu_gate.gate((0,), 10.0)
    gate.died(700, now_s=100.0)
    assert not gate.closed(0, 110.0)
    nvml.processes = {0: {700: 5 << 30}}  # by now of another job
    with capture_logs() as logs:
        assert not gate.closed(0, 111.0)
    assert logs == []


def test_a_card_that_gives_no_sizes_or_is_lost(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.processes = {0: {700: None}}
    gate = gpu_gate.gate((0,), 10.0)
    gate.died(700, now_s=100.0)
    assert gate.closed(0, 100.0)

    def lost(index: int) -> int:
        raise NVMLError_GpuIsLost

    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByIndex", lost)
    assert not gate.closed(0, 101.0)


def test_without_nvml_there_is_no_gate(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    gate = gpu_gate.gate((0,), 10.0)
    gate.died(700, now_s=100.0)
    assert not gate.closed(0, 100.0)
    assert nvml.open == 0


def test_without_gpus_nvml_is_not_even_asked(nvml: FakeNvml) -> None:
    gpu_gate.gate((), 10.0)
    assert nvml.open == 0


@pytest.fixture
def pool() -> Iterator[tuple[Pool, socket.socket]]:
    """A pool whose zygote is up, and the zygote's end of the line."""
    with selectors.DefaultSelector() as selector:
        pool = Pool(selector, sys.executable, Preload(), 1.0)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pool._zygote._control, pool._zygote.up = ours, True
        theirs.setblocking(False)
        yield pool, theirs
        for order, descriptors in pool._waiting.values():
            del order
            for descriptor in descriptors:
                os.close(descriptor)
        for process in pool.processes.values():
            process.channel.close()
        ours.close()
        theirs.close()


def ordered(line: socket.socket) -> bool:
    try:
        return bool(line.recv(65536))
    except BlockingIOError:
        return False


def test_the_pool_orders_the_fork_when_the_card_is_free(pool: tuple[Pool, socket.socket], tmp_path: Path) -> None:
    workers, line = pool
    held = {0: {700: 1 << 30}}
    workers.gate = Gate((0,), 60.0, lambda gpu: held[gpu])
    workers.gate.died(700, workers_now())
    workers.fork(1, 0, {}, ("x.py",), "/", str(tmp_path / "log"))
    workers.tick()
    assert not ordered(line)
    held[0] = {}
    workers.tick()
    assert ordered(line)
    workers.tick()
    assert not ordered(line)  # once


def test_a_worker_without_a_card_to_wait_for_is_ordered_at_once(
    pool: tuple[Pool, socket.socket], tmp_path: Path
) -> None:
    workers, line = pool
    workers.fork(1, 0, {}, ("x.py",), "/", str(tmp_path / "log"))
    assert ordered(line)


def workers_now() -> float:
    import time

    return time.monotonic()


# ── which cards a job sees ──────────────────────────────────────────────────────────────────────────────────────────


def config(cards: tuple[int, ...]) -> AgentConfig:
    return AgentConfig(
        cluster="c", node="n", job="j", address="127.0.0.1", slots=2, gpus=cards, etcd=EtcdAccess(endpoints=()),
        agent_dir="/a", logs_dir="/l",
    )  # fmt: skip


def test_a_job_sees_its_own_cards_numbered_as_nvml_does() -> None:
    env = worker_env.base(config((2, 3)), JobSpec(name="j", script="x.py"), {})
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"  # CUDA's own order is by speed
    assert env["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in worker_env.base(config(()), JobSpec(name="j", script="x.py"), {})


# ── health ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def health(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuCheck]:
    monkeypatch.setattr("elasticd.machine.gpus.LOOK_EVERY_S", 0.05)
    health = GpuCheck((0, 1), structlog.get_logger(), self_test=False)
    with looked_at(health):
        yield health
    assert nvml.open == 0


@contextlib.contextmanager
def looked_at(check: GpuCheck) -> Iterator[None]:
    """As the daemon does it: again and again, in a thread of its own."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(check.every_s):
            check.look()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(60.0)
        assert not thread.is_alive()
        check._steps.close()


def all_looks(check: GpuCheck) -> Text:
    """Its answer once it does not change any more."""
    for _ in check._steps:
        pass
    return check.look()


@pytest.mark.parametrize(("xid", "says"), [(79, "XID 79, fallen off the bus"), (48, "XID 48, uncorrectable")])
def test_an_xid_of_the_card_makes_the_node_sick(nvml: FakeNvml, health: GpuCheck, xid: int, says: str) -> None:
    assert health.reason == ""
    nvml.happens(1, xid)
    assert eventually(lambda: health.reason, 5.0).startswith(f"GPU 1: {says}")
    assert health.leave


def test_a_programs_own_xid_does_not(nvml: FakeNvml, health: GpuCheck) -> None:
    nvml.happens(0, 31)
    eventually(nvml.events.empty, 5.0)
    holds(lambda: not health.reason, 0.1)


def test_uncorrectable_errors_make_the_node_sick(nvml: FakeNvml, health: GpuCheck) -> None:
    holds(lambda: not health.reason, 0.1)
    nvml.uncorrectable = 2
    assert eventually(lambda: health.reason, 5.0).startswith("GPU 0: 2 uncorrectable memory errors")


def test_a_row_that_waits_to_be_remapped_makes_the_node_sick(nvml: FakeNvml, health: GpuCheck) -> None:
    nvml.remapped = (0, 1, 1, 0)
    assert eventually(lambda: health.reason, 5.0) == "GPU 0: a bad row of memory waits to be remapped: reset it"


def test_a_card_off_the_bus_makes_the_node_sick(nvml: FakeNvml, health: GpuCheck) -> None:
    nvml.uncorrectable = NVMLError_GpuIsLost
    assert eventually(lambda: health.reason, 5.0) == "GPU 0: fallen off the bus"


def test_gpu_health_reports_a_gpu_that_requires_reset(nvml: FakeNvml, health: GpuCheck) -> None:
    """As after an uncontained memory error: whatever is asked, that is the answer."""
    nvml.throttle = NVMLError_ResetRequired
    assert eventually(lambda: health.reason, 5.0) == "GPU 0: NVML: GPU requires restart"


@pytest.mark.parametrize("no", [NVMLError_NotSupported, NVMLError_FunctionNotFound, NVMLError_NoPermission])
def test_a_card_without_counters_or_events_is_well(
    no: type[NVMLError], nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old card, a driver older than nvidia-ml-py, a container."""
    nvml.uncorrectable = nvml.remapped = nvml.throttle = no
    nvml.hears = no
    monkeypatch.setattr("elasticd.machine.gpus.LOOK_EVERY_S", 0.01)
    health = GpuCheck((0,), structlog.get_logger(), self_test=False)
    with looked_at(health):
        holds(lambda: not health.reason, 0.1)


def test_gpu_health_logs_begin_and_end_of_throttling(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    health = GpuCheck((0,), structlog.get_logger(), self_test=False)
    with capture_logs() as logs:
        for reasons in (0, 0x40, 0x40, 0x4, 0x80):
            nvml.throttle = reasons
            health._look(nvml, {0: 0})
    assert [entry["event"] for entry in logs] == ["gpu.throttled", "gpu.full_speed", "gpu.throttled"]


def test_a_node_takes_no_work_before_its_self_test_is_passed(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    health = GpuCheck((0,), structlog.get_logger(), self_test=True)
    assert health.look() == reason(Code.SELF_TEST)
    assert not health.leave  # what runs here stays
    monkeypatch.setattr("elasticd.machine.gpus.self_test", lambda: "cuda:0: 3 of 8 words came back changed from a copy")
    assert all_looks(health) == "cuda:0: 3 of 8 words came back changed from a copy"
    assert health.leave
    assert nvml.open == 0


def test_a_self_test_that_passes_does_not_clear_another_problem_of_the_node(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = "interface eth9 does not exist"
    monkeypatch.setattr("elasticd.machine.gpus.self_test", lambda: "")
    health = GpuCheck((0,), structlog.get_logger(), self_test=True, problem=problem)
    assert all_looks(health) == problem
    assert health.leave


def test_a_self_test_that_cannot_be_started_is_tried_again(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """For want of memory or processes: it ended the daemon, and is no reason for what runs here to leave."""
    health, seen = GpuCheck((0,), structlog.get_logger(), self_test=True), []

    def short() -> str:
        seen.append((health.reason, health.leave))
        if len(seen) < 3:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return "cuda:0: a bad copy"

    monkeypatch.setattr("elasticd.machine.gpus.self_test", short)
    assert all_looks(health) == "cuda:0: a bad copy"
    assert [leave for _, leave in seen] == [False, False, False]
    assert codes(seen[2][0]) == {Code.NOT_TESTED}
    assert health.leave


def test_a_node_without_gpus_is_well_at_once() -> None:
    health = GpuCheck((), structlog.get_logger(), self_test=True)
    assert all_looks(health) == ""


def test_gpus_that_cannot_be_seen_keep_the_node_out_of_work(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a machine with GPUs would train on its CPU, and nothing would say so."""
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    found = host.gpus()
    assert found.indices == ()
    assert "nvidia-ml-py is missing: pip install nvidia-ml-py" in found.problem
    with capture_logs() as logs:
        health = GpuCheck(found.indices, structlog.get_logger(), self_test=True, problem=found.problem)
        assert Health({"gpus": health}, structlog.get_logger()).reason == found.problem
    assert all_looks(health) == found.problem
    assert health.leave
    assert [(entry["event"], entry["why"]) for entry in logs] == [("node.health", found.problem)]
    assert host.gpus("none") == host.Gpus()


@pytest.mark.parametrize(
    ("given", "found"),
    [("1", (1,)), ("1,0", (1, 0)), ("GPU-b0", (1,)), ("", ()), ("-1", ()), ("0,-1,1", (0,)), (" 1 , 1 ", (1,))],
)
def test_gpus_that_elasticd_was_not_given_are_left_alone(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, given: str, found: tuple[int, ...]
) -> None:
    """As Slurm does it without a cgroup: the others are in use by other programs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert host.gpus() == host.Gpus(found)


@pytest.mark.parametrize("given", ["2", "MIG-1", "GPU-", "0,x"])
def test_a_gpu_that_is_named_and_not_there_keeps_the_node_out_of_work(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert "is no GPU of this machine" in host.gpus().problem
    assert host.gpus("none") == host.Gpus()


def test_a_driver_that_does_not_answer_keeps_the_node_out_of_work(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise NVMLError_GpuIsLost()

    assert host.gpus() == host.Gpus((0, 1))
    monkeypatch.setattr(nvml, "nvmlInit", refuse)
    assert "GPUs cannot be seen: NVML" in host.gpus().problem


# ── the self-test ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_good_device_passes() -> None:
    assert gpu_selftest.trouble(torch.device("cpu"), 1 << 16, 64) == ""


def test_a_flipped_bit_in_a_copy_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    good = torch.Tensor.to

    def flips(self: torch.Tensor, *args: Any) -> torch.Tensor:
        moved = good(self, *args).clone()
        moved.view(-1)[5] += 1 << 40
        return moved

    monkeypatch.setattr(torch.Tensor, "to", flips)
    assert gpu_selftest._copies("cpu", 1 << 12) == "1 of 512 words came back changed from a copy"


def test_a_wrong_sum_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    good = torch.Tensor.__matmul__

    def errs(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        product = good(self, other)
        product[7, 1] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", errs)
    assert gpu_selftest._computes("cpu", 64) == "1 of 64 rows of a matrix product are wrong"


def test_an_unsteady_device_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    good, calls = torch.Tensor.__matmul__, iter(range(100))

    def errs(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        product = good(self, other)
        product[0, 0] += next(calls) == 2
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", errs)
    assert "came out in two ways" in gpu_selftest._computes("cpu", 64)


def test_memory_that_others_have_filled_is_no_sickness(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(device: Any) -> str:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_selftest, "trouble", full)
    assert gpu_selftest.main(["cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["problem"] == ""


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ('print(\'{"tested": [], "problem": ""}\')', ""),
        ('print(\'{"problem": "cuda:1: bad"}\'); raise SystemExit(1)', "cuda:1: bad"),
        ("import os; os.abort()", "failed with code -6: no word"),
        ("raise OSError('no driver')", "failed with code 1: OSError: no driver"),
    ],
)
def test_the_daemon_takes_the_self_tests_word(script: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONFAULTHANDLER", raising=False)
    found = self_test([sys.executable, "-S", "-c", script])
    assert found.endswith(says) if says else found == ""


# ── the zygote ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_fork_safety_detects_started_cuda_by_open_files_or_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fork_safety.cuda_started()
    with monkeypatch.context() as patch:
        patch.setattr(fork_safety.sockets, "links", lambda: {3: "/dev/null", 4: "/dev/nvidia-uvm"})
        assert fork_safety.cuda_started()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert fork_safety.cuda_started()
    assert "CUDA was started in it" in fork_safety.unfit()


def test_zygote_preloads_libcuda_only_with_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def load(name: str) -> None:
        asked.append(name)
        raise OSError("no such file")

    monkeypatch.setattr("ctypes.CDLL", load)
    zygote._load_cuda_libraries({"CUDA_VISIBLE_DEVICES": "0"})
    assert asked == ["libcuda.so.1"]
    zygote._load_cuda_libraries({})
    assert len(asked) == 1
