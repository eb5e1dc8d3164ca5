"""The installation on three nodes by the commands of the documents, word for word; addresses and names differ.

Not taken from them: elasticd's own environment is this one, by a link, since pip would install for minutes. etcd is
found where a distribution's package would have put it.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from support.documents import fenced, indented, section, uncommented
from support.etcd_server import etcd_binary
from support.installed import Machines
from support.lab import Hosts
from support.source import ROOT
from support.wait import eventually

from elasticd.etcd.versions import VersionSupport, judge

pytestmark = [pytest.mark.systemd, pytest.mark.etcd, pytest.mark.slow]

INSTALL = uncommented(indented(section("systemd/README.md"))[0]).splitlines()
TABLE, MAKE_KEY = indented(section("systemd/README.md", "## More than one node"))[:2]
CERTIFICATES, AS_ROOT = indented(section("docs/etcd.md", "## Installation"))
(ETCD_UNIT,) = fenced(section("docs/etcd.md", "## Installation"), "ini")
(ROLES,) = indented(section("docs/security.md", "### Roles"))
(SCRIPT,) = fenced(section("docs/index.md", "## Quick start"), "python")
START_ETCD = "systemctl daemon-reload; systemctl enable etcd; systemctl restart etcd"
NOT_RUN = (
    "/usr/bin/python3 -m venv /opt/elasticd",
    "/opt/elasticd/bin/pip install ",
    "editor /etc/elasticd/elasticd.toml",
)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with Hosts(3, systemd=True) as hosts:
        made = Machines(hosts)
        for host in made.hosts:
            host.link_venv()
            if str(ROOT).startswith(("/tmp/", "/var/tmp/")):
                made.write(host, "/etc/systemd/system/elasticd.service.d/test.conf", "[Service]\nPrivateTmp=no\n")
        yield made


def install_etcd(machines: Machines) -> str:
    """As a distribution's package does. Returns its version."""
    binary = etcd_binary()
    assert binary is not None
    for host in machines.hosts:
        for name in ("etcd", "etcdctl"):
            shutil.copy(pathlib.Path(binary).with_name(name), host.share / name)
            host.run(["ln", "-s", f"/mnt/{name}", f"/usr/local/bin/{name}"])
    return machines.hosts[0].run(["etcd", "--version"]).stdout.splitlines()[0]


def set_up_etcd(machines: Machines) -> None:
    """docs/etcd.md, "Installation", and docs/security.md, "Roles"."""
    first, *others = machines.hosts
    machines.sh(first, CERTIFICATES)
    assert machines.sh(first, "stat -c %a /etc/etcd/ca-key.pem") == "600\n"
    for host in others:
        host.run(["mkdir", "-m", "700", "/etc/etcd"])
        for name in ("ca.pem", f"{host.address}.pem", f"{host.address}-key.pem"):
            machines.copy(f"/etc/etcd/{name}", host)
    for number, host in enumerate(machines.hosts, start=1):
        before, cluster, after = re.split(r"(--initial-cluster=\S+)", ETCD_UNIT)
        unit = "".join(
            [before.replace("10.0.0.1", f"10.0.0.{number}"), cluster, after.replace("10.0.0.1", f"10.0.0.{number}")]
        )
        machines.write(host, "/etc/systemd/system/etcd.service", unit)
    assert START_ETCD in (ROOT / "docs" / "etcd.md").read_text()
    machines.on_all("sh", "-c", START_ETCD)
    machines.sh(first, AS_ROOT + ROLES)


