"""NCCL groups without a GPU: torch's calls replaced by fakes that keep to what torch documents and does.

The contracts are those of `torch/distributed/distributed_c10d.py` and of ProcessGroupNCCL: `abort` may block, and an
abort of one communicator may wait for the kernels of another; a wrapper is the same object only while a reference holds
it; a group in whose forming the thread is blocked is in none of torch's books yet. `tests/gpu` has the real thing.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture
from support.wait import stretched
from torch._C._distributed_c10d import ErrorType

from elastic.worker.comm import group, nccl
from elastic.worker.comm.errors import GroupAborted
from elastic.worker.comm.group import Group
from elastic.worker.torch_internals import torch_private

OFF = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")


class FakeNccl:
    """What `_get_backend` hands out for a GPU. Its error is what torch's watchdog has noted."""

    def __init__(self, act: Callable[[], None], error: ErrorType = ErrorType.SUCCESS) -> None:
        self.abort = act
        self.error = error

    def get_error(self) -> ErrorType:
        return self.error


class FakeGroup:
    """A process group as torch keeps it. `act` is what aborting its NCCL communicator does; None: it has none."""

    def __init__(self, act: Callable[[], None] | None) -> None:
        self.act = act
        self.wrapper: weakref.ref[Any] | None = None

    def _get_backend(self, device: torch.device) -> Any:
        assert device.type == "cuda"
        if self.act is None:
            raise RuntimeError("No backend type associated with device type cuda")
        found = self.wrapper() if self.wrapper else None
        if found is None:
            found = FakeNccl(self.act)
            self.wrapper = weakref.ref(found)
        return found


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> dict[Any, str]:
    """torch's book of its groups, by name."""
    groups: dict[Any, str] = {}
    monkeypatch.setattr(group.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(type(torch_private.c10d._world), "pg_names", property(lambda self: groups))
    return groups


def make(**options: Any) -> Group:
    return Group(backend="nccl", rank=0, world_size=2, store_host="127.0.0.1", store_port=9, generation=1, **options)


# ── aborting ────────────────────────────────────────────────────────────────────────────────────────────────────────


CARD = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set: the card has no kernel left to run. Without it `torch.cuda.synchronize` waits, at most 30 s."""
    idle = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: idle.wait(30.0) and None)
    return idle


@pytest.fixture
def stuck(card: threading.Event) -> Any:
    """An abort that waits for this does not return during the test."""
    stuck = threading.Event()
    yield stuck
    stuck.set()
    card.set()


def abort_all(wait_s: float = nccl.ABORT_S) -> list[str]:
    aborts = nccl.Aborts()
    aborts.start()
    aborts.wait(CARD, wait_s)
    return aborts.failed


def test_aborts_that_wait_for_each_other_do_not_dead_lock(world: dict[Any, str]) -> None:
    together = threading.Barrier(3)  # each returns when the kernels of all three are gone
    for name in "abc":
        world[FakeGroup(lambda: together.wait(60.0) and None)] = name
    assert abort_all() == []
    assert not together.broken


def test_each_communicator_is_aborted_once_and_new_ones_too(world: dict[Any, str]) -> None:
    log: list[str] = []
    aborts = nccl.Aborts()
    world[FakeGroup(lambda: log.append("a"))] = "a"
    world[FakeGroup(None)] = "cpu"
    for _ in range(50):  # the sweep after an abort; a forgotten wrapper would give its identity to the next one
        aborts.start()
    aborts.wait(CARD)
    assert log == ["a"]
    world[FakeGroup(lambda: log.append("late"))] = "late"
    aborts.start()
    aborts.start()
    aborts.wait(CARD)
    assert log == ["a", "late"]
    assert aborts.failed == []


def test_abort_of_a_communicator_shared_by_two_groups_runs_once(world: dict[Any, str]) -> None:
    log: list[str] = []
    twice = FakeGroup(lambda: log.append("a"))
    other = FakeGroup(lambda: None)
    other._get_backend = twice._get_backend  # type: ignore[method-assign]
    world |= {twice: "a", other: "b"}
    abort_all()
    assert log == ["a"]


def test_the_wrapper_of_torchs_debug_mode_is_looked_through(world: dict[Any, str]) -> None:
    log: list[str] = []

    class Wrapper:
        wrapped_pg = FakeNccl(lambda: log.append("inner"))

    wrapped = FakeGroup(lambda: None)
    wrapped._get_backend = lambda device: Wrapper()  # type: ignore[method-assign, assignment]
    world[wrapped] = "a"
    abort_all()
    assert log == ["inner"]


def test_a_backend_of_any_class_is_aborted(world: dict[Any, str]) -> None:
    """ "nccl" is another class from torch 2.15 on, and no subclass of the one before."""
    log: list[str] = []

    class ProcessGroupNCCL2:
        def abort(self) -> None:
            log.append("aborted")

    backend, made = ProcessGroupNCCL2(), FakeGroup(lambda: None)
    made._get_backend = lambda device: backend  # type: ignore[method-assign]
    world[made] = "a"
    assert abort_all() == []
    assert log == ["aborted"]


def test_gloo_is_left_to_the_cutting_of_its_sockets(world: dict[Any, str]) -> None:
    """Its `abort` frees nobody, and its groups may be asked for GPUs too."""
    store = dist.HashStore()
    gloo = dist.ProcessGroupGloo(store, 0, 1)
    made = FakeGroup(lambda: None)
    made._get_backend = lambda device: gloo  # type: ignore[method-assign]
    world[made] = "a"
    assert nccl.communicators() == []


def test_a_backend_that_cannot_be_aborted_is_refused_when_its_group_is_formed(world: dict[Any, str]) -> None:
    class Silent:
        def abort(self) -> None: ...

    silent, made = Silent(), FakeGroup(lambda: None)
    made._get_backend = lambda device: silent  # type: ignore[method-assign]
    world[made] = "a"
    with pytest.raises(
        RuntimeError, match=r"makes NCCL groups of Silent, which has no get_error\(\): .*Unset TORCH_DIST"
    ):
        nccl.check_abortable()
    world.clear()
    world[FakeGroup(lambda: None)] = "b"
    nccl.check_abortable()


def test_abort_failure_of_one_communicator_does_not_keep_the_others(world: dict[Any, str]) -> None:
    log: list[str] = []

    def refuse() -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    world |= {FakeGroup(refuse): "b", FakeGroup(lambda: log.append("a")): "a"}
    assert abort_all() == ["an NCCL communicator could not be aborted: NCCL error: unhandled system error"]
    assert log == ["a"]


def test_an_abort_that_does_not_return_is_told_and_not_waited_for_for_ever(
    world: dict[Any, str], stuck: threading.Event
) -> None:
    world[FakeGroup(lambda: stuck.wait(30.0) and None)] = "a"
    assert abort_all(wait_s=0.2) == ["the abort of an NCCL communicator has not returned within 0.2 s"]


def test_a_group_is_closed_while_an_abort_still_joins_nccls_threads(
    world: dict[Any, str], stuck: threading.Event, card: threading.Event
) -> None:
    """Its kernels are gone; NCCL's proxy threads look at the flag every half second, which nothing waits for."""
    world[FakeGroup(lambda: stuck.wait(30.0) and None)] = "a"
    made = make(device=CARD)
    made.abort("a rank died")
    card.set()
    made.close()
    assert not stuck.is_set()
    assert made.why == "a rank died"
    assert [thread.name for thread in threading.enumerate() if thread.name == "elastic-abort"] == ["elastic-abort"]


def test_a_group_is_not_closed_before_its_kernels_are_gone(
    world: dict[Any, str], stuck: threading.Event, card: threading.Event
) -> None:
    world[FakeGroup(lambda: stuck.wait(30.0) and None)] = "a"
    made = make(device=CARD)
    made.abort("a rank died")
    closing = threading.Thread(target=made.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    card.set()
    closing.join(60.0)
    assert not closing.is_alive()


def test_abort_failure_is_part_of_the_reason(world: dict[Any, str]) -> None:
    def refuse() -> None:
        raise RuntimeError("unhandled cuda error")

    world[FakeGroup(refuse)] = "a"
    made = make()
    made.abort("a rank died")
    made.close()
    assert made.why == "a rank died; an NCCL communicator could not be aborted: unhandled cuda error"


def test_the_gloo_side_is_free_while_the_abort_is_stuck(
    world: dict[Any, str], monkeypatch: pytest.MonkeyPatch, stuck: threading.Event, card: threading.Event
) -> None:
    cut = threading.Event()
    world[FakeGroup(lambda: stuck.wait(30.0) and None)] = "a"
    monkeypatch.setattr(group.sockets, "sockets_to", lambda addresses: cut.set() or [])
    made = make()
    made.abort("a rank died")
    assert cut.is_set()
    with pytest.raises(GroupAborted):
        made.check()
    card.set()
    made.close()


def test_a_group_that_nccl_cannot_abort_ends_the_process(
    world: dict[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise dist.DistBackendError("NCCL error: unhandled system error")

    monkeypatch.setattr(group.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(group.torch_private, "forget_all_groups", lambda: None)
    world[FakeGroup(refuse)] = "a"
    made = make()
    made.abort("a rank died")
    with pytest.raises(RuntimeError, match=r"this process cannot abort its NCCL group: .*NCCL error: unhandled"):
        made.close()


# ── the last time-out ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def noted(world: dict[Any, str], monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    """The communicator of the only group, to which a reference is kept."""
    monkeypatch.setattr(nccl, "LOOK_S", 0.01)
    only = FakeGroup(lambda: None)
    world[only] = "a"
    found: FakeNccl = only._get_backend(torch.device("cuda"))
    return found


def test_a_collective_beyond_the_groups_time_out_ends_the_process(
    noted: FakeNccl, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch's watchdog must not end the process: nothing else would wake a thread that waits on the device."""
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    thread = nccl.watch_time_out(threading.Event(), 5400.0, 7, 0, ended.put)
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.1)
    noted.error = ErrorType.TIMEOUT
    assert ended.get(timeout=5.0) == 1
    thread.join(60.0)
    said = capfd.readouterr().err
    assert said == (
        "a collective of generation 7 took longer than timeouts.group_s (5400 s): "
        "this process ends, so that the other ranks are released\n"
    )


def test_timeout_watch_ignores_peer_errors_and_timeouts_after_an_abort(noted: FakeNccl) -> None:
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    over = threading.Event()
    noted.error = ErrorType.COMM_ERROR
    thread = nccl.watch_time_out(over, 1.0, 1, 0, ended.put)
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.1)
    over.set()
    noted.error = ErrorType.TIMEOUT
    thread.join(60.0)
    assert not thread.is_alive()
    assert ended.empty()


def test_timeout_watch_spares_a_process_aborted_at_the_same_moment(
    noted: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    over = threading.Event()
    monkeypatch.setattr(noted, "get_error", lambda: over.set() or ErrorType.TIMEOUT)
    nccl.watch_time_out(over, 1.0, 1, 0, ended.put).join(60.0)
    assert over.is_set()
    assert ended.empty()


def test_timeout_watch_ends_only_the_first_rank(noted: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """All have run into it at the same moment; one process is enough for the agents to call the generation off."""
    monkeypatch.setattr(nccl, "GIVE_WAY_S", 20.0)
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    over = threading.Event()
    noted.error = ErrorType.TIMEOUT
    threads = [nccl.watch_time_out(over, 1.0, 1, rank, lambda _, rank=rank: ended.put(rank)) for rank in (2, 1, 0)]
    assert ended.get(timeout=5.0) == 0
    over.set()
    for thread in threads:
        thread.join(60.0)
    assert ended.empty()


@pytest.mark.parametrize("how", ["aborted", "closed"])
def test_a_group_that_is_over_is_watched_no_longer(how: str, formable: dict[str, Any]) -> None:
    made = make(device=torch.device("cuda", 0))
    made.form()
    (watching,) = [thread for thread in threading.enumerate() if thread.name == "elastic-time-out"]
    if how == "aborted":
        made.abort("a rank died")
    else:
        made.close()
    watching.join(60.0)
    assert not watching.is_alive()
    made.close()


# ── forming ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def formable(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Groups that skip the store. What torch was called with."""
    called: dict[str, Any] = {}
    monkeypatch.setattr(Group, "_arrive", lambda self, interrupted: setattr(self, "_store", dist.HashStore()))
    monkeypatch.setattr(nccl, "problems", list)
    monkeypatch.setattr(group.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(group.dist, "is_nccl_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: called.update(current=device))

    def init(name: str, **given: Any) -> None:
        called.update(given, name=name, environment=dict(os.environ))  # torch reads it when it makes the group

    monkeypatch.setattr(group.dist, "init_process_group", init)
    for name in (*OFF, *nccl.QUIET_TORCH, *nccl.QUIET_NCCL):
        monkeypatch.setenv(name, "0")  # so that it is put back
        monkeypatch.delenv(name)
    return called


def test_a_group_is_gloo_and_nccl_and_formed_at_once(formable: dict[str, Any]) -> None:
    made = make(device=torch.device("cuda", 1), timeout_s=7.0)
    made.form()
    made.close()
    assert formable["name"] == "cpu:gloo,cuda:nccl"
    assert formable["device_id"] == torch.device("cuda", 1)  # with an index: torch connects eagerly only then
    assert formable["current"] == torch.device("cuda", 1)
    assert formable["timeout"].total_seconds() == 7.0


def test_torchs_own_threads_are_quiet_before_the_group_is_made(
    formable: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its watchdog aborts by itself, or holds a lock for a minute that the next collective waits for."""
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")  # the flight recorder is written if it is asked for
    made = make(device=torch.device("cuda", 0))
    made.form()
    made.close()
    found = formable["environment"]
    assert [found.get(name) for name in OFF] == ["0", None]  # torch warns where the second, its older name, is set
    assert int(found["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"]) < 10
    assert found["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert found["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert [found[name] for name in ("NCCL_RAS_ENABLE", "NCCL_NVLS_ENABLE", "NCCL_RUNTIME_CONNECT")] == ["0"] * 3


def test_nccl_group_class_allows_disabling_its_watchdog_exit(
    formable: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist.Backend, "backend_list", ["undefined", "gloo", "nccl"])
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    assert nccl.backend_name() == "nccl"  # torch up to 2.14
    dist.Backend.backend_list.append("nccl-legacy")
    made = make(device=torch.device("cuda", 0))
    made.form()
    made.close()
    assert formable["name"] == "cpu:gloo,cuda:nccl-legacy"
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "1")
    assert nccl.backend_name() == "nccl"


def test_torchs_cache_is_emptied_before_nccl_allocates(
    formable: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card full of cached blocks would fail each forming anew, as if a peer were missing."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: formable.update(emptied="name" not in formable))
    made = make(device=torch.device("cuda", 0))
    made.form()
    made.close()
    assert formable["emptied"] is True


def test_a_forming_that_takes_too_long_is_given_up(formable: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, and nobody aborts: the peer that it waits for is stopped, and its agent has not noticed."""

    def init(name: str, **given: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            try:
                listener.accept()
            except OSError as error:
                raise dist.DistBackendError(f"NCCL error: ncclSystemError: {error}") from error

    monkeypatch.setattr(group.dist, "init_process_group", init)
    made = make(device=torch.device("cuda", 0), form_timeout_s=0.2)
    with pytest.raises(GroupAborted, match=r"forming took over 0\.2 s"):
        made.form()
    made.close()


def test_a_communicator_in_the_making_is_freed_by_its_sockets(
    formable: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL's bootstrap: the thread waits in accept, on a socket that nobody else knows."""
    users = socket.create_server(("127.0.0.1", 0))
    mine = socket.create_connection(users.getsockname())
    theirs, _ = users.accept()
    blocked = threading.Event()

    def init(name: str, **given: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            blocked.set()
            try:
                listener.accept()
            except OSError as error:
                raise dist.DistBackendError(f"NCCL error: ncclSystemError: {error}") from error

    monkeypatch.setattr(group.dist, "init_process_group", init)
    made = make(device=torch.device("cuda", 0))
    threading.Thread(target=lambda: blocked.wait(60.0) and made.abort("a rank died")).start()
    begun_s = time.monotonic()
    with pytest.raises(GroupAborted, match="a rank died"):
        made.form()
    made.close()
    assert time.monotonic() - begun_s < stretched(2.0)
    mine.sendall(b"still here")
    assert theirs.recv(64) == b"still here"
    for sock in (users, mine, theirs):
        sock.close()


def freed_beside_gloo(rank: int, world: int, port: int) -> Any:
    """A real gloo group stands already; NCCL's part, which is blocked, is a listening socket."""
    real, blocked = dist.init_process_group, threading.Event()

    def init(name: str, device_id: torch.device, **given: Any) -> None:
        real("gloo", **given)
        if given["store"].add("formed", 1) == world:
            given["store"].set("all formed", "1")
        given["store"].wait(["all formed"])  # else an abort here would fail the forming of a rank that is still at it
        with socket.create_server(("127.0.0.1", 0)) as listener:
            blocked.set()
            try:
                listener.accept()
            except OSError as error:
                raise dist.DistBackendError(f"NCCL error: {error}") from error

    group.dist.init_process_group = init
    nccl.problems = list
    torch.cuda.set_device = lambda device: None
    made = Group(
        backend="nccl", rank=rank, world_size=world, store_host="127.0.0.1", store_port=port, generation=1,
        device=torch.device("cuda", 0),
    )  # fmt: skip
    threading.Thread(target=lambda: blocked.wait(20.0) and made.abort("a rank died"), daemon=True).start()
    try:
        made.form()
    except GroupAborted as error:
        made.close()
        return str(error)
    return "formed"


@pytest.mark.slow
def test_gloos_own_listening_socket_is_spared() -> None:
    """To cut it would end the process."""
    assert run_ranks(freed_beside_gloo, world_size=2) == ["a rank died"] * 2


def test_an_aborted_group_is_struck_off_and_not_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """`destroy_process_group` waits for NCCL's kernels and joins its watchdog; an abort has no patience for either."""
    log: list[str] = []
    monkeypatch.setattr(group.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(group.dist, "is_nccl_available", lambda: False)
    monkeypatch.setattr(group.dist, "destroy_process_group", lambda: log.append("destroy"))
    monkeypatch.setattr(group.torch_private, "forget_all_groups", lambda: log.append("strike off"))
    aborted = make()
    aborted.abort("a rank died")
    aborted.close()
    orderly = make()
    orderly.close()
    assert log == ["strike off", "destroy"]


def test_no_book_of_torchs_is_left_out_when_groups_are_struck_off() -> None:
    """Also one that a later torch has: each attribute of its world that has an entry for the default group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    extra = dist.new_group([0])
    world = torch_private.c10d._world
    books = {name for name in dir(type(world)) if isinstance(getattr(type(world), name), property)}
    books.discard("pg_config_info")  # made of the others for each caller
    filled = {name for name in books if hasattr(getattr(world, name), "clear") and getattr(world, name)}
    assert {"pg_map", "pg_names"} <= filled
    torch_private.forget_all_groups()
    assert not dist.is_initialized()
    assert {name for name in filled if getattr(world, name)} == set()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.barrier()
    assert extra is not None
    dist.destroy_process_group()
