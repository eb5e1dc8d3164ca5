"""torch's dtypes and their codes in tensor tables and files."""

from __future__ import annotations

import torch

from .manifest import ITEM_BYTES

CODES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.complex32: "C32", torch.complex64: "C64", torch.complex128: "C128",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip

DTYPES: dict[str, torch.dtype] = {code: dtype for dtype, code in CODES.items()}

if any(ITEM_BYTES[code] != dtype.itemsize for code, dtype in DTYPES.items()):
    raise AssertionError("checkpoint.manifest.ITEM_BYTES and torch disagree about the size of a dtype")


def code_of(dtype: torch.dtype) -> str:
    """The code of a dtype. Raises TypeError for one that a checkpoint cannot hold (quantized and sub-byte dtypes)."""
    try:
        return CODES[dtype]
    except KeyError:
        raise TypeError(f"{dtype} cannot be checkpointed; known: {', '.join(sorted(map(str, CODES)))}") from None


def dtype_of(code: str) -> torch.dtype:
    """The dtype of a code. Raises TypeError for a code that this version does not support."""
    try:
        return DTYPES[code]
    except KeyError:
        raise TypeError(f"{code!r} is no tensor type this version knows") from None
