"""`Job.broadcast` and `Job.gather`: values sent as JSON and the raw bytes of their tensors. Nothing is pickled.

Rank 0 checks the value and describes it in a header, which passes along the chain of ranks first. So the other ranks
know each tensor's type and size before they allocate it, and a value that cannot be sent raises on all ranks instead of
leaving some of them waiting. The tensors follow with a checksum per slice, as those of a State do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from elastic.checkpoint.format.dtypes import CODES, dtype_of
from elastic.checkpoint.format.json_values import decode
from elastic.contract.worker.tensor_table import Table, TensorInfo
from elastic.worker.comm import p2p
from elastic.worker.comm.in_flight import complete
from elastic.worker.link.misuse import MisuseTypeError, MisuseValueError
from elastic.worker.state.parts.json_codec import CannotEncodeError, encode

from . import broadcast

MAX_HEADER_BYTES = 64 << 20
"""Limit for everything of a value that is not a tensor. A longer list belongs in a tensor."""


class ValueHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Sent before the tensors."""

    value: Any = None
    """As `json_codec.encode` gives it."""
    table: Table = ()
    devices: tuple[str, ...] = ()
    """Device type of each tensor of the table."""
    error: str = ""
    """Why rank 0 cannot send its value."""


def pack(value: Any, device: torch.device) -> tuple[bytes, list[torch.Tensor]]:
    """(header, tensors) for `value`. Raises TypeError for a type that is not supported, ValueError for one too large.

    `device`: the device of this worker; tensors lie there or on the CPU.
    """
    named: dict[str, torch.Tensor] = {}
    try:
        encoded = encode(value, "value", named, {})
    except CannotEncodeError as error:
        raise MisuseTypeError(
            f"cannot be sent: {error.path} is {error.kind}; send None, bool, int, float, str, bytes, list, tuple, set, "
            "dict and dense tensors, and make the rest of them on each rank"
        ) from None
    except RecursionError:
        raise MisuseTypeError("cannot be sent: the value contains itself, or is nested too deeply") from None
    tensors = [tensor.detach() for tensor in named.values()]
    table = tuple(_described(name, tensor, device) for name, tensor in zip(named, tensors, strict=True))
    header = ValueHeader(value=encoded, table=table, devices=tuple(tensor.device.type for tensor in tensors))
    raw = msgspec.json.encode(header)
    if len(raw) > MAX_HEADER_BYTES:
        raise MisuseValueError(
            f"cannot be sent: it takes {len(raw) >> 20} MiB as JSON, {MAX_HEADER_BYTES >> 20} MiB at most; "
            "send long lists of numbers and long texts as tensors"
        )
    return raw, tensors


def empty(header: ValueHeader, device: torch.device) -> list[torch.Tensor]:
    """Tensors to receive into. Raises ValueError for a header whose sizes contradict each other."""
    made = []
    for info, kind in zip(header.table, header.devices, strict=True):
        dtype = dtype_of(info.dtype)
        if info.nbytes != math.prod(info.shape) * dtype.itemsize or min(info.shape, default=0) < 0:
            raise ValueError(f"cannot be sent: {info.name} of shape {list(info.shape)} takes no {info.nbytes} bytes")
        if kind not in ("cpu", device.type):
            raise ValueError(f"cannot be sent: {info.name} lies on {kind} on rank 0, and this rank uses {device.type}")
        made.append(torch.empty(info.shape, dtype=dtype, device=device if kind == device.type else kind))
    return made


def unpack(header: ValueHeader, tensors: Sequence[torch.Tensor]) -> Any:
    """The value. `tensors`: those of the header's table, in its order."""
    by_name = {info.name: tensor for info, tensor in zip(header.table, tensors, strict=True)}
    return decode(header.value, lambda name, _: by_name[name], {})


