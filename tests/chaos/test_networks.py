"""Networks as they are: three members of etcd behind TLS and a password hashed at great cost, hosts without a default
route, whose own names stand for 127.0.1.1. Nothing is set but etcd's endpoints and credentials."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from chaos.harness import WARM_DAEMON
from support import api, scratch
from support.etcd_server import etcd_binary
from support.lab import Host, Hosts
from support.wait import eventually
from support.warm import SOCKET_ENV, ready

from elastic.etcd.client import Etcd, EtcdAccess
from elasticd.etcd import certificates

pytestmark = [pytest.mark.netns, pytest.mark.chaos, pytest.mark.etcd, pytest.mark.timeout(240)]

SCRIPT = """
import socket, torch, elastic
def setup(job):
    assert socket.gethostbyname(socket.gethostname()) == "127.0.1.1"
    model = torch.nn.Linear(1, 1)
    return elastic.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
def train(job, state):
    model = job.ddp(state.model)
    for batch in job.batches([torch.tensor([i / 60]) for i in range(60)], state, batch_size=6, epochs=1):
        loss = model(batch.data).square().mean()
        loss.backward(); state.optimizer.step(); state.optimizer.zero_grad()
        job.commit(state, loss=loss)
    open(f"done.{job.rank}", "w").write(str(state.step))
