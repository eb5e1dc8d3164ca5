"""Every call of the write path fails, or is the last one the process (or the machine) makes, in turn.

The file system here is a model: a file's bytes and a folder's names are safe only once they have been fsynced. After
each call several disks are possible: all that was written survived (the process died), only what was synced (the
power went), and mixtures. From each of them the newest good checkpoint must be a complete one of the right step, and
never older than the last one whose commit had returned.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from support.ckpt import blank, on, resume, save, state_at

from elastic.checkpoint.format.errors import CheckpointError
from elastic.checkpoint.format.files import Files
from elastic.checkpoint.saving.write import commit
from elastic.checkpoint.stored.retention import prune

ROOT = "/disk/checkpoints"


class Died(BaseException):
    """The process is no more: nothing in its code may run on, so this is no Exception."""


@dataclass(eq=False)
class Node:
    """A file (bytes) or a folder (names), as it is and as it is sure to be after a power cut."""

    folder: bool
    data: bytearray = field(default_factory=bytearray)
    safe_data: bytes = b""
    names: dict[str, Node] = field(default_factory=dict)
    safe_names: dict[str, Node] = field(default_factory=dict)


class Model(Files):
    """`fail_at`: the number of the call that fails with `error`. `die_at`: the call after which the process dies."""

    def __init__(self, *, fail_at: int = -1, die_at: int = -1, error: int = errno.EIO) -> None:
        self.root = Node(folder=True)
        self.root.names["disk"] = self.root.safe_names["disk"] = Node(folder=True)
        self.calls = 0
        self._fail_at, self._die_at, self._error = fail_at, die_at, error
        self._open: dict[int, Node] = {}
        self.struck = False

    def _at(self, path: str) -> Node:
        node = self.root
        for part in path.strip("/").split("/"):
            if part not in node.names:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            node = node.names[part]
        return node

    def _parent(self, path: str) -> tuple[Node, str]:
        head, _, name = path.rpartition("/")
        return self._at(head), name

    def _do(self, change: Callable[[], None], partly: Callable[[], None] | None = None) -> None:
        """One call: it fails (perhaps having done a part), or it is done, perhaps as the last one."""
        self.calls += 1
        if self.struck and self._die_at >= 0:
            raise Died  # a clean-up handler must not bring the dead back
        if self.calls == self._fail_at:
            self.struck = True
            if partly:
                partly()
            raise OSError(self._error, os.strerror(self._error))
        change()
        if self.calls == self._die_at:
            self.struck = True
            raise Died

    def mkdir(self, path: str) -> None:
        parent, name = self._parent(path)
        if name not in parent.names:
            self._do(lambda: parent.names.update({name: Node(folder=True)}))

    def create(self, path: str, *, direct: bool = False) -> int:
        parent, name = self._parent(path)
        fd = len(self._open)

        def change() -> None:
            node = parent.names.setdefault(name, Node(folder=False))
            node.data.clear()
            self._open[fd] = node

        self._do(change)
        return fd

    def reserve(self, fd: int, nbytes: int) -> None:
        node = self._open[fd]
        self._do(lambda: node.data.extend(bytes(max(0, nbytes - len(node.data)))))

    def write_at(self, fd: int, data: memoryview, at: int) -> None:
        node = self._open[fd]

        def put(raw: bytes) -> None:
            node.data.extend(bytes(max(0, at + len(raw) - len(node.data))))
            node.data[at : at + len(raw)] = raw

        self._do(lambda: put(bytes(data)), lambda: put(bytes(data[: len(data) // 2])))

    def truncate(self, fd: int, nbytes: int) -> None:
        node = self._open[fd]
        self._do(lambda: node.data.__delitem__(slice(nbytes, None)))

    def sync(self, fd: int) -> None:
        node = self._open[fd]
        self._do(lambda: setattr(node, "safe_data", bytes(node.data)))

    def close(self, fd: int) -> None:
        self._do(lambda: None)

    def rename(self, old: str, new: str) -> None:
        parent, name = self._parent(old)
        to, to_name = self._parent(new)
        node = self._at(old)
        if to_name in to.names and to.names[to_name].folder and to.names[to_name].names:
            raise OSError(errno.ENOTEMPTY, "not empty", new)

        def change() -> None:
            del parent.names[name]
            to.names[to_name] = node

        self._do(change)

    def unlink(self, path: str) -> None:
        parent, name = self._parent(path)
        self._at(path)
        self._do(lambda: parent.names.__delitem__(name))

    rmdir = unlink

    def sync_dir(self, path: str) -> None:
        node = self._at(path)
        self._do(lambda: setattr(node, "safe_names", dict(node.names)))

    def read(self, path: str) -> bytes:
        return bytes(self._at(path).data)

    def names(self, path: str) -> list[str]:
        try:
            return sorted(self._at(path).names)
        except FileNotFoundError:
            return []

    def size(self, path: str) -> int:
        return len(self._at(path).data)

    def identity(self, path: str) -> tuple[int, int] | None:
        try:
            return (0, id(self._at(path)))
        except FileNotFoundError:
            return None


Image = dict[str, bytes]


def image(node: Node, choose: Callable[[], bool], at: str = "") -> Image:
    """One disk that may be found after the crash: `choose` says per name and per file whether the new one survived."""
    found: Image = {}
    for name in sorted(node.names.keys() | node.safe_names.keys()):
        child = (node.names if choose() else node.safe_names).get(name)
        if child is None:
            continue
        if child.folder:
            found |= image(child, choose, f"{at}/{name}")
        else:
            found[f"{at}/{name}"] = bytes(child.data) if choose() else child.safe_data
    return found


def images(model: Model, mixtures: int, dice: random.Random) -> Iterator[Image]:
    yield image(model.root, lambda: True)
    yield image(model.root, lambda: False)
    for _ in range(mixtures):
        yield image(model.root, lambda: dice.random() < 0.5)


STEPS = (10, 20, 30)


def history(model: Model) -> Iterator[int]:
    """Train on, whatever becomes of each save. Yields the steps whose commit has returned."""
    for step in STEPS:
        try:
            path = save(ROOT, step, disk=model)
        except (OSError, CheckpointError):
            continue
        yield step
        with on(model):
            prune(ROOT, "job", 1, trusted=path)


def on_disk(disk: Image, folder: Path) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in disk.items():
        path = folder / name[1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return str(folder) + ROOT


def check(directory: str, least: int) -> int:
    """The newest checkpoint there is whole, undamaged, and of step `least` at least. Returns its step, 0 for none."""
    tensors = blank()
    found = resume(directory, "job", lambda info: tensors[info.name], threads=1)
    if found is None:
        assert least == 0, f"the checkpoint of step {least} is gone"
        return 0
    assert found.step >= least
    assert not found.aside, "a crash left something damaged under a checkpoint's name"
    assert found.manifest.extra == {"step": found.step, "shard": 0}
    for name, tensor in state_at(found.step).items():
        assert torch.equal(tensors[name], tensor), f"{name} is not that of step {found.step}"
    return found.step


def until_it_dies(model: Model) -> int:
    """The last step whose commit had returned."""
    committed = 0
    try:
        for step in history(model):
            committed = step
    except Died:
        return committed
    raise AssertionError("the fault did not strike")


def calls_of_a_history() -> int:
    model = Model()
    assert list(history(model)) == list(STEPS)
    return model.calls


@pytest.mark.slow
def test_the_process_or_the_machine_dies_after_any_call(tmp_path: Path) -> None:
    total, points, disks = calls_of_a_history(), 0, set()
    for die_at in range(1, total + 1):
        model = Model(die_at=die_at)
        committed = until_it_dies(model)
        for disk in images(model, 18, random.Random(die_at)):
            points += 1
            known = (committed, frozenset(disk.items()))
            if known in disks:
                continue
            disks.add(known)
            check(on_disk(disk, tmp_path / "disk"), committed)
    assert points > 2000, f"only {points} crash points"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_any_call_fails_and_training_goes_on(tmp_path: Path, error: int) -> None:
    for fail_at in range(1, calls_of_a_history() + 1):
        model = Model(fail_at=fail_at, error=error)
        committed = list(history(model))
        assert model.struck
        # A failed call costs at most the save it struck.
        assert len(committed) >= len(STEPS) - 1
        newest = check(on_disk(image(model.root, lambda: True), tmp_path / "disk"), max(committed))
        assert newest in STEPS


def test_a_commit_that_finds_it_done_has_it_on_disk(tmp_path: Path) -> None:
    """The one before was struck somewhere: perhaps where it was to make the new name durable."""
    again = 0
    for fail_at in range(1, calls_of_a_history() + 1):
        model = Model(fail_at=fail_at)
        try:
            save(ROOT, STEPS[0], disk=model)
        except OSError:
            try:
                with on(model):
                    commit(ROOT, "job", step=STEPS[0], generation=1, shards=2, world_size=2)
            except (OSError, CheckpointError):
                continue
            again += 1
            check(on_disk(image(model.root, lambda: False), tmp_path / "disk"), STEPS[0])
    assert again > 1


@pytest.mark.parametrize("call", ["sync", "sync_dir"])
def test_the_model_bites(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the fsyncs, some power cut shows a checkpoint with a hole, or loses one that was said to be safe."""
    monkeypatch.setattr(Model, call, lambda self, what: None)
    with pytest.raises((AssertionError, CheckpointError)):
        test_the_process_or_the_machine_dies_after_any_call(tmp_path)
