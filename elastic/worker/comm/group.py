"""Process groups that can be aborted and formed again in the same process.

A Group is used once: constructed, ``form()``, perhaps ``abort()`` from another thread, ``close()``. All methods except
``abort`` are for the main thread. ``abort`` frees the main thread from any blocking call: the wait for the other ranks,
the forming itself, or a collective. The exception that torch then raises is not the user's concern;
``is_communication_error`` distinguishes it from errors of the user's code.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from elastic.contract.records.reasons import Code, reason
from elastic.util.resolver import without_dns
from elastic.util.sealed_store import SealedStore
from elastic.worker.link.misuse import MisuseRuntimeError, found_in
from elastic.worker.torch_internals import torch_private

from . import direct, nccl, sockets
from .errors import COMPLAINT_CHARS, FormError, GroupAborted, is_communication_error
from .fence import Fence
from .in_flight import IN_FLIGHT

Backend = Literal["gloo", "nccl"]

SWEEP_S = 0.02
"""Interval at which, after an abort, sockets that were opened since are shut too, until the group is closed."""

GENTLE_LOOKS = 10
"""Number of times that gloo's sockets are only shut for reading."""

ABANDON_LOOKS = 15
"""After so many, collectives that are still in flight are given up: see `in_flight`."""

MOST_ABANDONED = 3
"""Groups per process of which gloo's threads may be left behind, each with the tensor that it was to send. With
more, the worker does not finish its abort, and the agent replaces its process."""

CONNECT_TRY_S = 2.0
"""Limit for a single attempt to connect to the store."""

DIAL_LOOK_S = 0.02
"""Interval at which the wait for the store's connection checks whether it is interrupted; also the pause between
attempts."""

RESOLVE_AGAIN_S = 0.5
"""Pause between failed look-ups of the store's host."""

# A process that the script forks, a DataLoader's for example, must not collect this process's garbage. The process
# group of an earlier generation may be part of that, and gloo's destructor joins threads, which do not exist in a fork.
os.register_at_fork(after_in_child=gc.freeze)


