"""Questions between daemons through etcd: each is answered once, within bounds, and nothing of it is left behind."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from support.fake_etcd import FakeClient, FakeServer
from support.wait import eventually

from elastic.contract.keys import ClusterKeys
from elastic.etcd.client import Etcd, EtcdUnavailable
from elastic.etcd.stamps import Stamps
from elasticd.api.doctor import unanswered
from elasticd.api.server import ANSWERED
from elasticd.base.errors import Refused
from elasticd.node import asks
from elasticd.node.asks import (
    CLOCKS,
    FRESH_S,
    MAX_BYTES,
    PIECE_BYTES,
    AnswerQueue,
    Ask,
    Asker,
    User,
    asks_of,
    joined,
    pieces,
    sealed,
    why_not,
)

LOG = structlog.get_logger()
KEY = b"k" * 32
ADA = User(name="ada", uid=1000, admin=False)


@given(body=st.binary(max_size=100), size=st.integers(1, 30))
def test_an_answer_is_whole_whatever_the_order_of_its_pieces(body: bytes, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asks, "PIECE_BYTES", size)
        cut = dict(enumerate(pieces("x", 200, body, KEY)))
    arrived: dict[int, bytes] = {}
    for number in reversed(cut):
        assert joined("x", arrived, KEY) is None
        arrived[number] = cut[number]
    assert joined("x", arrived, KEY) == (200, body)


def test_an_answer_that_is_too_large_becomes_a_refusal() -> None:
    status, body = joined("x", dict(enumerate(pieces("x", 200, b"x" * (MAX_BYTES + 1), KEY))), KEY) or (0, b"")
    assert status == 413
    assert "ask for less" in json.loads(body)["error"]["message"]
    assert all(len(piece) <= PIECE_BYTES for piece in pieces("x", 200, b"x" * MAX_BYTES, KEY))


class Two:
    """An asker on node a and an answer queue on node b, on one etcd in memory."""

    def __init__(self, server: FakeServer, key: bytes | None = KEY) -> None:
        self.server = server
        self.asked: list[str] = []
        a, b = FakeClient(server), FakeClient(server)
        self.asker = Asker(cast(Etcd, a), "main", "a", KEY)
        self.stamps = Stamps(ClusterKeys("main"))
        self.answers = AnswerQueue(cast(Etcd, b), "main", "b", self.answer, LOG, self.stamps.first_time, key)
        self.answers.start()

    def answer(self, path: str, query: Mapping[str, str], by: User) -> tuple[int, bytes]:
        self.asked.append(f"{path} {dict(query)} {by.name}")
        if path == "/refused":
            raise Refused(403, "not this")
        if path == "/fails":
            raise PermissionError(13, "Permission denied", "logs")
        return 200, json.dumps({"big": "x" * 3 * PIECE_BYTES} if path == "/big" else {"said": path}).encode()

    def run(self, path: str, within_s: float = 20.0, *, answering: bool = True) -> dict[str, object]:
        """Ask in a thread while news is delivered here."""
        found: dict[str, object] = {}

        def ask() -> None:
            try:
                found.update(self.asker.ask("b", path, {"rank": 1}, ADA, within_s))
            except Refused as refused:
                found["error"] = str(refused)

        thread = threading.Thread(target=ask)
        thread.start()

        def done() -> bool:
            self.server.pump()
            if answering and not self.answers._work.empty():
                self.answers.run_one()
            return not thread.is_alive()

        eventually(done, 30)
        return found


@pytest.fixture
def two() -> Two:
    return Two(FakeServer())


def test_a_question_is_answered_once_and_leaves_nothing(two: Two) -> None:
    assert two.run("/v1/x") == {"said": "/v1/x"}
    assert two.asked == ["/v1/x {'rank': '1'} ada"]
    assert not two.server.kvs
    assert len(cast(str, two.run("/big")["big"])) == 3 * PIECE_BYTES


def test_a_refusal_names_the_node(two: Two) -> None:
    assert two.run("/refused") == {"error": "b: not this"}


def test_a_request_that_fails_ends_no_thread(two: Two) -> None:
    assert "PermissionError" in str(two.run("/fails")["error"])
    assert two.run("/v1/x") == {"said": "/v1/x"}


def test_a_mac_that_is_no_ascii_is_refused(two: Two) -> None:
    ask = Ask(id="x", lease=1, asker="a", by=ADA, path="/p", query={}, wall_s=time.time(), mac="é")
    FakeClient(two.server).put(f"{asks_of('main', 'b')}x", msgspec.json.encode(ask))
    two.server.pump()
    assert two.answers._work.empty()
    with pytest.raises(Refused, match="not signed"):
        joined("x", {0: '{"status": 200, "pieces": 0, "mac": "é"}'.encode()}, KEY)


@pytest.mark.parametrize(
    "head", [b'{"x":' + b"[" * 9999, b"[]", b"\xff", b"{}", b'{"status": "200", "pieces": 1, "mac": ""}']
)
def test_an_answer_that_is_garbage_is_refused_at_once(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    two = Two(FakeServer())

    def forged(ask: str, *_: object) -> list[bytes]:
        FakeClient(two.server).put(f"{asks.answers_to('main', ask)}garbage", b"{}")
        return [head]

    monkeypatch.setattr(asks, "pieces", forged)
    assert "not one of a daemon" in str(two.run("/v1/x")["error"])


def test_a_node_that_does_not_answer_is_given_up(two: Two) -> None:
    found = two.run("/v1/x", 0.2, answering=False)
    assert found == {"error": "b has not answered within 0.2 s: does its elasticd run?"}
    assert not two.server.kvs


def test_without_etcd_the_question_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(FakeServer())

    def fails(ttl_s: float) -> int:
        raise EtcdUnavailable("gone")

    monkeypatch.setattr(client, "grant", fails)
    with pytest.raises(Refused, match="etcd cannot be reached") as refused:
        Asker(cast(Etcd, client), "main", "a").ask("b", "/v1/x", {}, ADA)
    assert refused.value.status == 503


def test_garbage_and_a_flood_of_questions_end_nothing(two: Two) -> None:
    client = FakeClient(two.server)
    prefix = asks_of("main", "b")
    client.put(f"{prefix}garbage", b"\xff{")
    client.put(f"{prefix}nested", b'{"x":' + b"[" * 9999)
    wrong = question(id="other", wall_s=time.time())
    client.put(f"{prefix}renamed", msgspec.json.encode(sealed(wrong, KEY)))
    for number in range(asks.MAX_WAITING + 5):
        ask = sealed(msgspec.structs.replace(wrong, id=f"n{number}"), KEY)
        client.put(f"{prefix}n{number}", msgspec.json.encode(ask))
    two.server.pump()
    assert two.answers._work.qsize() == asks.MAX_WAITING
    two.answers.run_one()  # its lease is gone: nothing is raised


def test_a_question_or_an_answer_of_another_key_is_refused() -> None:
    stolen = Two(FakeServer(), b"another key")
    assert "not answered" in str(stolen.run("/v1/x", 0.5)["error"])
    assert not stolen.asked
    with pytest.raises(Refused, match="not signed"):
        joined("x", dict(enumerate(pieces("x", 200, b"{}", b"another key"))), KEY)
    with pytest.raises(Refused, match="not signed"):
        joined("x", dict(enumerate(pieces("y", 200, b"{}", KEY))), KEY)


def question(**changed: Any) -> Ask:
    made = Ask(
        id="x", lease=1, asker="a", cluster="main", node="b", by=ADA, path="/p", query={}, wall_s=1000.0
    )  # fmt: skip
    return msgspec.structs.replace(made, **changed)


@pytest.mark.parametrize(
    "changed",
    [{"path": "/q"}, {"by": User(name="ada", uid=0, admin=True)}, {"lease": 2}, {"mac": ""}, {"wall_s": 0.0},
     {"node": "c"}, {"cluster": "other"}],
)  # fmt: skip
def test_a_changed_question_is_refused(changed: dict[str, object]) -> None:
    ask = sealed(question(), KEY)
    assert not why_not(ask, KEY, "main", "b", 1000.0 + FRESH_S)
    assert "not signed" in why_not(msgspec.structs.replace(ask, **changed), KEY, "main", "b", 1000.0)
    assert not why_not(sealed(ask, None), None, "main", "b", 1000.0), "a cluster without a key"
    assert "not signed" in why_not(sealed(ask, None), KEY, "main", "b", 1000.0)


def test_a_question_is_for_one_node_of_one_cluster_for_a_while_and_the_clocks_are_named() -> None:
    ask = sealed(question(), KEY)
    assert "asked of node 'b' of cluster 'main'" in why_not(ask, KEY, "main", "c", 1000.0)
    assert "asked of node 'b'" in why_not(ask, KEY, "other", "b", 1000.0)
    assert "310 s behind the clock of b" in why_not(ask, KEY, "main", "b", 1010.0 + FRESH_S)
    assert "clocks of a and b differ" in why_not(ask, KEY, "main", "b", 990.0 - FRESH_S)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_question_that_is_put_back_is_not_answered_again(two: Two, restarted: bool) -> None:
    """By another user, who watches etcd for the answer."""
    raw = msgspec.json.encode(sealed(question(wall_s=time.time()), KEY))
    thief, key = FakeClient(two.server), f"{asks_of('main', 'b')}x"
    thief.put(key, raw)
    two.server.pump()
    two.answers.run_one()
    thief.delete(key)
    two.server.pump()
    if restarted:
        saved, two = two.stamps.entries(), Two(two.server)
        two.stamps.load(saved)
    thief.put(key, raw)
    two.server.pump()
    assert two.answers._work.empty()


@pytest.mark.parametrize(
    ("path", "answered"),
    [
        ("/v1/jobs/train/logs", True),
        ("/v1/jobs/train/stacks", True),
        ("/v1/jobs/train/gradients", True),
        ("/v1/jobs/train/debug", False),
        ("/v1/doctor/local", True),
        ("/v1/doctor", False),
        ("/v1/jobs/train/stop", False),
        ("/v1/jobs/a/b/logs", False),
        ("/v1/jobs", False),
    ],
)
def test_only_reading_may_be_asked_for(path: str, answered: bool) -> None:
    assert bool(ANSWERED.fullmatch(path)) == answered


@pytest.mark.parametrize("off_s", [-FRESH_S - 10, FRESH_S + 10])
def test_an_asker_whose_clock_is_off_is_told_so(two: Two, monkeypatch: pytest.MonkeyPatch, off_s: float) -> None:
    """It waited for ten seconds, and asked whether the other elasticd runs."""
    there, now = threading.get_ident(), time.time
    monkeypatch.setattr(asks.time, "time", lambda: now() + (0.0 if threading.get_ident() == there else off_s))
    said = two.run("/v1/x")
    how = "ahead of" if off_s > 0 else "behind"
    assert f"b: the question's time is 310 s {how} the clock of b" in str(said["error"])
    assert not two.asked, "its question is not answered"
    found = unanswered("b", {"error": said["error"], "status": CLOCKS})
    assert (found.check, found.level) == ("clock", "error")
    assert "by NTP" in found.fix
