"""The lock of Lightning's `prepare_data`: exclusive, not to be taken by another user, and gone afterwards."""

from __future__ import annotations

import fcntl
import os
import pathlib
import tempfile
from typing import Any

import pytest

from elastic.integrations import _prepare_lock
from elastic.integrations._prepare_lock import one_at_a_time


@pytest.fixture
def shared(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return tmp_path


def is_locked(folder: pathlib.Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@pytest.mark.parametrize("job", ["mnist", "a/b \udcff", "x" * 300])
def test_the_lock_is_held_by_one_process_for_its_user_alone_and_removed(shared: pathlib.Path, job: str) -> None:
    for _ in range(2):
        with one_at_a_time(job):
            (lock,) = shared.iterdir()
            assert is_locked(lock)
            assert lock.stat().st_mode & 0o777 == 0o700
            with one_at_a_time("another"):
                assert len(list(shared.iterdir())) == 2
        assert not list(shared.iterdir())


def test_the_lock_is_removed_when_the_preparation_fails(shared: pathlib.Path) -> None:
    with pytest.raises(ZeroDivisionError), one_at_a_time("job"):
        raise ZeroDivisionError
    assert not list(shared.iterdir())


def test_what_a_killed_process_left_is_taken_over(shared: pathlib.Path) -> None:
    with one_at_a_time("job"):
        (lock,) = shared.iterdir()
    lock.mkdir(0o700)
    with one_at_a_time("job"):
        assert is_locked(lock)


def test_a_lock_that_was_removed_while_it_was_waited_for_is_not_held(
    shared: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process before removes the folder and ends; a third one has made a new folder by then, or not."""
    flock, turns = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        turns.append(descriptor)
        if len(turns) <= 2:
            (lock,) = shared.iterdir()
            lock.rmdir()
        if len(turns) == 2:
            lock.mkdir(0o700)
        flock(descriptor, operation)

    monkeypatch.setattr(_prepare_lock.fcntl, "flock", late)
    with one_at_a_time("job"):
        monkeypatch.undo()
        assert len(turns) == 3
        (lock,) = shared.iterdir()
        assert is_locked(lock)


def test_another_users_folder_of_that_name_is_refused_with_the_cure(
    shared: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)  # what is made from here on belongs to another
    fix = rf"not a folder of user {me + 1} alone: remove it, or set TMPDIR"
    with pytest.raises(PermissionError, match=fix), one_at_a_time("job"):
        raise AssertionError


@pytest.mark.parametrize("make", [
    lambda lock: (lock.mkdir(), lock.chmod(0o750)),
    lambda lock: lock.symlink_to(lock.parent),
    lambda lock: lock.touch(0o600),
], ids=["open to others", "link", "file"])  # fmt: skip
def test_what_is_no_folder_of_this_user_alone_is_refused(shared: pathlib.Path, make: Any) -> None:
    with one_at_a_time("job"):
        (lock,) = shared.iterdir()
    make(lock)
    with pytest.raises(PermissionError, match="not a folder of user"), one_at_a_time("job"):
        raise AssertionError


def test_a_sessions_own_folder_is_preferred_if_it_is_ones_own(
    shared: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = shared / "session"
    session.mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    with one_at_a_time("job"):
        assert len(list(session.iterdir())) == 1
    for unfit in (session, shared / "absent"):
        session.chmod(0o755)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(unfit))
        with one_at_a_time("job"):
            assert len(list(shared.glob("elastic-prepare-*"))) == 1