def broadcast_value(value: Any, *, rank: int, world_size: int, device: torch.device) -> Any:
    """Rank 0's `value`, over torch's default group; all ranks call it, and none returns before all have the value.

    Raises TypeError or ValueError on every rank if rank 0's value cannot be sent, broadcast.CorruptError, and what
    torch raises when the group is aborted.
    """
    following = rank + 1 if rank + 1 < world_size else None
    if rank == 0:
        try:
            raw, tensors = pack(value, device)
        except (TypeError, ValueError) as error:
            p2p.send_bytes(msgspec.json.encode(ValueHeader(error=str(error))), following)
            raise
        p2p.send_bytes(raw, following)
    else:
        raw = p2p.receive_bytes(rank - 1)
        p2p.send_bytes(raw, following)
        header = msgspec.json.decode(raw, type=ValueHeader)
        if header.error:
            raise MisuseTypeError(f"{header.error} (on rank 0)")
        tensors = empty(header, device)
        value = None
    if world_size > 1:
        if any(tensor.numel() for tensor in tensors):
            broadcast.relay(tensors, previous=rank - 1 if rank else None, following=following)
        # A rank that was lost meanwhile is noticed here by all, not only by its neighbour.
        complete(dist.barrier(async_op=True), device)
    return unpack(header, tensors) if rank else value


def gather(value: Any, *, rank: int, world_size: int, device: torch.device) -> list[Any]:
    """Every rank's `value`, by rank, over torch's default group; all ranks call it. Tensors arrive on the CPU.

    Raises TypeError or ValueError on every rank if one of them cannot send its value, and what torch raises when the
    group is aborted.
    """
    try:
        raw, tensors = pack(value, device)
    except (TypeError, ValueError) as error:
        if world_size == 1:
            raise
        raw, tensors = msgspec.json.encode(ValueHeader(error=f"{error} (on rank {rank})")), []
    mine = [torch.frombuffer(bytearray(raw), dtype=torch.uint8)]
    mine += [broadcast.byte_view(tensor.cpu().contiguous().resolve_conj().resolve_neg()) for tensor in tensors]
    if world_size == 1:  # a copy, as from several ranks: what is gathered must not follow later changes
        return [_from_bytes(msgspec.json.decode(raw, type=ValueHeader), torch.cat(mine)[len(raw) :])]
    control = p2p.control_device()
    flat = torch.cat([piece.to(control) for piece in mine])
    sizes = torch.tensor([len(raw), flat.numel()], device=control)
    everywhere = [torch.empty_like(sizes) for _ in range(world_size)]
    complete(dist.all_gather(everywhere, sizes, async_op=True), control)
    longest = max(int(numbers[1]) for numbers in everywhere)
    padded = torch.zeros(longest, dtype=torch.uint8, device=control)
    padded[: flat.numel()] = flat
    received = [torch.empty_like(padded) for _ in range(world_size)]
    complete(dist.all_gather(received, padded, async_op=True), control)
    arrived = []
    for numbers, data in zip(everywhere, received, strict=True):
        header = msgspec.json.decode(data[: int(numbers[0])].cpu().numpy().tobytes(), type=ValueHeader)
        if header.error:
            raise MisuseTypeError(header.error)
        arrived.append((header, data[int(numbers[0]) :].cpu()))
    return [_from_bytes(header, data) for header, data in arrived]


def _from_bytes(header: ValueHeader, data: torch.Tensor) -> Any:
    tensors = empty(msgspec.structs.replace(header, devices=("cpu",) * len(header.table)), torch.device("cpu"))
    start = 0
    for info, tensor in zip(header.table, tensors, strict=True):
        if tensor.numel():
            broadcast.byte_view(tensor).copy_(data[start : start + info.nbytes])
        start += info.nbytes
    return unpack(header, tensors)


def _described(name: str, tensor: torch.Tensor, device: torch.device) -> TensorInfo:
    """Raises TypeError."""
    kind = type(tensor).__name__
    if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided or kind == "DTensor":
        raise MisuseTypeError(f"cannot be sent: {name} is {kind} ({tensor.layout}); send dense tensors")
    if tensor.device.type not in ("cpu", device.type):
        raise MisuseTypeError(
            f"cannot be sent: {name} lies on {tensor.device}; move it to job.device ({device}) or the CPU"
        )
    if (code := CODES.get(tensor.dtype)) is None:
        raise MisuseTypeError(f"cannot be sent: {name} is of {tensor.dtype}; send its bytes, tensor.view(torch.uint8)")
    return TensorInfo(name, code, tuple(tensor.shape), tensor.nbytes)
