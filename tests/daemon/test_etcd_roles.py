"""The roles of docs/security.md, as its commands make them: they suffice for a daemon, and give a thief little."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
from collections.abc import Iterator

import pytest
from support.daemons import FAKE_AGENT, Node, Nodes
from support.etcd_server import EtcdServer, etcd_binary
from support.source import ROOT
from support.wait import eventually, holds

from elastic.contract.agent_files import EtcdAccess
from elastic.contract.job.spec import JobSpec
from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import JobState, SpecRecord, encode
from elastic.etcd.client import Delete, Etcd, EtcdDenied, EtcdError
from elasticd.node.asks import answers_to, asks_of

pytestmark = pytest.mark.etcd
KEYS = ClusterKeys("main")


def commands() -> list[list[str]]:
    """Those below "Roles" in docs/security.md; a password is given where it would be asked for."""
    text = (ROOT / "docs" / "security.md").read_text().partition("\n### Roles\n")[2].partition("\n## ")[0]
    found = [line.split() for line in re.findall(r"^    etcdctl (.+)$", text, flags=re.MULTILINE)]
    return [[*w[:2], f"{w[2]}:pw-{w[2]}"] if w[:2] == ["user", "add"] else w for w in found]


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    binary = etcd_binary()
    assert binary is not None
    etcdctl = str(pathlib.Path(binary).with_name("etcdctl"))
    with EtcdServer() as one:
        made = commands()
        assert made[-1] == ["auth", "enable"]
        for words in made:
            subprocess.run(
                [etcdctl, f"--endpoints={one.endpoint}", *words], check=True, capture_output=True, timeout=30,
                env={**os.environ, "ETCDCTL_API": "3"},
            )  # fmt: skip
        yield one


@pytest.fixture(scope="module")
def node(server: EtcdServer) -> Iterator[Node]:
    with Nodes() as nodes:
        key, password = nodes.folder / "cluster.key", nodes.folder / "password"
        key.write_text(bytes(range(32)).hex())
        password.write_text("pw-elasticd")
        for file in (key, password):
            file.chmod(0o600)
        yield nodes.add(
            "n", etcd__endpoints=server.endpoint, etcd__user="elasticd", etcd__password_file=str(password),
            cluster_key_file=str(key),
        )  # fmt: skip


@pytest.fixture
def thief(server: EtcdServer) -> Iterator[Etcd]:
    """A client with the nodes' password, and no cluster key."""
    client = Etcd(EtcdAccess(endpoints=(server.endpoint,), user="elasticd", password="pw-elasticd"), call_s=10.0)
    yield client
    client.close()


def test_the_role_of_the_nodes_suffices(node: Node) -> None:
    node.submit("ours", workers_per_node=1)
    eventually(lambda: node.agent_pid("ours"), 30)
    etcd = node.get("/v1/status")["etcd"]
    assert (etcd["anonymous"], etcd["signed"], etcd["refused"]) == (False, True, {})
    node.post("/v1/nodes/n/cordon", {"reason": "r"})
    node.post("/v1/nodes/n/uncordon")
    findings = node.get("/v1/doctor")["findings"]
    assert "a read" in str(findings)
    assert not [row for row in findings if row["check"] == "etcd" and row["level"] == "error"]


def test_a_thief_of_the_login_runs_nothing_and_reaches_no_other_keys(node: Node, thief: Etcd) -> None:
    spec = JobSpec(name="pwn", script="/t.py", workdir="/", python=str(FAKE_AGENT), workers_per_node=1)
    thief.put(KEYS.job("pwn").state, encode(JobState()))
    thief.put(KEYS.job("pwn").spec, encode(SpecRecord(spec=spec, submitted_wall_s=1.0, submitted_by="root")))
    eventually(lambda: KEYS.job("pwn").spec in node.get("/v1/status")["etcd"]["refused"], 30)
    holds(lambda: not (node.state / "jobs" / "pwn").exists(), 1.5)
    with pytest.raises(EtcdDenied):
        thief.put("/elastic/other/x", b"")
    thief.txn([], [Delete(KEYS.job("pwn").root, prefix=True)])
    eventually(lambda: not node.get("/v1/status")["etcd"]["refused"], 30)


def test_the_role_lets_daemons_ask_each_other_and_hides_it_from_a_reader(server: EtcdServer, thief: Etcd) -> None:
    reader = Etcd(EtcdAccess(endpoints=(server.endpoint,), user="reader", password="pw-reader"), call_s=10.0)
    try:
        for key in (f"{asks_of('main', 'other')}1", f"{answers_to('main', '1')}0"):
            thief.put(key, b"{}")
            with pytest.raises(EtcdDenied):
                reader.get(key)
            thief.delete(key)
    finally:
        reader.close()


def test_the_role_of_a_reader_writes_nothing(server: EtcdServer, node: Node) -> None:
    reader = Etcd(EtcdAccess(endpoints=(server.endpoint,), user="reader", password="pw-reader"), call_s=10.0)
    try:
        assert reader.get(KEYS.node("n")) is not None
        with pytest.raises(EtcdError):
            reader.delete(KEYS.node("n"))
    finally:
        reader.close()


def test_a_prefix_that_the_role_lacks_is_named(thief: Etcd) -> None:
    views: list[str] = []
    watch = thief.watch("/elastic/second/", lambda view: views.append(view.error))
    eventually(lambda: any("a role with readwrite below /elastic/second/" in error for error in views), 20)
    watch.close()
