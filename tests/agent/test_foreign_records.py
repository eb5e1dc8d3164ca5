"""Records in etcd that an agent cannot read: its workers do not notice."""

from __future__ import annotations

import gc
import math
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.jobs import changed, policy

from elastic.agent.inbox import Inbox
from elastic.agent.loop import AgentLoop
from elastic.agent.workers.pool import Pool
from elastic.checkpoint.saving.saver import Saver
from elastic.contract.agent_files import AgentConfig, EtcdAccess
from elastic.contract.job.spec import JobSpec
from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import (
    GenerationNode,
    GenerationRecord,
    JobState,
    MemberRecord,
    Phase,
    SpecRecord,
    encode,
)
from elastic.contract.worker.messages import Preload
from elastic.etcd.client import KV, View
from elastic.etcd.types import Refusal
from elastic.recovery.machine.model import Agent

KEYS = ClusterKeys("c").job("job")
SPEC = SpecRecord(spec=JobSpec(name="job", script="x.py"), submitted_wall_s=0.0, submitted_by="me")
GENERATION = GenerationRecord(
    number=3,
    nodes=(
        GenerationNode(node="n", incarnation="i", host="h", slots=(0,)),
        GenerationNode(node="b", incarnation="j", host="h", slots=(0,)),
    ),
    store_host="h",
    store_port=1,
    leader="b",
    why="first",
)
GOOD = {
    KEYS.spec: encode(SPEC),
    KEYS.state: encode(JobState(phase=Phase.RUNNING)),
    KEYS.generation: encode(GENERATION),
    KEYS.member("b"): encode(MemberRecord(node="b", incarnation="j", host="h", port=1, slots=1, ready=(0,))),
}
FOREIGN = {
    "another protocol": {KEYS.state: b'{"protocol": 99}'},
    "no such record": {KEYS.member("c"): b'{"protocol": 7, "node": 7}'},
    "no JSON": {KEYS.generation: b"\xff{"},
    "no UTF-8": {KEYS.member("c"): b'{"protocol": 7, "node": "\xff"}'},
    "too deep": {KEYS.member("c"): b'{"deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"},
}


def view(kvs: dict[str, bytes], revision: int, connected: bool = True) -> View:
    return View({k: KV(k, v, 1, revision, 0) for k, v in kvs.items()}, revision, connected, time.monotonic())


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[AgentLoop]:
    config = AgentConfig(
        cluster="c",
        node="n",
        job="job",
        address="h",
        slots=1,
        etcd=EtcdAccess(endpoints=()),
        agent_dir=str(tmp_path),
        logs_dir=str(tmp_path),
    )
    pool = Pool(selectors.DefaultSelector(), "", Preload(), 1.0)
    agent, inbox, mute, nothing = Agent(policy("n", spec=SPEC.spec)), Inbox(), Mute(), lambda *_: ""
    made = AgentLoop(config, agent, inbox, mute, mute, mute, KEYS, SPEC, pool, nothing, nothing)  # type: ignore[arg-type]
    yield made
    made.saver.close()
    made.pool.selector.close()
    inbox.close()
    gc.collect()


class Mute:
    """A writer that writes nothing, peers that watch nobody."""

    saved_generation = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.mark.parametrize("foreign", FOREIGN.values(), ids=FOREIGN.keys())
def test_in_a_generation_the_last_view_is_kept(loop: AgentLoop, foreign: dict[str, bytes]) -> None:
    loop._viewed(view(GOOD, 10))
    before = loop.agent
    assert before.formed.generation == GENERATION
    loop._viewed(view({**GOOD, **foreign}, 11))
    assert loop._ended is None
    assert loop.agent.etcd.view == before.etcd.view
    loop._reports.write(loop.agent, None)
    said = loop._view_reader.unreadable
    assert said
    assert said in (Path(loop.config.agent_dir) / "status.json").read_text().replace('\\"', '"')
    loop._viewed(view({**GOOD, **foreign}, 12, connected=False))
    assert not loop.agent.etcd.connected
    loop._viewed(view(GOOD, 13))
    assert not loop._view_reader.unreadable
    assert loop.agent.etcd.view.revision == 13


def refusing(*keys: str) -> View:
    """The good records, and others that are not signed for this submission of the job."""
    refused = {key: Refusal(KV(key, b"{}", 1, 5, 0), "it belongs to another job of this name") for key in keys}
    return replace(view({key: value for key, value in GOOD.items() if key not in keys}, 11), refused=refused)


@pytest.mark.parametrize("key", [KEYS.restored, f"{KEYS.head}of-a-later-version"])
def test_a_refused_key_that_holds_no_record_hides_no_view(loop: AgentLoop, key: str) -> None:
    loop._viewed(refusing(key))
    assert not loop._view_reader.unreadable
    assert loop.agent.formed.generation == GENERATION
    assert not loop.agent.etcd.view.written_back


@pytest.mark.parametrize("key", [KEYS.spec, KEYS.state, KEYS.generation, KEYS.broken(3)])
def test_a_refused_record_of_the_head_hides_the_view(loop: AgentLoop, key: str) -> None:
    loop._viewed(view(GOOD, 10))
    loop._viewed(refusing(key))
    assert f"{key} in etcd is refused: it belongs to another job" in loop._view_reader.unreadable
    assert loop.agent.etcd.view.revision == 10


def test_before_the_first_generation_another_protocol_is_the_end(loop: AgentLoop) -> None:
    loop._viewed(view({**GOOD, **FOREIGN["no JSON"]}, 10))
    assert loop._ended is None
    loop._viewed(view({**GOOD, **FOREIGN["another protocol"]}, 11))
    assert loop._ended is not None
    assert "protocol 99" in loop._ended.reason


def test_orders_with_a_damaged_byte_are_as_if_not_given(loop: AgentLoop) -> None:
    loop._viewed(view(GOOD, 10))
    orders = Path(loop.config.agent_dir) / "orders.json"
    orders.write_bytes(b'{"draining": "a new \xff"}')
    loop._read_orders()
    assert loop.agent.drain.draining is None
    orders.write_bytes(b'{"draining": "a new disk"}')
    loop._read_orders()
    assert loop.agent.drain.draining == "a new disk"


def test_a_deadline_that_is_given_later_reaches_an_agent_that_drains(loop: AgentLoop) -> None:
    loop._viewed(view(GOOD, 10))
    orders = Path(loop.config.agent_dir) / "orders.json"
    orders.write_bytes(b'{"draining": "a new disk"}')
    loop._read_orders()
    assert loop.agent.drain.drain_deadline_s == math.inf
    orders.write_bytes(b'{"draining": "a new disk", "drain_deadline_s": 300.0}')
    loop._read_orders()
    assert loop.agent.drain.drain_deadline_s <= time.monotonic() + 300.0


def test_sigterm_bounds_a_drain_and_no_order_lifts_that(loop: AgentLoop) -> None:
    loop._viewed(view(GOOD, 10))
    orders = Path(loop.config.agent_dir) / "orders.json"
    orders.write_bytes(b'{"draining": "a new disk"}')
    loop._read_orders()
    loop._on_signal()
    loop._on_tick(time.monotonic())
    assert loop.agent.drain.draining == "a new disk"
    by_s = loop.agent.drain.drain_deadline_s
    assert by_s < math.inf
    for again in (b'{"draining": "a disk"}', b"{}"):
        orders.write_bytes(again)
        loop._on_tick(time.monotonic())
        assert (loop.agent.drain.draining is None, loop.agent.drain.drain_deadline_s) == (False, by_s)


class _Writing:
    """A saver that is busy for `looks` looks, of ten seconds each."""

    def __init__(self, looks: int) -> None:
        self.left = looks
        self.writer, self.other = socket.socketpair()

    finish = Saver.finish

    def busy(self) -> bool:
        return self.left > 0

    def gets_on(self, now_s: float) -> bool:
        return self.busy()

    def readable(self) -> None:
        self.left -= 1


@pytest.mark.parametrize(
    ("phase", "told", "left"),
    [(Phase.SUCCEEDED, False, 0), (Phase.SUCCEEDED, True, 17), (Phase.FAILED, False, 17)],
)
def test_the_last_state_of_a_job_that_has_succeeded_gets_the_time_to_be_saved(
    loop: AgentLoop, monkeypatch: pytest.MonkeyPatch, phase: Phase, told: bool, left: int
) -> None:
    over = changed(loop.agent, view=replace(loop.agent.etcd.view, state=JobState(phase=phase)))
    monkeypatch.setattr(loop, "agent", over)
    saver = _Writing(20)
    monkeypatch.setattr(loop, "saver", saver)
    monkeypatch.setattr(loop._reports, "write", lambda *_: None)
    monkeypatch.setattr("elastic.checkpoint.saving.saver.LOOK_S", 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: 10.0 * (20 - saver.left))
    if told:
        loop._on_signal()
    loop._finish_saving()
    saver.writer.close()
    saver.other.close()
    assert saver.left == left
