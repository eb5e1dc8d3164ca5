"""From what is typed at `elasticctl run` and `submit` to a job: text stays text; what cannot run is said at once."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticd.ctl.jobs import job_file
from elasticd.ctl.jobs import job_file as modules
from elasticd.ctl.jobs.job_file import InvalidJob


@pytest.mark.parametrize(
    "pair",
    ["OMP_NUM_THREADS=4", "LR=0.1", "DEBUG=true", "DAY=2026-11-22", 'Q="quoted"', "E=", "X=a=b", "L=[1]", "N= x "],
)
def test_environment_variable_from_the_command_line_stays_text(pair: str) -> None:
    name, _, value = pair.partition("=")
    for apply in (
        lambda raw: job_file.environment(raw, [pair]),
        lambda raw: job_file.override(raw, [f"env.{pair}"]),
    ):
        raw: dict[str, Any] = {}
        apply(raw)
        assert raw == {"env": {name: value}}


def test_a_variable_without_a_value_is_the_shells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/hf")
    monkeypatch.delenv("GONE", raising=False)
    raw: dict[str, Any] = {}
    job_file.environment(raw, ["HF_HOME", "A.B=1"])
    assert raw["env"] == {"HF_HOME": "/hf", "A.B": "1"}
    with pytest.raises(InvalidJob, match="no variable 'GONE' in this shell"):
        job_file.environment(raw, ["GONE"])
    with pytest.raises(InvalidJob, match="write NAME=VALUE"):
        job_file.environment(raw, ["=x"])


def test_a_date_is_text_on_the_command_line_and_refused_by_name_in_a_file(tmp_path: pathlib.Path) -> None:
    raw: dict[str, Any] = {}
    job_file.override(raw, ["name=2026-11-22", "args=[2026-11-22]"])
    assert raw == {"name": "2026-11-22", "args": "[2026-11-22]"}
    file = tmp_path / "job.toml"
    file.write_text("[env]\nDAY = 2026-11-22\n")
    with pytest.raises(InvalidJob, match=r"env.DAY = 2026-11-22: no field is a date: write a text in quotes"):
        job_file.from_file(file)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"script": "gone.py"}, "script = 'gone.py': there is no such file"),
        ({"script": "."}, "script = '.': is a folder"),
        ({"script": "a\0b"}, "script = .*null byte"),
        ({"script": "~nobody-is-called-so/x"}, "script = "),
        ({"workdir": "gone"}, "workdir = 'gone': there is no such folder"),
        ({"python": "bin/gone"}, "python = 'bin/gone': there is no such program"),
        ({"script": "x" * 300}, "script = 'xxx"),
    ],
)
def test_job_with_missing_files_is_refused_by_field(tmp_path: pathlib.Path, fields: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidJob, match=words):
        job_file.resolve(dict(fields), tmp_path)


TYPED = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["a.b.c=1", "env=1", "env.X=1", "checkpoint=1", "checkpoint.dir=/x", "script=5", "python=[1]", "workdir=3",
     "x=" + "[" * 5000, "a." * 5000 + "b=1"]
)  # fmt: skip


@given(st.lists(TYPED, max_size=4))
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_setting_makes_a_job_or_a_sentence(tmp_path: pathlib.Path, typed: list[str]) -> None:
    raw: dict[str, Any] = {"script": "t.py", "name": "t"}
    (tmp_path / "t.py").touch()
    with contextlib.suppress(InvalidJob):
        job_file.override(raw, typed)
        job_file.resolve(raw, tmp_path)
        assert json.dumps(raw)


@pytest.fixture
def packages(tmp_path: pathlib.Path) -> pathlib.Path:
    """pkg (runnable) with pkg.train; bare (not runnable); odd, which changes its __path__; and a package that must not
    be imported to be found."""
    for name, text in {
        "pkg/__init__.py": "raise SystemExit('imported')", "pkg/__main__.py": "", "pkg/train.py": "",
        "bare/__init__.py": "", "odd/__init__.py": "__path__ = []", "space/sub.py": "",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("module", ["timeit", "pkg", "pkg.train", "odd.later", "space.sub", "json.tool"])
def test_a_module_that_is_there_is_found_without_importing_it(packages: pathlib.Path, module: str) -> None:
    assert modules.missing(module, sys.executable, str(packages), {}) == ""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("nope", "there is no module nope"),
        ("pkg.nope", "there is no module pkg.nope"),
        ("bare", "bare is a package without __main__.py"),
        ("timeit.x", "timeit is a module and no package"),
        ("train.py", "there is no module train"),
    ],
)
def test_a_module_that_is_not_there_is_named(packages: pathlib.Path, module: str, words: str) -> None:
    assert words in modules.missing(module, sys.executable, str(packages), {})


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("train.py", "def f(:\n", "cannot compile it:\n  File"),
        ("train.py", "if True:\nx = 1\n", "IndentationError"),
        ("train.py", "x = '\0'", "null byte"),
        ("prog.sh", "echo hello world\n", "elasticctl run --no-python -- "),
        ("prog", "#!/bin/bash\nexec python train.py\n", "elasticctl run --no-python -- "),
    ],
)
def test_a_script_that_does_not_compile_is_refused_before_it_is_submitted(
    tmp_path: pathlib.Path, name: str, text: str, words: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidJob, match=re.escape(words)) as refused:
        job_file.check_source({"script": str(tmp_path / name)}, sys.executable)
    assert str(refused.value).startswith(f"script = {str(tmp_path / name)!r}: ")


def test_a_script_is_judged_by_the_interpreter_that_is_to_run_it(tmp_path: pathlib.Path) -> None:
    newer = tmp_path / "python"  # it knows a syntax that ours does not
    newer.write_text("#!/bin/sh\nexit 0\n")
    newer.chmod(0o755)
    (script := tmp_path / "train.py").write_text("brand new syntax\n")
    job_file.check_source({"script": str(script), "python": str(newer)}, sys.executable)
    job_file.check_source({"script": str(script), "python": "/no/such/python"}, sys.executable)  # judged on its node
    (good := tmp_path / "good.py").write_text("#!/usr/bin/env python3\nassert 'a' is not 1\n")  # a SyntaxWarning
    job_file.check_source({"script": str(good)}, sys.executable)


@pytest.mark.parametrize("word", ["python", "/usr/bin/python3.12", "torchrun", "accelerate"])
def test_a_launcher_before_the_script_is_refused_with_the_way_to_write_it(word: str) -> None:
    with pytest.raises(InvalidJob, match=r"elasticctl run .*train\.py"):
        job_file.from_command([word, "train.py"], module=False)
    assert job_file.from_command(["./python/train.py"], module=False)["script"] == "./python/train.py"


def test_missing_module_check_is_silent_if_it_cannot_tell(packages: pathlib.Path) -> None:
    assert modules.missing("nope", "/no/such/python", str(packages), {}) == ""
    assert modules.missing("nope", "/bin/false", str(packages), {}) == ""
    assert modules.missing("a\0b", sys.executable, str(packages), {}) == ""


def test_the_jobs_own_environment_counts(packages: pathlib.Path) -> None:
    there = {"PYTHONPATH": str(packages)}
    assert "no module" in modules.missing("pkg", sys.executable, os.sep, {})
    assert modules.missing("pkg", sys.executable, os.sep, there) == ""


@pytest.mark.parametrize(
    ("given_", "in_venv", "taken"),
    [(None, True, "/v/python"), (None, False, ""), ("daemon", True, ""), ("/x/python", True, "/x/python")],
)
def test_a_script_runs_with_the_interpreter_of_the_shell_that_submits(
    given_: str | None, in_venv: bool, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/v/python")
    monkeypatch.setattr(sys, "prefix", "/v" if in_venv else sys.base_prefix)
    assert job_file.interpreter(given_, "/opt/python") == taken
    monkeypatch.setattr(sys, "prefix", "/v")
    assert job_file.interpreter(None, "/v/python") == "", "the daemon's own needs no name"


def test_env_file_is_made_absolute_and_must_exist(tmp_path: pathlib.Path) -> None:
    (tmp_path / "secrets").write_text("TOKEN=x")
    raw = {"workdir": str(tmp_path), "env_file": "secrets"}
    job_file.resolve(raw, tmp_path)
    assert raw["env_file"] == str(tmp_path / "secrets")
    with pytest.raises(InvalidJob, match="env_file = 'none'"):
        job_file.resolve({"workdir": str(tmp_path), "env_file": "none"}, tmp_path)
