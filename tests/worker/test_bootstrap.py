"""How a worker's process ends: with its script's own exit code, and with its error told, whatever takes its output."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
from support import warm

PROCESS = """
import os, sys
from elastic.contract.worker import messages
from elastic.worker.boot.bootstrap import become

log, workdir = sys.argv[1:]
order = messages.Fork(ticket=1, argv=("script.py",), env=dict(os.environ), workdir=workdir)
ends = os.pipe()
agent_pid = os.getpid()
if pid := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
become(order, [*ends, os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)], agent_pid)
"""


def exit_code(folder: pathlib.Path, script: str, log: pathlib.Path) -> int:
    (folder / "script.py").write_text(script)
    env = os.environ | {"TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    return warm.run(["-c", PROCESS, str(log), str(folder)], env=env).returncode


def error(folder: pathlib.Path) -> str:
    return str(json.loads((folder / "error.json").read_text())["message"]["message"])


def test_an_error_that_is_no_text_is_told(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    assert exit_code(tmp_path, 'raise FileNotFoundError("caf\\udce9.png")\n', log) == 1
    assert log.read_text().splitlines()[-1] == "FileNotFoundError: caf\\udce9.png"
    assert "FileNotFoundError" in error(tmp_path)


@pytest.mark.parametrize("code", [0, 7])
def test_a_full_disk_does_not_change_the_exit_code(tmp_path: pathlib.Path, code: int) -> None:
    script = f'import sys\nprint("half a line", end="")\nsys.exit({code})\n'
    assert exit_code(tmp_path, script, pathlib.Path("/dev/full")) == code


def test_a_script_that_prints_goes_on_when_its_log_has_no_room(tmp_path: pathlib.Path) -> None:
    script = 'import sys\nfor _ in range(3): print("x" * 9999, flush=True)\nprint("e", file=sys.stderr)\nsys.exit(5)\n'
    assert exit_code(tmp_path, script, pathlib.Path("/dev/full")) == 5


def test_on_a_full_disk_an_error_is_still_written_down_for_the_agent(tmp_path: pathlib.Path) -> None:
    assert exit_code(tmp_path, 'raise KeyError("mine")\n', pathlib.Path("/dev/full")) == 1
    assert "KeyError" in error(tmp_path)


ENDS = """
import atexit, concurrent.futures, os, tempfile, threading, time
record = open("record", "w", buffering=1)
left_open = open("left_open", "w")
left_open.write("not flushed")
folder = tempfile.TemporaryDirectory(dir=".")
open("folder", "w").write(folder.name)
atexit.register(record.write, "atexit ")
weak = lambda: folder

def late():
    time.sleep(0.2)
    record.write("thread ")

threading.Thread(target=late).start()
executor = concurrent.futures.ThreadPoolExecutor()
executor.submit(lambda: (time.sleep(0.3), record.write("executor ")))
"""


@pytest.mark.parametrize(("last", "code"), [("", 0), ("raise KeyError('mine')\n", 1), ("raise SystemExit(7)\n", 7)])
def test_the_process_ends_as_python_does(tmp_path: pathlib.Path, last: str, code: int) -> None:
    assert exit_code(tmp_path, ENDS + last, tmp_path / "log") == code
    assert (tmp_path / "record").read_text() == "thread executor atexit "
    assert (tmp_path / "left_open").read_text() == "not flushed"
    assert not pathlib.Path(tmp_path, (tmp_path / "folder").read_text()).exists()


def test_main_stays_the_scripts_for_its_threads_and_for_spawned_children(tmp_path: pathlib.Path) -> None:
    script = """
import multiprocessing, os, pickle, threading, time
class Mine: pass
def child(queue): queue.put(os.getpid())
def late():
    time.sleep(0.2)
    assert isinstance(pickle.loads(pickle.dumps(Mine())), Mine)
    print("pickled", flush=True)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    assert queue.get(timeout=60) == process.pid
    process.join()
    threading.Thread(target=late).start()
"""
    assert exit_code(tmp_path, script, tmp_path / "log") == 0
    assert (tmp_path / "log").read_text() == "pickled\n"


def test_a_traceback_begins_in_the_script(tmp_path: pathlib.Path) -> None:
    assert exit_code(tmp_path, "def f():\n    raise KeyError('mine')\nf()\n", tmp_path / "log") == 1
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{tmp_path}/script.py", line 3, in <module>'


DEEP = """
import torch
from elastic.worker.job.job import build
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
def setup(job):
    try:
        model(torch.zeros(5, 5))
    except RuntimeError as error:
        raise ValueError("wrong") from error
build(setup, None)
"""


def test_a_traceback_has_the_frames_of_the_script_and_the_innermost_one(tmp_path: pathlib.Path) -> None:
    assert exit_code(tmp_path, DEEP, tmp_path / "log") == 1
    frames = [line.split(", in ")[1] for line in (tmp_path / "log").read_text().splitlines() if ", in " in line]
    assert frames == ["setup", "forward", "<module>", "setup"]


def test_a_script_that_cannot_be_compiled_shows_no_frame_but_its_line(tmp_path: pathlib.Path) -> None:
    assert exit_code(tmp_path, "def f(:\n    pass\n", tmp_path / "log") == 1
    lines = (tmp_path / "log").read_text().splitlines()
    assert (lines[0], lines[-1]) == (f'  File "{tmp_path}/script.py", line 1', "SyntaxError: invalid syntax")


# The interval makes sure that the main thread is not asked to release the GIL: what it needs is one of the short spans
# in which a thread of gloo's has told of its last all-reduce, and still holds it. One turn in ten to a hundred has one.
LOCALS = """
import faulthandler, sys
import torch, torch.distributed as dist

faulthandler.dump_traceback_later(30, exit=True)
sys.setswitchinterval(60.0)

def turn():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(2, 2)).sum().backward()
    dist.destroy_process_group()

for _ in range(150):
    turn()
"""


def test_ddp_in_a_local_of_a_function_that_ends_with_its_group_ends(tmp_path: pathlib.Path) -> None:
    assert exit_code(tmp_path, LOCALS, tmp_path / "log") == 0


def test_a_script_that_goes_on_by_exec_keeps_its_channel_and_its_page(tmp_path: pathlib.Path) -> None:
    then = "import os; [os.fstat(int(os.environ[name])) for name in ('ELASTIC_CHANNEL_FD', 'ELASTIC_BEAT_FD')]"
    script = f"import os, sys\nos.execv(sys.executable, [sys.executable, '-S', '-c', {then!r}])\n"
    assert exit_code(tmp_path, script, tmp_path / "log") == 0


def test_an_interrupt_is_the_exception_that_python_makes_of_it(tmp_path: pathlib.Path) -> None:
    script = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    print("caught")
"""
    assert exit_code(tmp_path, script, tmp_path / "log") == 0
    assert (tmp_path / "log").read_text() == "caught\n"


@pytest.mark.parametrize(("imported", "frozen"), [("triton", False), ("other", True)])
def test_frozen_objects_are_ended_where_triton_would_report_them_as_leaked(imported: str, frozen: bool) -> None:
    code = (
        "import atexit, gc, sys, types\n"
        "from elastic.worker.boot import bootstrap\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"  # the first handler is the last to run
        f"sys.modules[{imported!r}] = types.ModuleType({imported!r})\n"
        "gc.freeze()\n"
        "bootstrap.unfreeze_at_exit()\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == f"{frozen}\n"
