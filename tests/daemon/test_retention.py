"""Which folders and logs of jobs may be removed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.contract import agent_files
from elastic.contract.job.spec import JobSpec
from elastic.contract.records.decoding import Member
from elastic.contract.records.job_records import JobState, MemberRecord, Phase, SpecRecord
from elasticd.agents.retention import (
    AGENT_FILES,
    DAY_S,
    YOUNG_S,
    JobFolder,
    RegularFile,
    Removed,
    forgettable,
    removals,
)
from elasticd.base.settings import RetentionSettings
from elasticd.cluster.cluster import Job

NOW_S = 1_000_000_000.0
OLD_S = NOW_S - 31 * DAY_S
KEEPS = RetentionSettings()
ALL = RetentionSettings(forgotten_days=0, log_files=0, logs_mb=0)


def log(place: str, worker: int, age_s: float = 2 * DAY_S, agent: str = "0a1b2c3d", mb: float = 1.0) -> RegularFile:
    return RegularFile(f"{place}.{agent}.{worker:04d}.log", int(mb * 1e6), NOW_S - age_s)


def gone(name: str = "train") -> JobFolder:
    """The folder of a job that ended 31 days ago."""
    return JobFolder(
        name, (RegularFile("slot0.0a1b2c3d.0001.log", 10, OLD_S),), (RegularFile("agent.log", 5, OLD_S),), 0, OLD_S
    )


def plan(
    *folders: JobFolder, known: frozenset[str] | None = frozenset(), settings: RetentionSettings = KEEPS
) -> list[Removed]:
    return removals(folders, known, settings, NOW_S)


def test_the_folder_of_a_job_that_etcd_no_longer_has_goes_after_its_days() -> None:
    (removal,) = plan(gone())
    assert (removal.folder, removal.what, removal.mb) == ("train", "folder", 0.0)
    assert removal.names == ["agent.log", "slot0.0a1b2c3d.0001.log"]


def test_each_file_in_an_agents_folder_is_known_also_while_it_is_replaced() -> None:
    """A folder that contains any other file is never removed."""
    documented = re.findall(r"/agent/([a-z.]+) ", agent_files.__doc__ or "")
    assert "gradients.json" in documented
    assert set(documented) == {name for name in AGENT_FILES if not name.startswith(".")}
    replaced = {name for name in documented if name.endswith(".json")}
    assert {f".{name}.new" for name in replaced} == {name for name in AGENT_FILES if name.startswith(".")}


KEPT: dict[str, tuple[JobFolder, frozenset[str] | None, RetentionSettings]] = {
    "a job in etcd": (gone(), frozenset({"train"}), KEEPS),
    "etcd is not known": (gone(), None, KEEPS),
    "a living agent": (replace(gone(), has_agent=True), frozenset(), KEEPS),
    "a living agent that has reported": (replace(gone(), has_agent=True, incarnation="0a1b2c3d"), frozenset(), KEEPS),
    "one file is newer": (replace(gone(), rest=(RegularFile("agent.log", 5, NOW_S - 29 * DAY_S),)), frozenset(), KEEPS),
    "no file, a new folder": (JobFolder("train", mtime_wall_s=NOW_S), frozenset(), KEEPS),
    "days = 0": (gone(), frozenset(), ALL),
    "a clock that was ahead": (replace(gone(), rest=(RegularFile("lock", 0, NOW_S + DAY_S),)), frozenset(), KEEPS),
    "written to just now": (JobFolder("train", mtime_wall_s=NOW_S - 60), frozenset(), RetentionSettings(
        forgotten_days=1e-6)),
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT)
def test_a_folder_stays(case: str) -> None:
    folder, known, settings = KEPT[case]
    assert plan(folder, known=known, settings=settings) == []


def test_a_folder_that_was_moved_aside_goes_whatever_etcd_says() -> None:
    (removal,) = plan(gone("~train~1000~1700000000"), known=None)
    assert removal.what == "folder"
    assert plan(gone("~train~1000~1700000000"), settings=ALL) == []


def test_a_folder_with_anything_else_in_it_loses_its_logs_only() -> None:
    (removal,) = plan(replace(gone(), strange=2))
    assert (removal.what, removal.names) == ("logs", ["slot0.0a1b2c3d.0001.log"])
    assert "2 entries that elasticd did not create" in removal.why
    assert "1 entry that" in plan(replace(gone(), strange=1))[0].why
    assert plan(replace(gone(), strange=2, logs=())) == []


def test_the_oldest_logs_beyond_the_number_go_each_with_its_error_file() -> None:
    logs = [log("slot0", n, age_s=(10 - n) * DAY_S) for n in range(5)]
    error = RegularFile("slot0.0a1b2c3d.0000.error.json", 100, NOW_S - 10 * DAY_S)
    (removal,) = plan(JobFolder("train", (*logs, error)), settings=RetentionSettings(log_files=4))
    assert removal.names == ["slot0.0a1b2c3d.0000.error.json", "slot0.0a1b2c3d.0000.log"]
    assert removal.what == "logs"


def test_the_oldest_logs_beyond_the_megabytes_go() -> None:
    logs = tuple(log("slot0", n, age_s=(10 - n) * DAY_S, mb=2.0) for n in range(5))
    (removal,) = plan(JobFolder("train", logs), settings=RetentionSettings(logs_mb=5))
    assert removal.names == [f"slot0.0a1b2c3d.{n:04d}.log" for n in range(3)]
    assert removal.mb == 6.0


def test_zero_is_no_limit() -> None:
    assert plan(JobFolder("train", tuple(log("slot0", n, mb=1e6) for n in range(50))), settings=ALL) == []


def test_logs_of_running_workers_stay_however_old() -> None:
    mine = [log("slot0", 7), log("slot0", 9), log("slot1", 3), log("standby", 4), log("standby", 5),
            RegularFile("zygote.0a1b2c3d.log", 10, OLD_S)]  # fmt: skip
    earlier = [log("slot0", 12, agent="ffffffff"), log("standby", 1, agent="ffffffff"), RegularFile(
        "zygote.ffffffff.log", 10, OLD_S)]  # fmt: skip
    folder = JobFolder("train", (*mine, *earlier), has_agent=True, incarnation="0a1b2c3d4e5f")
    (removal,) = plan(folder, settings=RetentionSettings(logs_mb=1e-9))
    assert set(removal.names) == {"slot0.0a1b2c3d.0007.log", *(found.name for found in earlier)}
    (removal,) = plan(replace(folder, has_agent=False, incarnation=""), settings=RetentionSettings(logs_mb=1e-9))
    assert len(removal.names) == len(mine) + len(earlier)


def test_no_log_goes_before_the_agent_has_reported_or_within_the_hour() -> None:
    old = JobFolder("train", tuple(log("slot0", n) for n in range(5)))
    least = RetentionSettings(log_files=1, logs_mb=1e-9)
    assert plan(old, settings=least)
    assert plan(replace(old, has_agent=True), settings=least) == []
    new = tuple(log("slot0", n, age_s=YOUNG_S - 1) for n in range(5))
    assert plan(replace(old, logs=new), settings=least) == []


places = st.sampled_from(["slot0", "slot1", "slot10", "standby"])
logs_of_a_job = st.lists(
    st.builds(
        log, places, st.integers(0, 30), st.floats(-DAY_S, 90 * DAY_S), st.sampled_from(["0a1b2c3d", "ffffffff"]),
        st.floats(0, 100),
    ),
    max_size=20, unique_by=lambda found: found.name,
)  # fmt: skip


@given(logs_of_a_job, st.integers(0, 8), st.floats(0, 300), st.booleans())
def test_what_is_kept_is_newer_than_what_goes_and_within_the_limits(
    logs: list[RegularFile], most: int, mb: float, lives: bool
) -> None:
    folder = JobFolder("train", tuple(logs), has_agent=lives, incarnation="0a1b2c3d" if lives else "")
    settings = RetentionSettings(log_files=most, logs_mb=mb)
    names = {name for removal in plan(folder, known=frozenset({"train"}), settings=settings) for name in removal.names}
    went = [found for found in logs if found.name in names]
    assert all(found.mtime_wall_s <= NOW_S - YOUNG_S for found in went)
    if lives:
        for place in ("slot0", "slot1", "slot10"):
            mine = [found.name for found in logs if found.name.startswith(f"{place}.0a1b2c3d.")]
            assert max(mine, default="") not in names
        assert not any(name.startswith("standby.0a1b2c3d.") for name in names)
    else:
        kept = [found for found in logs if found.name not in names]
        if went and kept:
            assert max(f.mtime_wall_s for f in went) <= min(f.mtime_wall_s for f in kept)
        settled = [found for found in kept if found.mtime_wall_s <= NOW_S - YOUNG_S]
        if settled and most:
            assert len(kept) <= most
        if settled and mb:
            assert sum(found.disk_bytes for found in kept) <= mb * 1e6


def over(name: str, days: float, phase: Phase = Phase.SUCCEEDED, agents: bool = False) -> Job:
    member = Member(MemberRecord(node="n", incarnation="i", host="h", port=1, slots=1), 1)
    state = JobState(phase=phase, since_wall_s=NOW_S - days * DAY_S)
    return Job(name, state=state, members={"n": member} if agents else {})


def test_jobs_that_are_over_are_forgotten_by_age_and_by_number() -> None:
    jobs = [over("new", 1), over("failed", 31, Phase.FAILED), over("older", 40), over("runs", 50, Phase.RUNNING),
            over("ending", 60, agents=True)]  # fmt: skip
    assert forgettable(jobs, RetentionSettings(), NOW_S) == ["older", "failed"]
    assert forgettable(jobs, RetentionSettings(over_days=0, over_jobs=2), NOW_S) == ["older"]
    assert forgettable(jobs, RetentionSettings(over_days=0.5, over_jobs=0), NOW_S) == ["older", "failed", "new"]
    assert forgettable(jobs, RetentionSettings(over_days=0, over_jobs=0), NOW_S) == []


def test_one_users_jobs_push_out_no_other_users() -> None:
    """Many of them, or with a time in their states that is still to come: the job's user signs those."""
    by = lambda name, days, uid: replace(  # noqa: E731
        over(name, days), spec=SpecRecord(spec=JobSpec(name=name, script="/t.py"), submitted_wall_s=1.0,
                                          submitted_by="x", uid=uid)
    )  # fmt: skip
    jobs = [by("theirs", 20, 1), *(by(f"his-{days}", -days, 2) for days in range(4))]
    assert forgettable(jobs, RetentionSettings(over_days=0, over_jobs=2), NOW_S) == ["his-0", "his-1"]
