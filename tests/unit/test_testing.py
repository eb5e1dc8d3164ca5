"""The fault kit without processes: faults refuse what cannot be, a fault strikes once, and what followed it is told."""

from __future__ import annotations

import inspect
import json
import os
import pathlib
import time
import tomllib
from typing import Any

import msgspec
import pytest

from elastic import testing
from elastic.testing.cluster import check
from elastic.testing.faults import Fault
from elastic.testing.history import FILE, PLAN_ENV, Commit, claim, struck


def test_faults_refuse_wrong_fields_by_name_and_say_what_to_write() -> None:
    wrong = {
        "Kill.place = 'middle': one of data, forward": lambda: testing.Kill(rank=0, place="middle"),  # type: ignore[arg-type]
        "Kill.rank = -1: a whole number from 0 on": lambda: testing.Kill(rank=-1),
        "Kill.signal = 'SIGSTOP': the name of a signal that ends": lambda: testing.Kill(rank=0, signal="SIGSTOP"),
        "Stop.for_s = 0: a number of seconds above 0": lambda: testing.Stop(rank=0, for_s=0),
        "Hang.inside = 'rust': 'python'": lambda: testing.Hang(rank=0, inside="rust"),  # type: ignore[arg-type]
        "Fail.error = 'Nothing': the name of an exception": lambda: testing.Fail(rank=0, error="Nothing"),
        "Call.function = 'leak': 'module:function'": lambda: testing.Call(rank=0, function="leak"),
        "LoseNode.node = '': the name of a node": lambda: testing.LoseNode(node=""),
        "StopEtcd.step = -2: a whole number from 0 on": lambda: testing.StopEtcd(step=-2, for_s=1.0),
        "FillDisk.folder = 'disk': the path of a folder, from / on": lambda: testing.FillDisk(folder="disk"),
        "DropLink.other = -1: a whole number from 0 on": lambda: testing.DropLink(rank=0, other=-1),
    }
    for text, make in wrong.items():
        with pytest.raises(testing.BadFaultError) as refused:
            make()
        assert text in str(refused.value)


def test_plan_is_read_as_it_was_written_and_refused_with_its_path_and_the_field(tmp_path: pathlib.Path) -> None:
    faults = (
        testing.Kill(rank=1, step=13, place="backward"), testing.Hang(rank=0, inside="c", for_s=2.0),
        testing.Fail(rank=2), testing.Call(rank=0, function="__main__:leak"), testing.LoseNode(node="node1"),
        testing.StopEtcd(for_s=1.0), testing.WipeEtcd(step=4), testing.Stop(rank=1),
        testing.FillDisk(folder="/mnt/ckpt", for_s=3.0), testing.DropLink(rank=0, other=1, for_s=1.0),
    )  # fmt: skip
    file = tmp_path / "plan.json"
    testing.Plan(faults=faults).write(file)
    assert testing.Plan.read(file) == testing.Plan(faults=faults, record=str(tmp_path / "plan.record"))
    for text, names in (
        ('{"faults": [{"do": "kill", "rank": 1, "setp": 3}]}', "unknown field `setp`"),
        ('{"faults": [{"do": "kil", "rank": 1}]}', "Invalid value 'kil'"),
        ('{"faults": [{"do": "kill", "rank": 1, "place": "middle"}]}', "middle"),
    ):
        file.write_text(text)
        with pytest.raises(testing.BadFaultError, match=r"plan\.json") as refused:
            testing.Plan.read(file)
        assert names in str(refused.value)


def test_a_fault_strikes_once_over_all_processes_and_the_file_says_so_before(tmp_path: pathlib.Path) -> None:
    fault = testing.Kill(rank=1, step=13)
    before_s = time.time(), time.monotonic()
    assert claim(tmp_path, fault, pid=7, node="n1")
    assert not claim(tmp_path, fault, pid=8)
    assert claim(tmp_path, testing.Kill(rank=1, step=14))
    first, second = struck(tmp_path)
    assert (first.fault, first.pid, first.node, second.pid, second.node) == (fault, 7, "n1", 0, "")
    assert before_s < (first.wall_s, first.at_s) < (time.time(), time.monotonic())