def set_up_elasticd(machines: Machines, extra: str) -> None:
    """systemd/README.md. `extra`: a setting for the etcd of the tests."""
    first = machines.hosts[0]
    assert [line for line in INSTALL if line.startswith(NOT_RUN)] == INSTALL[:2] + INSTALL[3:4]
    install, start, group, show = INSTALL[2], *INSTALL[4:]
    for host in machines.hosts:
        said = machines.sh(host, install)
        assert "write /etc/systemd/system/elasticd.service" in said, said
        settings = machines.sh(host, "cat /etc/elasticd/elasticd.toml")
        assert settings.count("\n[etcd]\n") == 1
        edited = settings.replace("\n[etcd]\n", f"\n[etcd]\n{TABLE}{extra}")
        machines.write(host, "/etc/elasticd/elasticd.toml", edited)
        for name, becomes in (("ca", "ca"), ("elasticd", "client"), ("elasticd-key", "client-key")):
            machines.copy(f"/etc/etcd/{name}.pem", host, f"/etc/elasticd/{becomes}.pem")
    machines.sh(first, MAKE_KEY)
    for host in machines.hosts[1:]:
        machines.copy("/etc/elasticd/cluster.key", host)
    machines.on_all(*start.split())  # returns when elasticd can work
    for host in machines.hosts:
        machines.sh(host, group.replace("NAME", "alice"))
    eventually(lambda: ready(machines), 20.0, "three nodes", every_s=0.5)
    said = machines.sh(first, show)
    assert "records signed, key" in said, said
    assert "records unsigned" not in said


def trains(status: dict[str, Any]) -> bool:
    assert (status["world_size"], status["phase"]) == (3, "running"), status
    return bool((status["step"] or 0) >= 20)


def ready(machines: Machines) -> bool:
    rows = json.loads(machines.sh(machines.hosts[0], "elasticctl nodes --json"))["nodes"]
    assert [row["state"] for row in rows] == ["ready"] * 3, rows
    return True


@pytest.mark.long
def test_three_nodes_by_the_documents_recover_from_a_death_and_from_a_lost_node(machines: Machines) -> None:
    version = install_etcd(machines)
    set_up_etcd(machines)
    unsound = judge(version, 3).support is VersionSupport.UNSOUND
    set_up_elasticd(machines, "allow_unsound_version = true\n" if unsound else "")

    for host in machines.hosts:
        machines.write(host, "/srv/alice/train.py", SCRIPT.replace("epochs=3", "epochs=1_000_000"))
    machines.by_alice("elasticctl", "run", "--nodes", "2:3", "--workers", "1", "--detach", "train.py")
    eventually(lambda: trains(machines.status()), 90.0, "three ranks train", every_s=0.5)
    before, struck = machines.status(), machines.hosts[1]  # where alice asks: all of its ranks are known there
    assert before["owner"] == "alice"
    victim = next(row for row in before["ranks"] if row["node"] == struck.name)
    assert struck.run(["ps", "-o", "user=", "-p", str(victim["pid"])]).stdout.split() == ["alice"]
    struck.run(["kill", "-9", str(victim["pid"])])
    (death,) = eventually(lambda: machines.recovered(1), 40.0, "it has recovered", every_s=0.5)
    assert (death["kind"], death["steps_lost"], death["restored_from"]) == ("exit", 0, "live")
    assert (death["ranks"], death["world_size_after"]) == ([victim["rank"]], 3), "the others keep their processes"

    lost = next(host for host in reversed(machines.hosts) if host is not machines.hosts[1])
    lost.power_off()  # with its member of etcd
    found = eventually(lambda: machines.recovered(2), 60.0, "it goes on with two", every_s=0.5)
    loss = next(row for row in found if row["generation"] != death["generation"])
    assert loss["kind"] in ("lost", "unreachable"), "whichever its peers see first"
    assert (loss["node"], loss["steps_lost"], loss["world_size_after"]) == (lost.name, 0, 2)
    assert machines.by_alice("elasticctl", "stop", "train", "--wait", "--timeout", "30") == "train is stopped\n"


def test_the_commands_are_where_this_file_looks_for_them() -> None:
    assert CERTIFICATES.startswith("mkdir -p /etc/etcd")
    assert AS_ROOT.startswith("export ETCDCTL_API=3")
    assert ROLES.rstrip().endswith("etcdctl auth enable")
    assert "--make-cluster-key" in MAKE_KEY
    assert os.path.basename(INSTALL[2].split()[0]) == "elasticctl"
