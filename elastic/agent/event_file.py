"""TensorBoard's event files, written without TensorBoard: scalars, and the mark that takes back later steps.

A file is a sequence of records (length, its masked CRC-32C, data, its masked CRC-32C), each an Event in protocol
buffers: github.com/tensorflow/tensorboard, compat/proto/event.proto and summary.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

VERSION = "brain.Event:2"
START = 1
"""SessionLog.START: readers drop events of this step and later ones that they have read before."""


def _table() -> tuple[int, ...]:
    rows = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        rows.append(byte)
    return tuple(rows)


_CRC = _table()


def masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return b"".join((length, struct.pack("<I", masked_crc(length)), data, struct.pack("<I", masked_crc(data))))


def header(wall_s: float) -> bytes:
    """The first record of a file."""
    return record(_event(wall_s, 0, _bytes(3, VERSION.encode())))


def restart(wall_s: float, step: int) -> bytes:
    """What was written of `step` and later ones does not count any more."""
    return record(_event(wall_s, step, _bytes(7, _varint(1 << 3) + _varint(START))))


def scalars(wall_s: float, step: int, values: Mapping[str, float]) -> bytes:
    found = (
        _bytes(1, _bytes(1, name.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", _float32(value)))
        for name, value in values.items()
    )
    return record(_event(wall_s, step, _bytes(5, b"".join(found))))


def _float32(value: float) -> float:
    """As float32; beyond its range infinite."""
    try:
        struct.pack("<f", value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return value


def _event(wall_s: float, step: int, content: bytes) -> bytes:
    return b"".join((_varint(1 << 3 | 1), struct.pack("<d", wall_s), _varint(2 << 3), _varint(step), content))


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
