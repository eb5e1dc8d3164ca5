"""What NCCL needs beside `init_process_group`: settings, versions known to be bad, aborts, and the last time-out.

What is said here of ProcessGroupNCCL is what its source does (torch 2.10 to 2.13).
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d

OLDEST_TORCH = (2, 10)
"""What is used here of torch's own books, and what is said here of its threads, was not looked at in older ones."""

OLDEST_NCCL = (2, 26, 2)
"""Older ones can dead-lock in the abort of a communicator."""

ABORT_S = 60.0
"""Longest wait for NCCL's aborts. The agent replaces the worker long before (`timeouts.let_go_s`)."""

LOOK_S = 1.0
"""How often is looked whether a collective has run into the group's time-out."""

GIVE_WAY_S = 5.0
"""So much longer than the rank before it does a rank wait until it ends by that time-out."""

QUIET_TORCH = {
    # When NCCL notices by itself that a peer is gone, torch's watchdog sleeps for four times this, a minute by default,
    # with the lock in hand that each new collective takes: whoever posts one is then stuck, and no abort frees him.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    # Its monitor would then write a dump and sleep for eight minutes, and the destructor of the group waits for it.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # An illegal access is the main thread's to report, with its name; the watchdog would end the process by SIGABRT.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # State is sent along a chain, one message after the other: that they are not sent at once is no news.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
"""Set unless the user has set them. torch reads them when a group is made."""


def prepare() -> None:
    """Settings that aborting from our own thread needs, and warnings of what is known to be bad."""
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if os.environ.get(name, "0") != "0":
            warnings.warn(f"{name}={os.environ[name]} is set to 0: elastic aborts groups itself", stacklevel=2)
        os.environ[name] = "0"
    for name, value in QUIET_TORCH.items():
        os.environ.setdefault(name, value)
    for problem in problems():
        warnings.warn(problem, stacklevel=2)


def problems(nccl_version: tuple[Any, ...] | None = None, torch_version: str = torch.__version__) -> list[str]:
    """What is known to be wrong with this torch, this NCCL and this environment, in words; empty if nothing is."""
    found = []
    numbers = tuple(map(int, re.findall(r"\d+", torch_version)[:2]))
    if numbers < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        found.append(f"torch {torch_version} is older than {oldest}: its NCCL groups may not be let go of as expected")
    version = nccl_version or torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if tuple(version)[:3] < OLDEST_NCCL:
        ours, least = (".".join(map(str, v)) for v in (version, OLDEST_NCCL))
        found.append(
            f"NCCL {ours} may hang in the abort of a group (the worker is replaced then); use {least} or newer"
        )
    for name, on in (("TORCH_NCCL_DESYNC_DEBUG", "1"), ("TORCH_DISTRIBUTED_DEBUG", "DETAIL")):
        if os.environ.get(name, "").upper() == on:
            found.append(f"{name}={on} makes torch end the process when a peer is lost; elastic would have kept it")
    return found


# ── aborting ────────────────────────────────────────────────────────────────────────────────────────────────────────


def abort_all(done: list[Any], wait_s: float = ABORT_S) -> str:
    """Abort the NCCL communicators of all groups that are not in `done` yet, and add them to it.

    Returns what went wrong, or ''. Only the communicators: the books that torch keeps of its groups belong to the
    main thread (``Group.close``).

    All at the same time, each in a thread of its own. One after the other could dead-lock: an abort waits until the
    device is rid of its own kernels, which may wait behind those of the next. A group call around them
    (``ncclGroupStart``) is bound to its thread, and torch's abort does the work in a thread of its own.
    """
    found = [communicator for communicator in communicators() if all(communicator is not known for known in done)]
    done += found  # held on to: a wrapper that is collected gives its identity to another
    troubles: list[str] = []

    def abort(communicator: Any) -> None:
        try:
            communicator.abort()
        except RuntimeError as error:
            troubles.append(f"an NCCL communicator could not be aborted: {error}")

    threads = [threading.Thread(target=abort, args=[c], name="elastic-abort", daemon=True) for c in found]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + wait_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        troubles.append(f"the abort of an NCCL communicator has not returned within {wait_s:g} s")
    return "; ".join(troubles)


def communicators() -> list[Any]:
    """The NCCL back ends of all groups, the newest group first."""
    if not dist.is_nccl_available():
        return []
    names = dict(c10d._world.pg_names)  # the main thread may make another one meanwhile
    found: list[Any] = []
    for group in sorted(names, key=lambda g: names[g], reverse=True):
        try:
            backend = group._get_backend(torch.device("cuda"))
        except RuntimeError:
            continue  # a group of the CPU only
        while hasattr(backend, "wrapped_pg"):  # TORCH_DISTRIBUTED_DEBUG=DETAIL
            backend = backend.wrapped_pg
        if isinstance(backend, c10d.ProcessGroupNCCL) and all(backend is not other for other in found):
            found.append(backend)
    return found


# ── the last time-out ───────────────────────────────────────────────────────────────────────────────────────────────


def watch_time_out(
    over: threading.Event, timeout_s: float, generation: int, rank: int, end: Callable[[int], object] = os._exit
) -> threading.Thread:
    """End this process when a collective has taken longer than the group's time-out; until `over`.

    On gloo the collective raises. NCCL's kernel waits on, and the one thread that knows, torch's watchdog, is kept from
    ending processes. To abort would hand what the kernel had in its buffers to the optimizer, as no agent has called
    the generation off. So the first rank ends; its agent calls the generation off, the others are let go of and keep
    their state. It is the last net below all others.
    """

    def look() -> None:
        while not over.wait(LOOK_S):
            if any(_timed_out(communicator) for communicator in communicators()):
                if over.wait(GIVE_WAY_S * rank):
                    return
                what = f"a collective of generation {generation} took longer than timeouts.group_s ({timeout_s:g} s)"
                print(f"{what}: this process ends, so that the others are let go of", file=sys.stderr, flush=True)
                end(1)
                return

    thread = threading.Thread(target=look, name="elastic-time-out", daemon=True)
    thread.start()
    return thread


def _timed_out(communicator: Any) -> bool:
    return bool(communicator.get_error() == _distributed_c10d.ErrorType.TIMEOUT)
