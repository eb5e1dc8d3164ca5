"""elasticctl wait, restart and forget, against a daemon that is played."""

from __future__ import annotations

import json
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from elasticd.ctl import main as ctl
from elasticd.ctl.client import Client, Failed
from elasticd.ctl.jobs import stopping
from elasticd.ctl.output import length

Json = dict[str, Any]


class Daemon:
    """Stands in for Client: answers from a table, and notes what it is asked to do."""

    def __init__(self, *jobs: Json) -> None:
        self.jobs = {row["job"]: row for row in jobs}
        self.done: list[str] = []
        self.refuses: dict[str, int] = {}

    def get(self, path: str, query: object = None, timeout_s: float | None = None) -> Json:
        if path == "/v1/status":
            return {"wall_s": 1000.0, "jobs": list(self.jobs.values())}
        return self.jobs[path.split("/")[3]]

    def post(self, path: str, body: Any = None, timeout_s: float | None = None) -> Json:
        if path == "/v1/forget":
            self.done += (done := [f"FORGET {job}" for job in body["jobs"] if job not in self.refuses])
            return {"forgotten": [line.removeprefix("FORGET ") for line in done]}
        self.done.append(f"POST {path}")
        if path.endswith("/stop"):
            self.jobs[path.split("/")[3]]["phase"] = "stopped"
        return {"job": path.split("/")[3], "phase": self.jobs[path.split("/")[3]]["phase"]}

    def delete(self, path: str) -> Json:
        if status := self.refuses.get(path.split("/")[3]):
            raise Failed(status, "refused")
        self.done.append(f"DELETE {path}")
        return {"job": path.split("/")[3]}


def row(job: str, phase: str, ended_wall_s: float = 0.0) -> Json:
    return {"job": job, "phase": phase, "since_wall_s": ended_wall_s, "step": 7, "reason": ""}


def call(daemon: Daemon, *words: str, monkeypatch: pytest.MonkeyPatch) -> Result:
    for name in ("get", "post", "delete"):
        monkeypatch.setattr(Client, name, lambda _, *args, _name=name, **more: getattr(daemon, _name)(*args, **more))
    return CliRunner().invoke(ctl.main, [*words])