elastic.run(setup, train)
"""


class Site:
    """Three hosts, each with a member of etcd and a daemon."""

    def __init__(self, hosts: Hosts, folder: pathlib.Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.tls = folder / "tls"
        certificates.ensure(self.tls, [host.address for host in hosts])
        self.password = folder / "password"
        self.password.touch(0o600)
        self.password.write_text("secret")
        self.members: list[subprocess.Popen[Any]] = [self.start_member(i) for i in range(3)]
        self.access = EtcdAccess(
            endpoints=tuple(f"{host.address}:2379" for host in hosts), ca_file=str(self.tls / "ca.pem"),
            user="root", password="secret",
        )  # fmt: skip

    def start_member(self, index: int) -> subprocess.Popen[Any]:
        host, address = self.hosts[index], self.hosts[index].address
        peers = ",".join(f"m{i}=http://{self.hosts[i].address}:2380" for i in range(3))
        argv = [
            str(etcd_binary()), f"--name=m{index}", f"--data-dir={self.folder}/m{index}", "--unsafe-no-fsync",
            f"--listen-client-urls=https://{address}:2379", f"--advertise-client-urls=https://{address}:2379",
            f"--listen-peer-urls=http://{address}:2380", f"--initial-advertise-peer-urls=http://{address}:2380",
            f"--initial-cluster={peers}", "--log-level=error",
            f"--cert-file={self.tls}/server.pem", f"--key-file={self.tls}/server-key.pem",
        ]  # fmt: skip
        with (self.folder / f"m{index}.log").open("ab") as log:
            return host.popen(argv, stdout=log, stderr=log)

    def ask_for_a_password(self) -> None:
        ctl = str(pathlib.Path(str(etcd_binary())).with_name("etcdctl"))
        common = [f"--endpoints={self.hosts[0].address}:2379", f"--cacert={self.tls}/ca.pem", "--command-timeout=20s"]
        eventually(lambda: self.hosts[0].run([ctl, *common, "get", "/"], check=False).returncode == 0, 30)
        for words in (["user", "add", "root:secret"], ["user", "grant-role", "root", "root"], ["auth", "enable"]):
            self.hosts[0].run([ctl, *common, *words], timeout_s=25)

    def socket(self, name: str) -> pathlib.Path:
        return self.folder / f"{name}.sock"

    def start_daemon(self, index: int, name: str, **etcd: object) -> subprocess.Popen[Any]:
        settings = {
            "endpoints": list(self.access.endpoints), "ca_file": self.access.ca_file, "user": "root",
            "password_file": str(self.password), "allow_unsound_version": True, **etcd,
        }  # fmt: skip
        (self.folder / f"{name}.toml").write_text(
            f'node = "{name}"\nslots = 1\nstate_dir = "{self.folder}/{name}"\n'
            f'socket = "{self.socket(name)}"\n[http]\nlisten = ""\n[etcd]\n'
            + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
        )
        hosts = self.folder / f"{name}.hosts"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}.lan {name}\n")
        debian = f'hostname {name}; mount --bind {hosts} /etc/hosts; exec "$@"'
        argv = ["unshare", "--mount", "--uts", "sh", "-c", debian, "sh"]
        argv += [sys.executable, str(WARM_DAEMON), "--config", str(self.folder / f"{name}.toml")]
        with (self.folder / f"{name}.log").open("ab") as log:
            return self.hosts[index].popen(argv, env={SOCKET_ENV: ready()}, stdout=log, stderr=log)

    def status(self, name: str) -> dict[str, Any]:
        try:
            return api.call(self.socket(name), "GET", "/v1/status")
        except OSError:
            return {}

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = (self.folder / f"{name}.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    folder = pathlib.Path(scratch.folder("networks"))
    try:
        with Hosts(3) as hosts:
            made = Site(hosts, folder)
            made.ask_for_a_password()
            for index in range(3):
                made.start_daemon(index, f"host{index}")
            try:
                yield made
            finally:
                for log in sorted(folder.glob("host*.log")):
                    print(f"== {log.name}\n{log.read_text()[-3000:]}")
    finally:
        shutil.rmtree(folder)


def no_default_route(host: Host) -> bool:
    return "default" not in host.run(["ip", "route"]).stdout


def test_nodes_find_their_addresses_log_in_and_train(site: Site) -> None:
    assert all(no_default_route(host) for host in site.hosts)
    for index, host in enumerate(site.hosts):
        status = eventually(lambda i=index: (s := site.status(f"host{i}")) and not s["problems"] and s, 60)  # type: ignore[misc]
        assert (status["address"], status["interface"]) == (host.address, "eth0")
        assert status["address_why"].startswith("reaches etcd at ")
    (site.folder / "t.py").write_text(SCRIPT)
    job = {"name": "job", "script": str(site.folder / "t.py"), "workdir": str(site.folder), "nodes": "3",
           "workers_per_node": 1, "python": sys.executable}  # fmt: skip
    api.call(site.socket("host0"), "POST", "/v1/jobs", job)

    def over() -> dict[str, Any] | None:
        row = api.call(site.socket("host0"), "GET", "/v1/jobs/job")
        if row["phase"] in ("failed", "stopped"):
            logs = [*site.folder.glob("host*/jobs/*/*.log"), *site.folder.glob("host*/jobs/*/*/*.log")]
            raise RuntimeError(row["reason"] + "".join(f"\n== {log}\n{log.read_text()[-1500:]}" for log in logs))
        return row if row["phase"] == "succeeded" else None

    row = eventually(over, 120, "three ranks on three hosts have trained")
    assert (row["world_size"], row["generation"], row["excluded_nodes"]) == (3, 1, [])
    assert [(site.folder / f"done.{rank}").read_text() for rank in range(3)] == ["10"] * 3


@pytest.mark.long
def test_a_member_that_is_down_is_named(site: Site) -> None:
    eventually(lambda: site.status("host0").get("etcd", {}).get("members"), 30)
    site.members[2].kill()
    site.members[2].wait(10)
    down = f"etcd member {site.hosts[2].address}:2379"

    def named() -> bool:
        status = site.status("host0")
        return status["health"] != "healthy" and any(p.startswith(down) for p in status["problems"])

    try:
        eventually(named, 60)
        assert any("2 of 3 are well, 2 are needed" in p for p in site.status("host0")["problems"])
    finally:
        site.members[2] = site.start_member(2)
    eventually(lambda: not site.status("host0")["problems"], 60, "it is back")
    lost = [e for e in site.events("host0") if e["event"] == "etcd.member_lost"]
    assert {e["level"] for e in lost if down.endswith(e["endpoint"])} == {"warning"}


@pytest.mark.parametrize("wrong", ["password", "authority"])
def test_wrong_credentials_are_said_at_the_start(site: Site, wrong: str) -> None:
    if wrong == "password":
        other = site.folder / "other-password"
        other.touch(0o600)
        other.write_text("guess")
        daemon = site.start_daemon(0, f"wrong-{wrong}", password_file=str(other))
    else:
        certificates.ensure(site.folder / "other-tls", ["nowhere"])
        daemon = site.start_daemon(0, f"wrong-{wrong}", ca_file=str(site.folder / "other-tls" / "ca.pem"))
    words = {"password": "authentication failed", "authority": "not signed by the authority of ca_file"}[wrong]
    name = f"wrong-{wrong}"

    def said() -> list[str]:
        return [e["level"] for e in site.events(name) if e["event"] == "etcd.contact" and words in e["error"].lower()]

    try:
        try:
            eventually(lambda: "warning" in said(), 30, f"a line with {words!r}")
        except AssertionError as error:
            error.add_note((site.folder / f"{name}.log").read_text()[-4000:])
            raise
        assert words in site.status(name)["etcd"]["error"].lower()
        assert daemon.poll() is None, "the operator may correct it meanwhile"
    finally:
        daemon.terminate()
        daemon.wait(20)


@pytest.mark.long
def test_external_etcd_client_reads_the_records_of_all_nodes(site: Site) -> None:
    """From the outside of all hosts, with the same credentials."""
    etcd = Etcd(site.access, call_s=1.0)
    try:
        eventually(lambda: _nodes(etcd) == {"host0", "host1", "host2"}, 60)
    finally:
        etcd.close()


def _nodes(etcd: Etcd) -> set[str]:
    from elastic.etcd.client import EtcdUnavailable

    try:
        return {os.path.basename(key) for key in etcd.get_prefix("/elastic/main/nodes/").kvs}
    except EtcdUnavailable:
        return set()
