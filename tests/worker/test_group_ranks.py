"""Process groups that are aborted and formed again in the same processes: real ranks, real sockets, gloo.

The contract of `Group`, for both implementations.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forming import both, formed, make
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture

from elastic.contract.records.reasons import Code
from elastic.worker.comm.errors import FormError, GroupAborted, is_communication_error
from elastic.worker.comm.group import Group
from elastic.worker.link.misuse import MisuseRuntimeError

pytestmark = pytest.mark.slow

LIMIT_S = 1.5
"""From an abort until the main thread is free; 0.01 to 0.1 on a machine with nothing else to do."""


def summed(world_size: int) -> bool:
    ones = torch.ones(1000)
    dist.all_reduce(ones)
    return bool((ones == world_size).all())


def abort_later(group: Group, after_s: float) -> list[float]:
    """Abort from another thread; the instant goes into the list that is returned."""
    at_s: list[float] = []

    def act() -> None:
        at_s.append(time.monotonic())
        group.abort("a rank died")

    threading.Timer(after_s, act).start()
    return at_s


def block_in(what: str, rank: int, world_size: int) -> None:
    """Collectives in which the victim, the last rank, never takes part."""
    while True:
        match what:
            case "all_reduce":
                dist.all_reduce(torch.ones(1 << 20))
            case "neighbour":  # waits for a living rank that waits for the dead one: no socket of its own breaks
                dist.recv(torch.ones(4), (rank + 1) % world_size)
            case "sub-group":
                dist.all_reduce(torch.ones(4), group=dist.new_group(list(range(world_size))))
            case "broadcast":
                dist.broadcast(torch.ones(1 << 20), world_size - 1)


def lose_one(rank: int, world_size: int, port: int, forming: str, what: str) -> Any:
    group = make(forming, rank, world_size, port, 1)
    group.form()
    assert summed(world_size)
    if what == "sub-group":
        dist.all_reduce(torch.ones(4), group=dist.new_group(list(range(world_size))))
    if rank == world_size - 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    at_s = abort_later(group, 0.5)
    with pytest.raises(RuntimeError) as caught:
        block_in(what, rank, world_size)
    assert is_communication_error(caught.value), caught.value
    said = str(caught.value)
    del caught
    if not at_s:  # this rank's own connection to the dead one broke before anybody told it
        group.abort("a collective failed")
        at_s = [time.monotonic()]
    freed_s = time.monotonic() - at_s[0]
    group.close()
    begun_s = time.monotonic()
    group = make(forming, rank, world_size - 1, port, 2)
    group.form()
    whole = summed(world_size - 1)
    group.close()
    return {"said": said, "freed_s": freed_s, "formed_s": time.monotonic() - begun_s, "whole": whole}


@both
@pytest.mark.parametrize("what", ["all_reduce", "neighbour", "sub-group", "broadcast"])
def test_survivors_of_a_kill_are_freed_and_form_again(what: str, forming: str) -> None:
    *survivors, dead = run_ranks(lose_one, world_size=4, forming=forming, what=what)
    assert dead == {"died": signal.SIGKILL}
    assert all(s["whole"] and s["said"] for s in survivors)
    assert max(s["freed_s"] for s in survivors) < LIMIT_S


def many_rounds(rank: int, world_size: int, port: int, forming: str, rounds: int) -> Any:
    hook = sys.excepthook
    counts: list[tuple[int, int]] = []
    for generation in range(rounds):
        group = make(forming, rank, world_size, port, generation)
        group.form()
        assert summed(world_size)
        if generation % 2:
            abort_later(group, 0.0)
            with pytest.raises(RuntimeError) as caught:
                dist.recv(torch.ones(4), 1 - rank)
            assert is_communication_error(caught.value), caught.value
            del caught
        group.close()
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return {"early": max(counts[:10]), "late": min(counts[-10:]), "hook": sys.excepthook is hook}


@both
def test_two_hundred_rounds_leak_neither_descriptors_nor_threads(forming: str) -> None:
    for result in run_ranks(many_rounds, world_size=2, forming=forming, rounds=200):
        assert result["hook"], "sys.excepthook is wrapped once more by each group"
        assert result["late"][0] <= result["early"][0] + 2
        assert result["late"][1] <= result["early"][1] + 1


def abort_while_forming(rank: int, world_size: int, port: int, forming: str, when_s: float) -> Any:
    """Rank 1 arrives, but never forms: rank 0 is stuck inside init_process_group."""
    if rank == 1:
        try:
            make(forming, rank, world_size, port, 1, timeout_s=1.0)._arrive(lambda: False)
        except FormError:
            return 0.0  # the other one was aborted before it came
        time.sleep(when_s + 0.5)
        return 0.0
    group = make(forming, rank, world_size, port, 1)
    at_s = abort_later(group, when_s)
    with pytest.raises(GroupAborted, match="a rank died"):
        group.form()
    freed_s = time.monotonic() - at_s[0]
    group.close()
    alone = make(forming, 0, 1, port, 2)
    alone.form()
    assert summed(1)
    alone.close()
    return freed_s


@both
@pytest.mark.parametrize("when_s", [0.0, 0.005, 0.3])
def test_abort_while_forming(when_s: float, forming: str) -> None:
    assert run_ranks(abort_while_forming, world_size=2, forming=forming, when_s=when_s)[0] < LIMIT_S


def abort_while_waiting(rank: int, world_size: int, port: int, forming: str) -> Any:
    group = make(forming, 0, 2, port, 1)  # the other one never comes
    at_s = abort_later(group, 0.2)
    with pytest.raises(GroupAborted):
        group.form()
    freed_s = time.monotonic() - at_s[0]
    group.close()
    group.close()
    group.abort("too late")
    return [freed_s, group._aborted.is_set()]


@both
def test_abort_while_waiting_for_the_others(forming: str) -> None:
    assert run_ranks(abort_while_waiting, world_size=1, forming=forming)[0][0] < 0.5


def silent_store(rank: int, world_size: int, port: int, forming: str) -> Any:
    """The store's host accepts, and never answers: torch's constructor waits, but not this process."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        group = make(forming, 0, 2, silent.getsockname()[1], 1)
        at_s = abort_later(group, 0.2)
        with pytest.raises(GroupAborted):
            group.form()
        freed_s = time.monotonic() - at_s[0]
        group.close()
    return freed_s


