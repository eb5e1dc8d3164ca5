"""What another user of the machine gets from the API: tried as uid 65534, over the real socket."""

from __future__ import annotations

import json
import os
import pathlib
import pwd
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from support import snapshots
from support.door import Door
from support.wait import eventually

from elastic.contract.job.spec import JobSpec
from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import (
    IncidentRecord,
    JobState,
    Phase,
    SpecRecord,
    WorkerError,
    decode,
    encode,
)
from elastic.contract.records.node_records import EventRecord
from elasticd.access.authority import UNKNOWN
from elasticd.api import actions
from elasticd.ctl import main as ctl
from elasticd.ctl.client import Client, Failed

KEYS = ClusterKeys("main")
OTHER = 65534

AS_OTHER = """
import json, os, socket, sys
uid, path, requests = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
for method, url, body in requests:
    line = socket.socket(socket.AF_UNIX); line.connect(path)
    raw = json.dumps(body).encode()
    line.sendall(f"{method} {url} HTTP/1.0\\r\\nHost: x\\r\\nContent-Length: {len(raw)}\\r\\n\\r\\n".encode() + raw)
    answer = b"".join(iter(lambda: line.recv(65536), b""))
    head, _, body = answer.partition(b"\\r\\n\\r\\n")
    print(json.dumps([int(head.split()[1]), body.decode()]))
"""


@pytest.fixture
def door(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    """With the job `train`, which belongs to this user, and its logs."""
    monkeypatch.setattr(actions, "SEEN_S", 0.0)
    made = Door(tmp_path)
    made.path.chmod(0o666)
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o001)
    keys, spec = KEYS.job("train"), JobSpec(name="train", script="/t.py")
    me = os.geteuid()
    record = SpecRecord(spec=spec, submitted_wall_s=0.0, submitted_by="me", uid=me, gid=me, user=str(me))
    made.client.put(keys.spec, encode(record))
    (tmp_path / "train" / "logs").mkdir(parents=True)
    (tmp_path / "train" / "logs" / "slot0.x.0001.log").write_text("a secret of the script\n")
    yield made
    made.close()


