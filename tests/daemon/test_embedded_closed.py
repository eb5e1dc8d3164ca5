"""The embedded etcd is elasticd's alone: the agents' login reads and writes records, and administers nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from support.etcd_server import EtcdServer
from support.wait import eventually

from elastic.contract.agent_files import EtcdAccess
from elastic.etcd import admin, login
from elastic.etcd.client import Delete, Etcd, EtcdDenied, EtcdError
from elasticd.etcd.closing import AGAIN_S, PREFIX, Closing

pytestmark = pytest.mark.etcd


class Embedded:
    """An etcd as the embedded one, with its logins in `folder`, here reached by its port."""

    def __init__(self, server: EtcdServer, state: Path) -> None:
        self.server, self.state = server, state
        (state / "etcd").mkdir()
        self.closing = self.made()
        self.closing.prepare()

    def made(self, stays_open: bool = False) -> Closing:
        return Closing(self.state, self.server.endpoint, stays_open, structlog.get_logger())

    def client(self, name: str = "") -> Etcd:
        user, _, password = (self.state / "etcd" / name).read_text().strip().partition(":") if name else ("", "", "")
        return Etcd(EtcdAccess(endpoints=(self.server.endpoint,), user=user, password=password), call_s=5.0)


def attempt(closing: Closing) -> None:
    """As the daemon does: again where a busy etcd has not answered in time."""
    eventually(lambda: closing.attempt() is None, 20.0, "etcd is as it is to be")


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Embedded]:
    with EtcdServer() as server:
        yield Embedded(server, tmp_path)


def test_only_its_logins_are_served_and_the_agents_one_administers_nothing(embedded: Embedded) -> None:
    attempt(embedded.closing)
    attempt(embedded.closing)  # closed already
    with pytest.raises(EtcdDenied):
        embedded.client().put("/elastic/x", b"1")
    agent = embedded.client(login.NAME)
    agent.put("/elastic/main/x", b"1")
    lease = agent.grant(5)
    agent.put("/elastic/_asks/main/y", b"1", lease)
    agent.revoke(lease)
    for forbidden in (
        lambda: agent.put("/other", b"1"),
        lambda: agent.get_prefix("/"),
        lambda: agent.txn([], [Delete("/", prefix=True)]),
    ):
        with pytest.raises(EtcdDenied):
            forbidden()
    connection = agent._connected()
    for method, request in {
        "Auth.UserAdd": lambda pb: pb.AuthUserAddRequest(name="x", password="x"),
        "Auth.UserChangePassword": lambda pb: pb.AuthUserChangePasswordRequest(name="root", password="x"),
        "Auth.AuthDisable": lambda pb: pb.AuthDisableRequest(),
        "Auth.AuthEnable": lambda pb: pb.AuthEnableRequest(),
        "Auth.RoleGrantPermission": lambda pb: pb.AuthRoleGrantPermissionRequest(name="elasticd"),
        "Maintenance.Defragment": lambda pb: pb.DefragmentRequest(),
        "Maintenance.Hash": lambda pb: pb.HashRequest(),
    }.items():
        with pytest.raises(EtcdError, match="permission denied"):
            connection.call(method, request, 5.0)
    snapshot = connection._rpc.stubs.MaintenanceStub(connection._channel).Snapshot
    with pytest.raises(Exception, match="permission denied"):
        list(snapshot(connection._rpc.messages.SnapshotRequest(), metadata=connection._metadata()))


def test_what_others_have_made_while_it_was_open_is_gone(embedded: Embedded) -> None:
    with admin._asking(embedded.server.endpoint) as anyone:
        anyone("RoleAdd", name="root")
        for name in ("root", "mallory"):
            anyone("UserAdd", name=name, password="theirs")
            anyone("UserGrantRole", user=name, role="root")
    embedded.client().put("/elastic/kept", b"1")
    attempt(embedded.closing)
    for user in ("root", "mallory"):
        access = EtcdAccess(endpoints=(embedded.server.endpoint,), user=user, password="theirs")
        with pytest.raises(EtcdDenied):
            Etcd(access).put("/elastic/x", b"1")
    kept = embedded.client(login.NAME).get("/elastic/kept")
    assert kept is not None


def test_a_client_that_began_before_it_was_closed_goes_on(embedded: Embedded, tmp_path: Path) -> None:
    """As the daemon's own, and agents of this version: the login is beside the socket before etcd asks for one."""
    agent = embedded.client(login.NAME)
    agent._connected()._found_login = True  # as if found beside a Unix socket
    agent.put("/elastic/x", b"1")
    views: list[int] = []
    agent.watch("/elastic/", lambda view: views.append(len(view.kvs)), refresh_s=0.5)
    attempt(embedded.closing)
    agent.put("/elastic/y", b"2")
    eventually(lambda: views and views[-1] == 2, 10, "the watch goes on")
    agent.close()


def test_another_root_is_not_taken_for_ours(embedded: Embedded) -> None:
    admin.close(embedded.server.endpoint, PREFIX, "another", "other")
    assert embedded.closing.attempt() == AGAIN_S


def test_where_other_nodes_reach_it_in_plain_text_it_is_open(embedded: Embedded) -> None:
    attempt(embedded.closing)
    attempt(embedded.made(stays_open=True))
    embedded.client().put("/elastic/x", b"1")


def test_the_login_is_found_beside_the_socket_and_a_given_one_stays(tmp_path: Path) -> None:
    endpoint = f"unix:{tmp_path}/client:0"
    access = EtcdAccess(endpoints=(endpoint,))
    assert login.with_login(endpoint, access) is access
    (tmp_path / login.NAME).write_text("elasticd:secret\n")
    found = login.with_login(endpoint, access)
    assert (found.user, found.password) == ("elasticd", "secret")
    given = EtcdAccess(endpoints=(endpoint,), user="me")
    assert login.with_login(endpoint, given) is given
    assert login.with_login("127.0.0.1:1", access) is access
    (tmp_path / login.NAME).unlink()
    (tmp_path / login.NAME).symlink_to("/etc/passwd")
    assert login.with_login(endpoint, access) is access


def test_every_failed_attempt_says_when_to_try_again(embedded: Embedded) -> None:
    embedded.server.kill()
    again_s = embedded.closing.attempt()
    assert again_s is not None
    with pytest.raises(EtcdError):
        admin.is_closed(embedded.server.endpoint, "x")
