"""Booted hosts on which elasticd is installed by the commands of the documents."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from .lab import Hosts, SystemdHost

EXIT_CODES = {"healthy": 0, "degraded": 3}
"""Of `elasticctl status` by the health of a job."""


class Machines:
    """Booted hosts, 10.0.0.1 and so on of the documents, with a user alice."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = [host for host in (hosts[i] for i in range(len(hosts))) if isinstance(host, SystemdHost)]
        for host in self.hosts:
            self.write(host, "/etc/sysusers.d/people.conf", "u alice 1500 - /srv/alice /bin/bash\n")
            host.run(["systemd-sysusers", "/etc/sysusers.d/people.conf"])
            host.run(["install", "-d", "-o", "alice", "-g", "alice", "-m", "700", "/srv/alice"])

    def placed(self, text: str) -> str:
        """With the addresses of the hosts."""
        return re.sub(r"\b10\.0\.0\.([1-9])\b", lambda found: self.hosts[int(found[1]) - 1].address, text)

    def sh(self, host: SystemdHost, text: str, timeout_s: float = 60.0) -> str:
        return host.run(["bash", "-euc", self.placed(text)], timeout_s).stdout

    def write(self, host: SystemdHost, path: str, text: str) -> None:
        (host.share / "file").write_text(self.placed(text))
        host.run(["install", "-D", "-m", "644", "/mnt/file", path])

    def copy(self, path: str, host: SystemdHost, target: str = "") -> None:
        """From the first host, to the same path or to `target`; mode 0600, owner root."""
        first = self.hosts[0]
        first.run(["install", "-m", "600", path, "/mnt/carried"])
        if host is not first:
            shutil.copy(first.share / "carried", host.share / "carried")
        host.run(["install", "-m", "600", "/mnt/carried", target or path])

    def on_all(self, *words: str, timeout_s: float = 60.0) -> None:
        """The same command on all hosts at the same time."""
        running = [(host, host.popen(words, stderr=subprocess.PIPE, text=True)) for host in self.hosts]
        for host, process in running:
            _, said = process.communicate(timeout=timeout_s)
            assert process.returncode == 0, f"{host.name}: {words}: {said}"

    def by_alice(self, *words: str) -> str:
        """Of a command in a shell of hers, on the second node."""
        return self._by_alice(words).stdout

    def _by_alice(self, words: Sequence[str], check: bool = True) -> subprocess.CompletedProcess[str]:
        shell = ["runuser", "--login", "alice", "--command", shlex.join(words)]
        return self.hosts[1].run(shell, timeout_s=30, check=check)

    def status(self) -> dict[str, Any]:
        """Of the job `train`, whatever its health, which the exit code says too."""
        done = self._by_alice(["elasticctl", "status", "train", "--json"], check=False)
        assert done.returncode in EXIT_CODES.values(), done
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["etcd"]["connected"] is False or done.returncode == EXIT_CODES[found["health"]], found
        return found

    def ranks_at(self, step: int) -> int:
        """How many of its ranks have come that far."""
        return sum((row["step"] or 0) >= step for row in self.status()["ranks"])

    def recovered(self, count: int) -> list[dict[str, Any]]:
        """Its failures that are over, once there are so many; before that, none. No failure: a node that is ready later
        than the others on a busy machine, and joins the job as planned."""
        rows = json.loads(self.by_alice("elasticctl", "incidents", "train", "--json"))["incidents"]
        over = [row for row in rows if not row["open"] and row["kind"] != "planned"]
        return over if len(over) >= count else []
