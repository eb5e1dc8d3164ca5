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
from collections.abc import Callable, Sequence

import msgspec
import xxhash

from elastic.checkpoint.format.errors import ArenaError, IncompleteSnapshot
from elastic.checkpoint.memory.arena import Arena, Image
from elastic.checkpoint.memory.buffers import Buffers
from elastic.contract.worker.messages import CopyState
from elastic.worker.comm import direct

from .arena_requests import ArenaRequests

CONNECT_S = 30.0
"""The buddy may still be busy with the end of its own set-up."""
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
        self._receiver: threading.Thread | None = None
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
            self._receiver = _started(self._guests.receive, self._listener, self._token)
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
        if self._sender is not None or self._listener is not None:
            direct.cut()  # wakes both threads
        if self._receiver is not None:
            self._receiver.join(JOIN_S)
            if self._receiver.is_alive():
                self._guests = Guests(self._requests)  # that thread may still write to the others
        self._sender = self._receiver = self._listener = None
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
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, ValueError, IncompleteSnapshot):
            sock = direct.dial(endpoint, stack)
            while (arena := self.todo.get()) is not None:
                state = _sent(sock, arena)
                self._settled(state, arena.header().step if state is CopyState.COPIED else self.copied[1])
            return
        # The agents find out who is lost. If it is this connection alone, there are no copies until the next
        # generation, and training goes on.
        self._settled(CopyState.UNREACHABLE, self.copied[1])
        while self.todo.get() is not None:
            self._settled(*self.copied)

    def _settled(self, state: CopyState, step: int) -> None:
        self.copied = state, step
        self.sending.clear()
        self._wake()


def _sent(sock: socket.socket, arena: Arena) -> CopyState:
    image, data = arena.image()
    raw = msgspec.msgpack.encode(image)
    sock.sendall(len(raw).to_bytes(LENGTH_BYTES, "little") + raw, socket.MSG_NOSIGNAL)
    if (answer := _answer(sock)) != _YES:
        return CopyState.COPIED if answer == _THERE else CopyState.NO_MEMORY
    digest = xxhash.xxh3_64()
    for at in range(0, len(data), SLICE_BYTES):
        piece = data[at : at + SLICE_BYTES]
        sock.sendall(piece, socket.MSG_NOSIGNAL)
        digest.update(piece)
    sock.sendall(digest.digest(), socket.MSG_NOSIGNAL)
    if _answer(sock) != _YES:
        raise ConnectionError("the copy arrived damaged")
    return CopyState.COPIED


class Guests:
    """The agent's buffers for copies of another node's part; `receive` in its own thread, one at a time."""

    def __init__(self, requests: ArenaRequests) -> None:
        self._requests = requests
        self._buffers = Buffers(keep_newest=True)
        self._refused_s = 0.0
        """Until when the agent is not asked for memory."""

    def receive(self, listener: socket.socket, token: str) -> None:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, ValueError, ArenaError):
            sock = direct.accept(listener, token, stack, CONNECT_S)
            while sock is not None:
                image = msgspec.msgpack.decode(_head(sock), type=Image)
                arena = self._room(image.nbytes)
                there = any(_holds(each, image) for each in self._buffers.arenas)
                sock.sendall(_THERE if there else _NO if arena is None else _YES, socket.MSG_NOSIGNAL)
                if arena is not None and not there:
                    sock.sendall(_YES if _fill(sock, arena, image) else _NO, socket.MSG_NOSIGNAL)

    def _room(self, nbytes: int) -> Arena | None:
        """The buffer with the older copy. None: the node has no memory for it."""
        if not self._buffers.fits(nbytes):
            self._buffers.replace(())
            if time.monotonic() < self._refused_s:
                return None
            answer = self._requests.ask(nbytes, optional=True)
            if answer is None:
                self._refused_s = time.monotonic() + ASK_AGAIN_S
                return None
            self._buffers.replace(answer[0])
        buffer = self._buffers.free()
        return None if buffer is None else self._buffers.arenas[buffer]


def _fill(sock: socket.socket, arena: Arena, image: Image) -> bool:
    """Returns whether the bytes are those that were sent."""
    data, digest = arena.fill_from(image), xxhash.xxh3_64()
    for at in range(0, image.nbytes, SLICE_BYTES):
        piece = data[at : at + SLICE_BYTES]
        direct.receive_into(sock, piece)
        digest.update(piece)
    sent = bytearray(digest.digest_size)
    direct.receive_into(sock, memoryview(sent))
    if bytes(sent) != digest.digest():
        return False
    arena.seal_as(image)
    return True


def _head(sock: socket.socket) -> bytearray:
    """Waits for the next snapshot, for however long. Raises OSError, ValueError."""
    length = bytearray(LENGTH_BYTES)
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    poller.poll()  # for longer than a transfer may stand still; `direct.cut` ends it
    direct.receive_into(sock, memoryview(length))
    if (nbytes := int.from_bytes(length, "little")) > MAX_HEAD_BYTES:
        raise ValueError(f"a snapshot's description of {nbytes} bytes")
    raw = bytearray(nbytes)
    direct.receive_into(sock, memoryview(raw))
    return raw


def _answer(sock: socket.socket) -> bytes:
    answer = bytearray(1)
    direct.receive_into(sock, memoryview(answer))
    return bytes(answer)


def _holds(arena: Arena, image: Image) -> bool:
    return arena.header().complete and arena.image()[0] == image
