"""A second copy of a rank's snapshots in the memory of another node, sent beside training.

Where each rank has a part of the state of its own, a node that dies takes its parts with it. So the rank in the same
place on the next node, the *buddy*, keeps each snapshot as well, as a guest in the memory of its own agent: from there
it comes to whichever rank has that part next. A part whose replicas are on several nodes needs no such copy.

Two threads for each generation, one that sends and one that receives, over TCP connections of their own.
The next snapshot waits until the last one is copied: it replaces the one before, and until the copy is whole that is
the newest of which a lost node's part is elsewhere.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import xxhash

from elastic.checkpoint.format.errors import ArenaError, IncompleteSnapshot
from elastic.checkpoint.memory.arena import Arena, Image
from elastic.contract.worker.messages import CopyState
from elastic.worker.comm import direct

from .arena_requests import ArenaRequests

ACCEPT_S = 3600.0
PAUSE_S = 1.0
STALL_S = 60.0
"""A peer that moves no byte for this long has failed; snapshots and checkpoints wait for it. Longer than an agent takes
to answer in any case."""
ASK_AGAIN_S = 60.0
"""Pause after the agent has refused memory."""
SLICE_BYTES = 4 << 20
LENGTH_BYTES = 8
MAX_HEAD_BYTES = 256 << 20
JOIN_S = 2.0
_NO, _YES, _THERE = b"\0", b"\1", b"\2"
"""The receiver's answers; `_THERE`: it has that copy already."""


class Neighbour(msgspec.Struct, frozen=True):
    """What the ranks tell each other as a generation begins."""

    key: int
    """See `RankPosition`."""
    node: int
    local_rank: int
    endpoint: direct.Endpoint
    """Where this rank receives copies."""


def buddies(everyone: Sequence[Neighbour]) -> dict[int, int | None]:
    """Each rank that sends -> the rank in the same place on the next node; None: there is no such rank. Of the ranks of
    a key the lowest sends, if they are all on one node."""
    lowest: dict[int, int] = {}
    apart: set[int] = set()
    places = {(each.node, each.local_rank): rank for rank, each in enumerate(everyone)}
    nodes = 1 + max(each.node for each in everyone)
    for rank, each in enumerate(everyone):
        if everyone[lowest.setdefault(each.key, rank)].node != each.node:
            apart.add(each.key)
    found: dict[int, int | None] = {}
    for key, rank in lowest.items():
        if key not in apart:
            own = everyone[rank]
            there = places.get(((own.node + 1) % nodes, own.local_rank))
            found[rank] = there if there != rank else None
    return found


class Buddy:
    """One per process: `listen` and `pair` begin a generation, `leave` ends it. Main thread only."""

    def __init__(self, requests: ArenaRequests, wake: Callable[[], None]) -> None:
        """`wake` is called, in a thread, when `sending` becomes false."""
        self._requests, self._wake = requests, wake
        self._state = CopyState.REPLICAS
        self._guests = Guests(requests)
        self._stack = contextlib.ExitStack()
        self._listener: socket.socket | None = None
        self._token = ""
        self._sender: Sender | None = None

    @property
    def copied(self) -> tuple[CopyState, int]:
        """How this rank's part is protected, and the newest step of which there is a copy; -1: none."""
        return self._sender.copied if self._sender is not None else (self._state, -1)

    @property
    def sending(self) -> bool:
        """Whether the newest snapshot is not at the buddy yet, and may still get there."""
        return self._sender is not None and self._sender.sending.is_set()

    def listen(self) -> direct.Endpoint:
        self._listener, endpoint = direct.listen(self._stack)
        self._token = endpoint.token
        return endpoint

    def pair(self, rank: int, everyone: Sequence[Neighbour]) -> None:
        """Begin to send snapshots to this rank's buddy, and to receive those of the rank that it is the buddy of."""
        senders = buddies(everyone)
        if self._listener is not None and rank in senders.values():
            self._guests.start(self._listener, self._token)
        self._state = CopyState.REPLICAS if rank not in senders else CopyState.NO_NODE
        if (buddy := senders.get(rank)) is not None:
            self._state = CopyState.UNREACHABLE
            sender = Sender(self._wake)
            if _started(sender.run, everyone[buddy].endpoint):
                self._sender = sender

    def send(self, arena: Arena) -> None:
        """`arena` holds the newest snapshot, and is not filled again while `sending`."""
        if self._sender is not None:
            self._sender.sending.set()
            self._sender.todo.put(arena)

    def leave(self) -> None:
        """The generation is over; also where none was begun."""
        if self._sender is not None:
            self._sender.todo.put(None)
        self._guests.over.set()
        if self._sender is not None or self._listener is not None:
            direct.cut()  # wakes both threads
        self._guests.join()
        self._sender = self._listener = None
        self._stack.close()


