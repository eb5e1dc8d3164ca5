"""A checkpoint's metadata: the manifest, and the note beside each shard with its tensors and the hashes of its pieces.

On disk a manifest is ``{"format": 1, "xxh3": "…", "body": {…}}``: the hash is that of the body's bytes as they are in
the file, so a manifest with one flipped bit is detected. Nothing in it is ever unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
import xxhash

from elastic.contract.worker.tensor_table import Table, TensorInfo

from .errors import Damaged

FORMAT, WITH_BOXES = 2, 3
"""Versions of the on-disk format; the second one is written where tensors are boxes of a whole. A reader that finds
another one skips the checkpoint and reports that."""

PIECE_BYTES = 16 * 1024 * 1024
"""Files are written, hashed and read in pieces of this size, each with a hash of its own."""

MANIFEST = "manifest.json"

ITEM_BYTES: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "C32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
    "C128": 16,
}  # fmt: skip
"""Bytes of one element."""

R = TypeVar("R")


digest = xxhash.xxh3_64_hexdigest


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """A shard, one rank's part: a safetensors file. Also written beside it as a note, once the file is on disk."""

    job: str = ""
    """The job that wrote the shard; empty in manifests of an earlier version. A commit refuses another job's notes."""
    file: str
    shard: int
    shards: int
    step: int
    generation: int
    nbytes: int
    data_at: int
    """Byte offset of the first tensor in the file; the tensors follow without gaps, in the order of `tensors`."""
    piece_nbytes: int = PIECE_BYTES
    xxh3: tuple[str, ...] = ()
    """xxh3-64 of each piece of the file, 16 hexadecimal digits each; the last piece may be short."""
    tensors: Table = ()
    extra: dict[str, Any] = {}
    """This rank's other state, as JSON. That of shard 0 is the job's."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    step: int
    generation: int
    """The generation in which `step` was committed. Checkpoints are ordered by (generation, step)."""
    world_size: int
    shards: tuple[Shard, ...]
    versions: dict[str, str] = {}
    created_wall_s: float = 0.0
    """For users; nothing is decided by it."""

    @property
    def extra(self) -> dict[str, Any]:
        """State of the job that is not tensors, as JSON."""
        return self.shards[0].extra

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a manifest that identifies the checkpoint: the part that `peek` reads."""

    job: str
    step: int
    generation: int


class _File(msgspec.Struct):
    format: int
    xxh3: str
    body: msgspec.Raw


_shard = msgspec.json.Decoder(Shard)
_manifest = msgspec.json.Decoder(Manifest)
_head = msgspec.json.Decoder(Head)
_file = msgspec.json.Decoder(_File)


def shard_file(shard: int, shards: int) -> str:
    return f"shard-{shard:05d}-of-{shards:05d}.safetensors"


def shard_note(shard: int, shards: int) -> str:
    return f"shard-{shard:05d}-of-{shards:05d}.json"


def encode(record: Manifest | Shard) -> bytes:
    """The bytes of a manifest's or a note's file."""
    body = msgspec.json.encode(record)
    shards = record.shards if isinstance(record, Manifest) else (record,)
    boxes = any(tensor.of for shard in shards for tensor in shard.tensors)
    return msgspec.json.encode(_File(WITH_BOXES if boxes else FORMAT, digest(body), msgspec.Raw(body))) + b"\n"


def decode(raw: bytes) -> Manifest:
    """Read a manifest and check its consistency. Raises Damaged."""
    manifest = _decoded(raw, _manifest, "manifest")
    _check(manifest)
    return manifest


def decode_note(raw: bytes) -> Shard:
    """Read the note beside a shard. Raises Damaged."""
    shard = _decoded(raw, _shard, "note")
    _check_shard(shard)
    return shard


def decode_head(raw: bytes) -> Head:
    """Read only the part that identifies the checkpoint. Raises Damaged."""
    return _decoded(raw, _head, "manifest")


def _decoded(raw: bytes, decoder: msgspec.json.Decoder[R], what: str) -> R:
    try:
        file = _file.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"{what}-damaged", f"the {what} cannot be read: {error}") from None
    if file.format not in (FORMAT, WITH_BOXES):
        raise Damaged("other-format", f"format {file.format}; this version reads {FORMAT} and {WITH_BOXES}")
    body = bytes(file.body)
    if (found := digest(body)) != file.xxh3:
        raise Damaged(f"{what}-damaged", f"the {what}'s hash is {found}, it says {file.xxh3}")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise Damaged(f"{what}-damaged", f"the {what} is not one: {error}") from None


