"""NCCL beyond `init_process_group`: settings, known-bad versions, aborts, and the final time-out.

Statements here about ProcessGroupNCCL are taken from its source (torch 2.10 to 2.13); from torch 2.15 on it is the
backend "nccl-legacy" (`backend_name`).
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

from elastic.worker.torch_internals import torch_private

OLDEST_TORCH = (2, 10)
"""Older versions were not examined for the torch internals used here and the behaviour of its threads assumed here."""

OLDEST_NCCL = (2, 26, 2)
"""Older ones can deadlock in the abort of a communicator."""

ABORT_S = 60.0
"""Limit of the wait for NCCL's aborts. The agent replaces the worker long before (`timeouts.abort_s`)."""

ABORT_LOOK_S = 0.002
"""Interval at which the wait for aborts checks whether they have returned."""

LEGACY = "nccl-legacy"
"""torch's name of ProcessGroupNCCL where "nccl" is another class."""

ABORTABLE = ("abort", "get_error")
"""Methods that a backend must have: to be aborted from another thread, and to report that a collective timed out."""

LOOK_S = 1.0
"""Interval of the check whether a collective has exceeded the group's time-out."""

GIVE_WAY_S = 5.0
"""Extra wait of each rank, compared with the rank before it, until that time-out ends it."""

