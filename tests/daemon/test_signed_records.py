"""Write access to etcd alone makes no node run, stop or move anything: real etcd, real daemons."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from support import procs
from support.api import ApiError, call
from support.daemons import ELASTICD, FAKE_AGENT, Node, Nodes
from support.etcd_server import EtcdServer
from support.wait import eventually, holds

from elastic.contract.agent_files import EtcdAccess, JobKey
from elastic.contract.job.spec import JobSpec
from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import JobState, Phase, SpecRecord, encode
from elastic.contract.records.node_records import DrainRecord
from elastic.etcd.client import ClusterSigner, Delete, Etcd, JobSigner, Put, View

pytestmark = pytest.mark.etcd
KEYS = ClusterKeys("main")
SECRET = bytes(range(32))


class Thief(Etcd):
    """A client with etcd's password or certificate and no key: reads and writes values as they are."""

    def raw(self, prefix: str) -> dict[str, bytes]:
        def request(pb: Any) -> Any:
            return pb.RangeRequest(key=prefix.encode(), range_end=prefix[:-1].encode() + bytes([ord(prefix[-1]) + 1]))

        return {kv.key.decode(): kv.value for kv in self._call("KV.Range", request, repeat=True).kvs}


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with EtcdServer() as one:
        yield one


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with Nodes() as made:
        yield made


@pytest.fixture(scope="module")
def node(nodes: Nodes, server: EtcdServer) -> Node:
    return nodes.add("honest", slots=8, etcd__endpoints=server.endpoint, cluster_key_file=key_file(nodes, SECRET))


@pytest.fixture
def thief(server: EtcdServer) -> Iterator[Thief]:
    client = Thief(server.access)
    yield client
    client.close()


def key_file(nodes: Nodes, secret: bytes) -> str:
    path = nodes.folder / f"{secret[:4].hex()}.key"
    path.write_text(secret.hex() + "\n")
    path.chmod(0o600)
    return str(path)


def hostile(name: str) -> bytes:
    spec = JobSpec(name=name, script="/tmp/pwn.py", workdir="/tmp", python=str(FAKE_AGENT), workers_per_node=1)
    return encode(SpecRecord(spec=spec, submitted_wall_s=1.0, submitted_by="root", submission="x"))


