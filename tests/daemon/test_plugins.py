"""What packages add by entry points: how it is found, what its faults do, and the two examples in a real daemon."""

from __future__ import annotations

import importlib.metadata
import math
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs
from support.daemons import Nodes
from support.source import ROOT
from support.wait import eventually

from elastic.contract.records.reasons import Code, Reason, Text, reason
from elasticd.base import entry_points
from elasticd.base.errors import PluginFailed
from elasticd.base.threads import Threads
from elasticd.machine import doctor
from elasticd.machine.gpus import GpuCheck
from elasticd.machine.health import LATE_S, Health
from elasticd.machine.preemption import RELUCTANT, PreemptionWatch
from elasticd.plugins import HealthCheck, Notice, NoticeUnknown

OURS = ["aws", "azure", "gcp"]


# ── finding ─────────────────────────────────────────────────────────────────────────────────────────────────


def point(name: str, value: str, setting: str = "preemption") -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint(name, value, entry_points.GROUPS[setting])


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[importlib.metadata.EntryPoint]:
    """What is installed, in place of what is."""
    there: list[importlib.metadata.EntryPoint] = []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [p for p in there if p.group == group])
    return there


def test_a_name_that_nobody_provides_is_refused_with_those_that_are_there() -> None:
    names = sorted({*OURS, *(p.name for p in importlib.metadata.entry_points(group="elasticd.notices"))})
    with pytest.raises(ValueError) as refused:
        entry_points.find("preemption", "x")
    assert str(refused.value) == f"preemption = 'x': no package provides it; there are: {', '.join(names)}"


