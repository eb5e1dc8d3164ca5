"""The booted systemd of the laboratory: what the other tests here stand on."""

from __future__ import annotations

import pathlib
import sys

import pytest
from support.lab import Hosts, SystemdHost
from support.procs import alive
from support.wait import eventually

pytestmark = pytest.mark.systemd


def booted(hosts: Hosts, index: int) -> SystemdHost:
    host = hosts[index]
    assert isinstance(host, SystemdHost)
    return host


def test_two_booted_hosts_on_one_bridge() -> None:
    with Hosts(2, systemd=True) as hosts:
        one, two = booted(hosts, 0), booted(hosts, 1)
        assert one.run(["hostname"]).stdout == "node0\n"
        assert one.run(["cat", "/proc/1/comm"]).stdout == "systemd\n"
        assert "1 received" in one.run(["ping", "-q", "-c1", "-W1", two.address]).stdout

        # the checkout and its Python are there; what is written stays inside
        assert one.run([sys.executable, "-c", "import elastic; print(elastic.__name__)"]).stdout == "elastic\n"
        one.run(["touch", "/etc/only-inside"])
        assert not pathlib.Path("/etc/only-inside").exists()
        two.run(["touch", "/mnt/shared"])
        assert (two.share / "shared").exists()

        # transient units work, and their processes are found from outside
        two.run(["systemd-run", "--quiet", "--unit=sleeper", "sleep", "60"])
        pid = two.outer_pid(int(two.show("sleeper", "MainPID")["MainPID"]))
        assert alive(pid)
        assert pid in two.pids()

        hosts.partition(0, 1)
        assert "0 received" in one.run(["ping", "-q", "-c1", "-W0.1", two.address], check=False).stdout
        hosts.heal()
        two.power_off()
        eventually(lambda: not alive(pid), 5.0)
        assert "0 received" in one.run(["ping", "-q", "-c1", "-W0.1", two.address], check=False).stdout