class Group:
    """The process group of one generation; torch's default group while it is open."""

    def __init__(
        self,
        *,
        backend: Backend,
        rank: int,
        world_size: int,
        store_host: str,
        store_port: int,
        generation: int,
        store_secret: str = "",
        device: torch.device | None = None,
        timeout_s: float = 600.0,
        form_timeout_s: float = 60.0,
    ) -> None:
        """`timeout_s`: for collectives, and for the wait for all ranks. `form_timeout_s`: for reaching the store,
        and again for forming once all ranks have arrived. `store_secret`: of the generation; see `SealedStore`."""
        self.backend = backend
        self.rank = rank
        self.world_size = world_size
        self.generation = generation
        self.device = device or torch.device("cpu")
        self._endpoint = (store_host, store_port)
        self._timeout_s = timeout_s
        self._form_timeout_s = form_timeout_s
        self._store_secret = store_secret
        self._store_addresses: set[Any] = set()
        self._sealed: SealedStore | None = None
        self._store: Store | None = None
        self._lock = threading.Lock()
        self._aborted = threading.Event()
        self._closed = threading.Event()
        self._over = threading.Event()
        """Aborted or closed."""
        self._sweeper: threading.Thread | None = None
        self._fence: Fence | None = None
        self._keeps_store = False
        """An abort leaves connections to the store alone."""
        self._aborts = nccl.Aborts()
        self._before_init: set[sockets.Sock] | None = None
        self._seen: set[sockets.Sock] = set()
        self._peers: list[sockets.Sock] = []
        """The connections to the other ranks with which it was formed."""
        self._looks = 0
        self._abandoned = False
        """Whether a collective did not end though its sockets are shut."""
        self.why = ""

    @property
    def altered(self) -> str:
        """The key of a value in the store that this rank has refused; empty: it has refused none."""
        return self._sealed.altered if self._sealed else ""

    def check(self) -> None:
        """Raises GroupAborted once the group was aborted."""
        if self._aborted.is_set():
            raise GroupAborted(self.why)

    def form(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Wait for all ranks on the store, then form the group.

        Raises GroupAborted if aborted or `interrupted` meanwhile, MisuseRuntimeError for an interface that this host
        does not have, FormError if a rank or the store is missing or forming takes too long, RuntimeError if torch
        already has a default group.
        """
        if dist.is_initialized():
            raise RuntimeError(
                "torch.distributed has a default group already, and elastic.run forms the job's own: leave out "
                "init_process_group()"
            )
        names = [name for _, name in socket.if_nameindex()]
        if unknown := sockets.unknown_interface(os.environ, names):
            raise MisuseRuntimeError(
                f"{unknown}: {socket.gethostname()} has no such interface; it has {', '.join(names)}"
            )
        direct.limit(self._timeout_s)
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
            self._peers = sockets.gloo_sockets()
        except (GroupAborted, FormError):
            raise
        except Exception as error:
            # torch reports a group that was cut while forming in many ways, some as other kinds of errors (KeyError):
            # only here is it certain that it was cut. Errors with another cause are raised unchanged.
            if self._aborted.is_set():
                raise GroupAborted(self.why) from error
            if self.altered:
                raise FormError(reason(Code.STORE_ALTERED, key=self.altered)) from error
            if is_communication_error(error):
                because = str(error)[:COMPLAINT_CHARS]
                raise FormError(reason(Code.NOT_FORMING, because, number=self.generation, rank=self.rank)) from error
            raise

    def cause_of(self, error: BaseException) -> BaseException:
        """`error`, which has left `train`; if that is a refusal and a rank is lost, what it may follow from: the script
        may have handled the error of its collective. The agent may know of a lost node after its lease only. Ranks that
        are refused the same are all there: each waits `misuse.WAIT_S` before it ends."""
        if not found_in(error) or all(map(sockets.is_whole, self._peers)):
            return error
        cause = GroupAborted("the connection to another rank was lost, and the script has handled the error of that")
        cause.__cause__ = error
        return cause

    def fenced(self) -> Fence:
        self._fence = Fence(self)
        return self._fence

    def store_after_abort(self, limit: timedelta) -> Store:
        """A connection to the generation's store that an abort leaves alone. Raises DistNetworkError or DistStoreError.
        For the fence; after `store_done`, connections are cut again."""
        self._keeps_store = True
        address, port = next(iter(self._store_addresses))
        with without_dns():
            client = TCPStore(address, port, None, False, timeout=limit, wait_for_workers=False)
        return PrefixStore(f"g{self.generation}", client)

    def store_done(self) -> None:
        self._keeps_store = False

    def abort(self, why: str) -> None:
        """Free the main thread from this group at once. From any thread, at any time; further calls do nothing."""
        with self._lock:
            if self._aborted.is_set() or self._closed.is_set():
                return
            self.why = why
            self._aborted.set()
            self._over.set()
            self._cut()
            self._sweeper = threading.Thread(target=self._sweep, name="elastic-sweep", daemon=True)
            self._sweeper.start()
        if self._fence is not None:
            self._fence.broken()

    def close(self) -> None:
        """Take the group down so that the next one can form. Main thread only; further calls do nothing.

        References that remain to the group (a DDP module, a traceback) keep its threads alive, but not its connections.
        """
        if self._aborted.is_set() and not self._closed.is_set():
            IN_FLIGHT.wait()  # `_sweep` gives up those that do not end
        with self._lock:  # a cut in progress must finish first, or it could hit the next group's sockets
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
        """Remove the group from torch's registries. Raises RuntimeError if NCCL's abort failed: this process can
        then form no other group."""
        if self._abandoned:
            _keep_for_ever(torch_private.registered_groups())
        if self.backend == "nccl" and self._aborted.is_set():
            torch_private.forget_all_groups()  # to destroy it would wait for its kernels and join its watchdog
            if self._aborts.failed:
                said = cuda_failure(self.device) or "; ".join(self._aborts.failed)
                raise RuntimeError(f"this process cannot abort its NCCL group: {said}")
            return
        try:
            dist.destroy_process_group()
        except RuntimeError:
            if not self._aborted.is_set():
                raise
            torch_private.abort_default_group()  # removes it from the registries nevertheless

    # ── forming ─────────────────────────────────────────────────────────────────────────────────────────────

    def _arrive(self, interrupted: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        # The store is up before its generation is published: a rank that cannot reach it does not delay the others.
        client = self._connect(min(self._timeout_s, self._form_timeout_s), interrupted)
        self._sealed = SealedStore(client, self._store_secret)
        store = PrefixStore(f"g{self.generation}", self._sealed)
        if store.add("arrived", 1) == self.world_size:
            store.set("all", "1")
        try:
            # One long wait: abort() cuts the store's connection too.
            store.wait(["all"], timedelta(seconds=max(0.001, deadline_s - time.monotonic())))
        except dist.DistStoreError as error:
            self._stop_if(interrupted)
            arrived = store.add("arrived", 0)
            raise FormError(
                reason(Code.RANKS_MISSING, arrived=arrived, total=self.world_size, within_s=self._timeout_s)
            ) from error
        self._store = store

    def _connect(self, within_s: float, interrupted: Callable[[], bool]) -> TCPStore:
        """A client of the store. Neither name resolution nor torch's constructor can be interrupted, so separate
        threads resolve and connect: two, as the connecting one must not have used DNS before (`without_dns`)."""
        host, port = self._endpoint
        deadline_s = time.monotonic() + within_s
        resolved: list[Any] = []
        box: list[TCPStore] = []
        self._aside("elastic-resolve", self._resolve, (deadline_s, resolved), deadline_s, interrupted)
        if not resolved:
            raise FormError(reason(Code.STORE_UNKNOWN, node=host, within_s=within_s))
        self._store_addresses = {address[:2] for *_, address in resolved}
        addresses = list(dict.fromkeys(str(address[0]) for *_, address in resolved))
        self._aside("elastic-dial", self._dial, (addresses, deadline_s, box), math.inf, interrupted)
        if not box:
            raise FormError(reason(Code.NO_STORE, endpoint=f"{host}:{port}", within_s=within_s))
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

    def _resolve(self, deadline_s: float, resolved: list[Any]) -> None:
        """An unresponsive name server costs this generation at most, not the process and its state."""
        while not self._aborted.is_set() and time.monotonic() < deadline_s:
            try:
                resolved += socket.getaddrinfo(*self._endpoint, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError):
                self._aborted.wait(RESOLVE_AGAIN_S)
            else:
                return

    def _dial(self, addresses: list[str], deadline_s: float, box: list[TCPStore]) -> None:
        turn = itertools.cycle(addresses)
        while not self._aborted.is_set() and (left_s := deadline_s - time.monotonic()) > 0:
            try_s = timedelta(seconds=min(CONNECT_TRY_S, left_s))
            try:
                with without_dns():
                    store = TCPStore(next(turn), self._endpoint[1], None, False, timeout=try_s, wait_for_workers=False)
            except (dist.DistNetworkError, dist.DistStoreError):
                self._aborted.wait(DIAL_LOOK_S)  # not up yet, or gone again: retry until the deadline
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
            torch.cuda.set_device(self.device)  # for operations of the script that name no device
            options["device_id"] = self.device  # creates the communicator here and not in the first collective
            self._before_init = set(sockets.tcp_sockets())
        assert self._store is not None
        self._create(name, self._store, **options)
        if self.backend == "nccl":
            nccl.check_abortable()
            nccl.watch_time_out(self._over, self._timeout_s, self.generation, self.rank)

    def _create(self, name: str, store: Store, **options: Any) -> None:
        # torch names a default group by a counter, which a forming that failed half-way leaves incremented. Ranks meet
        # under that name, so ranks with such a failure would not meet new ones.
        torch_private.restart_group_names()
        hook = sys.excepthook
        try:
            dist.init_process_group(
                name,
                store=store,
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=self._timeout_s),
                **options,
            )
        finally:
            self._before_init = None
            sys.excepthook = hook  # torch wraps it once more each time, and each wrapper adds '[rank0]: ' to every line

    def _stop_if(self, interrupted: Callable[[], bool]) -> None:
        self.check()
        if interrupted():
            raise GroupAborted("interrupted while the group was forming")

    # ── aborting ────────────────────────────────────────────────────────────────────────────────────────────

    def _cut(self) -> None:
        """Shut the sockets first, which takes no time. NCCL's kernels wait on the device, and only NCCL's own abort
        ends them.

        A communicator that is still being created cannot be aborted: torch has no record of it yet. It waits on
        sockets, so those that were opened since forming began are shut, listening ones included. Gloo's listening
        socket must never be shut, as that would end the process: so this happens from the second pass on, when gloo has
        registered its socket where it can be recognised.
        """
        # Gloo's sockets are shut for reading only, at first. Gloo's own thread then sees the end of the stream, fails
        # the operations that wait on this pair, and closes it. But it notifies neither a send that it could not write
        # (which it holds back, without an error, when the connection is broken) nor a receive for a message whose
        # header only has arrived: they wait until the group's time-out, and no later cut reaches them, as the socket is
        # closed by then. So no write is made to fail here: with both directions shut, 4 of 26 aborts between small
        # collectives left a rank waiting; with this, 1 of 68: there the dead peer has broken the connection. Gradients
        # and buffers that wait so, and elastic's own collectives, are given up (`in_flight`); a rank that waits in
        # another, one of the script's or SyncBatchNorm's, or between two ranks, is ended after `abort_s`.
        how = socket.SHUT_RD if self._looks < GENTLE_LOOKS else socket.SHUT_RDWR
        self._looks += 1
        direct.cut()
        for sock in sockets.gloo_sockets():
            sockets.cut(sock, how)
        others = [] if self._keeps_store else sockets.sockets_to(self._store_addresses)
        if (before := self._before_init) is not None:
            new = set(sockets.tcp_sockets()) - set(sockets.gloo_listeners()) - before
            others += new & self._seen
            self._seen = new
        for sock in others:
            sockets.cut(sock)
        if self.backend == "nccl":
            self._aborts.start()

    def _sweep(self) -> None:
        while not self._closed.wait(SWEEP_S):
            self._cut()
            if self._looks >= ABANDON_LOOKS and len(_ABANDONED) < MOST_ABANDONED:
                self._abandoned = IN_FLIGHT.fail(self.why) or self._abandoned


_ABANDONED: list[object] = []


def _keep_for_ever(groups: Iterable[object]) -> None:
    """Their destructors would join a thread of gloo's that still waits; so they must not run, not even at exit."""
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        _ABANDONED.append(group)


def cuda_failure(device: torch.device) -> str:
    """The error of CUDA once it has failed for good in this process, '' while it works. Does not wait for the device.

    An illegal access or a lost device is permanent: each later call fails, in every generation. NCCL hides it behind an
    error of its own, which looks as if a peer were lost.
    """
    if device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    try:
        torch.cuda.current_stream(device).query()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""
