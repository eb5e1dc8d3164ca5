"""A worker that is started later runs the code that the job began with, whatever has happened to the files since."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Callable

import pytest
from support import warm

from elastic.util import kept_code
from elastic.util.kept_code import ENV, KeptCode

PROCESS = """
import os, sys
from elastic.contract.worker import messages
from elastic.worker.boot.bootstrap import become

log, workdir, *argv = sys.argv[1:]
order = messages.Fork(ticket=1, argv=tuple(argv), env=dict(os.environ), workdir=workdir)
ends = os.pipe()
agent_pid = os.getpid()
if pid := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
become(order, [*ends, os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)], agent_pid)
"""
MAIN = """
import inspect, traceback
import model, parts.layer
def rate():
    return 1.0
print("rate", rate(), model.SIZE, parts.layer.NAME, inspect.getsource(rate).split()[-1], __name__)
"""
FIRST = "rate 1.0 4 linear 1.0 __main__\n"


def write(folder: pathlib.Path) -> None:
    (folder / "parts").mkdir(parents=True)
    (folder / "train.py").write_text(MAIN)
    (folder / "model.py").write_text("SIZE = 4\n")
    (folder / "parts" / "__init__.py").write_text("")
    (folder / "parts" / "layer.py").write_text("NAME = 'linear'\n")


def worker(tmp_path: pathlib.Path, *argv: str, submission: str = "a") -> str:
    """What a worker of the job prints. It is a process of its own; the kept code is in a file beside the script's
    folder."""
    log, folder = tmp_path / "log", tmp_path / "job"
    env = os.environ | {ENV: f"{submission}:{tmp_path / 'code.jsonl'}"}
    warm.run(["-c", PROCESS, str(log), str(folder), *argv], env=env)
    return log.read_text()


def edit(folder: pathlib.Path) -> None:
    (folder / "train.py").write_text(MAIN.replace("1.0", "1.5"))
    (folder / "model.py").write_text("SIZE = 5\n")
    (folder / "parts" / "layer.py").write_text("NAME = 'conv'\n")
    for path in folder.rglob("*.py"):  # Python takes a compiled file for that of a source of the same size and second
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime + 2))


def break_off(folder: pathlib.Path) -> None:
    for name in ("train.py", "model.py", "parts/layer.py"):
        (folder / name).write_text("def half(")


def remove(folder: pathlib.Path) -> None:
    shutil.rmtree(folder / "parts")
    (folder / "model.py").unlink()
    (folder / "train.py").rename(folder / "moved.py")


@pytest.mark.parametrize(
    ("change", "argv"),
    [(edit, ("train.py",)), (break_off, ("-m", "train")), (remove, ("train.py",)), (remove, ("-m", "train"))],
    ids=["edited", "broken-module", "removed", "removed-module"],
)
def test_a_later_worker_runs_the_code_that_the_job_began_with(
    tmp_path: pathlib.Path, change: Callable[[pathlib.Path], None], argv: tuple[str, ...]
) -> None:
    folder = tmp_path / "job"
    write(folder)
    assert worker(tmp_path, *argv) == FIRST
    change(folder)
    said = worker(tmp_path, *argv)
    assert FIRST in said
    for name in ("train.py", "model.py", "parts/layer.py"):
        assert f"elastic: {folder / name} has changed since this job began" in said


def test_a_later_submission_begins_anew(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "job")
    assert worker(tmp_path, "train.py") == FIRST
    edit(tmp_path / "job")
    assert worker(tmp_path, "train.py", submission="b") == "rate 1.5 5 conv 1.5 __main__\n"


def test_an_error_shows_the_line_that_ran(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "train.py").write_text("first = 1\nraise KeyError('mine')\n")
    worker(tmp_path, "train.py")
    (folder / "train.py").write_text("# another\n# file\n")
    assert "    raise KeyError('mine')\n" in worker(tmp_path, "train.py")


def test_code_that_cannot_be_kept_runs(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "job")
    (tmp_path / "code.jsonl").mkdir()
    said = worker(tmp_path, "train.py")
    assert FIRST in said
    assert "cannot be kept" in said


def test_what_is_kept_is_bounded(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_code, "MOST_BYTES", 400)
    code = KeptCode(str(tmp_path / "code.jsonl"), "one")
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).write_text("X = 1\n")
        assert code.keep(str(tmp_path / name)).source == b"X = 1\n"
    assert "d cannot be kept" in code.problem
    assert (tmp_path / "code.jsonl").stat().st_size <= 400


def test_a_line_that_its_writer_did_not_finish_is_written_again(tmp_path: pathlib.Path) -> None:
    source, store = tmp_path / "a.py", tmp_path / "code.jsonl"
    source.write_text("A = 1\n")
    KeptCode(str(store), "one").keep(str(source))
    store.write_bytes(store.read_bytes()[:-9])
    source.write_text("A = 2\n")
    other = KeptCode(str(store), "one")
    other.load()
    assert other.find(str(source)) is None
    assert other.keep(str(source)).source == b"A = 2\n"
    again = KeptCode(str(store), "one")
    again.load()
    assert (found := again.find(str(source))) is not None
    assert found.source == b"A = 2\n"
