"""The arena: shared memory that contains a safetensors file, allocated once and kept resident.

One memfd: a page for the header, the bytes of the file, tensors that are kept in memory only, then three JSON texts
(the table of the file's tensors, that of the others, the remaining state). The header lies in the shared memory itself,
so it outlives the process that filled it. Its state is `FILLING` from before the first byte changes until after the
last one has, so a half-filled arena is never taken for a complete one; its sequence is even only while the arena is
complete or empty, so a reader can detect a concurrent write.

No torch at import: the writer process maps arenas too.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import fcntl
import itertools
import mmap
import os
import struct
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from elastic.checkpoint.format.errors import ArenaError, IncompleteSnapshot
from elastic.checkpoint.format.layout import PAGE_BYTES, Layout, offsets_beside, pad, plan
from elastic.contract.worker.tensor_table import NO_REPLICAS, ReplicaTensors, Table, TensorInfo

from .progress import Progress, unreported

if TYPE_CHECKING:
    import torch

    from .fill import Fill
    from .memcpy import Move

_MAGIC = 0x454C41_53544943  # "ELASTIC"
_VERSION = 3
_FIELDS = 16
(_MAGIC_AT, _VERSION_AT, _CAPACITY, _SEQUENCE, _STATE, _STEP, _GENERATION, _NBYTES, _DATA_AT, _SHARD, _SHARDS, _PART,
 _PARTS, _TABLE, _EXTRA, _BESIDE) = range(_FIELDS)  # fmt: skip
_POPULATE_WRITE = 23  # madvise, Linux 5.14
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAULT_IN_BYTES = 16 * 1024 * 1024
"""Bytes populated by one call: some 10 ms, after which progress is reported."""


class Fullness(enum.IntEnum):
    EMPTY = 0
    FILLING = 1
    COMPLETE = 2


@dataclass(frozen=True, slots=True)
class Header:
    """In the order of the fields in memory."""

    sequence: int
    """Rises with each filling: two headers differ if the arena was filled again in between. Odd while it changes."""
    state: Fullness
    step: int
    generation: int
    nbytes: int
    """Length of the safetensors file in the arena."""
    data_at: int
    shard: int
    shards: int
    """The file is shard `shard` of `shards` of a checkpoint."""
    part: int
    parts: int
    """The arena is part `part` of `parts` of a snapshot that one node holds completely."""

    @property
    def complete(self) -> bool:
        return self.state is Fullness.COMPLETE


class _Keyed(msgspec.Struct):
    """Of an arena's extra, which may be large."""

    key: int = 0


class Image(msgspec.Struct, frozen=True):
    """What a complete arena holds, but for the bytes of its tensors: enough to fill another one with those."""

    fields: tuple[int, ...]
    """Of the header, from the step on."""
    tail: bytes
    """The JSON texts."""
    nbytes: int
    """Of the tensors' bytes, and what comes before them."""
    key: int
    """Of the rank whose part it is (`Arena.key`)."""


