"""Old folders and logs are removed from a node, and nothing else: whatever a job's user has put beside them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from click.testing import CliRunner
from support.door import Door, Heard
from support.procs import Procs
from support.snapshots import job, snapshot
from support.wait import eventually

from elastic.contract.agent_files import AgentStatus
from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import decode
from elastic.contract.records.node_records import EventRecord
from elasticd.access.authority import Authority, Peer
from elasticd.agents.agents import Agents, Running
from elasticd.agents.cleaner import Cleaner
from elasticd.api.routes import node_routes
from elasticd.base.command_answers import Cleanup
from elasticd.base.errors import Refused
from elasticd.base.settings import RetentionSettings, Settings
from elasticd.base.threads import Threads
from elasticd.cluster.published_state import Contact, LocalAgent, Snapshot
from elasticd.ctl import main as ctl
from elasticd.ctl.client import Client
from elasticd.machine.processes import launch

OLD_S = 40 * 86_400.0
HOLD = """
import fcntl, sys, time
lock = open(sys.argv[1], "r+")
fcntl.flock(lock, fcntl.LOCK_EX)
print(flush=True)
time.sleep(60)
"""
"""An agent, as far as the daemon sees it."""


class Place:
    """A state folder, and the cleaner of the daemon that it belongs to."""

    def __init__(self, folder: Path, **retention: Any) -> None:
        self.folder, self.jobs, self.log = folder, folder / "jobs", Heard()
        self.jobs.mkdir()
        self.state = snapshot(job())  # of a cluster whose one job is `train`
        log = cast(Any, self.log)
        self.agents = Agents(folder, launch.Detached(), Threads(log), lambda gone: None, log)
        settings = Settings(state_dir=str(folder), node="a", retention=RetentionSettings(**retention))
        self.cleaner = Cleaner(settings, ClusterKeys("main"), self.agents.retire, lambda: self.state, log)

    def file(self, name: str, size: int = 5_000, age_s: float = OLD_S) -> Path:
        path = self.jobs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
        return aged(path, age_s)

    def gone(self, name: str = "gone") -> Path:
        """The folder of a job that ended long ago."""
        for file in ("agent/config.json", "agent/lock", "agent/agent.log", "logs/slot0.0a1b2c3d.0001.log",
                     "logs/slot0.0a1b2c3d.0001.error.json", "logs/zygote.0a1b2c3d.log", "agent.out"):  # fmt: skip
            self.file(f"{name}/{file}")
        return self.jobs / name


def aged(path: Path, age_s: float = OLD_S) -> Path:
    at = path.stat().st_mtime - age_s
    os.utime(path, (at, at))
    return path


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_dry_run_names_what_goes_and_removes_nothing(place: Place) -> None:
    folder = place.gone()
    told = place.cleaner.clean(dry_run=True)
    assert [(row.folder, row.what, len(row.names)) for row in told.removed] == [("gone", "folder", 7)]
    assert told.dry_run
    assert len(list(folder.rglob("*"))) == 9
    done = place.cleaner.clean()
    assert [(row.folder, row.names, row.mb) for row in done.removed] == [
        (row.folder, row.names, row.mb) for row in told.removed
    ]
    assert (done.problems, done.dry_run) == ([], False)
    assert list(place.jobs.iterdir()) == []
    assert place.log.said == ["retention.removed"]


def test_nothing_goes_while_etcd_is_away_or_knows_the_job(place: Place) -> None:
    place.gone()
    place.gone("train")
    known = place.state
    place.state = replace(known, contact=Contact(False))
    assert place.cleaner.clean().removed == []
    place.state = Snapshot(contact=Contact(True))  # connected, and nothing was read yet
    assert place.cleaner.clean().removed == []
    unread = {"/elastic/main/jobs/gone/head/spec": "no signature"}
    for cluster in (replace(known.cluster, refused=unread), replace(known.cluster, foreign=unread)):
        place.state = replace(known, cluster=cluster)
        assert place.cleaner.clean().removed == []
    place.state = known
    assert [row.folder for row in place.cleaner.clean().removed] == ["gone"]
    assert len(list((place.jobs / "train").rglob("*"))) == 9


def test_the_folder_of_a_living_agent_stays_until_it_has_ended(place: Place) -> None:
    folder = place.gone()
    with Procs() as procs:
        agent = procs.popen([sys.executable, "-c", HOLD, folder / "agent" / "lock"], stdout=subprocess.PIPE)
        assert agent.stdout is not None
        agent.stdout.readline()
        assert place.cleaner.clean().removed == []
        assert place.agents.retire("gone") is None
        agent.kill()
        agent.wait()
    assert len(place.cleaner.clean().removed) == 1
    assert not folder.exists()


def test_a_job_that_is_started_after_the_listing_keeps_its_folder(place: Place) -> None:
    folder = place.gone()
    config = SimpleNamespace(slots=1)
    place.agents.running["gone"] = Running(cast(Any, config), 1, 0.0)
    done = place.cleaner.clean()
    assert (done.removed, done.problems) == ([], [])
    assert len(list(folder.rglob("*"))) == 9


def test_a_folder_is_not_retired_while_an_agent_is_being_started(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.gone()
    retired: list[Path | None] = []
    threads: list[threading.Thread] = []

    def start(*_: object) -> None:
        threads.append(threading.Thread(target=lambda: retired.append(place.agents.retire("gone"))))
        threads[0].start()
        threads[0].join(0.1)
        assert retired == []
        place.agents.running["gone"] = Running(cast(Any, None), 1, 0.0)

    monkeypatch.setattr(place.agents, "_start", start)
    place.agents.start(cast(Any, None), "")
    threads[0].join(60)
    assert retired == [None]


def _link(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def _fifo(path: Path, secret: Path) -> None:
    os.mkfifo(path)


def _checkpoint(path: Path, secret: Path) -> None:
    path.mkdir()
    (path / "manifest.json").write_text("{}")


@pytest.mark.parametrize("make", [_link, _fifo, _checkpoint])
@pytest.mark.parametrize("where", ["", "agent", "logs"])
@pytest.mark.parametrize("name", ["slot9.0a1b2c3d.0009.log", "history.json", "step-12", "a\nb\x1b[31m", "\udce9"])
def test_what_elasticd_did_not_create_stays_and_so_does_its_folder(
    place: Place, make: Callable[[Path, Path], None], where: str, name: str
) -> None:
    folder, secret = place.gone(), aged_secret(place)
    odd = folder / where / name
    make(odd, secret)
    (row,) = place.cleaner.clean().removed
    assert (row.what, len(row.names)) == ("logs", 3)
    assert os.path.lexists(odd)
    assert (folder / "agent" / "config.json").exists()
    assert secret.read_text() == "root:x\n"
    assert place.cleaner.clean().removed == []


def aged_secret(place: Place) -> Path:
    secret = place.folder / "secret" / "slot0.0a1b2c3d.0001.log"
    secret.parent.mkdir()
    secret.write_text("root:x\n")
    return aged(secret)


@pytest.mark.parametrize("part", ["", "agent", "logs"])
def test_a_link_in_place_of_a_folder_is_not_followed(place: Place, part: str) -> None:
    folder, secret = place.gone(), aged_secret(place)
    mine = folder / part
    mine.rename(place.folder / "aside")
    mine.symlink_to(secret.parent)
    place.cleaner.clean()
    assert secret.exists()
    assert mine.is_symlink()


def test_a_pipe_in_place_of_the_lock_holds_nothing_up(place: Place) -> None:
    folder = place.gone()
    (folder / "agent" / "lock").unlink()
    os.mkfifo(folder / "agent" / "lock")
    assert place.cleaner.clean().removed == []


def test_names_that_are_no_jobs_are_passed_over(place: Place) -> None:
    for name in ("UPPER", "a b", "~x", "\udce9", "..."):
        place.gone(name)
    place.file("file")
    assert place.cleaner.clean().removed == []
    assert len(list(place.jobs.iterdir())) == 6


def test_a_folder_that_was_moved_aside_goes(place: Place) -> None:
    folder = place.gone("~gone~1000~1700000000")
    assert place.cleaner.clean().removed[0].folder == folder.name
    assert not folder.exists()


def test_old_logs_of_a_running_job_go_and_those_of_its_workers_stay(tmp_path: Path) -> None:
    place = Place(tmp_path, log_files=1)
    status = AgentStatus(
        pid=1, incarnation="0a1b2c3d4e5f", job="train", node="a", phase="running", reason="", leader=True,
        generation=1, etcd_ok=True, written_wall_s=0.0,
    )  # fmt: skip
    place.state = replace(place.state, agents={"train": LocalAgent("train", 1, 1, status, None)})
    for number in (1, 2):
        place.file(f"train/logs/slot0.ffffffff.{number:04d}.log", age_s=OLD_S - number)
        place.file(f"train/logs/slot0.0a1b2c3d.{number + 6:04d}.log")
    (row,) = place.cleaner.clean().removed
    assert row.names == ["slot0.0a1b2c3d.0007.log", "slot0.ffffffff.0001.log"]
    left = sorted(path.name for path in (place.jobs / "train" / "logs").iterdir())
    assert left == ["slot0.0a1b2c3d.0008.log", "slot0.ffffffff.0002.log"]


def test_the_log_of_the_embedded_etcd_loses_its_middle(tmp_path: Path) -> None:
    place = Place(tmp_path, etcd_log_mb=1)
    logs = [tmp_path / "etcd" / "etcd.log", place.jobs / "train" / "agent.out"]
    for log in logs:
        log.parent.mkdir()
        log.write_bytes(b"".join(b"line %08d\n" % i for i in range(300_000)))
    told = place.cleaner.clean(dry_run=True).removed
    assert [row.folder for row in told] == ["etcd", "train"]
    assert logs[0].stat().st_blocks * 512 > 4_000_000
    assert [row.what for row in place.cleaner.clean().removed] == ["middle", "middle"]
    for log in logs:
        assert log.stat().st_blocks * 512 <= 1_000_000
        assert log.read_bytes().endswith(b"line 00299999\n")
    assert place.cleaner.clean().removed == []


def test_what_cannot_be_removed_is_said_and_the_rest_goes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        place.gone(name)
    retire = place.agents.retire

    def refused(job: str) -> Path | None:
        if job == "a":
            raise PermissionError(13, "Permission denied")
        return retire(job)

    monkeypatch.setattr(place.cleaner, "retire", refused)
    done = place.cleaner.clean()
    assert [row.folder for row in done.removed] == ["b"]
    assert done.problems == [f"{place.jobs / 'a'}: Permission denied"]
    assert place.log.said == ["retention.removed", "retention.not_removed"]


def test_without_a_jobs_folder_there_is_nothing_to_do(place: Place) -> None:
    place.jobs.rmdir()
    assert place.cleaner.clean() == Cleanup(node="a")


class Asked:
    """A request of a user who is no admin."""

    def __init__(self, place: Place) -> None:
        identity = SimpleNamespace(node="a")
        self.service = SimpleNamespace(authority=Authority(0), identity=identity, cleaner=place.cleaner)

    def peer(self) -> Peer:
        return Peer(1000, 1000, "eve")


@pytest.mark.parametrize("answer", [node_routes.get_gc, node_routes.post_gc])
def test_a_user_who_is_no_admin_may_neither_look_nor_remove(place: Place, answer: Callable[..., None]) -> None:
    folder = place.gone()
    with pytest.raises(Refused, match="may not clean up node 'a'"):
        answer(cast(Any, Asked(place)), {})
    assert folder.exists()


def test_the_socket_answers_and_what_was_removed_is_in_the_audit_trail(tmp_path: Path) -> None:
    door = Door(tmp_path)
    try:
        (tmp_path / "jobs").mkdir()
        client = Client(str(door.path))
        for answer in (client.get("/v1/gc"), client.post("/v1/gc", timeout_s=20.0)):
            assert (answer["node"], answer["removed"], answer["problems"]) == ("a", [], [])
        events = ClusterKeys("main").events  # written once the answer is on its way
        (kv,) = eventually(lambda: door.etcd.contents(events), 5.0).values()
        event = decode(EventRecord, kv.value)
        assert (event.kind, event.node) == ("node.cleaned", "a")
    finally:
        door.close()


def gc(place: Place, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    monkeypatch.setattr(Client, "get", lambda *_, **__: msgspec.to_builtins(place.cleaner.clean(dry_run=True)))
    monkeypatch.setattr(Client, "post", lambda *_, **__: msgspec.to_builtins(place.cleaner.clean()))
    done = CliRunner().invoke(ctl.main, ["gc", *words])
    return done.exit_code, done.output


def test_the_command_prints_each_removal_and_the_sum(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.gone()
    code, said = gc(place, monkeypatch, "--dry-run")
    first, last = said.splitlines()
    assert first.startswith("gone: folder with 7 files, ")
    assert first.endswith(" MB: etcd has no such job, and nothing was written here for 30 days")
    assert (code, last.endswith("MB would be freed")) == (0, True)
    assert last.split()[1] == first.split(", ")[1].split()[0] != "0"
    code, said = gc(place, monkeypatch)
    assert (code, said.splitlines()[-1].endswith("MB freed")) == (0, True)
    assert gc(place, monkeypatch) == (0, "a: nothing to remove\n")


def test_the_command_fails_if_something_could_not_be_removed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    place.gone()
    monkeypatch.setattr(os, "rename", refused)
    code, said = gc(place, monkeypatch)
    assert code == 1
    assert "not removed: " in said
    assert "Operation not permitted" in said
