"""The arena: any tensor goes in and comes back, and only a whole one is ever taken for whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import safetensors.torch
import torch
from support.ckpt import filled, state_at, table_of
from support.fake_cuda import Device, gpu  # noqa: F401 - a fixture

from elastic.checkpoint.format.dtypes import CODES, code_of, dtype_of
from elastic.checkpoint.format.errors import ArenaError, IncompleteSnapshot
from elastic.checkpoint.format.layout import PAGE_BYTES, arena_nbytes, plan
from elastic.checkpoint.memory import fill as fill_module
from elastic.checkpoint.memory.arena import Arena, Fullness

ALL_TYPES = {str(dtype): torch.arange(7 * dtype.itemsize, dtype=torch.uint8).view(dtype) for dtype in CODES
             if dtype is not torch.bool}  # fmt: skip
ODD_ONES = {
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(3, 0, 2),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "sliced": torch.arange(100)[5:50:7],
    "expanded": torch.tensor([1.0, 2.0]).expand(5, 2),
    "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
    "parameter": torch.nn.Parameter(torch.randn(4, 4)),
    'quo"ted ünicode': torch.ones(1),
}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


@pytest.mark.parametrize("tensors", [ALL_TYPES, ODD_ONES, {}, state_at(3)], ids=["types", "odd", "none", "state"])
def test_whatever_goes_in_comes_back(tensors: dict[str, torch.Tensor]) -> None:
    with filled(tensors, 5, extra={"lr": 0.1}) as arena:
        there = Arena.from_fd(os.dup(arena.fd))
        views = there.tensors()
        assert views.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert views[name].dtype == tensor.dtype
            assert views[name].shape == tensor.shape
            assert same(views[name], tensor), name
        assert (there.header().step, there.header().generation, there.extra()) == (5, 1, {"lr": 0.1})
        del views
        there.close()


def test_arena_contents_are_readable_by_safetensors() -> None:
    tensors = ALL_TYPES | ODD_ONES
    with filled(tensors, 5) as arena:
        found = safetensors.torch.load(bytes(arena.view()))
    assert found.keys() == tensors.keys()
    for name in ("bool", "scalar", "transposed", "torch.bfloat16", "torch.float64", "torch.complex64"):
        assert same(found[name], tensors[name])
    assert torch.equal(torch.view_as_complex(found["torch.complex128"]), tensors["torch.complex128"])


def test_the_first_tensor_lies_on_a_page_and_each_on_its_own_size() -> None:
    layout = plan(table_of(ALL_TYPES | ODD_ONES))
    assert len(layout.head) % PAGE_BYTES == 0
    for info, at in zip(layout.table, layout.offsets, strict=True):
        assert at % dtype_of(info.dtype).itemsize == 0


def test_names_must_differ() -> None:
    info = table_of({"a": torch.ones(1)})[0]
    with pytest.raises(ValueError, match="differ"):
        plan((info, info))
    with pytest.raises(ValueError, match="__metadata__"):
        plan(table_of({"__metadata__": torch.ones(1)}))


def test_quantized_tensors_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="qint8 cannot be checkpointed"):
        code_of(torch.qint8)


def test_arena_is_whole_only_from_seal_to_the_next_layout() -> None:
    tensors = {"a": torch.ones(5)}
    arena = Arena.create(arena_nbytes(table_of(tensors)))
    assert arena.header().state is Fullness.EMPTY
    with pytest.raises(IncompleteSnapshot, match="empty"):
        arena.view()
    arena.layout(table_of(tensors))
    assert arena.header().state is Fullness.FILLING
    arena.fill(list(tensors.values()))
    assert arena.header().state is Fullness.FILLING
    arena.seal(1, 1)
    assert arena.header().complete
    arena.layout(table_of(tensors))  # as before: nothing changes
    assert arena.header().complete
    arena.fill(list(tensors.values()))
    with pytest.raises(IncompleteSnapshot, match="filling"):
        arena.tensors()
    arena.seal(2, 1)
    arena.clear()
    assert arena.header().state is Fullness.EMPTY
    with pytest.raises(ArenaError, match="seal without fill"):
        arena.seal(3, 1)
    arena.close()
    arena.close()


@pytest.mark.slow
def test_arena_stays_incomplete_when_its_filling_process_dies_and_the_other_stays_whole() -> None:
    with filled(state_at(1), 1) as old, filled(state_at(1), 1) as new:
        code = (
            "import os, signal, sys, torch\n"
            "from elastic.checkpoint.memory.arena import Arena\n"
            "arena = Arena.from_fd(int(sys.argv[1]))\n"
            "tensors = [t.clone() for t in arena.tensors().values()]\n"
            "arena.layout(arena.table())\n"
            "class Deadly(torch.Tensor):\n"
            "    def data_ptr(self): os.kill(os.getpid(), signal.SIGKILL)\n"
            "tensors[-1] = torch.zeros(tensors[-1].shape).as_subclass(Deadly)\n"
            "arena.fill(tensors)\n"
        )
        run = subprocess.run([sys.executable, "-c", code, str(new.fd)], pass_fds=(new.fd,), timeout=60, check=False)
        assert run.returncode == -signal.SIGKILL
        assert new.header().state is Fullness.FILLING
        with pytest.raises(IncompleteSnapshot):
            new.tensors()
        assert old.header().complete
        assert torch.equal(old.tensors()["weight"], state_at(1)["weight"])


def test_arena_left_half_filled_can_be_filled_by_the_next_owner() -> None:
    with filled(state_at(1), 1) as arena:
        arena.fill(list(state_at(2).values()))
        heir = Arena.from_fd(os.dup(arena.fd))
        heir.layout(table_of(state_at(3)))
        heir.fill(list(state_at(3).values()))
        heir.seal(3, 2)
        heir.close()
        assert arena.header().complete
        assert torch.equal(arena.tensors()["weight"], state_at(3)["weight"])


def test_arena_refuses_a_state_larger_than_its_size() -> None:
    arena = Arena.create(10)
    with pytest.raises(ArenaError, match=r"the state takes 13\d\d\d bytes, the arena has 4096"):
        arena.layout(table_of({"a": torch.ones(2300)}))
    arena.layout(())
    with pytest.raises(ArenaError, match="1 tensors for a table of 0"):
        arena.fill([torch.ones(1)])
    arena.close()


def test_another_kind_of_descriptor_is_refused() -> None:
    fd = os.memfd_create("other")
    short = os.dup(fd)
    with pytest.raises(ArenaError, match="is no arena"):
        Arena.from_fd(short)
    os.ftruncate(fd, 3 * PAGE_BYTES)
    other = os.dup(fd)
    with pytest.raises(ArenaError, match="is no arena of version 3"):
        Arena.from_fd(other)
    os.close(fd)
    for each in (short, other):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(each)


def test_arena_created_cold_is_warmed_by_the_process_that_opens_it() -> None:
    cold = Arena.create(64 * PAGE_BYTES, warm=False)
    assert os.fstat(cold.fd).st_blocks * 512 < 4 * PAGE_BYTES
    Arena.from_fd(os.dup(cold.fd)).close()
    assert os.fstat(cold.fd).st_blocks * 512 >= 64 * PAGE_BYTES
    cold.close()


def test_arena_cannot_be_truncated() -> None:
    with filled(state_at(1), 1) as arena, pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 0)


class FakeCuda:
    """torch.cuda as its documentation has it, as far as `fill` uses it: what is queued where, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def stream(self, name: str) -> FakeStream:
        return FakeStream(name, self.log)


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for stream {other.name}")

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self.log)
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(f"{self.name} waits for event {event.at}")

    def __enter__(self) -> None:
        self.log.append(f"enter {self.name}")

    def __exit__(self, *_: object) -> None:
        self.log.append("leave")


