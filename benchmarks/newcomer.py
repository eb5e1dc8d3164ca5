"""docs/quickstart.md word for word, timed: an empty folder, an installation, an unchanged Trainer, a kill survived.

Builds a wheel, makes an empty folder, and there runs the page's commands on the page's script with an environment of
their own; kills the worker of rank 1 once the second checkpoint is there. Downloads torch and transformers (some
minutes, 1 GB) unless --installed gives a virtual environment that has all. The last line is one of JSON.

    python benchmarks/newcomer.py [--installed VENV]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import time

from _harness import HERE, Processes, kill, machine, wait_for, workplace

ROOT = HERE.parent
PAGE = (ROOT / "docs" / "quickstart.md").read_text()
SCRIPT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
COMMANDS = [line.strip() for line in re.findall(r"^    (.*)$", PAGE.replace(SCRIPT, ""), re.MULTILINE)]
INSTALL_LIMIT_S, LIMIT_S = 540.0, 180.0
"""For the installation; for all that follows it."""


def install(folder: pathlib.Path) -> float:
    """Run the page's commands of the installation, with a wheel of this tree for elasticd. Returns seconds."""
    wheels = folder.parent / "wheels"
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), str(ROOT)]
    subprocess.run(build, check=True, stdout=sys.stderr)
    wheel = next(wheels.glob("elasticd-*.whl"))
    venv, activate, pip = COMMANDS[:3]
    pip = pip.replace("elasticd[", f"{wheel}[")
    pip += f" -q -c {ROOT}/constraints.txt -c {ROOT}/tests/compat/constraints.txt"
    began_s = time.monotonic()
    subprocess.run(["bash", "-c", f"{venv} && {activate} && {pip}"], cwd=folder, check=True, timeout=INSTALL_LIMIT_S)
    return time.monotonic() - began_s


def trained(out: pathlib.Path, step: int) -> bool:
    return any(int(found.name.partition("-")[2]) >= step for found in out.glob("checkpoint-*"))


def epochs(log: pathlib.Path) -> list[float]:
    """Of the lines that rank 0's Trainer has logged."""
    return [float(found) for found in re.findall(r"^\[0\] .*'epoch': '?([\d.]+)", log.read_text(), re.MULTILINE)]


def train(folder: pathlib.Path, venv: pathlib.Path, processes: Processes) -> dict[str, float | int]:
    """The page's two commands; a worker is killed meanwhile. Returns seconds and what else was seen."""
    daemon, run = COMMANDS[3:5]
    env = {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "VIRTUAL_ENV": str(venv), "HOME": str(folder.parent),
           "XDG_RUNTIME_DIR": "", "XDG_STATE_HOME": ""}  # fmt: skip
    began_s = time.monotonic()

    def ctl(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [str(venv / "bin" / "elasticctl"), *words]
        return subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, timeout=30, check=False)

    processes.start("commands", ["bash", "-c", f"cd {folder}\n{daemon}\nsleep 3\n{run}\necho ended: $?"], env)
    log = folder.parent / "commands.log"
    out = folder / "out"
    wait_for(lambda: trained(out, 40), LIMIT_S, f"step 40, see {log}", every_s=0.05)
    first_s = time.monotonic() - began_s

    def pids() -> dict[int, int]:
        return {row["rank"]: row["pid"] for row in json.loads(ctl("status", "train", "--json").stdout)["ranks"]}

    def replaced() -> bool:
        now = pids()
        return len(now) == len(before) and not set(now.values()) & set(before.values())

    before = pids()
    killed_s = time.monotonic()
    kill(before[1])
    wait_for(replaced, LIMIT_S, f"new processes of both ranks, see {log}", every_s=0.05)
    seen = len(epochs(log))
    wait_for(lambda: len(epochs(log)) > seen, LIMIT_S, f"steps of new processes, see {log}", every_s=0.02)
    again_s = time.monotonic() - killed_s
    wait_for(lambda: "ended: " in log.read_text(), LIMIT_S, f"the end of the job, see {log}", every_s=0.05)
    all_s = time.monotonic() - began_s
    text = log.read_text()
    print(text)
    if "ended: 0" not in text or not trained(out, 300):
        raise RuntimeError("the job has not succeeded")
    incidents = json.loads(ctl("incidents", "train", "--json").stdout)["incidents"]
    print(ctl("incidents", "train").stdout)
    return {"to_step_40_s": first_s, "kill_to_next_logged_step_s": again_s, "all_s": all_s, "incidents": len(incidents)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--installed", type=pathlib.Path, help="a virtual environment; else the page's own is made")
    args = parser.parse_args()
    print(machine())
    with workplace() as (place, processes):
        folder = place / "empty"
        folder.mkdir()
        result: dict[str, float | int] = {}
        if not args.installed:
            result["install_s"] = install(folder)
        (folder / "train.py").write_text(SCRIPT)
        result |= train(folder, args.installed.resolve() if args.installed else folder / ".venv", processes)
    print(machine())
    print(json.dumps({name: round(value, 2) for name, value in result.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
