"""What other users of the machine can do to a daemon: nothing. They are tried with the rights of uid 65534."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from support.daemons import Node, Nodes
from support.etcd_server import EtcdServer, free_ports
from support.wait import eventually

pytestmark = [
    pytest.mark.etcd,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it takes the rights of another user"),
]

PUT = """
import os, sys
from elastic.etcd.client import Etcd, EtcdAccess, EtcdError
user, endpoint, *tls = sys.argv[1:]
ca, cert, key = tls or ("", "", "")
access = EtcdAccess(endpoints=(endpoint,), ca_file=ca, cert_file=cert, key_file=key)
first = Etcd(access, call_s=1)
try:
    first.get("/elastic/main/t")  # imports all there is to import, while that is allowed
except EtcdError:
    pass
first.close()
os.setgroups([]); os.setresgid(int(user), int(user), int(user)); os.setresuid(int(user), int(user), int(user))
etcd = Etcd(access, call_s=3)
try:
    etcd.put("/elastic/main/t", b"{}")
except EtcdError as error:
    print("refused:", error)
else:
    print("written")
"""
NOBODY = 65534


def put_as(user: int, endpoint: str, *tls: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", PUT, str(user), endpoint, *tls]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with Nodes() as made:
        made.folder.chmod(0o755)  # what keeps others out is to be the daemon's doing
        yield made


@pytest.fixture(scope="module")
def node(nodes: Nodes) -> Node:
    return nodes.add("solo")


def ports(pid: int) -> list[str]:
    connections = [each for each in psutil.net_connections(kind="tcp") if each.pid == pid]
    return [f"127.0.0.1:{c.laddr.port}" for c in connections if c.status == psutil.CONN_LISTEN]


def test_another_user_cannot_write_to_the_embedded_etcd(node: Node) -> None:
    (endpoint,) = node.get("/v1/status")["etcd"]["endpoints"]
    assert put_as(0, endpoint).stdout == "written\n"
    for way in {endpoint, *ports(node.etcd_pid())}:
        done = put_as(NOBODY, way)
        assert done.stdout.startswith("refused:"), f"by uid {NOBODY} through {way}: {done}"


def test_embedded_etcd_accepts_other_nodes_only_with_its_certificates(nodes: Nodes) -> None:
    listen = f"127.0.0.1:{free_ports(1)[0]}"
    first = nodes.add("first", etcd__embedded_listen=listen, etcd__insecure="false")
    tls = first.state / "etcd" / "tls"
    ca, cert, key = (str(tls / name) for name in ("ca.pem", "client.pem", "client-key.pem"))
    second = nodes.add(
        "second", etcd__endpoints=listen, etcd__ca_file=ca, etcd__cert_file=cert, etcd__key_file=key,
        etcd__insecure="false", cluster_key_file=str(first.state / "cluster.key"),
    )  # fmt: skip
    eventually(lambda: [row["node"] for row in first.get("/v1/nodes")["nodes"]] == ["first", "second"], 10)
    assert put_as(0, listen, ca, cert, key).stdout == "written\n"
    for tried in ((), (ca, "", "")):
        assert put_as(NOBODY, listen, *tried).stdout.startswith("refused:"), tried
    assert not second.get("/v1/status")["etcd"]["anonymous"]
    loose = {path.name: oct(path.stat().st_mode) for path in [tls, *tls.iterdir()] if path.stat().st_mode & 0o077}
    assert not loose, "only their owner may read the certificates and keys"


def test_root_refuses_an_etcd_that_anyone_may_write_to_unless_told_otherwise(nodes: Nodes) -> None:
    with EtcdServer() as server:
        key = nodes.folder / "key"  # for a certificate that this etcd never asks for
        key.touch(0o600)
        for name, more in (("bare", {}), ("vain", {"etcd__cert_file": str(key), "etcd__key_file": str(key)})):
            node = nodes.add(
                name, start=False, node="told", etcd__endpoints=server.endpoint, etcd__insecure="false", **more
            )
            node.start(wait_s=0)
            assert node.process is not None
            assert node.process.wait(20) == 78
            assert "from anyone" in node.log.read_text()
        told = nodes.add("told", etcd__endpoints=server.endpoint)
        eventually(lambda: told.get("/v1/status")["etcd"]["anonymous"], 10)
        assert "takes writes from anyone" in told.ctl("status").stdout


def test_a_state_folder_that_another_user_could_change_is_refused(nodes: Nodes) -> None:
    theirs = nodes.folder / "theirs"
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    for place in (theirs, theirs / "below"):
        node = nodes.add(f"in-{place.name}", start=False, state_dir=str(place))
        node.start(wait_s=0)
        assert node.process is not None
        assert node.process.wait(20) == 69
        assert f"uid {NOBODY} owns {theirs}" in node.log.read_text()


def test_a_password_that_others_may_read_is_refused(nodes: Nodes) -> None:
    password = nodes.folder / "password"
    password.write_text("secret")
    for mode, owner, words in ((0o644, 0, "chmod 600"), (0o600, NOBODY, f"belongs to uid {NOBODY}")):
        password.chmod(mode)
        os.chown(password, owner, owner)
        node = nodes.add(
            f"secret-{owner}", start=False, etcd__endpoints="127.0.0.1:1", etcd__user="u",
            etcd__password_file=str(password),
        )  # fmt: skip
        node.start(wait_s=0)
        assert node.process is not None
        assert node.process.wait(20) == 78
        assert words in node.log.read_text()
        assert "secret\n" not in node.log.read_text()
