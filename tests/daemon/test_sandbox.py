"""Limits and fence of a job's unit, and what an agent of another user is given."""

from __future__ import annotations

import fcntl
import os
import pathlib
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import structlog

from elastic.contract.agent_files import AgentConfig, EtcdAccess
from elastic.contract.job.spec import InvalidSpec, parse_job
from elastic.util.files import read_file, replace_file
from elasticd.access.authority import Account
from elasticd.agents import job_folders
from elasticd.agents.agents import Agents
from elasticd.agents.etcd_grants import EtcdGrants
from elasticd.base import ownership
from elasticd.base.errors import CannotStart
from elasticd.base.threads import Threads
from elasticd.machine.processes import launch

ALICE, BOB = Account(1500, 1600, "alice"), Account(1501, 1600, "bob")
RAW: dict[str, Any] = {"name": "j", "script": "/data/t.py", "workdir": "/data"}

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it makes files of other users")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INSTALLED", ("/opt/elasticd/bin/python", "/opt/elasticd/lib/sandbox.py"))


def test_unit_of_a_job_runs_as_its_user_within_its_limits() -> None:
    spec = parse_job(RAW | {"limits": {"memory": "64G", "cpu": 7.5, "tasks": 500}})
    assert set(launch.of_agent(spec, ALICE)) == {
        "User=alice", "Group=1600", "UMask=0027", "NoNewPrivileges=yes", "PrivateTmp=yes", "MemoryMax=64G",
        "CPUQuota=750%", "TasksMax=500",
    }  # fmt: skip


def test_unit_of_elasticds_own_user_has_defaults_and_no_user() -> None:
    found = launch.of_agent(parse_job(RAW), None)
    assert set(found) == {"UMask=0027", "NoNewPrivileges=yes", "PrivateTmp=yes", "TasksMax=16384"}


@pytest.mark.parametrize(
    ("more", "uses"),
    [
        ({}, False),
        ({"script": "/tmp/t.py"}, True),
        ({"workdir": "/var/tmp"}, True),
        ({"checkpoint": {"dir": "/tmp/ck"}}, True),
        ({"args": ["--data=/tmp/x"]}, True),
        ({"env": {"PYTHONPATH": "/lib:/tmp/mine"}}, True),
        ({"args": ["/data/tmp/x", "/tmpfs/x"]}, False),
    ],
)
def test_job_that_names_files_in_tmp_sees_the_machines(more: dict[str, Any], uses: bool) -> None:
    spec = parse_job(RAW | more)
    assert launch.uses_tmp(spec) is uses
    assert (f"PrivateTmp={'no' if uses else 'yes'}") in launch.of_agent(spec, None)


def test_job_of_an_elasticd_that_is_installed_in_tmp_sees_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its unit could not start the interpreter otherwise."""
    monkeypatch.setattr(launch, "INSTALLED", ("/tmp/venv/bin/python", "/lib/sandbox.py"))
    assert "PrivateTmp=no" in launch.of_agent(parse_job(RAW), None)


@pytest.mark.parametrize("memory", ["64G", "1073741824", "80%", "100%", "512M"])
def test_memory_limit_is_a_size_or_a_share(memory: str) -> None:
    assert parse_job(RAW | {"limits": {"memory": memory}}).limits.memory == memory


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"memory": "64 GB"}, "limits.memory"),
        ({"memory": "0"}, "limits.memory"),
        ({"memory": "101%"}, "limits.memory"),
        ({"memory": "1G\nUser=root"}, "limits.memory"),
        ({"cpu": 0.001}, "limits.cpu"),
        ({"cpu": -1}, "limits.cpu"),
        ({"tasks": 3}, "limits.tasks"),
        ({"mem": "1G"}, "limits.mem"),
    ],
)
def test_invalid_limit_is_named(limits: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidSpec, match=field):
        parse_job(RAW | {"limits": limits})


def test_a_unit_gets_no_variable_that_may_be_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """`systemctl show` tells every user of the machine a unit's variables."""
    given = {
        "https_proxy": "http://me:hush@proxy", "HF_TOKEN": "hush", "MYSQL_PWD": "hush", "HOME": "/root", "PATH": "/bin",
        "LC_ALL": "C", "NCCL_DEBUG": "INFO", "ELASTIC_AGENT_DIR": "/jobs/j", "CUDA_HOME": "/cuda",
    }  # fmt: skip
    commands: list[tuple[list[str], Mapping[str, str]]] = []

    def ran(command: list[str], env: Mapping[str, str]) -> str:
        commands.append((command, env))
        return "7"

    monkeypatch.setattr(launch.TransientUnit, "_run", staticmethod(ran))
    launch.TransientUnit().start(launch.ServiceProcess("j", ["true"], given, tmp_path, tmp_path / "out"))
    command, env = commands[0]
    assert "hush" not in str((command, env))
    named = {part.removeprefix("--setenv=") for part in command if part.startswith("--setenv=")}
    assert named == env.keys() == {"PATH", "LC_ALL", "NCCL_DEBUG", "ELASTIC_AGENT_DIR", "CUDA_HOME"}


