"""Much data goes over sockets of its own: bit for bit, only to the rank that has the token, and an abort wakes both."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture

from elastic.worker.comm import direct
from elastic.worker.comm.errors import is_communication_error
from elastic.worker.comm.group import Group
from elastic.worker.state.handover import broadcast

pytestmark = pytest.mark.slow

ELEMENTS = 6 << 20
"""24 MiB of float32."""


def group(rank: int, world_size: int, port: int) -> Group:
    made = Group(
        backend="gloo", rank=rank, world_size=world_size, store_host="127.0.0.1", store_port=port, generation=1
    )
    made.form()
    return made


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(ELEMENTS, generator=generator),
        torch.randn(5, generator=generator),
        torch.randn(300, 700, generator=generator).t(),
        torch.randn((), generator=generator),
    ]


def relay(held: list[torch.Tensor], rank: int, world_size: int) -> None:
    following = rank + 1 if rank + 1 < world_size else None
    broadcast.relay(held, previous=rank - 1 if rank else None, following=following)


def same(held: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(held, tensors(0), strict=True))


class Counted:
    """Counts what goes over a rank's own sockets."""

    def __init__(self, spoilt: bool = False) -> None:
        self.nbytes = 0
        self._spoilt = spoilt
        self._really = direct._send
        direct._send = self._send

    def _send(self, sock: socket.socket, data: torch.Tensor) -> None:
        self.nbytes += data.numel()
        if self._spoilt:
            data = data.clone()
            data[-1] ^= 1
        self._really(sock, data)


