"""elasticctl bundle: everything in one archive, nothing secret in it; and elasticctl config."""

from __future__ import annotations

import errno
import os
import pathlib
import socket
import tarfile
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from elasticd.base.command_answers import Setting
from elasticd.ctl import main as ctl
from elasticd.ctl.client import Client, Failed
from elasticd.ctl.nodes.bundle import without_secrets
from elasticd.ctl.nodes.node_commands import differences


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("HF_TOKEN=hf_secret1 x", "HF_TOKEN="),
        ('"WANDB_API_KEY": "secret1"\nDB_PASSWORD: secret1', "DB_PASSWORD: "),
        ("postgres://ada:secret1@db/x", "@db/x"),
        ("Authorization: Bearer secret1secret1", "Bearer"),
        ("-----BEGIN EC PRIVATE KEY-----\nsecret1\n-----END EC PRIVATE KEY-----", "********"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str, kept: str) -> None:
    shown = without_secrets(text)
    assert "secret1" not in shown
    assert kept in shown


def test_ordinary_text_stays() -> None:
    text = "step 3 loss 0.1 tokenizer=bert num_tokens: 512 keep=5 key_file = '/etc/k.pem'"
    assert without_secrets(text) == text


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(self: Client, path: str, *_: object, **__: object) -> dict[str, Any]:
        if path == "/v1/doctor":
            raise Failed(503, "etcd cannot be reached")
        if path.startswith("/v1/jobs/wrong"):
            raise Failed(404, "there is no job 'wrong'; there are: train, old")
        rows = [{"job": "train", "phase": "running"}, {"job": "old", "phase": "succeeded"}]
        return {"jobs": rows, "path": path, "note": "HF_TOKEN=secret1"}

    def lines(self: Client, *_: object) -> Iterator[dict[str, Any]]:
        yield {"slot": 0, "line": "login with password=secret1 "}
        yield {"end": True}

    monkeypatch.setattr(Client, "get", get)
    monkeypatch.setattr(Client, "lines", lines)


def test_bundle_holds_all_that_answers_and_names_what_does_not(daemon: None, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "b.tar.gz"
    done = CliRunner().invoke(ctl.main, ["bundle", "-o", str(target), "--logs"])
    assert done.exit_code == 0, done.output
    assert "left out: doctor.json: etcd cannot be reached" in done.output
    with tarfile.open(target) as archive:
        files = {entry.name.partition("/")[2]: entry for entry in archive}
        assert {"status.json", "settings.json", "jobs/train/job.json", "jobs/train/logs.txt", "journal.txt"} <= set(
            files
        )
        assert "jobs/train/stacks.json" in files
        assert "jobs/old/job.json" in files
        assert "jobs/old/stacks.json" not in files, "no worker of it is left to have a stack"
        for entry in files.values():
            read = archive.extractfile(entry)
            assert read is not None
            assert b"secret1" not in read.read(), entry.name
    assert target.stat().st_mode & 0o777 == 0o600, "the masks are a guess, and logs are for their owner"
    again = CliRunner().invoke(ctl.main, ["bundle", "-o", str(target)])
    assert again.exit_code == 1
    assert "is there already" in again.output


def test_no_bundle_is_written_of_a_job_that_does_not_exist(daemon: None, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "b.tar.gz"
    done = CliRunner().invoke(ctl.main, ["bundle", "wrong", "-o", str(target)])
    assert (done.exit_code, done.output) == (1, "elasticctl: there is no job 'wrong'; there are: train, old\n")
    assert not target.exists()


def test_half_a_bundle_is_not_left_behind(
    daemon: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tarfile.TarFile, "addfile", full)
    target = tmp_path / "b.tar.gz"
    done = CliRunner().invoke(ctl.main, ["bundle", "-o", str(target)])
    assert (done.exit_code, done.output) == (1, f"elasticctl: {target}: No space left on device\n")
    assert not target.exists()


@pytest.mark.parametrize("job", [[], ["train"]])
def test_a_bundle_without_a_daemon_says_what_is_missing_and_fails(tmp_path: pathlib.Path, job: list[str]) -> None:
    target = tmp_path / "b.tar.gz"
    done = CliRunner().invoke(ctl.main, ["--socket", str(tmp_path / "s"), "bundle", *job, "-o", str(target)])
    assert done.exit_code == 5, done.output
    left_out, *_, last = done.output.splitlines()
    parts = "status.json, doctor.json, settings.json, incidents.json, events.json"
    parts += ", jobs/train/job.json, jobs/train/stacks.json" if job else ""
    assert left_out.startswith(f"left out: {parts}: no elasticd on this machine")
    assert last.startswith(f"{target} is written with about.json")
    assert last.endswith(" only: what the daemon knows, all jobs too, is missing")
    with tarfile.open(target) as archive:
        assert any(entry.name.endswith("/about.json") for entry in archive)


def test_settings_that_differ() -> None:
    def node(slots: int, keep: list[str]) -> list[Setting]:
        return [Setting("slots", slots), Setting("etcd.endpoints", keep)]

    found = differences({"a": node(2, ["x:1"]), "b": node(4, ["x:1"]), "c": node(2, ["x:1"])})
    assert found == {"slots": {"2": ["a", "c"], "4": ["b"]}}


def test_config_check(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text("slots = 3\n")
    done = CliRunner().invoke(ctl.main, ["config", "check", str(file)])
    assert (done.exit_code, "good (1 settings" in done.output) == (0, True), done.output
    file.write_text("slotz = 3\n")
    done = CliRunner().invoke(ctl.main, ["config", "check", str(file)])
    assert done.exit_code == 2
    assert "slotz" in done.output


def test_the_settings_of_one_node_are_not_called_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"nodes": {"a": {"settings": [{"name": "slots", "value": 2}]}}}
    monkeypatch.setattr(Client, "get", lambda *_, **__: answer)
    done = CliRunner().invoke(ctl.main, ["config", "diff"])
    assert (done.exit_code, done.output) == (0, "one node answers: nothing to compare\n")


def test_a_sample_is_promised_only_while_the_job_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "get", lambda *_, **__: {"ranks": []})
    done = CliRunner().invoke(ctl.main, ["debug", "train"])
    assert done.exit_code == 1
    assert done.output.endswith("--gradients makes one while it trains\n")


def test_without_a_daemon_the_way_to_start_one_is_named(tmp_path: pathlib.Path) -> None:
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(tmp_path / "s"))
    for path in (tmp_path / "s", tmp_path / "none"):
        done = CliRunner().invoke(ctl.main, ["--socket", str(path), "status"])
        assert done.exit_code == 5
        assert "Start it (systemctl start elasticd, or just: elasticd)" in done.output