_ENDS = "makes torch end the process when a peer is lost; elastic would have kept it"
_SHARP = "lets NCCL use NVLink SHARP, under which the abort of a communicator may hang"
HARMFUL = (
    ("TORCH_NCCL_DESYNC_DEBUG", "1", _ENDS),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", _ENDS),
    ("TORCH_NCCL_BLOCKING_WAIT", "1", "turns off torch's watchdog: a collective beyond timeouts.group_s does not end"),
    ("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "1", "replaces the NCCL groups that elastic can abort by others"),
    ("TORCH_DIST_USE_NCCL2", "1", "makes NCCL groups whose watchdog ends the process when a peer is lost"),
    ("NCCL_NVLS_ENABLE", "1", _SHARP),
    ("NCCL_NVLS_ENABLE", "2", _SHARP),
)
"""Settings (name, value, effect) that cause a warning."""

QUIET_TORCH = {
    # When NCCL itself detects that a peer is gone, torch's watchdog sleeps for four times this, a minute by default,
    # holding the lock that each new collective takes: a thread that posts one is then blocked, and no abort frees it.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # Otherwise torch's monitor writes a dump and sleeps for eight minutes, and the group's destructor waits for it.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # An illegal access is reported by the main thread, by name; the watchdog would end the process by SIGABRT.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # Another torch thread, which ends the process (by SIGABRT) when the watchdog is stuck: the agent handles hangs.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # The flight recorder takes a stack trace per collective, and prints one per collective that an abort ends.
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
    # State is sent along a chain, one message after the other: the warning that sends are serialised is expected.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
"""Set unless the user has set them. torch reads them when a group is created."""

QUIET_NCCL = {
    # The RAS service opens listening sockets while the first communicator of a process is created. To free a thread
    # that is stuck there, sockets opened since are shut, after which the RAS thread would spin forever.
    "NCCL_RAS_ENABLE": "0",
    # Connect all peers while forming, which has a deadline, and not in the first collective, where a lost peer would
    # block the host inside NCCL.
    "NCCL_RUNTIME_CONNECT": "0",
    # An abort is not safe with NVLink SHARP's multicast: NVIDIA's resiliency extension requires the same setting.
    "NCCL_NVLS_ENABLE": "0",
}
"""Set unless the user has set them. NCCL reads them when the first communicator of a process is created."""


def prepare() -> None:
    """Apply the settings that aborting from another thread requires, and warn of known problems."""
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if os.environ.get(name, "0") != "0":
            warnings.warn(f"{name}={os.environ[name]} is set to 0: elastic aborts groups itself", stacklevel=2)
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ.pop("NCCL_ASYNC_ERROR_HANDLING", None)  # older name of that variable: torch warns if it is set at all
    for name, value in (QUIET_TORCH | QUIET_NCCL).items():
        os.environ.setdefault(name, value)
    for problem in problems():
        warnings.warn(problem, stacklevel=2)


def problems(nccl_version: tuple[Any, ...] | None = None, torch_version: str = torch.__version__) -> list[str]:
    """Known problems of this torch, this NCCL and this environment, as text; empty if there are none."""
    texts = []
    numbers = tuple(map(int, re.findall(r"\d+", torch_version)[:2]))
    if numbers < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        texts.append(f"torch {torch_version} is older than {oldest}: its NCCL groups may not abort as expected")
    version = nccl_version or torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if tuple(version)[:3] < OLDEST_NCCL:
        ours, least = (".".join(map(str, v)) for v in (version, OLDEST_NCCL))
        texts.append(
            f"NCCL {ours} may hang in the abort of a group (the worker is replaced then); use {least} or newer"
        )
    for name, value, effect in HARMFUL:
        if os.environ.get(name, "").upper() in (value, value.lower()):
            texts.append(f"{name}={os.environ[name]} {effect}")
    return texts


def backend_name() -> str:
    """The backend for GPU tensors, as `init_process_group` takes it.

    From torch 2.15 on "nccl" is ProcessGroupNCCL2. Its watchdog ends the process when a peer is lost and ignores the
    settings above, so the class that obeys them is requested, unless TORCH_DIST_USE_NCCL2=1 is set.
    """
    if LEGACY in dist.Backend.backend_list and os.environ.get("TORCH_DIST_USE_NCCL2") != "1":
        return LEGACY
    return "nccl"


def check_abortable() -> None:
    """Raises RuntimeError if a group has a backend that cannot be aborted: a lost peer would block this process."""
    for backend in communicators():
        missing = [name for name in ABORTABLE if not callable(getattr(backend, name, None))]
        if missing:
            raise RuntimeError(
                f"torch {torch.__version__} makes NCCL groups of {type(backend).__name__}, which has no "
                f"{' and no '.join(missing)}(): elastic could not free it from a lost peer. Unset TORCH_DIST_USE_NCCL2 "
                f"and TORCH_DISTRIBUTED_USE_TORCHCOMMS, or use a torch that docs/gpu.md lists"
            )


# ── aborting ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Aborts:
    """Aborts NCCL communicators, each in its own thread; `start` and `wait` may be called from any thread.

    All at the same time: one after the other could deadlock, since an abort waits until the kernels of its communicator
    have left the device, and these may be queued behind those of the next. A group call around them
    (``ncclGroupStart``) is bound to its thread, and torch's abort does the work in a thread of its own.

    Only the communicators are aborted: torch's registries of groups belong to the main thread (``Group.close``).
    """

    def __init__(self) -> None:
        self._begun: list[Any] = []  # kept alive: the id of a collected wrapper may be reused
        self._threads: list[threading.Thread] = []
        self.failed: list[str] = []
        """Failures, as text."""

    def start(self) -> None:
        """Begin to abort the communicators that exist and are not being aborted yet. Does not wait."""
        for backend in communicators():
            if any(backend is other for other in self._begun):
                continue
            self._begun.append(backend)
            thread = threading.Thread(target=self._abort, args=[backend], name="elastic-abort", daemon=True)
            self._threads.append(thread)
            thread.start()

    def wait(self, device: torch.device, wait_s: float = ABORT_S) -> None:
        """Wait until every abort has returned, or `device` has no kernel left to run; at most `wait_s` seconds.

        Kernels exit as soon as they see the abort flag. The rest of the abort, above all joining NCCL's proxy threads,
        which check the flag every 0.5 s, need not be waited for: it touches nothing of the next group.
        """
        deadline_s = time.monotonic() + wait_s
        idle = threading.Event()
        if any(thread.is_alive() for thread in self._threads):
            threading.Thread(target=_drain, args=[device, idle], name="elastic-drain", daemon=True).start()
        while any(thread.is_alive() for thread in self._threads) and not idle.wait(ABORT_LOOK_S):
            if time.monotonic() >= deadline_s:
                self.failed.append(f"the abort of an NCCL communicator has not returned within {wait_s:g} s")
                return

    def _abort(self, backend: Any) -> None:
        try:
            backend.abort()
        except RuntimeError as error:
            self.failed.append(f"an NCCL communicator could not be aborted: {error}")
        except AttributeError:
            self.failed.append(f"{type(backend).__name__} has no abort()")


def _drain(device: torch.device, idle: threading.Event) -> None:
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        pass  # a permanent failure of CUDA: `cuda_failure` reports it when the generation is over
    idle.set()


def communicators() -> list[Any]:
    """The GPU backends of all groups, the newest group first, of any class except gloo's."""
    if not dist.is_nccl_available():
        return []
    names = torch_private.group_names()
    backends: list[Any] = []
    for group in sorted(names, key=lambda g: names[g], reverse=True):
        try:
            backend = torch_private.gpu_backend(group)
        except RuntimeError:
            continue  # a CPU-only group
        while hasattr(backend, "wrapped_pg"):  # TORCH_DISTRIBUTED_DEBUG=DETAIL
            backend = backend.wrapped_pg
        if not torch_private.is_gloo(backend) and all(b is not backend for b in backends):
            backends.append(backend)
    return backends


# ── the final time-out ──────────────────────────────────────────────────────────────────────────────────────────────


def watch_time_out(
    over: threading.Event, timeout_s: float, generation: int, rank: int, end: Callable[[int], object] = os._exit
) -> threading.Thread:
    """End this process when a collective has exceeded the group's time-out, unless `over` is set before.

    On gloo the collective raises. On NCCL the kernel keeps waiting, and torch's watchdog, the only thread that detects
    it, is kept from ending processes. An abort would pass what the kernel had in its buffers on to the optimizer, as no
    agent has ended the generation. So the lowest rank ends its process; its agent ends the generation, and the other
    ranks abort and keep their state. This is the last safety net below all others.
    """

    def look() -> None:
        while not over.wait(LOOK_S):
            if any(map(torch_private.has_timed_out, communicators())):
                if over.wait(GIVE_WAY_S * rank):
                    return
                what = f"a collective of generation {generation} took longer than timeouts.group_s ({timeout_s:g} s)"
                print(f"{what}: this process ends, so that the other ranks are released", file=sys.stderr, flush=True)
                end(1)
                return

    thread = threading.Thread(target=look, name="elastic-time-out", daemon=True)
    thread.start()
    return thread
