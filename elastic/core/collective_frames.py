"""Whether a silent worker waits for the other ranks, as its stack shows it. Pure.

The collectives that we know of say so on the beat page (`Doing.EXCHANGING`). One of the script's own does not: then
the rank that keeps all waiting and those that wait for it look alike, silent while computing. Their stacks differ. Who
is inside a collective is a witness and not the culprit: that one is found by the agent of its own host. If all ranks
are witnesses (one has left out a collective), the group's own time-out ends it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/nn/parallel/distributed.py",
)
"""Who waits inside of these waits for other ranks. Not all of torch.distributed: to write a checkpoint is there too."""

_HELPERS = "torch/distributed/utils.py"
_EXCHANGES = ("_verify_param_shape_across_processes ", "_sync_module_states ", "_sync_params_and_buffers ")
"""Of the helpers, those that talk to other ranks; another copies a batch to the device, and may hang there."""

_THROUGH = ("torch/_ops.py", "torch/autograd/function.py", "torch/utils/_contextlib.py")
"""They only call on: the frame outside of them tells what for."""

_NATIVE = ("c10d::", "gloo::")

_PYTHON_FRAME = re.compile(r"\((.+\.py)(?::\d+)?\)$")
_HEADER = re.compile(r'^Thread .*?(?::\s*"(.*)")?$')
_MAIN = "MainThread"


def is_blocked_in_collective(dump: str) -> bool:
    """`dump`: as py-spy writes it, innermost frame first, with or without native frames.

    Looked at are the main thread's frames, from the innermost to the first one of Python: below it, torch's own code
    may wait on behalf of a line of the script (``work.wait()``).
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


def _main_thread(dump: str) -> Iterator[str]:
    """The frames of the main thread; of the first one where none has its name."""
    threads: list[tuple[str, list[str]]] = []
    for line in dump.splitlines():
        if header := _HEADER.match(line):
            threads.append((header[1] or "", []))
        elif threads and line.startswith(" "):
            threads[-1][1].append(line.strip())
    main = next((frames for name, frames in threads if name == _MAIN), threads[0][1] if threads else [])
    yield from main