class Arena:
    """Owns `fd` and its mapping. Every process that has the descriptor may create its own Arena over it."""

    def __init__(self, fd: int, memory: mmap.mmap) -> None:
        self.fd = fd
        self._memory = memory
        self._ints = memoryview(memory)[:PAGE_BYTES].cast("q")
        self._layout: Layout | None = None
        self._key: tuple[object, ...] = ()
        self._views: list[torch.Tensor] = []
        self._beside: tuple[Table, list[int]] = (), []
        self._pinned: bool | None = None
        """None: not tried yet."""
        self._filling: Fill | None = None

    @classmethod
    def create(cls, nbytes: int, *, warm: bool = True) -> Arena:
        """Allocate room for a file of `nbytes` (see `layout.arena_nbytes`). Raises ArenaError.

        `warm` populates every page, which takes 0.3 s per gigabyte and more on fresh memory. False returns at once, for
        an owner that must not block; `from_fd` in the process that fills the arena then populates it.
        """
        capacity = pad(nbytes)
        fd = os.memfd_create("elastic-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, PAGE_BYTES + capacity)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # no process can shrink it under another's mapping
            with mmap.mmap(fd, PAGE_BYTES) as head:
                head[: 3 * 8] = struct.pack("3q", _MAGIC, _VERSION, capacity)
        except OSError as error:
            os.close(fd)
            raise ArenaError(f"no shared memory for {nbytes / 1e6:.0f} MB of state: {error.strerror}") from error
        return cls.from_fd(fd, warm=warm)

    @classmethod
    def from_fd(cls, fd: int, *, warm: bool = True) -> Arena:
        """Map a descriptor received from another process, and take ownership of it. Raises ArenaError, with the
        descriptor closed."""
        try:
            return cls(fd, cls._mapped(fd, warm))
        except ArenaError:
            os.close(fd)
            raise

    @staticmethod
    def _mapped(fd: int, warm: bool) -> mmap.mmap:
        size = os.fstat(fd).st_size
        if size < PAGE_BYTES:
            raise ArenaError(f"descriptor {fd} is no arena")
        head = memoryview(os.pread(fd, _FIELDS * 8, 0)).cast("q")
        if head[_MAGIC_AT] != _MAGIC or head[_VERSION_AT] != _VERSION or size < PAGE_BYTES + head[_CAPACITY]:
            raise ArenaError(f"descriptor {fd} is no arena of version {_VERSION}")
        try:
            memory = mmap.mmap(fd, PAGE_BYTES + head[_CAPACITY])
            if warm:
                _fault_in(memory)
        except OSError as error:
            raise ArenaError(
                f"no shared memory for {head[_CAPACITY] / 1e6:.0f} MB of state: {error.strerror}"
            ) from error
        return memory

    def touch(self, progress: Progress = unreported) -> None:
        """Populate every page, also during a `fill`: other threads run meanwhile. Raises ArenaError.

        `progress` is called with the bytes populated since the last call.
        """
        try:
            _fault_in(self._memory, progress)
        except OSError as error:
            raise ArenaError(f"no shared memory for {self.capacity / 1e6:.0f} MB of state: {error.strerror}") from error

    @property
    def capacity(self) -> int:
        """Size of the longest file that fits, in bytes."""
        return self._ints[_CAPACITY]

    def header(self) -> Header:
        """The arena's current header. Its state is `FILLING` while the arena is being written."""
        ints = self._ints
        sequence = ints[_SEQUENCE]
        header = Header(sequence, Fullness(ints[_STATE]), *ints[_STEP : _PARTS + 1].tolist())
        if sequence % 2 or ints[_SEQUENCE] != sequence:
            return Header(sequence, Fullness.FILLING, -1, -1, 0, 0, -1, 0, -1, 0)
        return header

    # ── filling ─────────────────────────────────────────────────────────────────────────────────────────────

    def layout(
        self,
        table: Table,
        *,
        shard: int = 0,
        shards: int = 1,
        beside: ReplicaTensors = NO_REPLICAS,
        part: int | None = None,
        parts: int | None = None,
    ) -> None:
        """Prepare for the tensors of `table` and of `beside`; does nothing if they are unchanged.

        The file is shard `shard` of `shards` of a checkpoint; the whole arena is `part` of `parts` of a snapshot, by
        default the same. Raises ArenaError if the arena is too small.
        """
        part, parts = shard if part is None else part, shards if parts is None else parts
        key = (table, shard, shards, beside, part, parts)
        if self._layout is not None and key == self._key:
            return
        layout = plan(table)
        offsets, end = offsets_beside(beside.table)
        if (nbytes := pad(layout.nbytes) + end if beside.table else layout.nbytes) > self.capacity:
            raise ArenaError(f"the state takes {nbytes} bytes, the arena has {self.capacity}")
        self._dirty()
        raw, raw_beside = msgspec.json.encode(layout.table), msgspec.json.encode(beside)
        data_at = len(layout.head)
        self._memory[PAGE_BYTES : PAGE_BYTES + data_at] = layout.head
        self._put(self._tail_at, raw + raw_beside)
        ints = self._ints
        ints[_TABLE], ints[_BESIDE], ints[_EXTRA] = len(raw), len(raw_beside), 0
        ints[_NBYTES], ints[_DATA_AT], ints[_SHARD], ints[_SHARDS] = layout.nbytes, data_at, shard, shards
        ints[_PART], ints[_PARTS] = part, parts
        self._layout, self._key, self._views = layout, key, []
        self._beside = beside.table, [pad(layout.nbytes) + at for at in offsets]

    def fill(
        self, tensors: Sequence[torch.Tensor], *, volatile: Collection[int] = (), progress: Progress = unreported
    ) -> Fill:
        """Copy `tensors` into the arena, in the order of the table given to `layout`, then of `beside`.

        Call `finish()` on the result before the optimizer changes the tensors, and before `seal`: CUDA tensors are
        copied on a side stream, large CPU tensors by a thread. `volatile`: indices of tensors that the next forward
        pass may change (buffers); they are copied on return, or on CUDA before any work queued afterwards. `progress`
        is called with the bytes copied since the last call, while the caller waits here or in `finish`.
        """
        from .fill import fill

        if self._layout is None:
            raise ArenaError("fill before layout")
        if not self._views:
            self._views = list(self._tensors(self._layout.table, self._layout.offsets).values())
            self._views += self._tensors(*self._beside).values()
        if len(tensors) != len(self._views):
            raise ArenaError(f"{len(tensors)} tensors for a table of {len(self._views)}")
        self._dirty()
        if device := next((tensor.device for tensor in tensors if tensor.is_cuda), None):
            self.pin(device, progress)
        order = (*self._layout.order, *range(len(self._layout.order), len(self._views)))
        pairs = [(view, tensors[i]) for view, i in zip(self._views, order, strict=True)]
        self._filling = fill(pairs, [i in volatile for i in order] if volatile else [False] * len(pairs), progress)
        return self._filling

    def pin(self, device: torch.device, progress: Progress = unreported) -> None:
        """Register the memory with CUDA, so that copies from `device` overlap with its kernels. Repeated calls do
        nothing.

        It takes a while, and the first `fill` would do it otherwise. If CUDA refuses, a warning is issued and copies
        block the calling thread.
        """
        if self._pinned is None:
            from .fill import register

            refused = register(self._address, len(self._memory), device, progress)
            self._pinned = not refused
            if refused:
                warnings.warn(
                    f"snapshots block the training step: their memory cannot be registered ({refused})", stacklevel=2
                )

    def seal(self, step: int, generation: int, extra: Mapping[str, Any] | None = None) -> None:
        """Mark the arena complete: the state after `step`, committed in `generation`. `extra`: JSON stored with it.

        Raises ArenaError if nothing was filled, the copy has not finished, or its source changed meanwhile.
        """
        if self._ints[_STATE] != Fullness.FILLING or self._layout is None:
            raise ArenaError("seal without fill")
        if self._filling is not None and not self._filling.done:
            raise ArenaError("seal before the copy is finished")
        if self._filling is not None and self._filling.torn:
            raise ArenaError("a tensor was changed while it was copied: call state.changing() before changing it")
        raw = msgspec.json.encode(extra) if extra else b""
        self._put(self._extra_at, raw)
        ints = self._ints
        ints[_EXTRA], ints[_STEP], ints[_GENERATION] = len(raw), step, generation
        ints[_STATE] = Fullness.COMPLETE
        ints[_SEQUENCE] += 1

    def clear(self) -> None:
        """Discard the snapshot, which must not be used."""
        self._dirty()
        self._ints[_STATE] = Fullness.EMPTY
        self._ints[_SEQUENCE] += 1

    # ── reading ─────────────────────────────────────────────────────────────────────────────────────────────

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of all stored tensors by name, without a copy; valid until the arena is filled again. Raises
        IncompleteSnapshot."""
        return self._tensors(*self._placed())

    def load(self, tensors: Mapping[str, torch.Tensor], progress: Progress = unreported) -> None:
        """Copy all stored tensors into `tensors`, by name. Raises IncompleteSnapshot, and KeyError for a name that
        `tensors` lacks."""
        from .memcpy import Memcpy, movable

        table, offsets = self._placed()
        start = self._address + PAGE_BYTES
        rest: list[tuple[TensorInfo, int]] = []
        moves: list[Move] = []
        for info, at in zip(table, offsets, strict=True):
            tensor = tensors[info.name]
            if movable(tensor):
                moves.append((tensor.data_ptr(), start + at, info.nbytes))
            else:
                rest.append((info, at))
        Memcpy.of(moves).finish(progress)
        for name, view in self._tensors([info for info, _ in rest], [at for _, at in rest]).items():
            tensors[name].copy_(view)
            progress(view.nbytes)

    def _placed(self) -> tuple[Table, list[int]]:
        """All stored tensors, and the offset of each. Raises IncompleteSnapshot."""
        self._must_be_complete()
        table, beside = self.table(), self.beside().table
        ends = itertools.accumulate((tensor.nbytes for tensor in table), initial=self._ints[_DATA_AT])
        behind = pad(self._ints[_NBYTES])
        offsets = [at for at, _ in zip(ends, table, strict=False)]
        return (*table, *beside), [*offsets, *(behind + at for at in offsets_beside(beside)[0])]

    def table(self) -> Table:
        """The tensors of the file, in file order."""
        return msgspec.json.decode(os.pread(self.fd, self._ints[_TABLE], self._tail_at), type=Table)

    def beside(self) -> ReplicaTensors:
        """The tensors that are kept in memory only."""
        raw = os.pread(self.fd, self._ints[_BESIDE], self._tail_at + self._ints[_TABLE])
        return msgspec.json.decode(raw, type=ReplicaTensors) if raw else NO_REPLICAS

    def _extra_json(self) -> bytes:
        return os.pread(self.fd, self._ints[_EXTRA], self._extra_at) or b"{}"

    def extra(self) -> dict[str, Any]:
        """The state other than tensors, as JSON; empty if there is none."""
        return msgspec.json.decode(self._extra_json(), type=dict[str, Any])

    def key(self) -> int:
        """Which part of a sharded state it holds (`State.shard_key`); 0: the state is not sharded."""
        return msgspec.json.decode(self._extra_json(), type=_Keyed).key

    def image(self) -> tuple[Image, memoryview]:
        """(image, the bytes of its tensors), valid until the arena is filled again. Raises IncompleteSnapshot."""
        placed = zip(*self._placed(), strict=True)
        end = max((at + info.nbytes for info, at in placed), default=self._ints[_DATA_AT])
        fields = tuple(self._ints[_STEP:_FIELDS].tolist())
        tail = os.pread(self.fd, sum(fields[_TABLE - _STEP :]), self._tail_at)
        return Image(fields, tail, end, self.key()), memoryview(self._memory)[PAGE_BYTES : PAGE_BYTES + end]

    def fill_from(self, image: Image) -> memoryview:
        """Where the bytes of `image`, of another arena, are to be written; `seal_as` ends that. Raises ArenaError if
        this arena is too small."""
        if not 0 < image.nbytes <= self.capacity:
            raise ArenaError(f"the state takes {image.nbytes} bytes, the arena has {self.capacity}")
        self._dirty()
        self._layout, self._key, self._views = None, (), []
        return memoryview(self._memory)[PAGE_BYTES : PAGE_BYTES + image.nbytes]

    def seal_as(self, image: Image) -> None:
        """All bytes were written: the arena holds the same snapshot."""
        self._put(self._tail_at, image.tail)
        for field, value in zip(range(_STEP, _FIELDS), image.fields, strict=True):
            self._ints[field] = value
        self._ints[_STATE] = Fullness.COMPLETE
        self._ints[_SEQUENCE] += 1

    def view(self, *, padded: bool = False) -> memoryview:
        """The bytes of the file; `padded` up to the next page boundary, for O_DIRECT. Raises IncompleteSnapshot."""
        nbytes = self._must_be_complete().nbytes
        return memoryview(self._memory)[PAGE_BYTES : PAGE_BYTES + (pad(nbytes) if padded else nbytes)]

    def close(self) -> None:
        """Safe to call twice. Tensors handed out keep their memory until they are freed."""
        if self.fd < 0:
            return
        with contextlib.suppress(RuntimeError):  # a device that has failed copies no more
            self._settle()
        if self._pinned:
            from .fill import unregister

            unregister(self._address)
            self._pinned = None
        os.close(self.fd)
        self.fd = -1
        self._views = []
        self._ints.release()
        with contextlib.suppress(BufferError):  # views still exist: the last of them frees the mapping
            self._memory.close()

    # ── internals ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _tail_at(self) -> int:
        return PAGE_BYTES + self._ints[_CAPACITY]

    @property
    def _extra_at(self) -> int:
        return self._tail_at + self._ints[_TABLE] + self._ints[_BESIDE]

    @property
    def _address(self) -> int:
        import torch

        return torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()

    def _settle(self) -> None:
        """Stop a copy in progress, so that it cannot overwrite the next one. Raises RuntimeError."""
        if self._filling is not None:
            self._filling.drop()
            self._filling = None

    def _dirty(self) -> None:
        self._settle()
        if self._ints[_SEQUENCE] % 2 == 0:
            self._ints[_SEQUENCE] += 1
        self._ints[_STATE] = Fullness.FILLING

    def _must_be_complete(self) -> Header:
        if not (header := self.header()).complete:
            raise IncompleteSnapshot(f"the arena is {header.state.name.lower()}")
        return header

    def _put(self, at: int, raw: bytes) -> None:
        """Write behind the mapping: the memfd grows as needed."""
        done = 0
        while done < len(raw):
            done += os.pwrite(self.fd, raw[done:], at + done)

    def _tensors(self, table: Sequence[TensorInfo], offsets: Sequence[int]) -> dict[str, torch.Tensor]:
        import torch

        from elastic.checkpoint.format.dtypes import dtype_of

        memory = torch.frombuffer(self._memory, dtype=torch.uint8)
        return {
            tensor.name: memory[PAGE_BYTES + at : PAGE_BYTES + at + tensor.nbytes]
            .view(dtype_of(tensor.dtype))
            .view(tensor.shape)
            for tensor, at in zip(table, offsets, strict=True)
        }


def _fault_in(memory: mmap.mmap, progress: Progress = unreported) -> None:
    """Populate every page now: the first touch of a fresh page costs several times a copy into a resident one."""
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    held = ctypes.c_char.from_buffer(memory)  # keeps the mapping alive
    for start in range(0, len(memory), _FAULT_IN_BYTES):
        nbytes = min(_FAULT_IN_BYTES, len(memory) - start)
        # Not mmap.madvise, which holds the GIL.
        if _madvise(ctypes.addressof(held) + start, nbytes, _POPULATE_WRITE):
            if (code := ctypes.get_errno()) != errno.EINVAL:
                raise OSError(code, os.strerror(code))
            # An older kernel: touch each page. Reading suffices, since pages of a memfd are shared.
            sum(memory[at] for at in range(start, start + nbytes, PAGE_BYTES))
        progress(nbytes)
