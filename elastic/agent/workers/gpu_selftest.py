"""``python -m elastic.agent.workers.gpu_selftest [DEVICE …]``: copy to each GPU and back, compute, compare the results.

Prints one line of JSON, ``{"tested": ["cuda:0"], "problem": ""}``; exit code 1 when `problem` is not empty. If torch
sees no GPU nothing is tested, which is no problem; nor is a GPU whose memory other processes have filled. The daemon
runs this before its node takes work.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

COPY_BYTES = 256 << 20
SIZE = 2048
"""Rows and columns of the matrices. All sums in their products are below 2^24, so exact in float32 in any order."""
ROUNDS = 4


def main(argv: Sequence[str]) -> int:
    import torch

    names = list(argv) or [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    problem = ""
    for name in names:
        try:
            problem = trouble(torch.device(name))
        except torch.OutOfMemoryError:
            continue
        except RuntimeError as error:  # torch raises this for any CUDA error
            problem = str(error).partition("\n")[0]
        if problem:
            problem = f"{name}: {problem}"
            break
    print(json.dumps({"tested": names, "problem": problem}))
    return 1 if problem else 0


def trouble(device: Any, copy_bytes: int = COPY_BYTES, size: int = SIZE) -> str:
    """What is wrong with `device`; empty: no fault found."""
    return _copies(device, copy_bytes) or _computes(device, size)


def _copies(device: Any, nbytes: int) -> str:
    import torch

    pattern = torch.arange(nbytes // 8, dtype=torch.int64) * -0x61C8864680B583EB  # every bit takes both values
    there = pattern.to(device)
    back = there.to("cpu")
    if wrong := int((back != pattern).sum()):
        return f"{wrong} of {pattern.numel()} words came back changed from a copy"
    return ""


def _computes(device: Any, size: int) -> str:
    """Freivalds' check, A(Bx) against (AB)x, on integers, so that the results must be the same to the last bit."""
    import torch

    row, column = torch.arange(size).unsqueeze(1), torch.arange(size).unsqueeze(0)
    a, b = (row * 7 + column * 3) % 13 - 6, (row * 5 + column * 11) % 9 - 4
    signs = torch.arange(size) % 2 * 2 - 1
    expected = (a * (b * signs).sum(1)).sum(1)
    for dtype in (torch.float32, torch.bfloat16):
        there = a.to(device, dtype), b.to(device, dtype)
        for number in range(ROUNDS):
            # A bfloat16 product is rounded when stored, so its rounds are compared with each other only.
            product = there[0] @ there[1]
            if number == 0:
                first = product
            elif not torch.equal(product, first):
                return f"the same {dtype} matrix product came out in two ways"
        if dtype is torch.float32:
            found = (first.to("cpu").to(torch.int64) * signs).sum(1)
            if wrong := int((found != expected).sum()):
                return f"{wrong} of {size} rows of a matrix product are wrong"
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