def sent(rank: int, world_size: int, port: int) -> Any:
    counted, made, held = Counted(), group(rank, world_size, port), tensors(rank)
    relay(held, rank, world_size)
    made.close()
    return [same(held), counted.nbytes, len(direct._OPEN)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_bit_arrives_over_sockets_that_are_closed_afterwards(world_size: int) -> None:
    results = run_ranks(sent, world_size=world_size)
    assert [(right, left) for right, _, left in results] == [(True, 0)] * world_size
    assert all(nbytes > ELEMENTS * 4 for _, nbytes, _ in results[:-1])
    assert results[-1][1] == 0


def spoilt(rank: int, world_size: int, port: int) -> Any:
    """Rank 1 passes on other bytes than it has received."""
    Counted(spoilt=rank == 1)
    made, said = group(rank, world_size, port), ""
    try:
        relay(tensors(rank), rank, world_size)
    except broadcast.CorruptError as error:
        said = str(error)
    made.close()
    return said


def test_damage_on_the_way_is_found() -> None:
    assert run_ranks(spoilt, world_size=3) == ["", "", "7 of 7 slices of the state arrived damaged, the first is 0"]


def unreachable(rank: int, world_size: int, port: int, where: str) -> Any:
    counted, made, held = Counted(), group(rank, world_size, port), tensors(rank)
    if where == "no listener" and rank == 0:
        direct.sockets.listening_at = list
    if where == "refused" and rank == 1:
        direct._connect = refuse
    relay(held, rank, world_size)
    made.close()
    return [same(held), counted.nbytes]


def refuse(*_: object) -> None:
    raise ConnectionRefusedError("Connection refused")


@pytest.mark.parametrize("where", ["no listener", "refused"])
def test_without_a_connection_the_group_is_used(where: str) -> None:
    first, second, third = run_ranks(unreachable, world_size=3, where=where)
    assert (first, third) == ([True, 0], [True, 0])
    assert second[0]
    assert second[1] > 0  # its own follower can connect


def with_strangers(rank: int, world_size: int, port: int) -> Any:
    """Before rank 1, others connect: some say nothing, one leaves, one guesses, one says a little at a time."""
    counted, made, held = Counted(), group(rank, world_size, port), tensors(rank)
    strangers: list[socket.socket] = []
    over, really = threading.Event(), direct._connect

    def trickle(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not over.wait(0.1):
                sock.sendall(b"0", socket.MSG_NOSIGNAL)

    def connect(sock: socket.socket, endpoint: direct.Endpoint) -> None:
        where = endpoint.host, endpoint.port
        strangers.extend(socket.create_connection(where, 5) for _ in range(8))
        strangers[1].close()
        strangers[2].sendall(b"0" * direct.TOKEN_BYTES)
        threading.Thread(target=trickle, args=[strangers[3]], daemon=True).start()
        really(sock, endpoint)

    if rank:
        direct._connect = connect
    relay(held, rank, world_size)
    over.set()
    made.close()
    return [same(held), counted.nbytes, len(direct._OPEN)]


def test_only_the_connection_with_the_token_is_used() -> None:
    (source, nbytes, left), (received, *_) = run_ranks(with_strangers, world_size=2)
    assert (source, received, left) == (True, True, 0)
    assert nbytes > ELEMENTS * 4


def test_more_strangers_than_may_wait_at_a_time_are_dropped_and_none_breaks_the_listening() -> None:
    over = threading.Event()

    def flood() -> None:
        held: list[socket.socket] = []
        while not over.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(listener.getsockname(), 1))
                held[-1].sendall(b"x", socket.MSG_NOSIGNAL)
            if len(held) > direct.MOST_PENDING + 40:
                held.pop(0).close()
        for sock in held:
            sock.close()

    with (
        socket.create_server(("127.0.0.1", 0), backlog=64) as listener,
        contextlib.ExitStack() as stack,
        ThreadPoolExecutor(2) as threads,
    ):
        accepted = threads.submit(direct.accept, listener, "a" * direct.TOKEN_BYTES, stack, 2.0)
        flooded = threads.submit(flood)
        try:
            assert accepted.result() is None
        finally:
            over.set()
            flooded.result()


def elsewhere(rank: int, world_size: int, port: int) -> Any:
    """Rank 1's connection is made, but to another listener, as through a proxy: no rank may wait for it."""
    counted, made, held = Counted(), group(rank, world_size, port), tensors(rank)
    with socket.create_server(("127.0.0.1", 0)) as other:

        def connect(sock: socket.socket, endpoint: direct.Endpoint) -> None:
            sock.connect(other.getsockname())

        if rank:
            direct._connect = connect
        relay(held, rank, world_size)
    made.close()
    return [same(held), counted.nbytes, len(direct._OPEN)]


def test_a_connection_that_does_not_arrive_is_not_used() -> None:
    assert run_ranks(elsewhere, world_size=2) == [[True, 0, 0]] * 2


def threadless(rank: int, world_size: int, port: int) -> Any:
    counted, made, held = Counted(), group(rank, world_size, port), tensors(rank)
    if rank == 1:
        direct.ThreadPoolExecutor.submit = refuse_thread  # type: ignore[method-assign]
    relay(held, rank, world_size)
    made.close()
    return [same(held), counted.nbytes > 0]


def refuse_thread(*_: object) -> Any:
    raise RuntimeError("can't start new thread")


def test_without_a_thread_a_rank_in_the_middle_receives_and_sends_in_turn() -> None:
    assert run_ranks(threadless, world_size=3) == [[True, True], [True, True], [True, False]]


def aborted(rank: int, world_size: int, port: int, alone: int, folder: str) -> Any:
    """Only rank `alone` is aborted, in the middle of the transfer; its neighbour goes on once that one is out."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as command-line programs do
    made, out = group(rank, world_size, port), pathlib.Path(folder, "out")
    receive, send, begun = direct._Receiving.wait, direct._send, []

    def abort_soon() -> None:
        if rank == alone and not begun:
            begun.append(1)
            threading.Timer(0.3, made.abort, ["told so"]).start()

    def hold() -> None:
        if rank != alone:
            while not out.exists():
                time.sleep(0.02)

    def receive_late(receiving: direct._Receiving) -> None:
        abort_soon()
        hold()
        receive(receiving)

    def send_late(sock: socket.socket, data: torch.Tensor) -> None:
        abort_soon()
        hold()
        send(sock, data)

    direct._Receiving.wait = receive_late  # type: ignore[method-assign]
    direct._send = send_late
    said = ""
    try:
        relay([torch.full((32 << 20,), float(rank))], rank, world_size)
    except RuntimeError as error:
        said = "lost" if is_communication_error(error) else repr(error)
    if rank == alone:
        out.touch()
    made.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("elastic-send")]
    return [said, len(direct._OPEN), left]


@pytest.mark.parametrize(("alone", "world_size"), [(0, 2), (1, 2), (1, 3)])
def test_an_abort_wakes_a_rank_whose_neighbours_stand_still(
    alone: int, world_size: int, tmp_path: pathlib.Path
) -> None:
    found = run_ranks(aborted, world_size=world_size, alone=alone, folder=str(tmp_path), timeout_s=30)
    assert found == [["lost", 0, []]] * world_size


def fails(rank: int, world_size: int, port: int) -> Any:
    """Rank 1 fails by itself while its thread waits for rank 2, which reads nothing until rank 1 is out."""
    made, said, looks = group(rank, world_size, port), "", []
    out = made._store
    assert out is not None
    really = direct._Receiving.wait

    def after_it(receiving: direct._Receiving) -> None:
        out.wait(["rank 1 is out"])
        really(receiving)

    def check() -> None:
        looks.append(1)
        if rank == 1 and len(looks) == 4:
            raise ValueError("told so")

    if rank == 2:
        direct._Receiving.wait = after_it  # type: ignore[method-assign]
    try:
        following = rank + 1 if rank < 2 else None
        broadcast.relay(
            [torch.full((32 << 20,), float(rank))],
            previous=rank - 1 if rank else None,
            following=following,
            check=check,
        )
    except (ValueError, RuntimeError) as error:
        said = "told so" if "told so" in str(error) else "lost" if is_communication_error(error) else repr(error)
    if rank == 1:
        out.set("rank 1 is out", "")
    made.close()
    return said


def test_a_rank_that_fails_does_not_wait_for_its_follower() -> None:
    assert run_ranks(fails, world_size=3, timeout_s=30) == ["lost", "told so", "lost"]


class Dribble:
    """A socket that returns less than was asked for, as after a signal."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def recv_into(self, view: memoryview, nbytes: int, flags: int) -> int:
        count = min(3, len(self._raw))
        view[:count], self._raw = self._raw[:count], self._raw[count:]
        return count


def test_bytes_that_come_in_pieces_are_put_together_and_an_early_end_is_an_error() -> None:
    data = torch.zeros(10, dtype=torch.uint8)
    direct._Receiving(Dribble(bytes(range(10))), data).wait()  # type: ignore[arg-type]
    assert data.tolist() == list(range(10))
    with pytest.raises(dist.DistNetworkError, match="connection closed"):
        direct._Receiving(Dribble(bytes(5)), data).wait()  # type: ignore[arg-type]


def test_a_listener_that_another_thread_closes_ends_the_wait_for_a_connection() -> None:
    """The end of a generation closes it; the thread stayed, and was not there to receive the next one's copies."""
    found: list[object] = []
    with contextlib.ExitStack() as stack:
        listener = socket.create_server(("127.0.0.1", 0))
        waits = threading.Thread(target=lambda: found.append(direct.accept(listener, "x", stack, 600.0)), daemon=True)
        waits.start()
        time.sleep(0.2)
        listener.close()
        waits.join(30.0)
        assert not waits.is_alive()
    assert found == [None]


def test_what_is_closed_while_all_sockets_are_cut_leaves_the_others_to_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the garbage collector, in the thread that cuts them."""
    closed: list[object] = []

    class Closes:
        def shutdown(self, _: int) -> None:
            direct._OPEN.discard(self)  # type: ignore[arg-type]
            closed.append(self)

    monkeypatch.setattr(direct, "_OPEN", {Closes() for _ in range(3)})
    direct.cut()
    assert len(closed) == 3
