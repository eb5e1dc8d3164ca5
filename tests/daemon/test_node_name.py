"""A node keeps its name while agents have it."""

from __future__ import annotations

import errno
import fcntl
import pathlib
import signal

import pytest
from support import procs
from support.daemons import Nodes
from support.wait import eventually

from elasticd.agents import job_folders
from elasticd.agents.job_folders import kept_name as kept


def test_the_name_is_kept_while_agents_of_it_run(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "jobs" / "train" / "agent"
    folder.mkdir(parents=True)
    assert kept(tmp_path, "old") == "old"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert kept(tmp_path, "new") == "old"
        assert kept(tmp_path, "newer") == "old", "at each start"
    assert kept(tmp_path, "new") == "new", "they have left"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert kept(tmp_path, "old") == "new"


def test_a_full_disk_does_not_keep_elasticd_from_its_start(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(job_folders, "replace_file", no_space)
    assert kept(tmp_path, "new") == "new"


def test_a_damaged_file_gives_no_name(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "jobs" / "train" / "agent"
    folder.mkdir(parents=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for content in (b"", b"../x", b"\xff\xfe"):
            (tmp_path / "node").write_bytes(content)
            assert kept(tmp_path, "new") == "new"


@pytest.mark.etcd
@pytest.mark.long
def test_a_node_that_was_renamed_goes_on_under_its_name_with_its_agents() -> None:
    with Nodes() as nodes:
        node = nodes.add("old")
        node.submit("train", fake={})
        agent = eventually(lambda: node.agent_pid("train"), 10)
        node.kill(signal.SIGTERM)
        node._settings["node"] = "new"
        node.start()
        assert node.get("/v1/status")["node"] == "old"
        assert [row["node"] for row in node.get("/v1/nodes")["nodes"]] == ["old"]
        assert (node.agent_pid("train"), procs.alive(agent)) == (agent, True)
        assert "agent.ordered" not in node.log.read_text()
        assert "node.name_kept" in node.log.read_text()