def _started(act: Callable[..., None], *args: object) -> threading.Thread | None:
    """None: no thread can be started, and there are no copies."""
    thread = threading.Thread(target=act, args=args, name="elastic-buddy", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


class Sender:
    """Of one generation; `run` in its own thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.copied: tuple[CopyState, int] = CopyState.SENDING, -1
        """And the newest step of which there is a copy; -1: none."""
        self.todo: queue.SimpleQueue[Arena | None] = queue.SimpleQueue()
        """None: the generation is over."""
        self.sending = threading.Event()

    def run(self, endpoint: direct.Endpoint) -> None:
        """The agents find out who is lost. If it is this connection alone, the next snapshot is sent over another one,
        and training goes on."""
        with contextlib.ExitStack() as stack:
            sock = None
            while (arena := self.todo.get()) is not None:
                state, step = CopyState.UNREACHABLE, self.copied[1]
                try:
                    if sock is None:
                        sock = direct.dial(endpoint, stack)
                        direct.limit_of(sock, STALL_S)
                    state = _sent(sock, arena)
                    step = arena.header().step if state is CopyState.COPIED else step
                except (OSError, ValueError, IncompleteSnapshot):
                    sock = None
                    stack.close()
                finally:
                    self._settled(state, step)

    def _settled(self, state: CopyState, step: int) -> None:
        self.copied = state, step
        self.sending.clear()
        self._wake()


def _sent(sock: socket.socket, arena: Arena) -> CopyState:
    image, data = arena.image()
    raw = msgspec.msgpack.encode(image)
    sock.sendall(len(raw).to_bytes(LENGTH_BYTES, "little") + raw, socket.MSG_NOSIGNAL)
    if (answer := _received(sock, 1)) != _YES:
        return CopyState.COPIED if answer == _THERE else CopyState.NO_MEMORY
    digest = xxhash.xxh3_64()
    for at in range(0, len(data), SLICE_BYTES):
        piece = data[at : at + SLICE_BYTES]
        sock.sendall(piece, socket.MSG_NOSIGNAL)
        digest.update(piece)
    sock.sendall(digest.digest(), socket.MSG_NOSIGNAL)
    if _received(sock, 1) != _YES:
        raise ConnectionError("the copy arrived damaged")
    return CopyState.COPIED


class Guests:
    """The agent's buffers for copies of another node's part, and the thread that receives them."""

    def __init__(self, requests: ArenaRequests) -> None:
        self._requests = requests
        self._arenas: Sequence[Arena] = ()
        self._refused_s = 0.0
        """Until when the agent is not asked for memory."""
        self._thread: threading.Thread | None = None
        self.over = threading.Event()

    def start(self, listener: socket.socket, token: str) -> None:
        """Receive, unless the thread of an earlier generation still runs: two would write into the same buffers. The
        rank that sends is refused then, and where no thread can be started."""
        if self._thread is None:
            self.over = threading.Event()
            self._thread = _started(self._receive, listener, token, self.over)
            if self._thread is not None:
                return
        listener.close()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(JOIN_S)
            self._thread = self._thread if self._thread.is_alive() else None

    def _receive(self, listener: socket.socket, token: str, over: threading.Event) -> None:
        with contextlib.closing(listener):
            while not over.is_set():
                with contextlib.ExitStack() as stack, contextlib.suppress(OSError, ValueError, ArenaError):
                    if (sock := direct.accept(listener, token, stack, ACCEPT_S)) is not None:
                        direct.limit_of(sock, STALL_S)
                        self._serve(sock)
                over.wait(PAUSE_S)  # a listener that was cut returns at once

    def _serve(self, sock: socket.socket) -> None:
        """Until the connection ends, which raises."""
        while True:
            image = msgspec.msgpack.decode(_head(sock), type=Image)
            arena = self._room(image)
            there = any(_holds(each, image) for each in self._arenas)
            sock.sendall(_THERE if there else _NO if arena is None else _YES, socket.MSG_NOSIGNAL)
            if arena is not None and not there:
                sock.sendall(_YES if _fill(sock, arena, image) else _NO, socket.MSG_NOSIGNAL)

    def _room(self, image: Image) -> Arena | None:
        """A buffer without a copy of this part, else that with the older one. None: the node has no memory for it."""
        if not self._arenas or self._arenas[0].capacity < image.nbytes:
            for arena in self._arenas:
                arena.close()
            self._arenas = ()
            if time.monotonic() < self._refused_s:
                return None
            if (answer := self._requests.ask(image.nbytes, optional=True)) is None:
                self._refused_s = time.monotonic() + ASK_AGAIN_S
                return None
            self._arenas = answer[0]
        return least_needed(self._arenas, image.key)


def least_needed(arenas: Iterable[Arena], key: int) -> Arena:
    """That which is to be filled with a copy of the part of `key`: what holds nothing, then what is of another part,
    then what is older."""

    def need(arena: Arena) -> tuple[bool, bool, int, int]:
        header = arena.header()
        return header.complete, header.complete and arena.key() == key, header.generation, header.step

    return min(arenas, key=need)


def _fill(sock: socket.socket, arena: Arena, image: Image) -> bool:
    """Returns whether the bytes are those that were sent."""
    data, digest = arena.fill_from(image), xxhash.xxh3_64()
    for at in range(0, image.nbytes, SLICE_BYTES):
        piece = data[at : at + SLICE_BYTES]
        direct.receive_into(sock, piece)
        digest.update(piece)
    if _received(sock, digest.digest_size) != digest.digest():
        return False
    arena.seal_as(image)
    return True


def _head(sock: socket.socket) -> bytearray:
    """Waits for the next snapshot, for however long. Raises OSError, ValueError."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    poller.poll()  # for longer than a transfer may stand still; `direct.cut` ends it
    if (nbytes := int.from_bytes(_received(sock, LENGTH_BYTES), "little")) > MAX_HEAD_BYTES:
        raise ValueError(f"a snapshot's description of {nbytes} bytes")
    return _received(sock, nbytes)


def _received(sock: socket.socket, nbytes: int) -> bytearray:
    raw = bytearray(nbytes)
    direct.receive_into(sock, memoryview(raw))
    return raw


def _holds(arena: Arena, image: Image) -> bool:
    return arena.header().complete and arena.image()[0] == image