def ask_as_other(door: Door, *requests: tuple[str, str, dict[str, Any]]) -> list[tuple[int, str]]:
    """(status, body) of each request."""
    argv = [sys.executable, "-I", "-S", "-c", AS_OTHER, str(OTHER), str(door.path), json.dumps(requests)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def events(door: Door) -> list[EventRecord]:
    return [decode(EventRecord, kv.value) for key, kv in list(door.etcd.kvs.items()) if KEYS.events in key]


CHANGES = [
    ("POST", "/v1/jobs/train/stop", {}),
    ("POST", "/v1/jobs/train/scale", {"nodes": "1"}),
    ("POST", "/v1/jobs/train/checkpoint", {}),
    ("POST", "/v1/jobs/train/restart", {}),
    ("POST", "/v1/jobs/train/fault", {"do": "kill", "rank": 0}),
    ("DELETE", "/v1/jobs/train", {}),
    ("POST", "/v1/nodes/a/drain", {}),
    ("POST", "/v1/nodes/a/cordon", {}),
    ("POST", "/v1/nodes/a/uncordon", {}),
    ("POST", "/v1/jobs", {"spec": {"name": "x", "script": "/t.py"}, "as": "root"}),
]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it takes the rights of another user")
def test_another_user_sees_status_and_changes_and_reads_nothing(door: Door) -> None:
    before = {key for key in door.etcd.kvs if KEYS.events not in key}
    for request, (status, body) in zip(CHANGES, ask_as_other(door, *CHANGES), strict=True):
        assert (status, "may not" in body) == (403, True), (request, body)
    assert {key for key in door.etcd.kvs if KEYS.events not in key} == before
    assert [event.uid for event in events(door)] == [OTHER] * len(CHANGES)
    paths = ("/v1/status", "/v1/jobs/train", "/v1/jobs/train/logs", "/v1/jobs/train?secrets=1")
    answers = ask_as_other(door, *(("GET", path, {}) for path in paths))
    assert [status for status, _ in answers] == [200, 200, 403, 403]
    assert not any("a secret of the script" in body for _, body in answers)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it takes the rights of another user")
def test_another_user_sees_incidents_without_log_lines(door: Door) -> None:
    line = "Epoch 3: the customers' names"
    error = WorkerError(node="a", slot=1, rank=1, message="exit code 1", traceback=f"{line}\n", last_lines=(line,))
    record = IncidentRecord(
        generation=2, kind="exit", node="a", ranks=(1,), detail="d", wall_s=9.0, error=error, last_lines=(line,)
    )
    state = JobState(phase=Phase.FAILED, error=error)
    door.published.publish(snapshots.snapshot(snapshots.job(incidents=(record,), state=state)))
    paths = ("/v1/status", "/v1/jobs", "/v1/jobs/train", "/v1/incidents")
    for status, body in ask_as_other(door, *(("GET", path, {}) for path in paths)):
        assert status == 200
        assert line not in body
        assert "exit code 1" in body
    for path in paths:
        assert line in json.dumps(Client(str(door.path)).get(path)), path  # of its own job


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it takes the rights of another user")
def test_the_arguments_of_a_job_are_shown_to_its_owner_and_root_alone(door: Door, tmp_path: pathlib.Path) -> None:
    spec = JobSpec(name="train", script="/t.py", args=("--lr", "hush"), env={"KEY": "hush, too"})

    def by(uid: int, user: str) -> None:
        record = SpecRecord(spec=spec, submitted_wall_s=900.0, submitted_by=user, uid=uid, gid=uid, user=user)
        door.published.publish(snapshots.snapshot(snapshots.job(spec=record)))

    def args_for_another() -> list[str]:
        ((status, body),) = ask_as_other(door, ("GET", "/v1/jobs/train", {}))
        assert (status, "hush, too" in body) == (200, False)
        return json.loads(body)["spec"]["args"]

    by(0, "root")
    assert args_for_another() == ["********"]
    shown = CliRunner().invoke(ctl.main, ["--socket", str(door.path), "status", "train"])
    assert "/t.py --lr hush" in shown.stdout
    assert Client(str(door.path)).get("/v1/jobs/train")["spec"]["env"] == {"KEY": "********"}, "?secrets=1 shows it"
    for argv in (["report", "train", "-o", str(tmp_path / "r")], ["bundle", "train", "-o", str(tmp_path / "b")]):
        done = CliRunner().invoke(ctl.main, ["--socket", str(door.path), *argv])
        assert done.exit_code == 0, done.output
    assert "hush" not in (tmp_path / "r").read_text()
    with tarfile.open(tmp_path / "b") as archive:
        (job,) = [archive.extractfile(each) for each in archive.getnames() if each.endswith("train/job.json")]
        assert job is not None
        assert json.load(job)["spec"]["args"] == ["********"], "what is passed on has them for nobody"
    by(OTHER, pwd.getpwuid(OTHER).pw_name)
    assert args_for_another() == ["--lr", "hush"], "of its own job"


def test_owner_of_the_daemon_may_do_all_of_it(door: Door) -> None:
    client = Client(str(door.path))
    assert "a secret of the script" in json.dumps(list(client.lines("/v1/jobs/train/logs", {})))
    assert client.get("/v1/jobs/train", {"secrets": 1})["job"] == "train"
    client.post("/v1/jobs/train/scale", {"nodes": "1:3"})
    client.post("/v1/jobs/train/stop")


def test_masked_secret_is_refused_where_its_value_is_needed(door: Door) -> None:
    with pytest.raises(Failed, match=r"env\.HF_TOKEN holds \*+") as refused:
        Client(str(door.path)).post("/v1/jobs", {"name": "x", "script": "/t.py", "env": {"HF_TOKEN": "********"}})
    assert refused.value.status == 400


def test_peer_is_the_process_that_the_kernel_names(door: Door) -> None:
    Client(str(door.path)).post("/v1/jobs/train/stop")
    event = eventually(lambda: next(iter(events(door)), None), 5.0, "written after the answer")
    assert (event.uid, event.pid, event.kind) == (os.geteuid(), os.getpid(), "job.stop_requested")
    assert UNKNOWN.uid not in (0, os.geteuid())


def test_elasticctl_ends_with_7_where_the_user_is_not_permitted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def post(self: Client, path: str, body: object = None) -> dict[str, Any]:
        raise Failed(403, "it belongs to alice")

    monkeypatch.setattr(Client, "post", post)
    job = {"job": "x", "phase": "running", "step": 3, "spec": {"checkpoint": {"dir": "/ckpt"}}}
    monkeypatch.setattr(Client, "get", lambda self, path: job)
    with pytest.raises(SystemExit) as ended:
        ctl.main(["stop", "x"])
    assert ended.value.code == 7
    told = capsys.readouterr().err
    assert "it belongs to alice" in told
    assert "saves its steps" not in told, "it does not"


def test_submit_passes_the_user_that_root_names(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(Client, "post", lambda self, path, body=None: sent.append(body) or {"job": "x"})
    monkeypatch.setattr(Client, "get", lambda self, path: {"python": sys.executable})
    (tmp_path / "t.py").touch()
    (tmp_path / "job.toml").write_text(f'script = "{tmp_path}/t.py"\n')
    with pytest.raises(SystemExit):
        ctl.main(["submit", "--as", "alice", str(tmp_path / "job.toml")])
    assert sent[0]["as"] == "alice"
