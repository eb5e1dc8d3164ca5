"""What elasticctl says of a node on which no elasticd runs, and while etcd cannot be reached."""

from __future__ import annotations

import inspect
import pathlib
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
from click.testing import CliRunner, Result
from support import plain_views
from support.door import Door
from support.snapshots import job, snapshot

from elasticd.api.actions import known_nodes
from elasticd.api.doctor import unanswered, without_daemon
from elasticd.cluster.cluster import Node
from elasticd.cluster.published_state import Contact
from elasticd.ctl import main as ctl
from elasticd.machine.doctor import ERROR, WARNING

AWAY = Contact(False, 40.0, "refused")
APART = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}
"""click before 8.2 takes stderr and stdout together unless told."""


@pytest.fixture
def door(tmp_path: pathlib.Path) -> Iterator[Door]:
    """Node b has an agent of the job and no elasticd."""
    there = Door(tmp_path)
    (tmp_path / "jobs").mkdir()
    yield there
    there.close()


def call(door: Door, *words: str) -> Result:
    return CliRunner(**APART).invoke(ctl.main, ["--socket", str(door.path), *words])


def test_a_node_without_a_daemon_is_not_said_to_take_work_or_to_be_drained(door: Door) -> None:
    done = call(door, "uncordon", "b")
    assert (done.exit_code, done.stdout) == (0, "b may take work again, once its elasticd runs: now none does\n")
    assert call(door, "uncordon", "a").stdout == "a takes work again\n"
    done = call(door, "drain", "b")
    later = "b takes no new work, and is drained when elasticd runs there again: now none does\n"
    assert (done.exit_code, done.stdout) == (0, later)
    assert call(door, "drain", "a").stdout == "a is being drained\n"
    done = call(door, "drain", "b", "--wait", "--timeout", "0.001s")
    assert done.exit_code == 1
    assert "b still has train after 0.001 s; it is drained when elasticd runs on b again" in done.stderr


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"healthy": False, "reason": "disk full"}, "neither cordoned nor drained any more, and takes no work still: "),
        ({"draining": "drained by ada"}, "takes work again"),  # its daemon has yet to see that the drain is over
    ],
)
def test_uncordon_says_why_a_node_takes_no_work_still(door: Door, facts: dict[str, object], said: str) -> None:
    seen = snapshot(job())
    record = msgspec.structs.replace(seen.cluster.nodes["a"].record, **facts)
    door.published.publish(replace(seen, cluster=replace(seen.cluster, nodes={"a": Node(record, 1)})))
    assert said in call(door, "uncordon", "a").stdout


@pytest.mark.parametrize("words", [["jobs"], ["nodes"], ["incidents"], ["incidents", "--full"], ["events"]])
def test_an_answer_from_before_the_contact_was_lost_says_so(door: Door, words: list[str]) -> None:
    assert call(door, *words).stderr == ""
    door.published.publish(snapshot(job(), contact=AWAY))
    done = call(door, *words)
    assert done.exit_code == 0
    assert done.stderr.startswith("etcd cannot be reached: this is as it was last seen, ")
    assert done.stderr.endswith(" s ago (refused)\n")


def test_gc_says_which_folders_stay_while_etcd_is_away(door: Door) -> None:
    assert call(door, "gc", "--dry-run").stderr == ""
    door.published.publish(snapshot(job(), contact=AWAY))
    done = call(door, "gc", "--dry-run")
    assert (done.exit_code, done.stdout) == (0, "a: nothing to remove\n")
    assert done.stderr == "etcd cannot be reached: the folders of forgotten jobs stay until it can\n"


def test_a_node_that_could_not_be_asked_for_want_of_etcd_is_not_to_be_looked_at() -> None:
    silent = unanswered("b", {"error": "b has not answered", "status": 504})
    assert (silent.level, silent.fix) == (ERROR, "on b: systemctl status elasticd")
    unasked = unanswered("b", {"error": "etcd cannot be reached now", "status": 503})
    assert (unasked.level, unasked.fix) == (ERROR, "first what is said of etcd; then ask again")


def test_members_that_a_jobs_user_invents_name_no_nodes() -> None:
    """The user has the job's key, and may sign members of any name."""
    invented = job()
    invented = replace(invented, members={**invented.members, "ghost": invented.members["b"]})
    seen = replace(snapshot(job()), cluster=replace(snapshot(job()).cluster, jobs={"train": invented}))
    assert [found.node for found in without_daemon(seen.cluster)] == ["b"]
    assert [row["node"] for row in plain_views.nodes(seen, "a", 0.0)] == ["a", "b"]
    assert known_nodes(seen.cluster) == {"a", "b"}


def test_doctor_names_nodes_that_have_agents_and_no_daemon() -> None:
    (found,) = without_daemon(snapshot(job()).cluster)
    assert (found.node, found.level, found.check) == ("b", WARNING, "node")
    assert found.text == "no elasticd runs there; its agents of train go on"
    assert found.fix.startswith("start it on b")


@pytest.mark.parametrize("words", [["list"], ["verify"]])
def test_checkpoints_of_a_job_need_a_daemon(tmp_path: pathlib.Path, words: list[str]) -> None:
    done = CliRunner(**APART).invoke(ctl.main, ["--socket", str(tmp_path / "s"), "checkpoint", *words, "train"])
    assert done.exit_code == 5
    assert "'train' is no folder here, and as a job: no elasticd on this machine" in done.stderr


def test_an_export_names_the_folder_that_it_wants() -> None:
    done = CliRunner(**APART).invoke(ctl.main, ["checkpoint", "export", "train", "out.pt"])
    assert done.exit_code == 1
    assert "give that of one checkpoint, CHECKPOINT_DIR/step-N" in done.stderr