# ── folders of other users ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def state(tmp_path: pathlib.Path) -> pathlib.Path:
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
    return tmp_path


def owner_and_mode(path: pathlib.Path) -> tuple[int, str]:
    found = path.lstat()
    return found.st_uid, oct(found.st_mode & 0o777)


@as_root
def test_job_folder_is_the_users_below_a_folder_of_roots(state: pathlib.Path) -> None:
    job = state / "jobs" / "j"
    job_folders.prepare(job, (1500, 1600))
    assert owner_and_mode(job) == (0, "0o711")
    assert owner_and_mode(job / "agent") == owner_and_mode(job / "logs") == (1500, "0o700")
    (job / "logs" / "old").touch()
    job_folders.prepare(job, (1500, 1600))
    assert (job / "logs" / "old").exists(), "a restarted agent finds its files"


@as_root
@pytest.mark.parametrize("next_owner", [(1501, 1600), None])
def test_files_of_an_earlier_jobs_user_are_moved_aside(state: pathlib.Path, next_owner: tuple[int, int] | None) -> None:
    job = state / "jobs" / "j"
    job_folders.prepare(job, (1500, 1600))
    (job / "logs" / "hers").touch()
    job_folders.prepare(job, next_owner)
    assert not (job / "logs" / "hers").exists()
    (aside,) = (state / "jobs").glob("~j~1500~*")
    assert owner_and_mode(aside / "logs") == (1500, "0o700")


@as_root
def test_link_in_place_of_a_users_folder_is_refused(state: pathlib.Path) -> None:
    (state / "elsewhere").mkdir()
    (state / "link").symlink_to(state / "elsewhere")
    with pytest.raises(CannotStart, match="belongs to uid 0, not to uid 1500"):
        ownership.given(state / "link", 1500, 1600, 0o700)
    with pytest.raises(CannotStart, match="must be a folder"):
        ownership.searchable(state / "link")
    assert owner_and_mode(state / "elsewhere")[0] == 0


@as_root
def test_state_folder_that_users_cannot_enter_is_named(state: pathlib.Path) -> None:
    (state / "closed").mkdir(mode=0o700)
    with pytest.raises(CannotStart, match=r"closed: .*chmod o\+x"):
        job_folders.prepare(state / "closed" / "jobs" / "j", (1500, 1600))


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_file_that_a_user_has_replaced_is_not_read(tmp_path: pathlib.Path, kind: str) -> None:
    (tmp_path / "agent").mkdir()
    secret, log = tmp_path / "secret", tmp_path / "agent" / "agent.log"
    secret.write_text("root:x")
    if kind == "link":
        log.symlink_to(secret)
    else:
        os.mkfifo(log)
    with pytest.raises(OSError, match=r"agent\.log"):
        read_file(log)
    assert job_folders.last_line(tmp_path) == ""
    (tmp_path / job_folders.OUTPUT).write_text("one\ntwo\n")
    assert job_folders.last_line(tmp_path) == "two"


# ── access to etcd ──────────────────────────────────────────────────────────────────────────────────────────


