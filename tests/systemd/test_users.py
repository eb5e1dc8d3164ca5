"""Two users of a booted host: jobs run as their submitter, and no user reaches another's."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from support.history import History
from support.lab import Hosts, SystemdHost
from support.source import ROOT
from support.wait import eventually

pytestmark = [pytest.mark.systemd, pytest.mark.etcd, pytest.mark.slow]

CTL = "/opt/elasticd/bin/elasticctl"
CONFIG = 'node = "alpha"\nslots = 4\nsocket_group = "elasticd"\nadmin_group = "elasticd-admin"\n'
USERS = "".join(
    f"u {name} {uid} - /var/people/{name} /bin/sh\nm {name} elasticd\n"
    for name, uid in (("alice", 1500), ("bob", 1501), ("carol", 1502))
)
DENIED = 7


class Machine:
    def __init__(self, host: SystemdHost) -> None:
        self.host = host
        host.link_venv()
        host.run(["/opt/elasticd/bin/elasticctl", "install-service"])
        self.write("/etc/sysusers.d/people.conf", f"{USERS}m carol elasticd-admin\n")
        host.run(["systemd-sysusers"])
        self.write("/etc/elasticd/elasticd.toml", CONFIG)
        # The checkout may lie in /tmp.
        self.write("/etc/systemd/system/elasticd.service.d/test.conf", "[Service]\nPrivateTmp=no\n")
        host.systemctl("daemon-reload")
        host.systemctl("start", "elasticd")

    def write(self, path: str, text: str) -> None:
        (self.host.share / "file").write_text(text)
        self.host.run(["install", "-D", "-m", "644", "/mnt/file", path])

    def by(self, user: str, *words: str) -> tuple[int, str]:
        """(exit code, output) of a command of a user."""
        done = self.host.run(["runuser", "-u", user, "--", *words], check=False, timeout_s=30)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with Hosts(1, systemd=True) as hosts:
        host = hosts[0]
        assert isinstance(host, SystemdHost)
        yield Machine(host)


def job_of_alice(machine: Machine) -> History:
    record = machine.host.share / "record"
    record.mkdir()
    (machine.host.share / "train.py").write_text(
        "import json, os, runpy\n"
        "with open('/mnt/checkpoints/environment.' + os.environ['RANK'], 'w') as file:\n"
        "    json.dump(dict(os.environ), file)\n"
        f"runpy.run_path('{ROOT}/tests/support/train_chaos.py', run_name='__main__')\n"
    )
    (machine.host.share / "job.toml").write_text(
        'name = "hers"\nscript = "/mnt/train.py"\nworkdir = "/"\nworkers_per_node = 2\n'
        "stop_grace_s = 1.0\n[limits]\nmemory = '3G'\ncpu = 1.5\ntasks = 900\n"
        '[checkpoint]\ndir = "/mnt/checkpoints"\nevery_steps = 20\n'
        '[env]\nRECORD_DIR = "/mnt/record"\nSTEPS = "100000"\nPACE_S = "0.02"\nHF_TOKEN = "hush"\n'
    )
    (machine.host.share / "checkpoints").mkdir()
    machine.host.run(["chown", "alice:", "/mnt/record", "/mnt/checkpoints"])
    assert machine.by("alice", CTL, "submit", "/mnt/job.toml") == (
        0, "hers is submitted; see: elasticctl status hers\n"
    )  # fmt: skip
    return History(record)


def test_job_runs_as_its_submitter_and_out_of_reach_of_another_user(machine: Machine) -> None:
    host = machine.host
    history = job_of_alice(machine)
    eventually(lambda: history.read().step() > 40, 60.0, "the job trains")

    # as alice, fenced in and limited, with her files
    shown = host.show(
        "elasticd-job-hers", "User", "Group", "UMask", "NoNewPrivileges", "PrivateTmp", "MemoryMax", "TasksMax",
        "CPUQuotaPerSecUSec", "MainPID",
    )  # fmt: skip
    pid = shown.pop("MainPID")
    assert shown == {
        "User": "alice", "Group": "1500", "UMask": "0027", "NoNewPrivileges": "yes",
        "PrivateTmp": "no" if str(ROOT).startswith(("/tmp/", "/var/tmp/")) else "yes",
        "MemoryMax": str(3 * 2**30), "TasksMax": "900", "CPUQuotaPerSecUSec": "1.500000s",
    }  # fmt: skip
    users = set(host.run(["ps", "-o", "user=", "--ppid", pid, "-p", pid]).stdout.split())
    assert users == {"alice"}
    environ = dict(line.partition("=")[::2] for line in host.run(["cat", f"/proc/{pid}/environ"]).stdout.split("\0"))
    assert (environ["HOME"], environ["USER"], environ["LOGNAME"]) == ("/var/people/alice", "alice", "alice")
    theirs = json.loads((host.share / "checkpoints" / "environment.0").read_text())
    assert theirs["HOME"] == "/var/people/alice"
    assert not {"STATE_DIRECTORY", "INVOCATION_ID"} & theirs.keys()
    find = ["find", "/mnt/checkpoints", "-name", "*.safetensors", "-printf", "%u %m\\n"]
    eventually(lambda: host.run(find, check=False).stdout, 20.0, "a checkpoint")
    assert set(host.run(find, check=False).stdout.splitlines()) == {"alice 640"}

    # bob sees that it runs, and no secret; he changes and reads nothing
    code, said = machine.by("bob", CTL, "status", "hers", "--json")
    assert (code, json.loads(said)["owner"], json.loads(said)["spec"]["env"]["HF_TOKEN"]) == (0, "alice", "********")
    for words in (
        ["stop", "hers"],
        ["logs", "hers"],
        ["scale", "hers", "1"],
        ["forget", "hers"],
        ["checkpoint", "now", "hers"],
    ):
        code, said = machine.by("bob", CTL, *words)
        assert code == DENIED, (words, said)
        assert "it belongs to alice; alice, a member of group elasticd-admin or root can" in said
        assert "saves its steps" not in said
    code, said = machine.by("bob", CTL, "drain", "alpha")
    assert (code, "a member of group elasticd-admin or root can" in said) == (DENIED, True)
    for path in ("jobs/hers/agent/config.json", "jobs/hers/logs", "access/1500/client-0", "etcd/client:0"):
        assert machine.by("bob", "ls", f"/var/lib/elasticd/{path}")[0] != 0, path
    assert machine.by("alice", "cat", "/var/lib/elasticd/jobs/hers/agent/config.json")[0] == 0
    code, said = machine.by("root", CTL, "run", "--", f"{ROOT}/tests/support/train_chaos.py")
    assert (code, "run_as.allow_root" in said) == (DENIED, True)

    # its owner reads and stops it, and the journal has each request
    assert machine.by("alice", CTL, "logs", "hers", "-n", "1")[0] == 0
    assert machine.by("carol", CTL, "checkpoint", "now", "hers")[0] == 0
    code, said = machine.by("alice", CTL, "stop", "hers", "--wait", "--timeout", "20")
    assert (code, said.partition("\n")[0]) == (0, "hers is stopped")
    lines = [json.loads(line) for line in host.journal("elasticd").splitlines() if '"event": "audit"' in line]
    trail = {(line["by"], line["kind"], line["result"]) for line in lines}
    assert {
        ("alice", "job.submitted", "done"), ("bob", "job.stop_requested", "refused: 403"),
        ("bob", "node.drain_requested", "refused: 403"), ("carol", "job.checkpoint_requested", "done"),
        ("alice", "job.stop_requested", "done"),
    } <= trail  # fmt: skip
    eventually(lambda: host.run(["ls", "/var/lib/elasticd/access"]).stdout == "", 10.0, "her access to etcd is gone")


@pytest.mark.long
def test_new_job_of_another_user_does_not_inherit_the_old_ones_files(machine: Machine) -> None:
    host = machine.host
    (host.share / "script.py").write_text("import os; print('of', os.environ['USER'])\n")
    host.run(["chmod", "644", "/mnt/script.py"])
    submit = (CTL, "run", "--name", "shared", "--workers", "1", "--", "/mnt/script.py")
    code, said = machine.by("alice", *submit)
    assert (code, "of alice" in said) == (0, True), said
    assert machine.by("bob", *submit)[0] == 1, "the name is taken"
    assert machine.by("alice", CTL, "forget", "shared")[0] == 0
    assert machine.by("bob", CTL, "logs", "shared")[0] == DENIED, "left by a job of alice"
    code, said = machine.by("bob", *submit)
    assert (code, "of bob" in said) == (0, True), said
    assert "of alice" not in machine.by("bob", CTL, "logs", "shared")[1]
    names = host.run(["ls", "/var/lib/elasticd/jobs"]).stdout.split()
    assert any(name.startswith("~shared~1500~") for name in names), names
