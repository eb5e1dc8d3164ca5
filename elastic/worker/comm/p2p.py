"""Small transfers between two ranks, over torch's default group, whichever backend it has."""

from __future__ import annotations

import torch
import torch.distributed as dist

LENGTH_BYTES = 8

FIRST_BYTES = 64 << 10
"""Each message waits for the other rank; most texts fit into a single one of this size."""


def exchange(tensor: torch.Tensor, *, source: int | None = None, target: int | None = None) -> None:
    """One small blocking transfer of a CPU tensor, over whichever backend the group has."""
    device = control_device()
    moved = tensor if tensor.device == device else tensor.to(device)
    if source is not None:
        dist.recv(moved, source)
        tensor.copy_(moved)
    if target is not None:
        dist.send(moved, target)


def send_number(number: int, rank: int) -> None:
    exchange(torch.tensor([number]), target=rank)


def receive_number(rank: int) -> int:
    number = torch.zeros(1, dtype=torch.int64)
    exchange(number, source=rank)
    return int(number)


def memory_of(data: torch.Tensor) -> memoryview:
    """Of a flat uint8 tensor on the CPU."""
    return memoryview(data.numpy())  # type: ignore[arg-type]


def send_bytes(raw: bytes, following: int | None) -> None:
    """To rank `following`, if there is one: the length and the first bytes in one message, the rest in another."""
    if following is None:
        return
    first = torch.zeros(FIRST_BYTES, dtype=torch.uint8)
    head = (len(raw).to_bytes(LENGTH_BYTES, "little") + raw)[:FIRST_BYTES]
    first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    exchange(first, target=following)
    if rest := raw[FIRST_BYTES - LENGTH_BYTES :]:
        exchange(torch.frombuffer(bytearray(rest), dtype=torch.uint8), target=following)


def receive_bytes(previous: int) -> bytes:
    """What rank `previous` has passed to `send_bytes`."""
    first = torch.zeros(FIRST_BYTES, dtype=torch.uint8)
    exchange(first, source=previous)
    head = first.numpy().tobytes()
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    raw = head[LENGTH_BYTES : LENGTH_BYTES + length]
    if length > len(raw):
        rest = torch.empty(length - len(raw), dtype=torch.uint8)
        exchange(rest, source=previous)
        raw += rest.numpy().tobytes()
    return raw


def control_device() -> torch.device:
    """Device on which small tensors must be to be sent: the CPU, unless the group has only NCCL."""
    if dist.get_backend() == "nccl" and "cpu:" not in str(dist.get_backend_config()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
