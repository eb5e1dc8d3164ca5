"""Questions from one node's daemon to another's, through etcd: no port is open between nodes for it.

    /elastic/_asks/<cluster>/<node>/<id>          Ask, watched by the daemon of `node` alone
    /elastic/_answers/<cluster>/<id>/<number>     pieces of the answer, watched by the daemon that asks

Neither lies below the cluster's own prefix, so no other daemon or agent receives them, and `_asks` can be no cluster's
name. All keys of one question have the lease of its asker: they are gone when it has its answer, or has given up. Only
reading requests can be asked. Question and answer are signed with the cluster key: a question for one node, which
answers it once, also after a restart (`Stamps.first_time`). An answer has at most MAX_BYTES.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from elastic.contract.records.job_records import PROTOCOL
from elastic.etcd.client import Etcd, EtcdError, View
from elasticd.base import answers
from elasticd.base.answers import Json
from elasticd.base.errors import Fault, Refused, our_faults
from elasticd.base.log import Log

PIECE_BYTES = 512 * 1024
"""etcd takes requests of up to 1.5 MiB."""
MAX_BYTES = 2 * 1024 * 1024
ANSWER_S = 10.0
"""How long an answer is waited for."""
FRESH_S = 300.0
"""A question may be this old, or from this far ahead: clocks differ."""
CLOCKS = 425
"""HTTP status of the refusal of a question for its time: Too Early."""
WORKERS = 2
"""Questions of other nodes that are answered at a time."""
MAX_WAITING = 32
"""Questions beyond those that are being answered; more are refused."""

_NUMBERS = frozenset(str(number) for number in range(2 + MAX_BYTES // PIECE_BYTES))
"""Of the pieces of an answer, and its head."""

AT_ONCE = 16
"""Nodes that one request asks at a time."""


class User(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    uid: int
    admin: bool


FirstTime = Callable[[str, int], bool]
"""(id of a question, nanoseconds since 1970) -> whether it has not been answered: see `Stamps.first_time`."""
Answerer = Callable[[str, Mapping[str, str], User], tuple[int, bytes]]
"""(path, query, asking user) -> (HTTP status, body)."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    lease: int
    """The asker's: the answer is written under it."""
    asker: str
    """The node that asks."""
    cluster: str = ""
    node: str = ""
    """The one that is asked."""
    by: User
    path: str
    query: dict[str, str]
    wall_s: float
    mac: str = ""
    """HMAC with the cluster key over all other fields; empty where records are not signed."""
    protocol: int = PROTOCOL


class _Head(msgspec.Struct, frozen=True):
    status: int
    pieces: int
    mac: str


def asks_of(cluster: str, node: str) -> str:
    return f"/elastic/_asks/{cluster}/{node}/"


def answers_to(cluster: str, ask: str) -> str:
    return f"/elastic/_answers/{cluster}/{ask}/"


def sealed(ask: Ask, secret: bytes | None) -> Ask:
    return msgspec.structs.replace(ask, mac=_mac(secret, b"ask", _unsealed(ask)))


def why_not(ask: Ask, secret: bytes | None, cluster: str, node: str, wall_s: float) -> str:
    """Why no daemon of this cluster has asked this of `node` within FRESH_S; empty: one has."""
    if not _equal(ask.mac, _mac(secret, b"ask", _unsealed(ask))):
        return "it is not signed with the cluster key"
    if (ask.cluster, ask.node) != (cluster, node):
        return f"it was asked of node {ask.node!r} of cluster {ask.cluster!r}"
    if abs(off_s := ask.wall_s - wall_s) > FRESH_S:
        how = f"{abs(off_s):.0f} s {'ahead of' if off_s > 0 else 'behind'} the clock of {node}"
        clocks = f"the clocks of {ask.asker} and {node} differ (timedatectl)"
        return f"the question's time is {how}: it is an old one, or {clocks}"
    return ""


def _unsealed(ask: Ask) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(ask, mac=""))


