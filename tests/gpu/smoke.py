"""The GPU tests' own code where there is no GPU: "cuda" is the CPU, and NCCL is gloo. For typos, and nothing else.

    ELASTIC_GPU_SMOKE=1 make test-gpu        ELASTIC_GPU_SMOKE=1 python benchmarks/nccl.py --quick

What is measured and passed so says nothing of a GPU; tests that would be about nothing are skipped by name. Ranks are
forked from a process that has torch imported, which CUDA would not survive: that makes it quick enough for `make test`.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

ON = os.environ.get("ELASTIC_GPU_SMOKE") == "1"

ABOUT_NOTHING = (
    "test_running_out_of_memory",
    "test_an_illegal_access",
    "test_the_dead_leave_the_card",
    "test_the_self_test",
    "test_a_fork_of_a_warm_process",
    "test_a_communicator_in_the_making",
    "test_what_two_ranks_on_one_card_need",
    "test_a_collective_beyond_the_time_out",
)
"""Parts of names: what these test has no likeness on a CPU."""


_installed: list[bool] = []


def install() -> None:
    """Before a process uses "cuda". Main thread; again does nothing."""
    if _installed:
        return
    _installed.append(True)
    import torch
    import torch._dynamo  # an optimizer would, and it asks torch.cuda a lot
    from torch.overrides import TorchFunctionMode

    from elastic.worker.comm import group

    cpu = torch.device("cpu")

    def there(value: Any) -> Any:
        return cpu if isinstance(value, (str, torch.device)) and str(value).startswith("cuda") else value

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.device:  # to name one needs no GPU
                return func(*args, **(kwargs or {}))
            given = {key: there(value) for key, value in (kwargs or {}).items() if key != "pin_memory"}
            if func is torch.Tensor.cuda:
                return args[0]
            return func(*(there(value) for value in args), **given)

    class Nothing:
        """Event and stream."""

        def __init__(self, *_: Any, **__: Any) -> None: ...
        def record(self, *_: Any) -> None: ...
        def synchronize(self) -> None: ...
        def query(self) -> bool:
            return True

    class Generator(torch.Generator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls, there(device))

    formed = group.Group.__init__

    def form(self: Any, **given: Any) -> None:
        formed(self, **given | {"backend": "gloo", "device": cpu})

    group.Group.__init__ = form  # type: ignore[assignment]
    stubs = {
        "is_available": lambda: True, "synchronize": lambda *_: None, "set_device": lambda *_: None, "Event": Nothing,
        "Stream": Nothing, "stream": lambda _: contextlib.nullcontext(), "current_stream": Nothing,
        "_sleep": lambda _: None, "mem_get_info": lambda: (1 << 40, 1 << 40),
    }  # fmt: skip
    for name, stub in stubs.items():
        setattr(torch.cuda, name, stub)
    torch.Generator = Generator  # type: ignore[misc]
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        if hasattr(torch.optim.Optimizer, name):  # a build for CUDA would start CUDA in it
            setattr(torch.optim.Optimizer, name, lambda self: None)
    OnCpu().__enter__()
