"""The writer process: ``python -m elastic.checkpoint.saving.writer FD``, started by `WriterProcess`.

It takes orders from a socket, writes the contents of arenas, commits, prunes and copies to remote storage, so that
neither the training processes nor the agent's loop ever wait for a disk. It runs at low priority, imports no torch, and
dies with the process that started it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastic.checkpoint.format.errors import CheckpointError, SaveFailed, ShardsMissing
from elastic.checkpoint.format.names import head_of
from elastic.checkpoint.memory.arena import Arena
from elastic.checkpoint.stored.retention import discard, prune
from elastic.contract.structs import replace
from elastic.util.processes import die_with

from . import orders
from .write import commit, shards_missing, write_shard

MAX_PACKET_BYTES = 64 * 1024
_LOOK_EVERY_S = 0.05
_FAILED_KEPT = 32


@dataclass(slots=True)
class _Pending:
    """A commit that waits for shards."""

    order: orders.Commit
    started_s: float
    waits_since_s: float
    """When the last shard came, plus the time since then in which this process was writing."""
    missing: int


class CheckpointWriter:
    def __init__(self, channel: socket.socket, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel = channel
        self._clock = clock
        self._arenas: dict[int, Arena] = {}
        """By inode: mapping two gigabytes again for each save would cost more than the write itself."""
        self._pending: list[_Pending] = []
        self._failed: dict[tuple[int, int], str] = {}
        """Saves of which this process failed to write a shard, and why: waiting for the others is pointless."""
        self._swept = False
        """What an earlier run had left unfinished is removed; in a directory of this node alone."""
        self._copying: set[str] = set()
        """Checkpoints that are being copied to remote storage, which retention spares meanwhile."""
        self._notes: tuple[str, ...] = ()
        self._poller = select.poll()
        self._poller.register(channel, select.POLLIN)

    def run(self) -> None:
        """Process orders until the other end is closed."""
        # Files of other hosts appear without an event, so they are polled for while a commit waits.
        while self.turn(_LOOK_EVERY_S if self._pending else None):
            pass

    def turn(self, timeout_s: float | None) -> bool:
        """Process one order if one arrives in time, then look at the commits that wait. False: the other end is
        closed."""
        if self._poller.poll(None if timeout_s is None else timeout_s * 1000) and not self._receive():
            return False
        self._pending = [pending for pending in self._pending if not self._try_commit(pending)]
        return True

    def _receive(self) -> bool:
        raw, fds, _, _ = socket.recv_fds(self._channel, MAX_PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not raw:
            return False
        order = orders.decode_order(raw)
        match order:
            case orders.Write():
                started_s = self._clock()
                self._reply(self._write(order, fds[0]))
                self._has_written(order, self._clock() - started_s)
            case orders.Commit():
                now_s = self._clock()
                self._pending.append(_Pending(order, now_s, now_s, order.shards))
            case orders.CopyUp():
                self._begin_copy(order)
            case orders.Forget():
                while self._arenas:
                    self._arenas.popitem()[1].close()
        return True

    def _has_written(self, order: orders.Write, seconds: float) -> None:
        """A commit does not wait for others while shards of this node, of its save or an earlier one, are written."""
        for pending in self._pending:
            if (order.generation, order.step) <= (pending.order.generation, pending.order.step):
                pending.waits_since_s += seconds

    def _write(self, order: orders.Write, fd: int) -> orders.Result:
        started_s = time.monotonic()
        result = orders.Result(id=order.id, kind="Write", step=order.step, generation=order.generation)
        if order.alone and not self._swept:
            # Its generations may have been counted from another node's disk: a save of this run could be completed with
            # its shards.
            self._swept = True
            discard(order.directory, order.job, sys.maxsize, sys.maxsize)
        try:
            arena = self._arena(fd)
            header = arena.header()
            if not header.complete or (header.step, header.generation) != (order.step, order.generation):
                state = header.state.name.lower()
                raise SaveFailed(f"the arena is {state} with step {header.step} of generation {header.generation}")
            shard = write_shard(arena, order.directory, order.job)
        except (OSError, CheckpointError) as error:
            why = orders.describe(error)
            self._failed = {**dict(list(self._failed.items())[-_FAILED_KEPT:]), (order.step, order.generation): why}
            return replace(result, error=why, seconds=time.monotonic() - started_s)
        self._failed.pop((order.step, order.generation), None)
        return replace(result, path=shard.file, seconds=time.monotonic() - started_s)

    def _arena(self, fd: int) -> Arena:
        inode = os.fstat(fd).st_ino
        if known := self._arenas.get(inode):
            os.close(fd)
            return known
        self._arenas[inode] = arena = Arena.from_fd(fd)
        return arena

    def _try_commit(self, pending: _Pending) -> bool:
        """True when the commit is finished, successfully or not."""
        order = pending.order
        result = orders.Result(id=order.id, kind="Commit", step=order.step, generation=order.generation)
        if why := self._failed.pop((order.step, order.generation), ""):
            self._reply(replace(result, error=why))
            self._discard(order)
            return True
        now_s = self._clock()
        with contextlib.suppress(OSError):  # commit gets the same error, and reports it
            missing = shards_missing(order.directory, order.job, order.step, order.generation, order.shards)
            if len(missing) < pending.missing:
                pending.missing, pending.waits_since_s = len(missing), now_s
            if missing and now_s - pending.waits_since_s < order.wait_s:
                return False
        try:
            path = commit(
                order.directory, order.job, step=order.step, generation=order.generation, shards=order.shards,
                world_size=order.world_size, versions=order.versions, created_wall_s=time.time(),
            )  # fmt: skip
            result = replace(result, path=path, notes=self._notes)
        except (OSError, CheckpointError) as error:
            missing = error.missing if isinstance(error, ShardsMissing) else ()
            result = replace(result, error=orders.describe(error), missing=missing)
        self._reply(replace(result, seconds=self._clock() - pending.started_s))
        if not result.ok:
            self._discard(order)
        else:
            # After the reply, which need not wait for removals. Failed removals are reported with the next commit.
            keep = order.keep, order.keep_every_steps
            _, failed = prune(order.directory, order.job, *keep, trusted=result.path, spare=self._copying)
            self._notes = tuple(failed[:8])
        return True

    def _discard(self, order: orders.Commit) -> None:
        spare = [(p.order.step, p.order.generation) for p in self._pending if p.order is not order]
        discard(order.directory, order.job, order.step, order.generation, spare=spare)

    def _begin_copy(self, order: orders.CopyUp) -> None:
        """In a thread. Without one, for a limit of threads or of memory, that copy alone fails."""
        self._copying.add(order.path)
        try:
            threading.Thread(target=self._copy_up, args=(order,), daemon=True).start()
        except (RuntimeError, MemoryError) as error:
            self._copying.discard(order.path)
            self._reply(replace(_copy_result(order), error=f"no thread for it: {orders.describe(error)}"))

    def _copy_up(self, order: orders.CopyUp) -> None:
        from elastic.checkpoint.stored.remote import copy_up

        started_s, result = time.monotonic(), _copy_result(order)
        try:
            url = copy_up(order.path, order.url, keep=order.keep, keep_every_steps=order.keep_every_steps)
            result = replace(result, path=url)
        except (OSError, CheckpointError) as error:
            result = replace(result, error=orders.describe(error))
        finally:
            self._copying.discard(order.path)
        self._reply(replace(result, seconds=time.monotonic() - started_s))

    def _reply(self, result: orders.Result) -> None:
        self._channel.send(orders.encode(result))


def _copy_result(order: orders.CopyUp) -> orders.Result:
    head = head_of(order.path)
    step, generation = (head.step, head.generation) if head else (-1, -1)
    return orders.Result(id=order.id, kind="CopyUp", step=step, generation=generation)


def main() -> None:
    parser = argparse.ArgumentParser(prog="elastic.checkpoint.saving.writer")
    parser.add_argument("fd", type=int)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--nice", type=int, default=0)
    args = parser.parse_args()
    if not die_with(args.parent):
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole process group; the parent decides
    _step_back(args.nice)
    parent_closes = contextlib.suppress(BrokenPipeError, ConnectionResetError)
    with parent_closes, socket.socket(fileno=args.fd) as channel:
        CheckpointWriter(channel).run()


def _step_back(nice: int) -> None:
    """Lower CPU and disk priority, so that a save slows the training as little as possible."""
    import psutil

    os.nice(nice)
    with contextlib.suppress(OSError, psutil.Error):  # not supported here, and optional
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)


if __name__ == "__main__":
    main()