def _mac(secret: bytes | None, what: bytes, message: bytes) -> str:
    """'' without a key: this cluster's records are not signed either."""
    return hmac.new(secret, b"elasticd " + what + b"\0" + message, hashlib.sha256).hexdigest() if secret else ""


def _equal(theirs: str, ours: str) -> bool:
    return hmac.compare_digest(theirs.encode(errors="replace"), ours.encode())  # of texts it takes ASCII only


def pieces(ask: str, status: int, body: bytes, secret: bytes | None) -> list[bytes]:
    """The answer to `ask` cut into values of etcd: the first is a head with status, number of pieces and a MAC."""
    if len(body) > MAX_BYTES:
        status, error = 413, f"the answer has {len(body)} bytes: at most {MAX_BYTES}; ask for less"
        body = json.dumps(answers.error(status, error)).encode()
    cut = [body[i : i + PIECE_BYTES] for i in range(0, len(body), PIECE_BYTES)]
    mac = _mac(secret, b"answer", f"{ask} {status} ".encode() + body)
    return [json.dumps({"status": status, "pieces": len(cut), "mac": mac}).encode(), *cut]


def joined(ask: str, found: Mapping[int, bytes], secret: bytes | None) -> tuple[int, bytes] | None:
    """The answer from its pieces, by number; None: not all are there yet. Raises Refused for one that no daemon of
    this cluster has given."""
    if 0 not in found:
        return None
    try:
        head = msgspec.json.decode(found[0], type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Refused(502, "the answer in etcd is not one of a daemon") from None
    if not all(number in found for number in range(1, head.pieces + 1)):
        return None
    status, body = head.status, b"".join(found[i] for i in range(1, head.pieces + 1))
    if not _equal(head.mac, _mac(secret, b"answer", f"{ask} {status} ".encode() + body)):
        raise Refused(502, "the answer in etcd is not signed with this cluster's key")
    return status, body


class Asker:
    """Asks other nodes' daemons, in the thread of a request."""

    def __init__(self, etcd: Etcd, cluster: str, node: str, secret: bytes | None = None) -> None:
        """`secret`: the cluster key."""
        self._etcd, self._cluster, self._node, self._secret = etcd, cluster, node, secret

    def ask(self, node: str, path: str, query: Mapping[str, object], by: User, within_s: float = ANSWER_S) -> Json:
        """The answer of `node`'s daemon to GET `path`. Raises Refused: its own refusal, 503 without etcd, 504 if it
        does not answer within `within_s`."""
        name = uuid.uuid4().hex
        prefix = answers_to(self._cluster, name)
        values: dict[int, bytes] = {}
        arrived = threading.Event()

        def show(view: View) -> None:
            for key, kv in view.kvs.items():
                number = key.removeprefix(prefix)
                if number in _NUMBERS:  # anything may lie there: an error in this thread would end the daemon
                    values[int(number)] = kv.value
            try:
                complete = joined(name, dict(values), self._secret) is not None
            except Refused:
                complete = True
            if complete:
                arrived.set()

        try:
            lease = self._etcd.grant(within_s + 5)
            watch = self._etcd.watch(prefix, show)
            try:
                ask = Ask(
                    id=name, lease=lease, asker=self._node, cluster=self._cluster, node=node, by=by, path=path,
                    query={key: str(value) for key, value in query.items()}, wall_s=time.time(),
                )  # fmt: skip
                raw = msgspec.json.encode(sealed(ask, self._secret))
                self._etcd.put(f"{asks_of(self._cluster, node)}{name}", raw, lease)
                arrived.wait(within_s)
            finally:
                watch.close()
                with contextlib.suppress(EtcdError):  # it expires by itself
                    self._etcd.revoke(lease)
        except EtcdError as error:
            raise Refused(503, f"etcd cannot be reached now, and asking {node} needs it: {error}") from error
        if (answer := joined(name, values, self._secret)) is None:
            raise Refused(504, f"{node} has not answered within {within_s:g} s: does its elasticd run?")
        status, body = answer
        content: Json = json.loads(body)
        if status >= 400:
            raise Refused(status, f"{node}: {content['error']['message']}")
        return content


def ask_each(asker: Asker, nodes: Sequence[str], path: str, query: Mapping[str, object], by: User) -> dict[str, Json]:
    """Node -> its answer, or `{"error": why, "status": HTTP status}`; all are asked at the same time."""

    def one(node: str) -> Json:
        try:
            return asker.ask(node, path, query, by)
        except Refused as refused:
            return {"error": str(refused), "status": refused.status}

    if not nodes:
        return {}
    with ThreadPoolExecutor(min(AT_ONCE, len(nodes))) as pool:
        return dict(zip(nodes, pool.map(one, nodes), strict=True))


@dataclass(eq=False)
class AnswerQueue:
    """Questions of other nodes' daemons, queued and answered. `secret`: the cluster key; None: questions are not
    signed."""

    etcd: Etcd
    cluster: str
    node: str
    answer: Answerer
    log: Log
    first_time: FirstTime
    secret: bytes | None = None

    def __post_init__(self) -> None:
        self._work: queue.Queue[Ask] = queue.Queue(MAX_WAITING)
        self._seen: set[str] = set()

    def start(self) -> None:
        """Watch for questions; `run_one` answers them."""
        self.etcd.watch(asks_of(self.cluster, self.node), self.show)

    def show(self, view: View) -> None:
        if not view.connected:
            return
        names = {key.rpartition("/")[2]: kv.value for key, kv in view.kvs.items()}
        for name in names.keys() - self._seen:
            try:
                ask = msgspec.json.decode(names[name], type=Ask)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self.log.warning("ask.unreadable", key=name, why=str(error))
                continue
            if ask.id != name or ask.protocol != PROTOCOL:
                continue
            if why := why_not(ask, self.secret, self.cluster, self.node, time.time()):
                self.log.warning("ask.refused", asker=ask.asker, path=ask.path, why=why)
                if why_not(ask, self.secret, self.cluster, self.node, ask.wall_s):
                    continue  # else its clock alone is the reason, which the asker is told
            elif not self.first_time(ask.id, int(ask.wall_s * 1e9)):
                self.log.warning("ask.refused", asker=ask.asker, path=ask.path, why="it was answered before")
                continue
            try:
                self._work.put_nowait(ask)
            except queue.Full:
                self.log.warning("ask.refused", asker=ask.asker, path=ask.path, why="too many at a time")
        self._seen = set(names)

    def run_one(self) -> None:
        """Wait for one question, and answer it: repeated by WORKERS threads."""
        ask = self._work.get()
        began_s = time.monotonic()
        try:
            if why := why_not(ask, self.secret, self.cluster, self.node, time.time()):
                raise Refused(CLOCKS, why)
            with our_faults(self.log, "ask.failed", asker=ask.asker, path=ask.path):
                status, body = self.answer(ask.path, ask.query, ask.by)
        except (Refused, Fault, OSError) as error:
            status, why = error.status if isinstance(error, Refused) else 500, str(error)
            if isinstance(error, OSError):
                self.log.error("ask.failed", asker=ask.asker, path=ask.path, exc_info=True)
                why = f"elasticd failed at this request: {type(error).__name__}: {error}; its log has the traceback"
            body = json.dumps(answers.error(status, why)).encode()
        prefix = answers_to(self.cluster, ask.id)
        try:
            for number, piece in enumerate(pieces(ask.id, status, body, self.secret)):
                self.etcd.put(f"{prefix}{number}", piece, ask.lease)
        except EtcdError as error:  # it has given up, or will by its own time limit
            self.log.info("ask.not_answered", asker=ask.asker, path=ask.path, why=str(error))
            return
        self.log.info("ask.answered", asker=ask.asker, by=ask.by.name, path=ask.path, status=status, nbytes=len(body),
                       took_s=round(time.monotonic() - began_s, 3))  # fmt: skip
