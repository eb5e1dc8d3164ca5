"""How an agent finds the newest generation that its job has checkpoints of."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import wait
from pathlib import Path

import pytest

from elastic.agent import saved_generations
from elastic.checkpoint.format.errors import CheckpointError
from elastic.checkpoint.format.names import tmp_name
from elastic.checkpoint.stored.remote import RemoteError
from elastic.contract.job.spec import Checkpoint, JobSpec
from elastic.recovery.machine.events import Event, NewestSaved


def spec_of(folder: Path, remote: str = "") -> JobSpec:
    return JobSpec(name="job", script="x.py", checkpoint=Checkpoint(dir=str(folder), remote=remote))


def looked(spec: JobSpec, *, remote: bool = True) -> NewestSaved:
    posted: list[Event] = []
    finder = saved_generations.NewestSavedFinder(spec, posted.append)
    finder.look(remote=remote)
    finder.close()
    [event] = posted
    assert isinstance(event, NewestSaved)
    return event


def test_a_checkpoint_folder_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("")
    assert "Not a directory" in looked(spec_of(folder)).error


def test_unfinished_checkpoints_count_too(tmp_path: Path) -> None:
    """A new life of a job that ended within its first save would complete that one with its own shards."""
    (tmp_path / tmp_name(60, 7, "job")).mkdir()
    (tmp_path / tmp_name(60, 9, "another")).mkdir()
    assert looked(spec_of(tmp_path)) == NewestSaved(7, True)


@pytest.mark.parametrize(
    ("local", "remote", "newest"), [(3, 10, 10), (3, None, 3), (0, 10, 10), (0, None, None)], ids=str
)
def test_checkpoints_at_the_remote_end_count(
    local: int, remote: int | None, newest: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node without one of its own may load them, and a user may have moved local ones away to go back. A remote end
    that does not answer (None) is waited for only if there is no other checkpoint."""

    def listed(*_: object) -> list[tuple[int, int, str]]:
        if remote is None:
            raise RemoteError("listing memory://copies: no answer")
        return [(500, remote, "step-500")]

    monkeypatch.setattr(saved_generations, "peek", lambda *_: [(60, local, "step-60")] if local else [])
    monkeypatch.setattr(saved_generations, "newest_generation", lambda *_: local)
    monkeypatch.setattr(saved_generations, "list_remote", listed)
    spec = spec_of(tmp_path, "memory://copies")
    event = looked(spec)
    assert (None if event.error else event.generation) == newest
    assert ("no answer" in event.error) is (newest is None)
    assert looked(spec, remote=False) == NewestSaved(local, False), "it was not asked"


@pytest.mark.parametrize("local", [3, 0])
def test_a_remote_end_that_hangs_holds_up_no_publication(
    local: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a local checkpoint the job goes on without it; else each try says so, and begins no further listing. One
    that was late is used."""
    answers, listings = threading.Event(), []

    def listed(*_: object) -> list[tuple[int, int, str]]:
        listings.append(1)
        answers.wait(60.0)
        return [(500, 10, "step-500")]

    monkeypatch.setattr(saved_generations, "peek", lambda *_: [(60, local, "step-60")] if local else [])
    monkeypatch.setattr(saved_generations, "newest_generation", lambda *_: local)
    monkeypatch.setattr(saved_generations, "list_remote", listed)
    spec = spec_of(tmp_path, "memory://copies")
    remote = saved_generations.RemoteEnd(limit_s=0.05)
    for _ in range(2):
        with contextlib.nullcontext() if local else pytest.raises(CheckpointError, match="longer than"):
            assert saved_generations.newest_saved(spec, remote) == local
    assert listings == [1]
    answers.set()
    listing = remote._listing
    assert listing is not None
    assert listing.result(60.0) == 10
    assert saved_generations.newest_saved(spec, remote) == 10


@pytest.mark.parametrize("first", [5, None])
def test_a_listing_that_ended_long_ago_unread_is_made_again(
    first: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was late, and etcd loses its data again hours later: by then there are copies of newer generations, and an
    error is no longer true either."""
    answers, results = threading.Event(), [first, 20]

    def listed(*_: object) -> list[tuple[int, int, str]]:
        answers.wait(60.0)
        if (newest := results.pop(0)) is None:
            raise RemoteError("listing memory://copies: no answer")
        return [(500, newest, "step-500")]

    clock_s = [1000.0]
    monkeypatch.setattr(saved_generations, "list_remote", listed)
    remote = saved_generations.RemoteEnd(limit_s=0.0, clock=lambda: clock_s[0])
    with pytest.raises(CheckpointError, match="longer than"):
        remote.newest("memory://copies", "job")
    listing = remote._listing
    assert listing is not None
    answers.set()
    wait([listing], timeout=60.0)
    clock_s[0] += saved_generations.FRESH_S + 1.0
    remote._limit_s = 60.0
    assert remote.newest("memory://copies", "job") == 20
