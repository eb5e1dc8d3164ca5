"""What `elasticctl doctor` finds: each judgement at its limit, and the measurements on this machine."""

from __future__ import annotations

import os
import pathlib
import resource
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.etcd.client import MemberHealth
from elasticd.api.doctor import Doctor
from elasticd.base.answers import Diagnosis, read
from elasticd.base.settings import Settings
from elasticd.ctl.nodes.doctor import lines
from elasticd.machine import doctor
from elasticd.machine.doctor import ERROR, OK, WARNING, Finding
from elasticd.machine.health import Health


@pytest.mark.parametrize(
    ("resolved", "alone", "level"),
    [
        (["10.0.0.1"], False, OK),
        (["127.0.1.1"], False, WARNING),
        (["127.0.1.1"], True, OK),
        (["10.0.0.1", "::1"], False, WARNING),
        ([], False, WARNING),
    ],
)
def test_own_name(resolved: list[str], alone: bool, level: str) -> None:
    found = doctor.judge_name("n1", resolved, alone)
    assert found.level == level
    assert bool(found.fix) == (level != OK)


@pytest.mark.parametrize(
    ("mode", "uid", "level"),
    [(0o600, 0, OK), (0o400, 7, OK), (0o640, 0, ERROR), (0o604, 7, ERROR), (0o600, 1000, ERROR)],
)
def test_files_with_secrets(mode: int, uid: int, level: str) -> None:
    assert doctor.judge_mode("/k", mode, uid, 7).level == level


@pytest.mark.parametrize(("state", "level"), [(0, OK), (5, WARNING), (None, OK)])
def test_clock_of_this_machine(state: int | None, level: str) -> None:
    assert doctor.judge_clock(state).level == level


def test_clocks_of_others_count_beyond_what_the_answer_took() -> None:
    found = list(doctor.judge_clocks({"b": (3.0, 0.5), "c": (-3.0, 0.5), "d": (3.0, 2.5), "e": (0.9, 0.0)}))
    assert [(f.node, f.text) for f in found] == [
        ("b", "its clock is 3.0 s ahead of this node's"),
        ("c", "its clock is 3.0 s behind this node's"),
    ]


@pytest.mark.parametrize(("took_s", "level"), [(0.01, OK), (0.46, WARNING), (1.5, ERROR)])
def test_latency_of_etcd(took_s: float, level: str) -> None:
    assert doctor.judge_latency("a read", took_s, 1.5, "fix").level == level


def test_etcd_members() -> None:
    three = [("a", True, "3.5.9", ""), ("b", True, "3.5.9", ""), ("c", True, "3.5.9", "")]
    assert [f.level for f in doctor.judge_members(three)] == [OK]
    assert [f.level for f in doctor.judge_members([*three[:2], ("c", False, "", "refused")])] == [ERROR, OK]
    assert "2 etcd members" in next(doctor.judge_members(three[:2])).text
    assert "3.4.1, 3.5.9" in next(doctor.judge_members([*three[:2], ("c", True, "3.4.1", "")])).text


def test_versions_of_nodes() -> None:
    alike = {"a": {"torch": "2.13", "python": "3.11"}, "b": {"torch": "2.13", "python": "3.11"}}
    assert [f.level for f in doctor.compare(alike)] == [OK]
    assert list(doctor.compare({"a": alike["a"]})) == [], "there is nothing to compare"
    differs = {"a": {"torch": "2.13", "python": "3.11", "driver": "550"}, "b": {"torch": "2.12", "python": "3.11"}}
    found = list(doctor.compare(differs))
    assert [(f.level, f.text) for f in found[:2]] == [
        (WARNING, "driver differs: 550 on a; none on b"),
        (ERROR, "torch differs: 2.12 on b; 2.13 on a"),
    ]


def test_limits_and_space() -> None:
    assert doctor.judge_limit("files", resource.RLIM_INFINITY, 4096, "c").level == OK
    assert doctor.judge_limit("files", 1024, 4096, "c").level == WARNING
    assert doctor.judge_free("shm", "/dev/shm", 64, 512, "w", "c").level == WARNING
    assert doctor.judge_free("shm", "/dev/shm", 512, 512, "w", "c").level == OK


def here(tmp_path: pathlib.Path, **facts: object) -> dict[str, Finding]:
    given = {"address": "127.0.0.1", "interface": "lo", "state_dir": str(tmp_path), "secrets": (), "gpus": False}
    found = doctor.local(**(given | {"alone": True} | facts))  # type: ignore[arg-type]
    return {finding.check: finding for finding in sorted(found, key=lambda f: f.level == ERROR)}


def test_this_machine_is_measured(tmp_path: pathlib.Path) -> None:
    found = here(tmp_path)
    assert {"name", "address", "interface", "disk", "shm", "limits", "clock"} <= set(found)
    assert found["address"].level == OK
    assert here(tmp_path, address="192.0.2.1")["address"].level == ERROR
    assert "does not exist" in here(tmp_path, interface="nosuch0")["interface"].text
    key = tmp_path / "key"
    key.write_text("x")
    os.chmod(key, 0o644)
    assert "chmod 600" in here(tmp_path, secrets=(str(key),))["files"].fix
    assert here(tmp_path, secrets=(str(tmp_path / "none"),))["files"].level == ERROR


def test_every_warning_and_error_has_a_cure_on_the_screen() -> None:
    rows = [
        {"check": "disk", "level": "ok", "text": "fine", "fix": "", "node": "a"},
        {"check": "clock", "level": "warning", "text": "late", "fix": "chrony", "node": "b"},
        {"check": "etcd", "level": "error", "text": "down\x1b[2J", "fix": "start it", "node": ""},
    ]
    data = read({"findings": rows, "versions": {"a": {}, "b": {}}}, Diagnosis)
    said = [text for text, _ in lines(data, every=False)]
    assert said == [
        "error   etcd      down\\x1b[2J", "                  → start it",
        "warning clock     b: late", "                  → chrony",
        "1 error, 1 warning; 3 checks on 2 nodes",
    ]  # fmt: skip
    assert any("fine" in text for text, _ in lines(data, every=True))


def test_a_machine_on_which_no_job_can_run_takes_no_work_and_says_the_cure(tmp_path: pathlib.Path) -> None:
    assert doctor.blocking("lo", str(tmp_path)) is None
    assert doctor.blocking("", str(tmp_path)) is None
    why = str(doctor.blocking("nosuch0", str(tmp_path)))
    assert "health check interface: interface nosuch0 does not exist: set `interface` to one of" in why
    assert "then restart elasticd" in str(doctor.blocking("lo", str(tmp_path / "none")))


@pytest.mark.parametrize(("version", "named"), [("3.5.1", True), ("3.6.99", False)])
def test_a_version_of_etcd_with_known_faults_is_named(version: str, named: bool) -> None:
    etcd: Any = SimpleNamespace(members=lambda within_s: [MemberHealth("a:2379", version, True, "")])
    nobody: Any = None
    found = list(Doctor(Settings(), etcd, nobody, False, Health({}, nobody))._members())
    assert any(each.level == WARNING and version in each.text for each in found) is named