def etcd_of(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = node.get("/v1/status")["etcd"]
    return found


def runs(node: Node, job: str) -> bool:
    return (node.state / "jobs" / job / "agent").exists()


def test_a_job_put_into_etcd_without_the_key_is_not_run_and_status_says_so(node: Node, thief: Thief) -> None:
    thief.put(KEYS.job("pwn").state, encode(JobState()))
    thief.put(KEYS.job("pwn").spec, hostile("pwn"))
    eventually(lambda: etcd_of(node)["refused"].get(KEYS.job("pwn").spec) == "it is not signed", 20)
    holds(lambda: not runs(node, "pwn"), 1.5)
    assert any("refused" in problem for problem in node.get("/v1/status")["problems"])
    assert "records signed, key" in node.ctl("status").stdout
    thief.txn([], [Delete(KEYS.job("pwn").root, prefix=True)])
    eventually(lambda: not etcd_of(node)["refused"], 20)


def test_signed_records_of_one_job_start_no_job_of_another_name(node: Node, thief: Thief) -> None:
    node.submit("mine", workers_per_node=1)
    eventually(lambda: node.agent_pid("mine"), 30)
    there = thief.raw(KEYS.job("mine").root)
    assert b"elasticd-signed-1" in there[KEYS.job("mine").spec]
    for key, value in there.items():
        thief.put(key.replace("/mine/", "/stolen/"), value)
    eventually(lambda: KEYS.job("stolen").spec in etcd_of(node)["refused"], 20)
    holds(lambda: not runs(node, "stolen"), 1.5)
    thief.txn([], [Delete(KEYS.job("stolen").root, prefix=True)])


def test_forged_orders_and_states_move_nothing(node: Node, thief: Thief) -> None:
    node.submit("stays", workers_per_node=1)
    agent = eventually(lambda: node.agent_pid("stays"), 30)
    thief.put(KEYS.drain("honest"), encode(DrainRecord(reason="r", since_wall_s=1.0)))
    thief.put(KEYS.job("stays").state, encode(JobState(phase=Phase.STOPPING)))
    eventually(lambda: KEYS.drain("honest") in etcd_of(node)["refused"], 20)
    holds(lambda: node.agent_pid("stays") == agent, 1.5)
    assert next(row for row in node.get("/v1/nodes")["nodes"] if row["node"] == "honest")["state"] == "ready"
    genuine = b"\nelasticd-signed-1 "
    eventually(lambda: genuine in thief.raw(KEYS.job("stays").root)[KEYS.job("stays").state], 20, "it is written over")
    thief.put(KEYS.job("stays").state, b"{}")
    node.post("/v1/jobs/stays/stop")
    eventually(lambda: node.job("stays")["phase"] in ("stopping", "stopped"), 20)
    thief.delete(KEYS.drain("honest"))
    thief.txn([], [Delete(KEYS.job("stays").root, prefix=True)])


def test_the_state_of_a_finished_job_that_is_deleted_or_written_again_starts_nothing(node: Node, thief: Thief) -> None:
    keys = KEYS.job("done")
    node.submit("done", workers_per_node=1)
    agent = eventually(lambda: node.agent_pid("done"), 30)
    before = thief.raw(keys.root)[keys.state]
    node.post("/v1/jobs/done/stop")
    eventually(lambda: node.job("done")["phase"] in ("stopping", "stopped"), 20)
    thief.put(keys.state, before)
    eventually(lambda: thief.raw(keys.root)[keys.state] != before, 20, "the daemon writes the newer one over it")
    assert node.job("done")["phase"] in ("stopping", "stopped")
    assert not etcd_of(node)["refused"]
    thief.delete(keys.state)
    procs.kill(agent)
    holds(lambda: (node.job("done")["agent"] or {}).get("pid") in (agent, None), 2.0)
    thief.txn([], [Delete(keys.root, prefix=True)])


def test_nothing_that_is_put_back_has_an_effect_also_after_a_restart(node: Node, thief: Thief) -> None:
    """As the user of a job, who reads etcd's history: a drain that was lifted, a job that was forgotten, a node's own
    record, with a lease that the user keeps alive."""
    keys = KEYS.job("gone")
    node.submit("gone", workers_per_node=1)
    agent = eventually(lambda: node.agent_pid("gone"), 30)
    node.post("/v1/nodes/honest/drain", {"reason": "old"})
    eventually(lambda: b'"draining":"old"' in thief.raw(KEYS.nodes).get(KEYS.node("honest"), b""), 20)
    node.post("/v1/nodes/honest/cordon", {"reason": "old"})
    old = thief.raw(KEYS.root)
    assert {KEYS.drain("honest"), KEYS.cordon("honest"), KEYS.node("honest"), keys.spec, keys.state} <= old.keys()
    node.post("/v1/nodes/honest/uncordon")
    node.post("/v1/jobs/gone/stop")
    procs.kill(agent)
    eventually(lambda: node.job("gone")["phase"] == "stopped", 30)
    call(node.socket, "DELETE", "/v1/jobs/gone")
    started = (node.state / "jobs" / "gone" / "agent" / "config.json").stat().st_mtime_ns
    assert node.kill(15) == 0
    lease = thief.grant(60)
    for key, value in old.items():
        if not key.startswith(KEYS.events):
            thief.put(key, value, lease if KEYS.is_leased(key) else 0)
    thief.txn([], [Delete(KEYS.endings, prefix=True)])
    node.start(wait_s=0)

    def repaired() -> bool:
        there = thief.raw(KEYS.root)
        return not {KEYS.drain("honest"), KEYS.cordon("honest"), keys.spec, keys.state} & there.keys()

    eventually(repaired, 30, "the daemon deletes again what was deleted for good")
    row = eventually(lambda: next(r for r in node.get("/v1/nodes")["nodes"] if r["node"] == "honest"), 20)
    eventually(lambda: node.ready(), 20)
    assert row["state"] == "ready"
    assert "gone" not in [job["job"] for job in node.get("/v1/jobs")["jobs"]]
    assert (node.state / "jobs" / "gone" / "agent" / "config.json").stat().st_mtime_ns == started, (
        "no agent was started"
    )
    thief.revoke(lease)


def test_the_key_of_a_job_that_its_user_has_is_good_for_that_job_only(node: Node, thief: Thief) -> None:
    node.submit("alice", workers_per_node=1)
    eventually(lambda: node.agent_pid("alice"), 30)
    raw = json.loads((node.state / "jobs" / "alice" / "agent" / "config.json").read_text())
    assert SECRET.hex() not in json.dumps(raw), "the cluster key stays with the daemon"
    config = raw["job_key"]
    own = Etcd(EtcdAccess(endpoints=thief.access.endpoints), signer=JobSigner(JobKey(**config)))
    try:
        own.get(KEYS.job("alice").spec)
        own.put(KEYS.job("alice").state, encode(JobState(phase=Phase.RUNNING, reason="by its agent")))
        eventually(lambda: node.job("alice")["reason"] == "by its agent", 20)
        as_cluster = ClusterSigner(KEYS.root, bytes.fromhex(config["secret"]))
        as_cluster.key_id = config["key_id"]
        (forged,) = as_cluster.sealed([Put(KEYS.job("root").spec, hostile("root"))])
        assert isinstance(forged, Put)
        thief.put(forged.key, forged.value)
        eventually(lambda: "not valid" in etcd_of(node)["refused"].get(KEYS.job("root").spec, ""), 20)
        holds(lambda: not runs(node, "root"), 1.0)
    finally:
        own.close()
        thief.txn([], [Delete(KEYS.job("root").root, prefix=True)])


def test_a_node_without_the_key_stays_out_and_says_what_to_do(nodes: Nodes, node: Node, server: EtcdServer) -> None:
    keyless = nodes.add("keyless", start=False, etcd__endpoints=server.endpoint).start(wait_s=0)
    eventually(lambda: keyless.socket.exists(), 30)
    eventually(lambda: any("copy cluster.key" in p for p in keyless.get("/v1/status")["problems"]), 30)
    assert "keyless" not in [row["node"] for row in node.get("/v1/nodes")["nodes"]]
    with pytest.raises(ApiError, match=r"copy cluster\.key"):
        keyless.submit("nowhere")
    assert keyless.kill(15) == 0


def test_an_embedded_etcd_gets_a_key_at_its_first_start_that_others_cannot_read(nodes: Nodes) -> None:
    first = nodes.add("first")
    key = first.state / "cluster.key"
    assert key.stat().st_mode & 0o777 == 0o600
    second = nodes.add("second", etcd__endpoints=f"unix:{first.state}/etcd/client:0")
    assert etcd_of(first)["key_id"] == etcd_of(second)["key_id"] != ""
    assert sorted(row["node"] for row in first.get("/v1/nodes")["nodes"]) == ["first", "second"]


def test_make_cluster_key_generates_once(nodes: Nodes) -> None:
    path = nodes.folder / "made" / "cluster.key"
    argv = [*ELASTICD, "--make-cluster-key", "--set", f"cluster_key_file={path}"]
    first = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert first.returncode == 0, first.stderr
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(bytes.fromhex(path.read_text())) == 32
    again = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert again.returncode == 78
    assert "exists already" in again.stderr


def test_watch_reads_what_was_refused_again_when_the_spec_arrives(server: EtcdServer) -> None:
    """After a loss of etcd's data, agents write the state before the spec."""
    daemon, late = ClusterSigner(KEYS.root, SECRET), ClusterSigner(KEYS.root, SECRET)
    client, reader = Thief(server.access), Etcd(server.access, signer=late)
    keys, views = ClusterKeys("main").job("again"), list[View]()
    first, second = (
        {op.key: op.value for op in daemon.sealed([Put(keys.spec, record(name)), Put(keys.state, encode(JobState()))])
         if isinstance(op, Put)}
        for name in ("one", "two")
    )  # fmt: skip
    try:
        client.put(keys.spec, first[keys.spec])
        reader.watch(keys.root, views.append)
        eventually(lambda: views and keys.spec in views[-1].kvs, 20)
        client.put(keys.state, second[keys.state])
        eventually(lambda: keys.state in views[-1].refused, 20)
        client.put(keys.spec, second[keys.spec])
        eventually(lambda: {keys.spec, keys.state} == views[-1].kvs.keys() and not views[-1].refused, 20)
    finally:
        client.txn([], [Delete(keys.root, prefix=True)])
        client.close()
        reader.close()


def record(submission: str) -> bytes:
    made = SpecRecord(
        spec=JobSpec(name="again", script="/t.py"), submitted_wall_s=1.0, submitted_by="root", submission=submission
    )
    return encode(made)
