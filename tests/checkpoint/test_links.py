"""Root writes checkpoints into a folder that another user owns: what that user plants there leads root nowhere."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from support.ckpt import filled, save, state_at

from elastic.checkpoint.format import manifest as m
from elastic.checkpoint.format.files import REAL
from elastic.checkpoint.format.names import tmp_name
from elastic.checkpoint.saving.write import write_shard
from elastic.checkpoint.stored.find import newest_good, verify
from elastic.checkpoint.stored.retention import prune

ANOTHER = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: another user owns the folder")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A folder of root's with a file."""
    folder = tmp_path / "root"
    folder.mkdir(mode=0o700)
    (folder / "shadow").write_text("secret")
    return folder


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, ANOTHER, ANOTHER)
    return folder


def plant(link: Path, target: Path) -> None:
    link.symlink_to(target)
    os.chown(link, ANOTHER, ANOTHER, follow_symlinks=False)


def untouched(secret: Path) -> bool:
    return os.listdir(secret) == ["shadow"] and (secret / "shadow").read_text() == "secret"


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(secret: Path, theirs: Path) -> None:
    folder = theirs / tmp_name(10, 1, "job")
    folder.mkdir()
    os.chown(folder, ANOTHER, ANOTHER)
    names = [m.shard_file(0, 1), m.shard_note(0, 1), m.shard_note(0, 1) + ".part", m.MANIFEST, m.MANIFEST + ".part"]
    for name in names[:1] + names[2:]:
        plant(folder / name, secret / "shadow")
    path = save(str(theirs), 10, shards=1)
    assert untouched(secret)
    verify(path, "job")
    assert not [name for name in os.listdir(path) if (Path(path) / name).is_symlink()]


def test_a_link_in_the_place_of_a_folder_is_refused(secret: Path, theirs: Path) -> None:
    plant(theirs / tmp_name(10, 1, "job"), secret)
    with filled(state_at(10), 10) as arena, pytest.raises(PermissionError, match=f"link of uid {ANOTHER}"):
        write_shard(arena, str(theirs), "job")
    assert untouched(secret)


def test_a_link_in_the_place_of_the_checkpoints_folder_is_refused(secret: Path, theirs: Path) -> None:
    plant(theirs / "runs", secret)
    with filled(state_at(10), 10) as arena, pytest.raises(PermissionError, match=f"link of uid {ANOTHER}"):
        write_shard(arena, str(theirs / "runs"), "job")
    with filled(state_at(10), 10) as arena, pytest.raises(PermissionError, match=f"link of uid {ANOTHER}"):
        write_shard(arena, str(theirs / "runs" / "new"), "job")
    assert untouched(secret)


def test_retention_deletes_nothing_through_a_link(secret: Path, theirs: Path) -> None:
    plant(theirs / "step-1.g1.gone", secret)
    path = save(str(theirs), 10, shards=1)
    removed, failed = prune(str(theirs), "job", 1, trusted=path)
    assert removed == []
    assert len(failed) == 1
    assert untouched(secret)


def test_a_checkpoint_that_is_a_link_or_holds_a_pipe_is_not_read(secret: Path, theirs: Path) -> None:
    good = Path(save(str(theirs), 10, shards=1))
    moved = secret / "step-20"
    good.rename(moved)
    plant(theirs / "step-20", moved)
    with pytest.raises(PermissionError):
        REAL.read(str(theirs / "step-20" / m.MANIFEST))
    os.mkdir(theirs / "step-30")
    os.mkfifo(theirs / "step-30" / m.MANIFEST)
    with pytest.raises(PermissionError, match="no regular file"):
        REAL.read(str(theirs / "step-30" / m.MANIFEST))  # and does not wait for a writer of the pipe


def test_links_of_roots_own_and_a_users_to_their_own_are_followed(tmp_path: Path, theirs: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "data").symlink_to("disk/../disk")
    (theirs / "real").mkdir()
    os.chown(theirs / "real", ANOTHER, ANOTHER)
    plant(theirs / "link", theirs / "real")
    for place in (tmp_path / "data", theirs / "link"):
        save(str(place), 10, shards=1)
        assert newest_good(str(place), "job") is not None
    assert os.listdir(disk)
    assert os.listdir(theirs / "real")


def test_other_users_cannot_read_a_checkpoint(tmp_path: Path) -> None:
    path = Path(save(str(tmp_path / "new"), 10, shards=1))
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in [path, *path.iterdir()]}
    assert not [name for name, mode in modes.items() if mode & stat.S_IRWXO], modes