@both
def test_abort_while_the_store_does_not_answer(forming: str) -> None:
    assert run_ranks(silent_store, world_size=1, forming=forming)[0] < LIMIT_S


def too_few(rank: int, world_size: int, port: int, forming: str) -> Any:
    said = []
    for options, where in [({"timeout_s": 0.3}, port), ({"timeout_s": 0.3}, 9)]:
        group = make(forming, 0, 3, where, 1, **options)
        with pytest.raises(FormError) as caught:
            group.form()
        group.close()
        said.append(caught.value.why.code)
    overdue = make(forming, 0, 2, port, 2, form_timeout_s=0.3)
    threading.Thread(target=make(forming, 1, 2, port, 2)._arrive, args=[lambda: False], daemon=True).start()
    with pytest.raises(GroupAborted) as late:
        overdue.form()
    overdue.close()
    return [*said, str(late.value)]


@both
def test_group_forming_error_names_what_is_missing(forming: str) -> None:
    few, no_store, late = run_ranks(too_few, world_size=1, forming=forming)[0]
    assert few == Code.RANKS_MISSING
    assert no_store == Code.NO_STORE
    assert late == "forming took over 0.3 s"


def other_sockets(rank: int, world_size: int, port: int, forming: str) -> Any:
    """The user's own connections, open before, during and after, among them an asyncio server's, stay whole."""
    import asyncio

    listener = socket.create_server(("127.0.0.1", 0))

    def connected() -> tuple[socket.socket, socket.socket]:
        client = socket.create_connection(listener.getsockname())
        return client, listener.accept()[0]

    answering: list[asyncio.StreamWriter] = []

    def answer_hi(_: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        answering.append(to)
        to.write(b"hi")

    pairs = [connected()]
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(answer_hi, "127.0.0.1", 0))
    group = make(forming, rank, world_size, port, 1)
    group.form()
    pairs.append(connected())
    reader, writer = loop.run_until_complete(asyncio.open_connection(*server.sockets[0].getsockname()))
    with contextlib.suppress(RuntimeError):  # the other one may abort before this one is through
        summed(world_size)
    group.abort("test")
    group.close()
    answer = loop.run_until_complete(reader.readexactly(2))
    for end in (writer, *answering):  # Python 3.12.1 waits for both ends
        end.close()
    server.close()
    loop.run_until_complete(server.wait_closed())
    loop.close()
    for client, accepted in pairs:
        client.sendall(b"x")
        assert accepted.recv(1) == b"x"
    return answer.decode()


@both
def test_the_users_own_sockets_are_left_alone(forming: str) -> None:
    assert run_ranks(other_sockets, world_size=2, forming=forming) == ["hi", "hi"]


def refused(rank: int, world_size: int, port: int, *, dies: bool) -> list[str]:
    """What a refusal is found to be, before and after the other rank has died."""
    group = formed(rank, world_size, port)
    error = MisuseRuntimeError("step 7 ended with state.step = 7")
    found = [type(group.cause_of(error)).__name__]
    dist.barrier()
    if dies and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    found += [type(group.cause_of(each)).__name__ for each in (error, KeyError("x"))]
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    group.abort("over")
    group.close()
    return found


@pytest.mark.parametrize(("dies", "then"), [(True, "GroupAborted"), (False, "MisuseRuntimeError")])
def test_a_refusal_after_the_loss_of_a_rank_that_the_script_has_handled_is_none(dies: bool, then: str) -> None:
    """Whatever the agent knows: a node's death it sees when the lease has expired."""
    first, *_ = run_ranks(refused, world_size=2, dies=dies)
    assert first == ["MisuseRuntimeError", then, "KeyError"]
