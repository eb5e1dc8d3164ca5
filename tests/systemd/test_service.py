"""elasticd as a service of a real systemd: installed as systemd/README.md says, on a booted host of its own."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator

import pytest
from support.history import History
from support.lab import Hosts, SystemdHost
from support.procs import alive, kill
from support.source import ROOT
from support.wait import eventually, stretched

pytestmark = [pytest.mark.systemd, pytest.mark.etcd, pytest.mark.slow]

CTL = "/opt/elasticd/bin/elasticctl"
CONFIG = 'node = "alpha"\nslots = 4\nsocket_group = "elasticd"\n[run_as]\nallow_root = true\n'
# Sooner than in the shipped unit, so that the tests need not wait; and /tmp seen, in case the checkout lies there.
DROP_IN = "[Service]\nWatchdogSec=2s\nTimeoutAbortSec=1s\nRestartSec=200ms\nPrivateTmp=no\n"


@pytest.fixture(scope="module")
def machine() -> Iterator[SystemdHost]:
    with Hosts(1, systemd=True) as hosts:
        host = hosts[0]
        assert isinstance(host, SystemdHost)
        host.link_venv()
        host.run(["/opt/elasticd/bin/elasticctl", "install-service"])
        write(host, "/etc/systemd/system/elasticd.service.d/test.conf", DROP_IN)
        host.systemctl("daemon-reload")
        yield host


@pytest.fixture
def host(machine: SystemdHost) -> Iterator[SystemdHost]:
    """The installed service, not running, with good settings and no state."""
    write(machine, "/etc/elasticd/elasticd.toml", CONFIG)
    yield machine
    machine.systemctl("stop", "elasticd.service", "elasticd.slice")
    machine.systemctl("reset-failed", check=False)
    machine.run(["rm", "-rf", "/var/lib/elasticd"])


def write(host: SystemdHost, path: str, text: str) -> None:
    (host.share / "file").write_text(text)
    host.run(["install", "-D", "-m", "644", "/mnt/file", path])


def main_pid(host: SystemdHost, unit: str = "elasticd") -> int:
    return int(host.show(unit, "MainPID")["MainPID"])


def ctl(host: SystemdHost, *words: str) -> dict[str, object]:
    answer: dict[str, object] = json.loads(host.run([CTL, *words, "--json"], timeout_s=20).stdout)
    return answer


def until_active(host: SystemdHost, other_than: int = 0) -> int:
    """The process id of the daemon, once it is ready and another than that of before."""

    def ready() -> int:
        seen = host.show("elasticd", "ActiveState", "MainPID")
        pid = int(seen["MainPID"])
        return pid if seen["ActiveState"] == "active" and pid != other_than else 0

    return eventually(ready, 20.0, "elasticd is active again", every_s=0.1)


def test_systemd_takes_the_installed_unit_without_a_word(machine: SystemdHost) -> None:
    said = machine.run(["systemd-analyze", "verify", "elasticd.service", "elasticd.slice"])
    assert [line for line in (said.stdout + said.stderr).splitlines() if "elasticd" in line] == []
    assert machine.run(["getent", "group", "elasticd"]).stdout.startswith("elasticd:")


def test_started_is_ready_to_work(host: SystemdHost) -> None:
    host.systemctl("start", "elasticd")
    nodes = ctl(host, "nodes")["nodes"]  # at once, without waiting: `start` came back because it can work
    assert [(n["node"], n["state"], n["slots"]) for n in nodes] == [("alpha", "ready", 4)]  # type: ignore[attr-defined]
    seen = host.show("elasticd", "StatusText", "Type", "NotifyAccess", "WatchdogUSec")
    assert seen == {"StatusText": "0 agents here", "Type": "notify", "NotifyAccess": "main", "WatchdogUSec": "2s"}
    assert host.show("elasticd-etcd", "ActiveState", "Slice") == {"ActiveState": "active", "Slice": "elasticd.slice"}
    mode = host.run(["stat", "-c", "%a %U %G", "/run/elasticd/elasticd.sock"]).stdout.strip()
    assert mode == "660 root elasticd"


def test_the_embedded_etcd_is_a_user_of_its_own_in_a_sandbox_and_closed(host: SystemdHost) -> None:
    host.systemctl("start", "elasticd")
    seen = host.show(
        "elasticd-etcd", "User", "Description", "CapabilityBoundingSet", "ProtectSystem", "NoNewPrivileges"
    )
    assert seen == {
        "User": "elasticd-etcd", "Description": "elasticd: embedded etcd", "CapabilityBoundingSet": "",
        "ProtectSystem": "strict", "NoNewPrivileges": "yes",
    }  # fmt: skip
    said = host.run(["systemd-analyze", "security", "--no-pager", "elasticd-etcd"], check=False).stdout
    exposed = said.splitlines()[-1]
    assert float(exposed.partition("elasticd-etcd.service: ")[2].split()[0]) < 3.0, exposed
    assert "import" not in host.systemctl("status", "--no-pager", "elasticd-etcd")
    put = (
        "from elastic.etcd.client import *; Etcd(EtcdAccess(endpoints=('unix:/var/lib/elasticd/etcd/client:0',){})).put"
    )
    login = ", user='elasticd', password=open('/var/lib/elasticd/etcd/login').read().strip().split(':')[1]"
    python = "/opt/elasticd/bin/python"
    assert host.run([python, "-c", f"{put.format(login)}('/elastic/x', b'1')"], check=False).returncode == 0
    refused = host.run([python, "-c", f"{put.format(login)}('/other', b'1')"], check=False)
    assert "permission denied" in refused.stderr
    # and an etcd that an earlier elasticd has started as root becomes one of that user
    host.systemctl("stop", "elasticd")
    host.systemctl("stop", "elasticd-etcd")
    host.run(["chown", "-R", "root:root", "/var/lib/elasticd/etcd"])
    host.systemctl("start", "elasticd")
    assert host.show("elasticd-etcd", "User") == {"User": "elasticd-etcd"}
    assert [n["state"] for n in ctl(host, "nodes")["nodes"]] == ["ready"]  # type: ignore[attr-defined]


def test_doctor_needs_no_call_that_the_unit_forbids(host: SystemdHost) -> None:
    host.systemctl("start", "elasticd")
    before = main_pid(host)
    said = json.loads(host.run([CTL, "doctor", "--json"], timeout_s=60, check=False).stdout)
    clocks = [row["text"] for row in said["findings"] if row["check"] == "clock"]
    assert clocks
    assert "does not say" not in clocks[0], "the kernel was asked"
    assert main_pid(host) == before, "no system call has ended it"
    assert host.show("elasticd", "NRestarts") == {"NRestarts": "0"}


def test_service_without_etcd_stays_activating_and_states_why(host: SystemdHost) -> None:
    write(host, "/etc/elasticd/elasticd.toml", CONFIG + '[etcd]\nendpoints = ["127.0.0.1:23999"]\ninsecure = true\n')
    host.systemctl("start", "--no-block", "elasticd")
    eventually(lambda: "etcd cannot be reached" in host.show("elasticd", "StatusText")["StatusText"], 15.0)
    assert host.show("elasticd", "ActiveState") == {"ActiveState": "activating"}


def test_a_wrong_setting_is_named_and_not_tried_again(host: SystemdHost) -> None:
    write(host, "/etc/elasticd/elasticd.toml", "slotz = 4\n")
    host.systemctl("start", "elasticd", check=False)
    eventually(lambda: host.show("elasticd", "ActiveState")["ActiveState"] == "failed", 10.0)
    assert host.show("elasticd", "NRestarts", "ExecMainStatus") == {"NRestarts": "0", "ExecMainStatus": "78"}
    assert "did you mean 'slots'" in host.journal("elasticd")


def test_a_crash_is_followed_by_a_start(host: SystemdHost) -> None:
    host.systemctl("start", "elasticd")
    before = main_pid(host)
    etcd = main_pid(host, "elasticd-etcd")
    host.systemctl("kill", "--kill-whom=main", "--signal=SIGKILL", "elasticd")
    until_active(host, other_than=before)
    assert main_pid(host, "elasticd-etcd") == etcd  # found again, not started again
    assert ctl(host, "nodes")["nodes"]


class Training:
    """A job of two workers on the host, whose records lie on the outside."""

    def __init__(self, host: SystemdHost, checkpoint: dict[str, object] | None = None) -> None:
        self.host = host
        self.record = host.share / "record"
        self.record.mkdir()
        job = {
            "name": "long", "script": str(ROOT / "tests/support/train_chaos.py"), "workdir": "/",
            "workers_per_node": 2, "stop_grace_s": 1.0,
        }  # fmt: skip
        env = {"RECORD_DIR": "/mnt/record", "STEPS": "100000", "PACE_S": "0.02"}
        lines = [f"{name} = {json.dumps(value)}" for name, value in job.items()]
        lines += ["[checkpoint]", *(f"{name} = {json.dumps(value)}" for name, value in (checkpoint or {}).items())]
        lines += ["[env]", *(f"{name} = {json.dumps(value)}" for name, value in env.items())]
        (host.share / "job.toml").write_text("\n".join(lines))
        host.run([CTL, "submit", "/mnt/job.toml"])

    @property
    def history(self) -> History:
        return History(self.record).read()

    def processes(self) -> set[str]:
        return {c.process for c in self.history.commits}

    def steps_on(self, more: int = 20) -> None:
        there = self.history.step()
        eventually(lambda: self.history.step() >= there + more, 20.0, "the job steps on")

    def slowest_since(self, instant_s: float) -> float:
        """Longest time between two steps, in seconds, from `instant_s` on."""
        history = self.history
        history.commits = [c for c in history.commits if c.at_s >= instant_s]
        return max(history.gaps_s())


def test_workers_are_unaffected_by_daemon_restart_kill_hang_and_stop(host: SystemdHost) -> None:
    """G5: restart, SIGKILL, a hang ended by the watchdog, stop and start: the job goes on, the same processes."""
    host.systemctl("start", "elasticd")
    job = Training(host)
    eventually(lambda: job.history.step() > 20, 40.0, "the job trains")
    workers, began_s = job.processes(), time.monotonic()
    assert len(workers) == 2
    agent = main_pid(host, "elasticd-job-long")

    def the_same_agent_known() -> None:
        seen = ctl(host, "status", "long")
        assert seen["agent"]["pid"] == agent, seen["agent"]  # type: ignore[index]

    pid = main_pid(host)
    host.systemctl("restart", "elasticd")
    pid = until_active(host, other_than=pid)
    eventually(lambda: the_same_agent_known() or True, 10.0)
    job.steps_on()

    kill(host.outer_pid(pid))
    pid = until_active(host, other_than=pid)
    eventually(lambda: the_same_agent_known() or True, 10.0)
    job.steps_on()

    kill(host.outer_pid(pid), signal.SIGSTOP)  # a hang: its loop turns no more
    pid = until_active(host, other_than=pid)
    assert "watchdog" in host.run(["journalctl", "--quiet", "--output=cat", "--unit=elasticd"]).stdout.lower()
    job.steps_on()

    host.systemctl("stop", "elasticd")
    assert host.show("elasticd", "Result", "ActiveState") == {"Result": "success", "ActiveState": "inactive"}
    job.steps_on()
    host.systemctl("start", "elasticd")
    eventually(lambda: the_same_agent_known() or True, 10.0)
    job.steps_on()

    assert job.processes() == workers
    assert job.history.generations() == [1]
    assert main_pid(host, "elasticd-job-long") == agent
    slowest_s = job.slowest_since(began_s)
    assert slowest_s < stretched(1.0), f"a step took {slowest_s:.2f} s"

    # and when it shall all end, it does
    left = [host.outer_pid(int(process.rpartition(".")[2])) for process in workers]
    host.systemctl("stop", "elasticd.service", "elasticd.slice")
    eventually(lambda: not any(map(alive, left)), 10.0, "the workers are gone")
    assert host.show("elasticd-job-long", "ActiveState") == {"ActiveState": "inactive"}


@pytest.mark.long
def test_a_machine_that_shuts_down_drains_its_node() -> None:
    """Its only job saves a checkpoint first, though none is due; without the drain there is none."""
    with Hosts(1, systemd=True) as hosts:
        host = hosts[0]
        assert isinstance(host, SystemdHost)
        host.link_venv()
        host.run(["/opt/elasticd/bin/elasticctl", "install-service"])
        write(host, "/etc/systemd/system/elasticd.service.d/test.conf", DROP_IN)
        write(host, "/etc/elasticd/elasticd.toml", CONFIG)
        host.systemctl("daemon-reload")
        host.systemctl("start", "elasticd")
        training = Training(host, {"dir": "/mnt/checkpoints", "every_steps": 1_000_000})
        eventually(lambda: training.history.step() >= 5, 60.0, "the job trains")
        folder = host.share / "checkpoints"
        assert not list(folder.glob("*/step-*")) + list(folder.glob("step-*"))
        host.systemctl("start", "--no-block", "poweroff.target")
        eventually(lambda: list(folder.glob("step-*/manifest*")) or list(folder.glob("*/step-*/manifest*")), 40.0)