@pytest.mark.parametrize(("phase", "code"), [("succeeded", 0), ("failed", 4), ("stopped", 1)])
def test_wait_ends_with_the_result(phase: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    done = call(Daemon(row("train", phase)), "wait", "train", monkeypatch=monkeypatch)
    assert done.exit_code == code
    assert "at step 7" in done.output


def test_wait_does_not_take_the_end_of_another_job_for_that_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """That one was stopped, and another submitted under its name, while this command waited for an answer."""
    daemon = Daemon(row("train", "running") | {"submitted_wall_s": 1.0})
    later = row("train", "succeeded") | {"submitted_wall_s": 9.0}
    answers = [daemon.jobs["train"], later]
    monkeypatch.setattr(daemon, "get", lambda *_, **more: answers.pop(0) if len(answers) > 1 else answers[0])
    done = call(daemon, "wait", "train", monkeypatch=monkeypatch)
    assert "has succeeded" not in done.output
    assert done.exit_code == 1
    assert "a new job now uses the name train" in done.output


def test_wait_gives_up_at_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    done = call(Daemon(row("train", "running")), "wait", "train", "--timeout", "0", monkeypatch=monkeypatch)
    assert (done.exit_code, done.output) == (1, "train is still running after 0 s\n")


def test_restart_stops_a_running_job_first(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(row("train", "running"))
    assert call(daemon, "restart", "train", monkeypatch=monkeypatch).exit_code == 0
    assert daemon.done == ["POST /v1/jobs/train/stop", "POST /v1/jobs/train/restart"]
    daemon = Daemon(row("train", "failed"))
    call(daemon, "restart", "train", monkeypatch=monkeypatch)
    assert daemon.done == ["POST /v1/jobs/train/restart"]


class Saving(Daemon):
    """Its job is at step 7 with a checkpoint of step 4; one of step 8 is there at the second look after the order."""

    def __init__(self, folder: str = "/ckpt", phase: str = "running", saves: bool = True) -> None:
        job = row("train", phase) | {"spec": {"checkpoint": {"dir": folder}}, "checkpoint": {"step": 4}}
        super().__init__(job)
        self.saves, self.looks = saves, 0

    def get(self, path: str, query: object = None, timeout_s: float | None = None) -> Json:
        if "POST /v1/jobs/train/checkpoint" in self.done:
            self.looks += 1
            if self.saves and self.looks == 2:
                self.jobs["train"]["checkpoint"] = {"step": 8}
        return super().get(path, query, timeout_s)


CHECKPOINT, STOP, RESTART = (f"POST /v1/jobs/train/{what}" for what in ("checkpoint", "stop", "restart"))


@pytest.mark.parametrize(
    ("daemon", "words", "done"),
    [
        (Saving(), ("stop", "train"), [CHECKPOINT, STOP]),
        (Saving(), ("restart", "train"), [CHECKPOINT, STOP, RESTART]),
        (Saving(), ("stop", "train", "--discard"), [STOP]),
        (Saving(""), ("stop", "train"), [STOP]),
        (Saving(phase="waiting"), ("stop", "train"), [STOP]),
    ],
)
def test_a_job_with_a_folder_for_checkpoints_saves_its_steps_before_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch, daemon: Saving, words: tuple[str, ...], done: list[str]
) -> None:
    assert call(daemon, *words, monkeypatch=monkeypatch).exit_code == 0
    assert daemon.done == done
    assert daemon.looks == (2 if CHECKPOINT in done else 0) + (words[0] == "restart")


def test_a_job_that_saves_nothing_is_stopped_all_the_same_and_what_is_lost_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stopping, "SAVE_S", 0.0)
    daemon = Saving(saves=False)
    done = call(daemon, "stop", "train", monkeypatch=monkeypatch)
    assert daemon.done == [CHECKPOINT, STOP]
    assert "the steps after 4 are lost" in done.output


def test_forget_over_takes_finished_jobs_of_the_age_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def daemon() -> Daemon:
        return Daemon(row("old", "failed", 100.0), row("new", "succeeded", 990.0), row("live", "running", 1.0))

    every = daemon()
    done = call(every, "forget", "--over", "--json", monkeypatch=monkeypatch)
    assert json.loads(done.output)["forgotten"] == ["old", "new"]
    assert every.done == ["FORGET old", "FORGET new"]
    aged = daemon()
    call(aged, "forget", "--over", "--older-than", "10m", monkeypatch=monkeypatch)
    assert aged.done == ["FORGET old"]
    raced = daemon()
    raced.refuses = {"old": 409}
    assert "forgotten: new" in call(raced, "forget", "--over", monkeypatch=monkeypatch).output
    many = Daemon(*(row(f"j{number}", "failed") for number in range(1100)))
    said = call(many, "forget", "--over", monkeypatch=monkeypatch).output
    assert len(many.done) == 1100
    assert [line for line in said.splitlines() if " of " in line] == ["512 of 1100", "1024 of 1100", "1100 of 1100"]
    assert "forgotten: 1100 jobs" in said


@pytest.mark.parametrize("words", [(), ("--over", "train"), ("train", "--older-than", "1h")])
def test_forget_refuses_unclear_usage(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(row("train", "failed"))
    assert call(daemon, "forget", *words, monkeypatch=monkeypatch).exit_code == 2
    assert not daemon.done


@pytest.mark.parametrize(("text", "length_s"), [("90", 90), ("1.5h", 5400), ("2m", 120), ("3d", 259200), ("0", 0)])
def test_lengths_of_time(text: str, length_s: float) -> None:
    assert length(text) == length_s


@pytest.mark.parametrize("text", ["", "h", "-1", "1y", "nan", "1e9", "1 h"])
def test_what_is_no_length_of_time_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="no length of time"):
        length(text)


def test_every_late_command_exists_under_its_name() -> None:
    for name in ctl.LATE:
        command = ctl.main.get_command(click.Context(ctl.main), name)
        assert command is not None
        assert command.name == name
        assert command.help, f"{name} has no help text"
