"""Layout of tensors in a safetensors file. No torch here: the writer process uses it too.

The file is 8 bytes of header length, a JSON header padded with blanks, then the tensors without gaps. The padding puts
the first tensor on a page boundary (for O_DIRECT and for mapping); tensors are ordered by element size, so that each
one is aligned for its type.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from elastic.contract.worker.tensor_table import Table, TensorInfo

from .manifest import ITEM_BYTES

PAGE_BYTES = 4096

BESIDE_ALIGN = 64

STORED_AS: dict[str, tuple[str, tuple[int, ...]]] = {"C32": ("F16", (2,)), "C128": ("F64", (2,)), "F8_E8M0": ("U8", ())}
"""Types that safetensors' readers lack: the code and the extra last dimension that are written instead."""


@dataclass(frozen=True, slots=True)
class Layout:
    table: Table
    """In the order of the file."""
    order: tuple[int, ...]
    """Index in the caller's table of each entry of `table`."""
    head: bytes
    """Everything before the first tensor."""
    offsets: tuple[int, ...]
    """Where each tensor begins, from the start of the file."""
    nbytes: int
    """Length of the file."""


def pad(nbytes: int) -> int:
    """Round up to the next page boundary."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def file_order(table: Sequence[TensorInfo]) -> tuple[int, ...]:
    """Indices into `table` in file order: by element size, the largest first, otherwise stable."""
    return tuple(sorted(range(len(table)), key=lambda i: -ITEM_BYTES[table[i].dtype]))


def plan(table: Table) -> Layout:
    """Lay `table` out. Raises ValueError if a name occurs twice, or is the one that safetensors reserves."""
    names = {tensor.name for tensor in table}
    if len(names) != len(table) or "__metadata__" in names:
        raise ValueError("tensor names must differ from each other and from '__metadata__'")
    order = file_order(table)
    placed = tuple(table[i] for i in order)
    ends = list(itertools.accumulate((tensor.nbytes for tensor in placed), initial=0))
    header: dict[str, object] = {}
    for tensor, (begin, end) in zip(placed, itertools.pairwise(ends), strict=True):
        code, last = STORED_AS.get(tensor.dtype, (tensor.dtype, ()))
        header[tensor.name] = {"dtype": code, "shape": (*tensor.shape, *last), "data_offsets": (begin, end)}
    text = msgspec.json.encode(header)
    text = text.ljust(pad(8 + len(text)) - 8)
    head = len(text).to_bytes(8, "little") + text
    offsets = tuple(len(head) + begin for begin in ends[:-1])
    return Layout(placed, order, head, offsets, len(head) + ends[-1])


def offsets_beside(table: Table) -> tuple[list[int], int]:
    """Offsets of in-memory-only tensors behind the file, and the end of the last: multiples of BESIDE_ALIGN."""
    offsets, end = [], 0
    for tensor in table:
        offsets.append(end)
        end += -(-tensor.nbytes // BESIDE_ALIGN) * BESIDE_ALIGN
    return offsets, end


def arena_nbytes(table: Table, beside: Table = ()) -> int:
    """Size to pass to `Arena.create` for a file of `table` with `beside` behind it."""
    return pad(plan(table).nbytes) + offsets_beside(beside)[1]