def test_no_disk_is_filled_and_no_link_cut_that_is_not_the_tests(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # there is no nft
    (tmp_path / "sh").symlink_to("/bin/sh")
    for fault, why in (
        (testing.FillDisk(folder=str(tmp_path)), "it lies on the file system of "),
        (testing.FillDisk(folder="/"), "it lies on the file system of /"),
        (testing.FillDisk(folder=str(tmp_path / "none")), "it is no folder that you may write to; name a mount of"),
        (testing.DropLink(rank=0, other=1), "DropLink needs root, and nft (apt-get install nftables)"),
    ):
        with pytest.raises(testing.BadFaultError) as refused:
            check(fault)
        assert why in str(refused.value)
    assert os.statvfs(tmp_path).f_bavail


def record(folder: pathlib.Path, *commits: Commit) -> testing.Record:
    fault = testing.Kill(rank=1, step=3, place="backward")
    line = msgspec.json.encode(testing.Struck(fault=fault, wall_s=1003.5, at_s=3.5, pid=2, node="n"))
    (folder / FILE).write_bytes(line + b"\n")
    for commit in commits:
        step = {"step": commit.step, "generation": commit.generation, "rank": commit.rank, "world_size": 2,
                "at_s": commit.at_s}  # fmt: skip
        with (folder / f"commits.{commit.process}.jsonl").open("a") as file:
            file.write(json.dumps(step) + "\n")
    return testing.Record(folder, [fault])


def commits(generation: int, pids: tuple[int, int], steps: range, at_s: float) -> list[Commit]:
    return [Commit(s, generation, r, 2, at_s + s, f"n.{pid}") for s in steps for r, pid in enumerate(pids)]


def test_what_followed_a_fault_is_told_from_the_steps_of_all_processes(tmp_path: pathlib.Path) -> None:
    before = commits(1, (1, 2), range(3), 1.0)
    (tmp_path / "ended").mkdir()
    (tmp_path / "restarted").mkdir()
    (tmp_path / "replaced").mkdir()
    ended = record(tmp_path / "ended", *before)
    assert [str(each) for each in testing.recoveries(ended)] == [
        "rank 1 was killed in the backward of step 3: no step was made again"
    ]
    assert [str(each) for each in testing.judge(ended)] == [
        "no step was made again within 60 s: rank 1 was killed in the backward of step 3"
    ]
    restarted = record(tmp_path / "restarted", *before, *commits(2, (3, 4), range(5), 10.0))
    assert str(testing.recoveries(restarted)[0]).endswith("of step 3: restarted, 3 steps lost")
    assert not testing.judge(restarted)
    assert [str(each) for each in testing.judge(restarted, within_s=5.0)] == [
        "no step was made again within 5 s: rank 1 was killed in the backward of step 3"
    ]
    replaced = record(tmp_path / "replaced", *before, *commits(2, (1, 4), range(3, 5), 10.0))
    assert str(testing.recoveries(replaced)[0]).endswith("replaced, the others kept their processes, no steps lost")


class Told(testing.Record):
    """A run of which incidents are told."""

    told: list[dict[str, Any]]

    def incidents(self) -> list[Any]:
        return self.told


TRUE: dict[str, Any] = {
    "generation": 2, "kind": "exit", "node": "n", "ranks": [1], "detail": "killed by SIGKILL", "open": False,
    "wall_s": 1003.6, "ended_wall_s": 1013.5, "timeline_s": {"stepping": 9.9}, "step": 3, "steps_lost": 0,
    "steps_lost_at_most": 0, "world_size_before": 2, "world_size_after": 2, "restored_from": "live",
    "causes": [{"generation": 1, "node": "n", "kind": "exit", "ranks": [1]}],
}  # fmt: skip
WRONG: dict[str, tuple[list[dict[str, Any]], str]] = {
    "nothing is told": ([], "no incident tells of it: rank 1 was killed in the backward of step 3"),
    "twice": ([TRUE, {**TRUE, "wall_s": 1013.6, "ended_wall_s": 1014.0}], "no fault has caused it: incident 2 (exit"),
    "another kind": ([{**TRUE, "kind": "hang"}], "its kind is hang, not exit"),
    "another rank": ([{**TRUE, "ranks": [0]}], "ranks [0], not [1]"),
    "another step": ([{**TRUE, "step": 2}], "step 3 was the newest, not 2"),
    "steps lost": ([{**TRUE, "steps_lost": 2, "steps_lost_at_most": 2}], "2 steps lost it says, 0 were done again"),
}


def test_judge_compares_incidents_with_the_ground_truth_and_the_steps(tmp_path: pathlib.Path) -> None:
    record(tmp_path, *commits(1, (1, 2), range(3), 1.0), *commits(2, (1, 4), range(3, 5), 10.0))
    run = Told(tmp_path, [testing.Kill(rank=1, step=3, place="backward")])
    run.told = [TRUE, {**TRUE, "kind": "planned", "wall_s": 1020.0, "ranks": []}]
    assert not [str(each) for each in testing.judge(run)]
    for name, (told, said) in WRONG.items():
        run.told = told
        assert said in "; ".join(str(each) for each in testing.judge(run)), name


def test_the_page_names_what_a_job_under_elasticd_needs() -> None:
    page = (pathlib.Path(__file__).parents[2] / "docs" / "testing.md").read_text()
    job = tomllib.loads(page.partition("```toml")[2].partition("```")[0])
    assert job == {"preload": ["elastic.testing.preload"], "env": {PLAN_ENV: "/shared/plan.json"}}
    public = [getattr(testing, name) for name in testing.__all__]
    faults = [each.__name__ for each in public if inspect.isclass(each) and issubclass(each, Fault)]
    assert len(faults) >= 10
    assert all(f"`{name}(" in page for name in faults)
