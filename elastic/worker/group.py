"""Process groups that can be let go of and formed again in the same process.

A group lives once: constructed, ``form()``, perhaps ``abort()`` from another thread, ``close()``. Everything but
``abort`` belongs to the main thread. ``abort`` frees the main thread from whatever it is blocked in: the wait for the
other ranks, the forming itself, or a collective. What then comes out of torch is no matter for the user's code;
``is_communication_error`` tells it from the user's own mistakes.
"""

from __future__ import annotations

import itertools
import math
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from . import nccl, sockets
from .errors import FormError, GroupAborted, is_communication_error

Backend = Literal["gloo", "nccl"]

SWEEP_S = 0.02
"""How often, after an abort, sockets that were opened since are cut too, until the main thread is back."""

GENTLE_LOOKS = 10
"""So many times gloo's sockets are only shut for reading."""

CONNECT_TRY_S = 2.0
"""Longest single try to reach the store."""

DIAL_LOOK_S = 0.02
"""How often the wait for the store's connection looks whether it is still wanted, and its pause between tries."""

RESOLVE_AGAIN_S = 0.5
"""Pause between look-ups of the store's host that failed."""


class Group:
    """One generation's process group, torch's default group while it lives."""

    def __init__(
        self,
        *,
        backend: Backend,
        rank: int,
        world_size: int,
        store_host: str,
        store_port: int,
        generation: int,
        device: torch.device | None = None,
        timeout_s: float = 600.0,
        form_timeout_s: float = 60.0,
    ) -> None:
        """`timeout_s`: of collectives, and of the wait for all ranks; `form_timeout_s`: to reach the store, and
        then again once all have arrived."""
        self.backend = backend
        self.rank = rank
        self.world_size = world_size
        self.generation = generation
        self.device = device or torch.device("cpu")
        self._endpoint = (store_host, store_port)
        self._timeout_s = timeout_s
        self._form_timeout_s = form_timeout_s
        self._store_addresses: set[Any] = set()
        self._store: Store | None = None
        self._lock = threading.Lock()
        self._aborted = threading.Event()
        self._closed = threading.Event()
        self._over = threading.Event()
        """Aborted or closed."""
        self._sweeper: threading.Thread | None = None
        self._aborts = nccl.Aborts()
        self._before_init: set[sockets.Sock] | None = None
        self._seen: set[sockets.Sock] = set()
        self._looks = 0
        self.why = ""

    @property
    def aborted(self) -> bool:
        return self._aborted.is_set()

    def check(self) -> None:
        """Raises GroupAborted once the group was aborted."""
        if self._aborted.is_set():
            raise GroupAborted(self.why)

    def form(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Wait for all ranks on the store, then form the group.

        Raises GroupAborted when aborted or `interrupted` meanwhile, FormError when a rank or the store is missing or
        forming takes too long, RuntimeError when torch has a default group already.
        """
        if dist.is_initialized():
            raise RuntimeError("torch.distributed has a default group already: close it first")
        try:
            self._arrive(interrupted)
            self._stop_if(interrupted)
            overdue = threading.Timer(self._form_timeout_s, self.abort, [f"forming took over {self._form_timeout_s} s"])
            overdue.daemon = True
            overdue.start()
            try:
                self._init()
            finally:
                overdue.cancel()
            self._stop_if(interrupted)
        except (GroupAborted, FormError):
            raise
        except Exception as error:
            # torch says it in many ways that a group was cut while it formed, some as errors of other kinds (KeyError):
            # only here is known that it was. What comes for another reason is raised as it is.
            if self._aborted.is_set():
                raise GroupAborted(self.why) from error
            if is_communication_error(error):
                raise FormError(f"generation {self.generation}, rank {self.rank}: {error}") from error
            raise

    def abort(self, why: str) -> None:
        """Free the main thread from this group at once. From any thread, at any moment; again does nothing."""
        with self._lock:
            if self._aborted.is_set() or self._closed.is_set():
                return
            self.why = why
            self._aborted.set()
            self._over.set()
            self._cut()
            self._sweeper = threading.Thread(target=self._sweep, name="elastic-sweep", daemon=True)
            self._sweeper.start()

    def close(self) -> None:
        """Take the group down so that the next one can form. Main thread; again does nothing.

        Whoever still holds the group (a DDP module, a traceback) keeps its threads alive, but not its connections.
        """
        with self._lock:  # a cut in progress must end first: it would hit the next group's sockets
            if self._closed.is_set():
                return
            self._closed.set()
            self._over.set()
        if self._sweeper is not None:
            self._sweeper.join()
        self._aborts.wait(self.device)
        if self._aborts.failed:
            self.why += f"; {'; '.join(self._aborts.failed)}"
        if dist.is_initialized():
            self._strike_off()
        self._store = None

    def _strike_off(self) -> None:
        """Off torch's books. Raises RuntimeError where NCCL does not let go: this process can form no other group."""
        if self.backend == "nccl" and self._aborted.is_set():
            nccl.strike_off()  # to destroy it would wait for its kernels and join its watchdog
            if self._aborts.failed:
                said = cuda_failure(self.device) or "; ".join(self._aborts.failed)
                raise RuntimeError(f"this process cannot abort its NCCL group: {said}")
            return
        try:
            dist.destroy_process_group()
        except RuntimeError:
            if not self._aborted.is_set():
                raise
            c10d._abort_process_group()  # strikes it off all the same

    # ── forming ─────────────────────────────────────────────────────────────────────────────────────────────

    def _arrive(self, interrupted: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        # The store stands before its generation is published: who cannot get there does not keep the others waiting.
        client = self._connect(min(self._timeout_s, self._form_timeout_s), interrupted)
        store = PrefixStore(f"g{self.generation}", client)
        if store.add("arrived", 1) == self.world_size:
            store.set("all", "1")
        try:
            # One long wait: abort() cuts the store's connection too.
            store.wait(["all"], timedelta(seconds=max(0.001, deadline_s - time.monotonic())))
        except dist.DistStoreError as error:
            self._stop_if(interrupted)
            arrived = store.add("arrived", 0)
            raise FormError(f"only {arrived} of {self.world_size} ranks came within {self._timeout_s:g} s") from error
        self._store = store

    def _connect(self, within_s: float, interrupted: Callable[[], bool]) -> TCPStore:
        """A client of the store. Neither a look-up of its host's name nor torch's constructor can be interrupted, so
        threads of their own ask and dial: two, since the one that dials must not have asked before (`without_dns`)."""
        host, port = self._endpoint
        deadline_s = time.monotonic() + within_s
        found: list[Any] = []
        box: list[TCPStore] = []
        self._aside("elastic-resolve", self._resolve, (deadline_s, found), deadline_s, interrupted)
        if not found:
            raise FormError(
                f"{host}, which has the store, was not found within {within_s:g} s: name or service unknown"
            )
        self._store_addresses = {address[:2] for *_, address in found}
        addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
        self._aside("elastic-dial", self._dial, (addresses, deadline_s, box), math.inf, interrupted)
        if not box:
            raise FormError(f"no store at {host}:{port} within {within_s:g} s")
        return box[0]

    def _aside(
        self,
        name: str,
        work: Callable[..., None],
        args: tuple[Any, ...],
        until_s: float,
        interrupted: Callable[[], bool],
    ) -> None:
        thread = threading.Thread(target=work, args=args, name=name, daemon=True)
        thread.start()
        while thread.is_alive() and time.monotonic() < until_s:
            thread.join(DIAL_LOOK_S)
            self._stop_if(interrupted)
        self._stop_if(interrupted)

    def _resolve(self, deadline_s: float, found: list[Any]) -> None:
        """A name server that does not answer now costs this generation at most, not the process and its state."""
        while not self._aborted.is_set() and time.monotonic() < deadline_s:
            try:
                found += socket.getaddrinfo(*self._endpoint, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError):
                self._aborted.wait(RESOLVE_AGAIN_S)
            else:
                return

    def _dial(self, addresses: list[str], deadline_s: float, box: list[TCPStore]) -> None:
        turn = itertools.cycle(addresses)
        while not self._aborted.is_set() and (left_s := deadline_s - time.monotonic()) > 0:
            try_s = timedelta(seconds=min(CONNECT_TRY_S, left_s))
            try:
                with sockets.without_dns():
                    store = TCPStore(next(turn), self._endpoint[1], None, False, timeout=try_s, wait_for_workers=False)
            except (dist.DistNetworkError, dist.DistStoreError):
                self._aborted.wait(DIAL_LOOK_S)  # not there yet, or gone again: an answer comes by the deadline
            else:
                store.set_timeout(timedelta(seconds=self._form_timeout_s))
                box.append(store)
                return

    def _init(self) -> None:
        options: dict[str, Any] = {}
        name = "gloo"
        if self.backend == "nccl":
            nccl.prepare()
            name = f"cpu:gloo,cuda:{nccl.backend_name()}"
            torch.cuda.empty_cache()  # NCCL allocates its buffers outside of torch's cache
            torch.cuda.set_device(self.device)  # what a script does without naming a device belongs there
            options["device_id"] = self.device  # forms the communicator here and not in the first collective
            self._before_init = set(sockets.tcp_sockets())
        # torch names a default group by a count that a forming which failed half-way leaves behind. The ranks meet
        # under that name, so those who were there would not meet who has come since.
        c10d._world.group_count = 0
        hook = sys.excepthook
        try:
            dist.init_process_group(
                name,
                store=self._store,
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=self._timeout_s),
                **options,
            )
        finally:
            self._before_init = None
            sys.excepthook = hook  # torch wraps it once more each time, and each adds its '[rank0]: ' to every line
        if self.backend == "nccl":
            nccl.check_abortable()
            nccl.watch_time_out(self._over, self._timeout_s, self.generation, self.rank)

    def _stop_if(self, interrupted: Callable[[], bool]) -> None:
        self.check()
        if interrupted():
            raise GroupAborted("interrupted while the group was forming")

    # ── letting go ──────────────────────────────────────────────────────────────────────────────────────────

    def _cut(self) -> None:
        """The sockets first: that takes no time. NCCL's kernels wait on the device, and only its own abort frees them.

        A communicator that is still being made cannot be aborted: torch does not know it yet. What it waits for is
        sockets, so those that were opened since forming began are cut, the listening ones too. Never gloo's listening
        one, which would end the process: so at the second look, by when gloo has put it where it can be recognised.
        """
        # Gloo's for reading only, at first. Its own thread then sees the end of the stream, tells those who wait on
        # this pair, and closes. But it does not tell who waits for a send that it could not write (it holds that back,
        # without an error, when the connection is broken), nor for a message of which it has the head only: they wait
        # until the group's time-out, and no later cut reaches them, as the socket is closed by then. So no writing is
        # made to fail here: 4 of 26 aborts between small collectives left a rank waiting with both directions shut,
        # 1 of 68 with this. There the dead peer has broken the connection; `abort_s` ends that rank.
        how = socket.SHUT_RD if self._looks < GENTLE_LOOKS else socket.SHUT_RDWR
        self._looks += 1
        for sock in sockets.gloo_sockets():
            sockets.cut(sock, how)
        found = sockets.sockets_to(self._store_addresses)
        if (before := self._before_init) is not None:
            new = set(sockets.tcp_sockets()) - set(sockets.gloo_listeners()) - before
            found += new & self._seen
            self._seen = new
        for sock in found:
            sockets.cut(sock)
        if self.backend == "nccl":
            self._aborts.start()

    def _sweep(self) -> None:
        while not self._closed.wait(SWEEP_S):
            self._cut()


def cuda_failure(device: torch.device) -> str:
    """What CUDA says once it has failed for good in this process, '' while it works. Does not wait for the device.

    An illegal access or a lost device sticks: each later call fails, in each generation. NCCL hides it behind an error
    of its own, which looks as if a peer had gone.
    """
    if device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    try:
        torch.cuda.current_stream(device).query()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""