def test_our_own_are_found_where_an_earlier_elasticd_is_installed(
    installed: list[importlib.metadata.EntryPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert entry_points.find("preemption", "aws").value == "elasticd.machine.preemption:aws"
    installed.append(point("aws", "elasticd.machine.preemption:aws"))
    assert entry_points.find("preemption", "aws") == installed[0]
    installed.clear()
    monkeypatch.setattr(entry_points, "SOURCE", pathlib.Path("/nowhere"))
    with pytest.raises(ValueError, match=r"there is none; .* install it anew \(pip install \.\)"):
        entry_points.find("preemption", "aws")
    with pytest.raises(ValueError, match=r"no package provides it; there is none$"):
        entry_points.find("health_checks", "x")


def test_a_name_that_two_packages_provide_is_refused(installed: list[importlib.metadata.EntryPoint]) -> None:
    installed.append(point("aws", "other:aws"))
    with pytest.raises(ValueError, match=r"more than one .*: elasticd\.machine\.preemption:aws, other:aws"):
        entry_points.find("preemption", "aws")


@pytest.mark.parametrize("value", ["no_such_module:f", "os:no_such_name", "math:sqrt", "sys:exit"])
def test_a_factory_that_fails_is_named(installed: list[importlib.metadata.EntryPoint], value: str) -> None:
    installed.append(point("x", value, "health_checks"))
    with capture_logs() as logs, pytest.raises(PluginFailed, match=r"^health_checks = 'x': "):
        entry_points.made("health_checks", "x", structlog.get_logger(), "no number")
    assert [(entry["event"], entry["exc_info"]) for entry in logs] == [("plugin.failed", True)]


# ── health checks ───────────────────────────────────────────────────────────────────────────────────────────


class Check(HealthCheck):
    """Says, or raises, what stands in `says`."""

    every_s = 0.1

    def __init__(self, says: Any = "") -> None:
        self.says = says

    def look(self) -> Text:
        if isinstance(self.says, BaseException):
            raise self.says
        return self.says() if callable(self.says) else self.says


def health_of(*checks: HealthCheck) -> Health:
    made = Health({}, structlog.get_logger())
    for number, check in enumerate(checks):
        made.add(f"c{number}", check)
    return made


def said(what: str, check: str = "c0") -> Reason:
    return reason(Code.HEALTH_CHECK, what, check=check)


def test_the_node_takes_no_work_while_a_check_has_something_to_say_or_has_not_looked() -> None:
    check = Check()
    health = health_of(check)
    assert health.reason == said("has not answered yet")
    assert health.leaves(gpus=True) is None
    health.watches[0].turn()
    assert health.reason == ""
    check.says = "  no\n  mount\udc80 "
    health.watches[0].turn()
    assert health.reason == said("no\\n  mount\\udc80")
    assert health.leaves(gpus=True) is None
    check.leave = True
    health.watches[0].turn()
    assert health.leaves(gpus=False) == said("no\\n  mount\\udc80")


def test_the_words_of_a_check_have_a_length() -> None:
    health = health_of(Check("x" * 1_000_000))
    health.watches[0].turn()
    assert len(str(health.reason)) < 500


def test_a_machine_on_which_no_job_can_run_has_no_faulty_gpu() -> None:
    why = doctor.blocking("nosuch0", "/")
    check = GpuCheck([], structlog.get_logger(), self_test=True, problem=why or "")
    health = Health({"gpus": check}, structlog.get_logger())
    assert why is not None
    assert (why.code, health.reason, health.leaves(gpus=True)) == (Code.HEALTH_CHECK, why, why)


def test_only_jobs_with_gpus_leave_for_a_gpu() -> None:
    check = Check("GPU 0: off")
    check.leave, check.of_gpus = True, True  # type: ignore[attr-defined]
    health = Health({"gpus": check}, structlog.get_logger())
    assert health.reason == "GPU 0: off"
    assert health.leaves(gpus=True) == reason(Code.GPU_FAULTY, "GPU 0: off")
    assert health.leaves(gpus=False) is None


@pytest.mark.parametrize("wrong", [ValueError("x"), SystemExit(1), None, 3, b"no mount", Reason(Code.DRAINED)])
def test_the_last_answer_of_a_check_that_fails_counts(wrong: object) -> None:
    check = Check(wrong)
    health = health_of(check)
    with capture_logs() as logs:
        for _ in range(3):
            health.watches[0].turn()
        assert health.reason == ""
        check.says = "no mount"
        health.watches[0].turn()
        check.says = wrong
        for _ in range(3):
            health.watches[0].turn()
    assert health.reason == said("no mount")
    assert [entry["event"] for entry in logs] == ["plugin.failed", "node.health"]
    assert [(f.level, "last answer counts" in f.text) for f in health.findings()] == [
        ("error", False), ("warning", True)
    ]  # fmt: skip


@pytest.mark.parametrize("every_s", [math.nan, math.inf, "soon", None])
def test_a_check_without_a_sound_interval_is_looked_at_again(every_s: Any) -> None:
    check = Check("no mount")
    check.every_s = every_s
    health = health_of(check)
    assert health.watches[0].turn() == 5.0
    assert health.watches[0].failed
    check.every_s = -1.0
    assert health.watches[0].turn() == 0.1


def test_a_check_that_hangs_holds_up_no_other() -> None:
    hangs, log = threading.Event(), structlog.get_logger()
    health = health_of(Check(lambda: hangs.wait(60.0) and ""), Check("no mount"))
    threads = Threads(log)
    health.start(threads)
    try:
        eventually(lambda: health.watches[1].answer == said("no mount", "c1"), 10.0)
        assert health.reason == said("has not answered yet")
    finally:
        threads.closed.set()
        hangs.set()


def test_a_check_that_hangs_at_its_first_look_keeps_the_node_out_of_work_by_name() -> None:
    health = health_of(Check())
    watch = health.watches[0]
    with capture_logs() as logs:
        health.tell_late()
        seen = []
        for _ in range(3):
            watch.due_s -= LATE_S
            health.tell_late()
            seen.append(str(health.reason))
        assert [text.partition(": see")[0] for text in seen] == [
            f"health check c0: has not answered for over {over_s} s" for over_s in (60, 120, 120)
        ]  # fmt: skip
        assert "take it out of health_checks and restart elasticd" in seen[0]
        assert [(f.level, f.text) for f in health.findings()] == [("error", seen[-1])]
        watch.turn()
        assert health.reason == ""
        health.tell_late()
        watch.due_s = time.monotonic() - LATE_S
        health.tell_late()
    assert [(entry["event"], entry["why"].partition("; ")[2]) for entry in logs] == [
        ("node.health_late", "the node takes no work until it has answered"),
        ("node.health_late", "its last answer counts"),
    ]
    assert health.reason == ""
    assert [(f.level, "health check c0: no answer for 60 s " in f.text) for f in health.findings()] == [
        ("warning", True)
    ]  # fmt: skip


# ── notices ─────────────────────────────────────────────────────────────────────────────────────────────────


class Source:
    def __init__(self, look: Callable[[], Any]) -> None:
        self._look = look

    def look(self, now_wall_s: float) -> Notice | None:
        notice: Notice | None = self._look()
        return notice


def raises(error: BaseException) -> Callable[[], Any]:
    def look() -> Any:
        raise error

    return look


@pytest.mark.parametrize(
    ("look", "events"),
    [
        (raises(NoticeUnknown("x")), ["preemption.unknown"]),
        (raises(KeyError("x")), ["plugin.failed", "preemption.unknown"]),
        (raises(SystemExit(1)), ["plugin.failed", "preemption.unknown"]),
        (lambda: "soon", ["plugin.failed", "preemption.unknown"]),
        (lambda: Notice("x", math.nan), ["plugin.failed", "preemption.unknown"]),
    ],
)
def test_a_source_that_fails_drains_nothing_and_is_told_once(look: Callable[[], Any], events: list[str]) -> None:
    drained: list[Notice] = []
    with capture_logs() as logs:
        watch = PreemptionWatch(Source(look), lambda notice: not drained.append(notice), structlog.get_logger())
        for _ in range(RELUCTANT + 3):
            watch.look()
    assert not drained
    assert [entry["event"] for entry in logs] == events
    watch.source = Source(lambda: Notice("a\nb", -7.0))
    watch.look()
    assert drained == [Notice("a\\nb", 1.0)]


# ── the examples ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder in which both are installed."""
    folder = tmp_path_factory.mktemp("plugins")
    sources = shutil.copytree(ROOT / "examples" / "plugins", folder / "source")
    argv = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps"]
    argv += ["--no-build-isolation", "--target", str(folder / "target"), *map(str, sorted(sources.iterdir()))]
    subprocess.run(argv, check=True, timeout=100)
    return folder / "target"


@pytest.mark.etcd
@pytest.mark.slow
def test_the_examples_keep_a_node_out_of_work_and_drain_it(target: pathlib.Path, tmp_path: pathlib.Path) -> None:
    mark, ends = tmp_path / "mounted", tmp_path / "ends"
    mark.touch()
    env = {"PYTHONPATH": os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])}
    with Nodes() as nodes:
        node = nodes.add(
            "a", start=False, health_checks="data-mount", preemption="batch", preemption_url=ends.as_uri()
        )  # fmt: skip
        node.start(env=env | {"DATA_MARK": str(mark)})

        def row() -> dict[str, Any]:
            (found,) = node.get("/v1/nodes")["nodes"]
            return dict(found)

        eventually(lambda: row()["state"] == "ready", 20.0)
        mark.unlink()
        why = f"health check data-mount: {mark} is not there: mount the file system of data"
        eventually(lambda: row()["state"] == "draining", 20.0)
        assert why in row()["reason"]
        assert why in " ".join(node.ctl("nodes", "--json").stdout.split())
        findings = [f for f in node.get("/v1/doctor")["findings"] if f["check"] == "health" and f["level"] == "error"]
        assert [(f["node"], f["text"]) for f in findings] == [("a", why)]
        eventually(lambda: why in node.ctl("events").stdout, 20.0)

        mark.touch()
        eventually(lambda: row()["state"] == "ready", 20.0)
        ends.write_text(str(time.time() + 3600.0))
        eventually(lambda: row()["state"] == "draining", 20.0)
        assert "its allocation ends" in row()["reason"]


@pytest.mark.etcd
def test_an_unknown_name_ends_the_start() -> None:
    with Nodes() as nodes:
        node = nodes.add("a", start=False, health_checks="fly").start(wait_s=0)
        assert node.process is not None
        assert node.process.wait(30) == 78
        assert "health_checks = 'fly': no package provides it" in node.log.read_text()
