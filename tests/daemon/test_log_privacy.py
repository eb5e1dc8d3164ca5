"""Log lines in incidents are for those who may read the job's logs; what failed, and why, is for all."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.snapshots import job, snapshot

from elastic.agent.workers import worker_env
from elastic.contract.agent_files import AgentConfig, EtcdAccess
from elastic.contract.records.job_records import IncidentRecord, JobState, Phase, WorkerError
from elasticd.access.authority import Authority, Peer
from elasticd.agents.logs import Tail
from elasticd.agents.retention import LOG
from elasticd.api.request import Captured
from elasticd.api.routes import log_routes
from elasticd.api.views import views
from elasticd.api.views.instant import Now
from elasticd.base import masking as log_privacy
from elasticd.base.answers import JobDetail, Json
from elasticd.base.folders import Folder
from elasticd.base.masking import MASK
from elasticd.cluster.published_state import PublishedState, Snapshot
from elasticd.node.asks import User

LINE = "Epoch 3: the customers' names are Ada and Grace"
NOW = Now(100.0, 1000.0)


def failed(error: WorkerError) -> JobDetail:
    record = IncidentRecord(
        generation=2, kind="exit", node="a", ranks=(1,), detail="ValueError: boom", wall_s=990.0, error=error,
        last_lines=(LINE,),
    )  # fmt: skip
    one = job(state=JobState(phase=Phase.FAILED, error=error), incidents=(record,))
    return views.job_detail(snapshot(one), one, NOW)


def an_error(traceback: str, message: str = "ValueError: boom") -> WorkerError:
    return WorkerError(node="a", slot=1, rank=1, message=message, traceback=traceback, last_lines=(LINE,), exit_code=1)


@pytest.mark.parametrize("traceback", [f"{LINE}\nTraceback (most recent call last):\n  boom", f"{LINE}\n{LINE}", ""])
def test_log_lines_are_hidden_and_what_failed_stays(traceback: str) -> None:
    whole = failed(an_error(traceback))
    assert LINE.encode() in msgspec.json.encode(whole)
    shown = log_privacy.job(whole)
    assert LINE.encode() not in msgspec.json.encode(shown)
    assert MASK.encode() in msgspec.json.encode(shown)
    assert shown.error is not None
    assert shown.error.message == "ValueError: boom"
    assert ("  boom" in shown.error.traceback) is ("boom" in traceback)
    assert shown.last_incident is not None
    assert whole.last_incident is not None
    assert shown.last_incident.verdict.cause == whole.last_incident.verdict.cause


def test_a_job_without_incidents_is_shown_as_it_is() -> None:
    one = job(incidents=())
    whole = views.job_detail(snapshot(one), one, NOW)
    assert log_privacy.job(whole) == whole


# ── followed logs ───────────────────────────────────────────────────────────────────────────────────────────

ADA = Peer(os.getuid(), os.getgid(), "ada")


def submitted(number: str, **facts: Any) -> Snapshot:
    one = job(members={}, generation=None, incidents=(), progress=None)
    assert one.spec
    spec = msgspec.structs.replace(one.spec, submission=number, uid=ADA.uid, user="ada")
    return snapshot(replace(one, spec=spec, **facts))


class Slow(Captured):
    """A reader of a followed log; the first line is `taken` late."""

    def __init__(self, published: PublishedState, folder: Path, taken: Any, authority: Authority) -> None:
        service = SimpleNamespace(
            published=published, identity=SimpleNamespace(node="a"), asker=None, logs=lambda job: Folder(folder),
            authority=authority,
        )  # fmt: skip
        super().__init__(service, User(name=ADA.user, uid=ADA.uid, admin=False))  # type: ignore[arg-type]
        self._taken = taken
        self.rounds = 0

    def stream(self, content: Json) -> None:
        super().stream(content)
        if self._taken and "line" in content:
            self._taken, taken = None, self._taken
            taken()

    def still_there(self) -> bool:
        self.rounds += 1
        return self.rounds < 4


def lines_of(h: Captured, **query: str) -> list[str]:
    log_routes.get_logs(h, query, "train")  # type: ignore[arg-type]
    return [m["line"] for m in h.content["lines"] if "line" in m]


def test_lines_of_an_earlier_job_of_the_name_are_shown_on_request_only(tmp_path: Path) -> None:
    """Also where this node's clock is behind that of the node at which the job was submitted."""
    published, numbers = PublishedState(), ("5be1c0de" * 4, "0123abcd" * 4)
    published.publish(submitted(numbers[1]))
    for number, said in zip(numbers, ("earlier", "present"), strict=True):
        config = AgentConfig(cluster="c", node="a", job="train", address="", slots=1, etcd=EtcdAccess(endpoints=()),
                             agent_dir="", logs_dir=str(tmp_path), submission=number)  # fmt: skip
        written = Path(worker_env.files(config, 0, 1, f"{said:x<32}").log_file)
        written.write_text(f"{said}\n")
        assert LOG.fullmatch(written.name), "it can be removed"
    (tmp_path / "slot0.i.0001.log").write_text("of an agent of an earlier version\n")

    def asked(**query: str) -> list[str]:
        return sorted(lines_of(Slow(published, tmp_path, None, Authority(daemon_uid=ADA.uid + 1)), **query))

    assert asked() == ["of an agent of an earlier version", "present"]
    assert asked(earlier="1") == ["earlier", "of an agent of an earlier version", "present"]


def test_a_followed_log_does_not_go_on_into_a_later_job_of_the_name(tmp_path: Path) -> None:
    published = PublishedState()
    published.publish(submitted("one"))
    (tmp_path / "slot0.i.1.log").write_text("of ada\n")

    def another_job() -> None:
        published.publish(submitted("two"))
        (tmp_path / "slot0.j.1.log").write_text("of bob\n")

    h = Slow(published, tmp_path, another_job, Authority(daemon_uid=ADA.uid + 1))
    log_routes.get_logs(h, {"follow": "1"}, "train")
    *before, end = h.content["lines"]
    assert [m["line"] for m in before if "line" in m] == ["of ada"]
    assert [m["note"] for m in before if "note" in m] == [log_routes.NAME_REUSED]
    assert end["end"]
    assert end["phase"] is None


def test_a_folder_that_has_become_another_users_is_not_read(tmp_path: Path) -> None:
    log = tmp_path / "slot0.i.1.log"
    log.write_text("of bob\n")
    assert [line.text for line in Tail(Folder(tmp_path), owner=os.getuid()).last(9)] == ["of bob"]
    of_ada = Tail(Folder(tmp_path), owner=os.getuid() + 1)
    assert of_ada.last(9) == []
    assert list(of_ada.more()) == []
    assert of_ada.more_from({log.name: 0}) == []


def test_a_reader_gets_a_tail_of_the_own_folders_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slot0.i.1.log").write_text("of bob\n")
    published = PublishedState()
    published.publish(submitted("one"))
    monkeypatch.setattr(log_routes, "_folder_uid", lambda h, job: None)  # there was no folder yet at the check
    for peer_uid, lines in ((ADA.uid, ["of bob"]), (ADA.uid + 1, [])):
        h = Slow(published, tmp_path, None, Authority(daemon_uid=ADA.uid + 2))
        monkeypatch.setattr(h, "peer", lambda peer_uid=peer_uid: Peer(peer_uid, -1, "ada"))
        monkeypatch.setattr(Authority, "check_logs", lambda *_: None)
        monkeypatch.setattr(Authority, "is_admin", lambda *_: False)
        log_routes.get_logs(h, {}, "train")
        assert [m["line"] for m in h.content["lines"] if "line" in m] == lines