def listen() -> None:
    """A socket in the current folder: its whole path may be too long."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("client:0")


@pytest.fixture
def access(state: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> EtcdAccess:
    (state / "etcd").mkdir(mode=0o700)
    monkeypatch.chdir(state / "etcd")
    listen()
    (state / "etcd" / "key").write_text("old")
    (state / "etcd" / "key").chmod(0o600)
    return EtcdAccess(endpoints=(f"unix:{state}/etcd/client:0", "10.0.0.1:2379"), key_file=f"{state}/etcd/key")


@as_root
def test_users_agent_gets_copies_of_its_own(state: pathlib.Path, access: EtcdAccess) -> None:
    grants = EtcdGrants(state, access, structlog.get_logger())
    hers = grants.of(ALICE)
    folder = state / "access" / "1500"
    assert hers == EtcdAccess(
        endpoints=(f"unix:{folder}/client-0", "10.0.0.1:2379"), key_file=f"{folder}/key.pem"
    )  # fmt: skip
    assert owner_and_mode(state / "access") == (0, "0o711")
    assert owner_and_mode(folder) == (1500, "0o700")
    assert owner_and_mode(folder / "key.pem") == (1500, "0o600")
    assert (folder / "client-0").samefile(state / "etcd" / "client:0")
    grants.renew({1500: 1600})
    assert (folder / "key.pem").read_text() == "old"


@as_root
def test_access_is_renewed_when_its_originals_change_and_ends_with_the_last_agent(
    state: pathlib.Path, access: EtcdAccess
) -> None:
    grants = EtcdGrants(state, access, structlog.get_logger())
    grants.of(ALICE)
    grants.of(BOB)
    replace_file(state / "etcd" / "key", b"new")
    (state / "etcd" / "client:0").unlink()
    grants.renew({1500: 1600})  # etcd has just ended: kept as it is
    listen()
    grants.renew({1500: 1600})
    folder = state / "access" / "1500"
    assert (folder / "key.pem").read_text() == "new"
    assert (folder / "client-0").samefile(state / "etcd" / "client:0")
    assert [path.name for path in (state / "access").iterdir()] == ["1500"]
    grants = EtcdGrants(state, access, structlog.get_logger())  # elasticd was restarted
    grants.renew({})
    assert list((state / "access").iterdir()) == []


@as_root
@pytest.mark.parametrize("linked", [True, False])
def test_what_is_in_the_place_of_etcds_socket_is_not_opened_to_all(
    state: pathlib.Path, access: EtcdAccess, linked: bool
) -> None:
    """The embedded etcd's user owns that socket, and may replace it."""
    (state / "etcd" / "client:0").unlink()
    secret = state / "cluster.key" if linked else state / "etcd" / "client:0"
    secret.write_text("secret")
    secret.chmod(0o600)
    if linked:
        (state / "etcd" / "client:0").symlink_to(secret)
    with pytest.raises(CannotStart, match="is no socket"):
        EtcdGrants(state, access, structlog.get_logger()).of(ALICE)
    assert owner_and_mode(secret) == (0, "0o600")


@as_root
def test_what_one_user_puts_in_the_way_keeps_no_other_from_renewed_access(
    state: pathlib.Path, access: EtcdAccess
) -> None:
    grants = EtcdGrants(state, access, structlog.get_logger())
    for user in (ALICE, BOB):
        grants.of(user)
    for user in (ALICE, BOB):
        other = BOB if user is ALICE else ALICE
        (state / "access" / str(user.uid) / ".key.pem.new").mkdir()
        replace_file(state / "etcd" / "key", user.user.encode())
        grants.renew({ALICE.uid: ALICE.gid, BOB.uid: BOB.gid})
        assert (state / "access" / str(other.uid) / "key.pem").read_text() == user.user
        (state / "access" / str(user.uid) / ".key.pem.new").rmdir()


@as_root
def test_folders_that_a_user_nests_do_not_end_the_loop_and_the_access_ends_all_the_same(
    state: pathlib.Path, access: EtcdAccess
) -> None:
    """The folder belongs to the user: elasticd removes its own files only, and leaves the nested folders there."""
    grants = EtcdGrants(state, access, structlog.get_logger())
    grants.of(ALICE)
    folder = state / "access" / "1500"
    deepest = os.open(folder, os.O_RDONLY)
    for _ in range(sys.getrecursionlimit() + 100):
        os.mkdir("d", dir_fd=deepest)
        below = os.open("d", os.O_RDONLY, dir_fd=deepest)
        os.close(deepest)
        deepest = below
    os.close(deepest)
    try:
        grants.renew({})
        grants.renew({})
        assert os.listdir(folder) == ["d"]
        assert grants.of(ALICE).key_file == f"{folder}/key.pem"
        assert (folder / "key.pem").exists()
    finally:
        subprocess.run(["rm", "-r", str(folder / "d")], check=True)
    grants.renew({})
    assert list((state / "access").iterdir()) == []


@as_root
def test_process_of_another_user_that_holds_a_users_lock_is_not_taken_for_the_agent(state: pathlib.Path) -> None:
    """A user can hand a descriptor of the own lock file to a service, which must not be signalled as an agent."""
    log = structlog.get_logger()
    agents = Agents(state, launch.Detached(), Threads(log), lambda gone: None, log)
    config = AgentConfig(
        cluster="main", node="n", job="j", address="127.0.0.1", slots=1, etcd=EtcdAccess(endpoints=("127.0.0.1:1",)),
        agent_dir=str(agents.dir("j")), logs_dir=str(agents.dir("j").with_name("logs")),
    )  # fmt: skip
    for owner, adopted in (((1500, 1600), False), (None, True)):
        job_folders.prepare(agents.dir("j").parent, owner)
        with open(agents.dir("j") / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write(str(os.getpid()))
            lock.flush()
            assert agents.adopt("j", config) is adopted
