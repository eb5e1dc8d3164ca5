"""Whether a silent worker waits for other ranks, judged by its stack. Pure.

The collectives that elastic tracks show on the beat page (`Doing.EXCHANGING`). One of the script's own does
not: then the rank that holds up the others and the ranks that wait for it look alike, silent while computing. Their
stacks differ. A rank inside a collective waits and is not the culprit; the culprit is found by the agent of its own
host. If all ranks are inside a collective (one has skipped another one), the group's own timeout ends it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/nn/parallel/distributed.py",
    "elastic/worker/comm/direct.py",
)
"""A thread that blocks in one of these files waits for other ranks. Not all of torch.distributed: checkpoint writing is
part of it, too."""

_HELPERS = "torch/distributed/utils.py"
_EXCHANGES = ("_verify_param_shape_across_processes ", "_sync_module_states ", "_sync_params_and_buffers ")
"""The functions of _HELPERS that communicate with other ranks; another copies a batch to the device, and may hang."""

_THROUGH = (
    "torch/_ops.py",
    "torch/autograd/function.py",
    "torch/utils/_contextlib.py",
    "threading.py",
    "concurrent/futures/_base.py",
)
"""Files whose functions only forward a call: the next outer frame shows which."""

_NATIVE = ("c10d::", "gloo::")

_PYTHON_FRAME = re.compile(r"\((.+\.py)(?::\d+)?\)$")
_HEADER = re.compile(r'^Thread .*?(?::\s*"(.*)")?$')
_MAIN = "MainThread"


def is_blocked_in_collective(dump: str) -> bool:
    """Whether the main thread of a process is inside a collective.

    `dump`: as py-spy writes it, innermost frame first, with or without native frames. The frames are examined from the
    innermost to the first Python frame that does not only forward a call: below that, torch's native code may wait on
    behalf of a line of the script (``work.wait()``).
    """
    for frame in _main_thread(dump):
        if any(name in frame for name in _NATIVE):
            return True
        if python := _PYTHON_FRAME.search(frame):
            path = python[1]
            if path.endswith(_HELPERS):
                return frame.startswith(_EXCHANGES)
            if not path.endswith(_THROUGH):
                return path.endswith(_COLLECTIVES)
    return False


def place_in_train(dump: str) -> str:
    """The frame of the script's `train`, with its line: where the script is, whatever it has called there. Without one,
    the whole stack of the main thread."""
    inner = ""
    for frame in _main_thread(dump):
        if frame.startswith("_train_in "):
            return inner
        inner = frame
    return "\n".join(_main_thread(dump))


def _main_thread(dump: str) -> Iterator[str]:
    """The frames of the main thread; of the first thread if none has its name."""
    threads: list[tuple[str, list[str]]] = []
    for line in dump.splitlines():
        if header := _HEADER.match(line):
            threads.append((header[1] or "", []))
        elif threads and line.startswith(" "):
            threads[-1][1].append(line.strip())
    main = next((frames for name, frames in threads if name == _MAIN), threads[0][1] if threads else [])
    yield from main
