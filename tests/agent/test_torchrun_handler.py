"""The rendezvous handler on a real etcd, several nodes in one process: what torch's agent is promised."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from support.etcd_server import EtcdServer
from support.wait import eventually, holds, stretched
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import GenerationRecord, decode
from elastic.etcd.client import Etcd, EtcdUnavailable, TxnResult, View
from elastic.torchrun.handler import create_handler
from elastic.torchrun.rendezvous import EtcdRendezvousHandler

pytestmark = pytest.mark.etcd


class Run:
    """Nodes of one run. Each `join` is a `next_rendezvous` in a thread of its own."""

    def __init__(self, server: EtcdServer, run_id: str) -> None:
        self.server = server
        self.run_id = run_id
        self.keys = ClusterKeys("torchrun").job(run_id)
        self.etcd = Etcd(server.access, call_s=20.0)
        self._handlers: list[EtcdRendezvousHandler] = []
        self._pool = ThreadPoolExecutor(16)

    def node(self, least: int, most: int, **conf: str) -> EtcdRendezvousHandler:
        conf = {"timeout": "20", "last_call_timeout": "0.3", "lease_ttl": "2", **conf}
        params = RendezvousParameters(
            "elastic", self.server.endpoint, self.run_id, least, most, local_addr="127.0.0.1", **conf
        )
        handler = create_handler(params)
        assert isinstance(handler, EtcdRendezvousHandler)
        self._handlers.append(handler)
        return handler

    def join(self, *nodes: EtcdRendezvousHandler) -> list[Future[RendezvousInfo]]:
        return [self._pool.submit(node.next_rendezvous) for node in nodes]

    def formed(self, *nodes: EtcdRendezvousHandler) -> list[RendezvousInfo]:
        return [future.result(60) for future in self.join(*nodes)]

    def generation(self) -> GenerationRecord:
        kv = self.etcd.get(self.keys.generation)
        assert kv is not None
        return decode(GenerationRecord, kv.value)

    def close(self) -> None:
        for handler in self._handlers:
            handler.shutdown()
        self._pool.shutdown(cancel_futures=True)
        self.etcd.close()


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with EtcdServer() as one:
        yield one


@pytest.fixture
def run(server: EtcdServer, request: pytest.FixtureRequest) -> Iterator[Run]:
    server.ensure_started()
    made = Run(server, re.sub(r"[^a-z0-9]+", "-", request.node.name)[:60].strip("-"))
    yield made
    made.close()


def kill(node: EtcdRendezvousHandler) -> None:
    """What SIGKILL would do, as far as etcd can see: nothing more is heard of the node."""
    node._shut = True
    party = node._party
    with party.changed:
        party._closing = True
        party._wake()
    node._etcd.close()
    party.close()


def ranks(infos: list[RendezvousInfo]) -> set[int]:
    assert {info.world_size for info in infos} == {len(infos)}
    return {info.rank for info in infos}


def test_rendezvous_nodes_share_one_fresh_store(run: Run) -> None:
    a, b = run.node(2, 2), run.node(2, 2)
    first = run.formed(a, b)
    assert ranks(first) == {0, 1}
    first[0].store.set("k", "v")
    assert first[1].store.get("k") == b"v"
    boot = first[0].bootstrap_store_info
    assert boot is not None
    assert boot == first[1].bootstrap_store_info
    assert a.use_agent_store
    assert (a.get_backend(), a.get_run_id()) == ("elastic", run.run_id)
    assert holds(lambda: a.num_nodes_waiting() + b.num_nodes_waiting() == 0, 0.5) is None

    second = run.formed(a, b)
    assert [info.rank for info in second] == [info.rank for info in first], "nobody changes places without need"
    again = second[0].bootstrap_store_info
    assert again is not None
    assert again.master_port != boot.master_port
    assert not second[0].store.check(["k"]), "nothing of the generation before"


def test_rendezvous_below_min_nodes_times_out_and_names_what_is_missing(run: Run) -> None:
    node = run.node(2, 3, timeout="1")
    began_s = time.monotonic()
    with pytest.raises(RendezvousTimeoutError, match="1 of at least 2 nodes"):
        node.next_rendezvous()
    assert 0.9 < time.monotonic() - began_s < stretched(3.0)
    assert not run.etcd.get_prefix(run.keys.members).kvs, "an agent that gave up is not counted"


@pytest.mark.slow
def test_max_is_not_exceeded_and_a_spare_takes_a_lost_ones_place(run: Run) -> None:
    a, b = run.node(2, 2), run.node(2, 2)
    run.formed(a, b)
    spare = run.node(2, 2, timeout="1")
    [waiting] = run.join(spare)
    holds(lambda: not waiting.done() and not a.num_nodes_waiting(), 1.5, "a spare waits, past its deadline, in peace")
    kill(b)
    eventually(a.num_nodes_waiting, 6, "the loss is seen when the lease ends")
    [again] = run.join(a)
    assert ranks([again.result(60), waiting.result(60)]) == {0, 1}


def test_a_late_joiner_is_taken_in(run: Run) -> None:
    a, b = run.node(1, 3), run.node(1, 3)
    assert ranks(run.formed(a)) == {0}
    late = run.join(b)
    eventually(a.num_nodes_waiting, 3)
    assert ranks([*run.formed(a), late[0].result(60)]) == {0, 1}
    assert a.num_nodes_waiting() == 0


def test_rendezvous_last_call_gathers_nodes_into_one_generation(run: Run) -> None:
    first = run.join(run.node(1, 4, last_call_timeout="1"))
    time.sleep(0.2)
    rest = run.join(*(run.node(1, 4, last_call_timeout="1") for _ in range(2)))
    assert ranks([future.result(60) for future in first + rest]) == {0, 1, 2}
    assert run.generation().number == 1


def test_full_house_does_not_wait_for_the_last_call(run: Run) -> None:
    began_s = time.monotonic()
    run.formed(*(run.node(1, 2, last_call_timeout="10") for _ in range(2)))
    assert time.monotonic() - began_s < stretched(5.0)


def test_leaving_is_seen_at_once(run: Run) -> None:
    nodes = [run.node(2, 3) for _ in range(3)]
    run.formed(*nodes)
    gone, *stay = nodes
    assert gone.shutdown()
    for node in stay:
        eventually(node.num_nodes_waiting, 1, "no lease has to end first")
    assert ranks(run.formed(*stay)) == {0, 1}
    assert not stay[0].is_closed(), "leaving closes nothing for the others"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_node_makes_the_others_re_form(run: Run, victim: int) -> None:
    nodes = [run.node(1, 2) for _ in range(2)]
    infos = run.formed(*nodes)
    [lost] = [node for node, info in zip(nodes, infos, strict=True) if info.rank == victim]
    [left] = [node for node in nodes if node is not lost]
    kill(lost)
    began_s = time.monotonic()
    eventually(left.num_nodes_waiting, 6)
    assert ranks(run.formed(left)) == {0}
    assert time.monotonic() - began_s < stretched(6.0)
    assert left.num_nodes_waiting() == 0


def test_below_min_the_survivors_wait_for_a_replacement(run: Run) -> None:
    a, b = run.node(2, 2), run.node(2, 2)
    run.formed(a, b)
    b.shutdown()
    eventually(a.num_nodes_waiting, 2)
    waiting = run.join(a)
    holds(lambda: not waiting[0].done(), 0.7)
    new = run.join(run.node(2, 2))
    assert ranks([waiting[0].result(60), new[0].result(60)]) == {0, 1}


def test_rendezvous_after_worker_failure_takes_two_etcd_writes(run: Run) -> None:
    nodes = [run.node(4, 4) for _ in range(4)]
    run.formed(*nodes)
    before = run.etcd.revision(run.keys.root)
    again = run.join(nodes[2])
    for node in nodes:
        if node is not nodes[2]:
            eventually(node.num_nodes_waiting, 2)
            again += run.join(node)
    assert ranks([future.result(60) for future in again]) == {0, 1, 2, 3}
    assert run.etcd.revision(run.keys.root) - before == 2, "what broke, and the new generation"


def test_rendezvous_of_all_nodes_failing_at_once_forms_one_generation(run: Run) -> None:
    nodes = [run.node(3, 3) for _ in range(3)]
    run.formed(*nodes)
    run.formed(*nodes)
    assert run.generation().number == 2


def test_rendezvous_completes_when_the_answer_to_publish_is_lost(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = run.node(2, 2), run.node(2, 2)
    lost = []
    for node in (a, b):

        def txn(*args: Any, real: Callable[..., TxnResult] = node._etcd.txn) -> TxnResult:
            result = real(*args)
            if not lost:
                lost.append(result)
                raise EtcdUnavailable("no answer")
            return result

        monkeypatch.setattr(node._etcd, "txn", txn)
        [watch] = node._etcd._watches

        def late(view: View, real: Callable[[View], None] = watch._on_view) -> None:
            if run.keys.generation in view.kvs:
                time.sleep(1)  # long enough for the publication to be tried again
            real(view)

        monkeypatch.setattr(watch, "_on_view", late)
    assert ranks(run.formed(a, b)) == {0, 1}
    assert lost[0].ok
    assert run.generation().number == 1


@pytest.mark.slow
def test_node_lost_during_rendezvous_does_not_block_the_others(run: Run) -> None:
    a, b = run.node(1, 2), run.node(1, 2)
    run.formed(a, b)
    kill(b)  # its lease still runs, so the next generation names it
    assert ranks(run.formed(a)) == {0}


def test_closed_is_closed_for_all_and_later(run: Run) -> None:
    a, b = run.node(2, 2), run.node(2, 2)
    run.formed(a, b)
    assert not a.is_closed()
    a.set_closed()
    assert b.is_closed()
    with pytest.raises(RendezvousClosedError):
        b.next_rendezvous()
    with pytest.raises(RendezvousClosedError):
        run.node(1, 1).next_rendezvous()


def test_rendezvous_shutdown_of_last_node_leaves_no_key_in_etcd(run: Run) -> None:
    a, b = run.node(2, 2), run.node(2, 2)
    run.formed(a, b)
    run.formed(a, b)
    a.shutdown()
    eventually(lambda: len(b._party.view.members) == 1, 2)
    b.shutdown()
    assert not run.etcd.get_prefix(run.keys.root).kvs


@pytest.mark.slow
def test_rendezvous_id_is_reusable_after_all_nodes_were_killed(run: Run) -> None:
    nodes = [run.node(2, 2) for _ in range(2)]
    run.formed(*nodes)
    for node in nodes:
        kill(node)
    run.formed(*(run.node(2, 2, last_call_timeout="0.1") for _ in range(2)))


@pytest.mark.slow
def test_etcd_away_for_longer_than_the_leases_disturbs_nobody(run: Run) -> None:
    a, b = run.node(2, 2), run.node(2, 2)
    run.formed(a, b)
    run.server.kill()
    holds(lambda: a.num_nodes_waiting() + b.num_nodes_waiting() == 0, 3, "no contact is no reason")
    run.server.start()
    eventually(lambda: len(run.etcd.get_prefix(run.keys.members).kvs) == 2, 8, "members again")
    holds(lambda: a.num_nodes_waiting() + b.num_nodes_waiting() == 0, 3.5)
    assert ranks(run.formed(a, b)) == {0, 1}, "and it can re-form"


@pytest.mark.slow
def test_a_wiped_etcd_gets_its_generation_back(run: Run) -> None:
    a, b = run.node(2, 2), run.node(2, 2)
    run.formed(a, b)
    before = run.generation()
    run.server.wipe()
    eventually(lambda: run.etcd.get(run.keys.generation), 8, "put back by the leader")
    assert run.generation() == before
    holds(lambda: a.num_nodes_waiting() + b.num_nodes_waiting() == 0, 3.5)


@pytest.mark.slow
def test_begun_while_etcd_is_away(run: Run) -> None:
    run.server.stop()
    nodes = [run.node(2, 2) for _ in range(2)]
    waiting = run.join(*nodes)
    run.server.start()
    assert ranks([future.result(60) for future in waiting]) == {0, 1}


def test_no_etcd_at_all_is_a_connection_error_in_time(run: Run) -> None:
    run.server.stop()
    with pytest.raises(RendezvousConnectionError, match="no contact with etcd"):
        run.node(1, 1, timeout="1").next_rendezvous()


def test_a_record_of_another_version_is_a_state_error(run: Run) -> None:
    run.etcd.put(run.keys.generation, b'{"protocol": 99}')
    with pytest.raises(RendezvousStateError, match="protocol 99"):
        run.node(1, 1).next_rendezvous()


def test_shutdown_ends_its_threads(run: Run) -> None:
    node = run.node(1, 1)
    run.formed(node)
    assert node.shutdown()
    assert node.shutdown()
    eventually(lambda: not [t for t in threading.enumerate() if t.name == "elastic-party"], 3)
