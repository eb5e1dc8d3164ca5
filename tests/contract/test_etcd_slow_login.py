"""An etcd whose logins take longer than a call may: passwords hashed at great cost, members or nodes that are busy."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator

import pytest
from support.etcd_server import EtcdServer, enable_auth, free_ports
from support.wait import eventually, stretched

from elastic.etcd import wire
from elastic.etcd.client import Etcd, EtcdAccess, EtcdDenied, EtcdError, View

pytestmark = pytest.mark.etcd
CALL_S = 0.6


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    """One etcd that is reached by three endpoints, as if it were three members."""
    made = EtcdServer(args=["--bcrypt-cost=13"])
    made.more = [f"127.0.0.1:{port}" for port in free_ports(2)]  # type: ignore[attr-defined]
    urls = ",".join(f"http://{endpoint}" for endpoint in (made.endpoint, *made.more))  # type: ignore[attr-defined]
    made._args += (f"--listen-client-urls={urls}", f"--advertise-client-urls={urls}")
    with made:
        enable_auth(made, "root", "secret")
        yield made


def access(server: EtcdServer, password: str = "secret") -> EtcdAccess:
    endpoints = (server.endpoint, *server.more)  # type: ignore[attr-defined]
    return EtcdAccess(endpoints=endpoints, user="root", password=password)


def logins(server: EtcdServer) -> int:
    """How many etcd has taken."""
    with urllib.request.urlopen(f"http://{server.endpoint}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.search(r'grpc_server_handled_total\{grpc_code="OK",grpc_method="Authenticate".*\} (\d+)', text)
    return int(found[1]) if found else 0


def test_etcd_login_outlasts_the_calls_waiting_for_it_and_its_token_is_kept(server: EtcdServer) -> None:
    etcd = Etcd(access(server), call_s=CALL_S)

    def answers() -> bool:
        began_s = time.monotonic()
        try:
            return etcd.put("/t/a", b"1") > 0
        except EtcdError:
            assert time.monotonic() - began_s < stretched(CALL_S + 2), "a call keeps its own deadline"
            return False

    try:
        eventually(answers, 30, "logged in at last")
        eventually(lambda: logins(server) <= 3, 1)
        before = logins(server)
        views: list[View] = []
        etcd.watch("/t/", views.append)
        eventually(lambda: views and views[-1].connected, 10)
        server.pause()  # so that every connection is given up
        eventually(lambda: not views[-1].connected, 10)
        server.cont()
        eventually(lambda: views[-1].connected and answers(), 10)
        assert logins(server) <= max(before, 3), "the token of before still serves on new connections"
    finally:
        etcd.close()


def test_a_wrong_password_is_said_and_not_tried_again_at_once(server: EtcdServer) -> None:
    etcd = Etcd(access(server, "wrong"), call_s=CALL_S)

    def refused() -> str:
        try:
            etcd.get("/t/a")
        except EtcdDenied as error:
            return str(error)
        except EtcdError:
            return ""
        return "let in"

    try:
        assert "authentication failed" in eventually(refused, 30, "a clear answer")
        began_s = time.monotonic()
        for _ in range(20):
            assert "authentication failed" in refused()
        assert time.monotonic() - began_s < stretched(5.0), (
            "a try costs etcd a second of a core: remembered for a while"
        )
    finally:
        etcd.close()


def test_a_refused_login_is_said_while_it_is_tried_again(server: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not "still logging in" on one member after the other, in which the refusal was lost."""
    monkeypatch.setattr(wire, "DENIED_S", 0.0)
    etcd = Etcd(access(server, "wrong"), call_s=0.1)
    said = list[str]()

    def refused() -> bool:
        try:
            etcd.get("/t/a")
        except EtcdError as error:
            said.append(str(error))
            return isinstance(error, EtcdDenied)
        return False

    try:
        eventually(refused, 30, "a clear answer")
        said.clear()
        assert all(refused() for _ in range(12)), said
    finally:
        etcd.close()