class FakeEvent:
    def __init__(self, log: list[str]) -> None:
        self.log, self.at = log, -1

    def record(self, stream: FakeStream) -> None:
        self.at = len(self.log)
        self.log.append(f"event on {stream.name}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for event {self.at}")


class FakeTensor:
    is_cuda = True
    _version = 0
    device = torch.device("cuda", 0)

    nbytes = 4

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def detach(self) -> FakeTensor:
        return self

    def copy_(self, source: FakeTensor, non_blocking: bool = False) -> None:
        assert non_blocking
        self.log.append(f"copy {source.name}")

    def record_stream(self, stream: FakeStream) -> None:
        self.log.append(f"{self.name} kept for {stream.name}")


def test_cuda_copies_run_beside_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    log = cuda.log
    current = cuda.stream("current")
    fakes: dict[str, Callable[..., object]] = {
        "current_stream": lambda device: current,
        "Stream": lambda device: cuda.stream("side"),
        "Event": lambda: FakeEvent(log),
        "stream": lambda stream: stream,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(fill_module, "_streams", {})
    weight, buffer = FakeTensor("weight", log), FakeTensor("buffer", log)
    place = FakeTensor("arena", log)
    copying = fill_module.fill([(place, weight), (place, buffer)], [False, True])  # type: ignore[list-item]
    assert log == [
        "side waits for stream current",  # what the optimizer has queued comes first
        "enter side",
        "copy buffer",  # the next forward may change it: it goes first,
        "buffer kept for side",
        "event on side",
        "current waits for event 4",  # and the forward waits for it alone
        "copy weight",
        "weight kept for side",
        "event on side",
        "leave",
    ]
    copying.finish()
    copying.finish()
    assert log[10:] == ["host waits for event 8"]


def test_arena_seal_requires_a_finished_copy(gpu: Device) -> None:  # noqa: F811
    tensors = {"a": torch.ones(5)}
    arena = Arena.create(arena_nbytes(table_of(tensors)))
    arena.layout(table_of(tensors))
    copying = arena.fill([gpu.tensor(tensors["a"])])
    assert not copying.done
    with pytest.raises(ArenaError, match="seal before the copy is finished"):
        arena.seal(1, 1)
    gpu.broken = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            copying.finish()
        assert not copying.done
    gpu.broken = False
    copying.finish()
    arena.seal(1, 1)
    assert torch.equal(arena.tensors()["a"], torch.ones(5))
    arena.close()
    assert gpu.pinned == {}


def test_arena_fill_finishes_the_previous_copy_before_the_next(gpu: Device) -> None:  # noqa: F811
    """Else the late bytes of one that was given up would land in the next."""
    tensors = {"a": torch.ones(5)}
    arena = Arena.create(arena_nbytes(table_of(tensors)))
    arena.layout(table_of(tensors))
    given_up = arena.fill([gpu.tensor(tensors["a"])])
    arena.fill([torch.full((5,), 2.0)])
    assert given_up.done
    arena.seal(2, 1)
    assert torch.equal(arena.tensors()["a"], torch.full((5,), 2.0))
    last = arena.fill([gpu.tensor(tensors["a"])])
    arena.close()
    assert last.done  # the memory is not taken away under it


def test_arena_fill_is_invalid_if_a_nonvolatile_tensor_changes_during_the_copy(gpu: Device) -> None:  # noqa: F811
    weight, buffer = torch.ones(5), torch.ones(5)
    table = table_of({"weight": weight, "buffer": buffer})
    arena = Arena.create(arena_nbytes(table))
    arena.layout(table)
    there = [gpu.tensor(weight), gpu.tensor(buffer)]
    for at, spoilt in ((1, False), (0, True)):
        copying = arena.fill([t.detach() for t in there], volatile={1})
        there[at].add_(1)
        copying.finish()
        there[0].add_(1)  # the optimizer, after it
        copying.finish()
        assert copying.torn is spoilt
    with pytest.raises(ArenaError, match=r"call state\.changing\(\) before"):
        arena.seal(1, 1)
    arena.close()