def _check(manifest: Manifest) -> None:
    count = len(manifest.shards)
    if not count or [(s.shard, s.shards) for s in manifest.shards] != [(i, count) for i in range(count)]:
        raise Damaged("manifest-damaged", "the manifest does not list each shard once, in order")
    for shard in manifest.shards:
        if (shard.step, shard.generation) != (manifest.step, manifest.generation):
            raise Damaged("manifest-damaged", f"{shard.file} is of step {shard.step}, not {manifest.step}")
        if shard.job not in ("", manifest.job):
            raise Damaged("manifest-damaged", f"{shard.file} is of job {shard.job!r}, not {manifest.job!r}")
        _check_shard(shard)
    first = manifest.shards[0]
    if "key" not in first.extra:
        _check_boxes(tensor for shard in manifest.shards for tensor in shard.tensors)
        return
    for shard in manifest.shards:  # each has whole tensors of its own, under one name
        _check_boxes(shard.tensors, filled=False)
    if not first.extra.get("staged"):
        _check_boxes(tensor for shard in manifest.shards for tensor in shard.tensors if tensor.of or shard is first)


def _check_boxes(tensors: Iterable[TensorInfo], *, filled: bool = True) -> None:
    """A whole tensor is there once; the boxes of one do not overlap and, if it is to be `filled`, fill it. A box may be
    there more than once: each of its replicas has saved it."""
    boxes: dict[str, dict[tuple[int, ...], TensorInfo]] = {}
    for tensor in tensors:
        known = boxes.setdefault(tensor.name, {})
        if (same := known.setdefault(tensor.at, tensor)) is not tensor and (not tensor.of or same != tensor):
            raise Damaged("manifest-damaged", f"a tensor is listed twice: {tensor.name}")
        if tensor.of and not _within(tensor):
            raise Damaged("manifest-damaged", f"a box of {tensor.name} lies outside of it")
    for name, found in boxes.items():
        held = list(found.values())
        if len({(box.of, box.dtype) for box in held}) > 1:
            raise Damaged("manifest-damaged", f"the boxes of {name} are of unlike tensors")
        if filled and held[0].of and (sum(map(elements, held)) != math.prod(held[0].of) or _overlapping(held)):
            raise Damaged("manifest-damaged", f"the boxes of {name} do not fill it")


def _within(box: TensorInfo) -> bool:
    sides = zip(box.at, box.shape, box.of, strict=False)
    return len(box.at) == len(box.shape) == len(box.of) and all(0 <= a <= a + n <= of for a, n, of in sides)


def _overlapping(boxes: list[TensorInfo]) -> bool:
    """Whether any two have an element in common. In the order of their beginning, a box can only meet those that begin
    before it ends, along the first dimension."""
    boxes = sorted((box for box in boxes if elements(box)), key=lambda box: box.at)
    for number, box in enumerate(boxes):
        for other in boxes[number + 1 :]:
            if box.at and other.at[0] >= box.at[0] + box.shape[0]:
                break
            if overlap(box, other) is not None:
                return True
    return False


def elements(box: TensorInfo) -> int:
    return math.prod(box.shape)


Slices = tuple[slice, ...]


def overlap(one: TensorInfo, other: TensorInfo) -> tuple[Slices, Slices] | None:
    """What two boxes of a tensor have in common: its place in `one` and in `other`; None: nothing."""
    here, there = list[slice](), list[slice]()
    starts = one.at or (0,) * len(one.shape), other.at or (0,) * len(other.shape)
    for a, n, b, m in zip(starts[0], one.shape, starts[1], other.shape, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        here.append(slice(low - a, high - a))
        there.append(slice(low - b, high - b))
    return tuple(here), tuple(there)


def _check_shard(shard: Shard) -> None:
    bad = Damaged("manifest-damaged", f"shard {shard.shard} of {shard.shards} contradicts itself")
    if shard.file != shard_file(shard.shard, shard.shards) or shard.piece_nbytes < 1:
        raise bad
    if len(shard.xxh3) != -(-shard.nbytes // shard.piece_nbytes):
        raise bad
    if shard.data_at + sum(tensor.nbytes for tensor in shard.tensors) != shard.nbytes:
        raise bad
    for tensor in shard.tensors:
        if tensor.dtype not in ITEM_BYTES:
            raise Damaged("other-format", f"{tensor.name} is {tensor.dtype}, which this version does not know")
        if tensor.nbytes != math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] or min(tensor.shape, default=0) < 0:
            raise bad
