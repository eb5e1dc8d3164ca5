"""A worker of four on two nodes is killed under elasticd, torchrun, torchft, NVRx and Ray Train, on CPUs with gloo.

The measure is that of `recovery.py`: seconds from SIGKILL of a random worker, at a random step, until every rank of the
full world has made a new step; until any rank has; and the steps that were made and are lost. torchft's nodes are four
replica groups of one worker, as in its example for DDP; NVRx in process has reserve workers, one for each kill, as it
starts none. What stores checkpoints does so every 20 steps.

Each rival has an environment of its own in ENVS/NAME, made from the package index with this environment's torch, which
must be a build for CPUs. What cannot be installed or does not run is `{"skipped": why}` in the result. `--quick` and
`--smoke` make no environments: they take those that are there. `--ports` instead runs the scripts in `ports/`, which
are `examples/ddp_plain.py` ported to each, and counts the lines that differ.

    python benchmarks/compared.py [--envs FOLDER] [--only WAY ...] [--ports]
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import recovery
import torch
from _harness import HERE, SMOKE, Processes, Record, Recovery, TooLate, free_port, machine, wait_for, workplace
from recovery import SHARE_OFF, WORLD, Cluster, explained, say

SCRIPT = HERE / "_compared_train.py"
PLAIN = HERE.parent / "examples" / "ddp_plain.py"
PORTS = HERE / "ports"
PACKAGES = {"torchft": "torchft-nightly", "nvrx": "nvidia-resiliency-ext", "ray": "ray[train]"}
"""Environment -> what is installed in it beside torch. Of torchft a nightly build: under 0.2.0, its newest release, the
survivors of a broken gloo collective end, by an assertion in `backward`."""
INSTALL_LIMIT_S, PORT_LIMIT_S, START_LIMIT_S = 900.0, 300.0, 90.0
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
RAY_ENV = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1", "SPT_NOENV": "1"}
"""The last: its processes keep their environment where `Processes` reads it."""
Command = list[str | os.PathLike[str]]
Result = dict[str, Any]


class Skipped(Exception):
    """Why there are no figures."""


@dataclass(frozen=True, slots=True)
class Plan:
    ours: int
    """Kills under elasticd."""
    torchrun: int
    rivals: int
    """Kills under each of the others."""
    default_limit_s: float
    """Of the one kill under torchrun with its defaults; 0: none."""


FULL = Plan(ours=12, torchrun=4, rivals=4, default_limit_s=60.0)
QUICK = Plan(ours=4, torchrun=1, rivals=1, default_limit_s=0.0)
SMALLEST = Plan(ours=1, torchrun=1, rivals=1, default_limit_s=0.0)


# ── environments ────────────────────────────────────────────────────────────────────────────────────────────────


def python_of(envs: pathlib.Path, name: str, make: bool) -> pathlib.Path:
    """The interpreter of a rival's environment. Raises Skipped."""
    python = envs / name / "bin" / "python"
    if torch.version.cuda is not None:
        raise Skipped(f"this environment's torch {torch.__version__} is a CUDA build")
    if not python.exists() and not make:
        raise Skipped(f"no environment {name} in the folder given by --envs")
    if not python.exists():
        install(envs, name)
    shown = "import torch; print(torch.version.cuda)"
    done = subprocess.run([python, "-c", shown], capture_output=True, text=True, check=False)
    if done.stdout.strip() != "None":
        raise Skipped(f"environment {name}: {(done.stdout + done.stderr).strip()[-300:]}")
    return python


def install(envs: pathlib.Path, name: str) -> None:
    """Raises Skipped; the folder is left as it is, for a look."""
    say(f"making environment {name}")
    folder = envs / name
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={torch.__version__}\n")
    pip: Command = [folder / "bin" / "python", "-m", "pip", "install", "-q", "-c", constraints]
    try:
        done = subprocess.run(
            [*pip, "torch", "numpy", "psutil", PACKAGES[name]],
            capture_output=True,
            text=True,
            timeout=INSTALL_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise Skipped(f"pip install {PACKAGES[name]}: not within {late.timeout:g} s") from late
    if done.returncode:
        raise Skipped(f"pip install {PACKAGES[name]}: {done.stderr.strip()[-300:]}")


def version(python: pathlib.Path, name: str) -> str:
    shown = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    package = PACKAGES[name].partition("[")[0]
    done = subprocess.run([python, "-c", shown, package], capture_output=True, text=True, check=True)
    return f"{package} {done.stdout.strip()}"


# ── what is started ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Start:
    """What starting a rival's job takes."""

    python: pathlib.Path
    processes: Processes
    record: Record
    folder: pathlib.Path
    kills: int

    @property
    def script(self) -> Command:
        """And its arguments, but for the framework's name."""
        checkpoint = self.folder / f"{self.record.folder.name}.pt"
        return ["--record", self.record.folder, "--world-size", str(WORLD), "--checkpoint", checkpoint]

    def program(self, name: str) -> pathlib.Path:
        return self.python.parent / name


def start_torchft(start: Start, lighthouse: Sequence[str] = (), options: Sequence[str] = ()) -> None:
    port = free_port()
    command: Command = [start.program("torchft_lighthouse"), "--bind", f"0.0.0.0:{port}", "--min_replicas", "1",
               "--quorum_tick_ms", "100", "--join_timeout_ms", "10000", *lighthouse]  # fmt: skip
    name = start.record.folder.name
    start.processes.start(f"{name}-lighthouse", command)
    for group in range(WORLD):
        agent: Command = [start.program("torchrun"), "--nnodes=1", "--nproc-per-node=1", "--max-restarts=100",
                 f"--master-port={free_port()}", SCRIPT, "torchft", *start.script, *options]  # fmt: skip
        env = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "REPLICA_GROUP_ID": str(group)}
        start.processes.start(f"{name}-{group}", agent, {**NO_GPU, **env, "NUM_REPLICA_GROUPS": str(WORLD)})


def start_torchft_tuned(start: Start) -> None:
    """Without the second, a survivor that waits for another survivor's part does so for 5 s."""
    start_torchft(start, ["--heartbeat_timeout_ms", "1000"], ["--timeout-s", "1"])


def start_launcher(start: Start) -> None:
    agent: Command = [start.program("ft_launcher"), "--nnodes=2", "--nproc-per-node=2", "--max-restarts=100",
             "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=compared",
             "--ft-initial-rank-heartbeat-timeout=60", "--ft-rank-heartbeat-timeout=30",
             "--ft-enable-nic-monitor=False", SCRIPT, "launcher", *start.script]  # fmt: skip
    for number in range(2):
        start.processes.start(f"{start.record.folder.name}-agent{number}", agent, {**NO_GPU, **SHARE_OFF})


def start_inprocess(start: Start) -> None:
    port, ranks = free_port(), WORLD + start.kills
    for rank in range(ranks):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": str(ranks)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **NO_GPU}
        command: Command = [start.python, SCRIPT, "inprocess", *start.script]
        start.processes.start(f"{start.record.folder.name}-{rank}", command, env)


def start_ray(start: Start) -> None:
    temp = start.folder / "ray"
    temp.mkdir(exist_ok=True)
    env = {**RAY_ENV, "PYTHONPATH": str(HERE)}
    command: Command = [start.python, SCRIPT, "ray", *start.script, "--temp", str(temp)]
    start.processes.start(start.record.folder.name, command, {**NO_GPU, **env})


RIVALS: dict[str, tuple[str, Callable[[Start], None], str]] = {
    "torchft": ("torchft", start_torchft, "ddp_torchft"),
    "torchft_tuned": ("torchft", start_torchft_tuned, "ddp_torchft"),
    "nvrx_launcher": ("nvrx", start_launcher, "ddp_nvrx"),
    "nvrx_inprocess": ("nvrx", start_inprocess, "ddp_nvrx_inprocess"),
    "ray_train": ("ray", start_ray, "ddp_ray"),
}
"""Way -> environment, start of the job, port of the example."""
WAYS = ("elasticd", "torchrun", *RIVALS, "torchrun_defaults")


# ── measuring ───────────────────────────────────────────────────────────────────────────────────────────────────


def figures(found: list[Recovery]) -> Result:
    return {
        "kills": len(found),
        "full_world_s": round(statistics.median(r.seconds for r in found), 2),
        "full_world_each_s": [round(r.seconds, 2) for r in found],
        "any_step_s": round(statistics.median(r.first_s for r in found), 2),
        "any_step_each_s": [round(r.first_s, 2) for r in found],
        "steps_lost_each": [r.steps_lost for r in found],
    }


def elasticd(folder: pathlib.Path, processes: Processes, kills: int, rng: random.Random) -> Result:
    cluster = Cluster(folder, processes)
    with explained(cluster):
        found = recovery.ours(cluster, folder, kills, rng)
    processes.end()
    return figures(found)


def torchrun_defaults(folder: pathlib.Path, processes: Processes, plan: Plan, rng: random.Random) -> Result:
    if not plan.default_limit_s:
        raise Skipped("only in the full run")
    try:
        return figures(recovery.torchrun(folder, processes, 1, rng, {}, "defaults", plan.default_limit_s))
    except TooLate as late:
        return {"kills": 1, "late": str(late)}


def rival(way: str, start: Start, rng: random.Random, limit_s: float = 60.0) -> Result:
    """Raises Skipped if the job does not come to train."""
    found: list[Recovery] = []
    RIVALS[way][1](start)
    try:
        start.record.wait_step(15, WORLD, START_LIMIT_S)
        for _ in range(start.kills):
            found += recovery.kill_series(start.record, 1, rng, limit_s)
    except TooLate as late:
        if not start.record.commits:
            raise Skipped(f"does not train on this machine: {late}") from late
        return {**(figures(found) if found else {"kills": 0}), "late": str(late)}
    finally:
        start.processes.end()
    return figures(found)


def measure(way: str, envs: pathlib.Path, plan: Plan, args: argparse.Namespace, rng: random.Random) -> Result:
    try:
        with workplace(args.keep) as (folder, processes):
            if way == "elasticd":
                return {**elasticd(folder, processes, plan.ours, rng), **lines("ddp")}
            if way == "torchrun":
                stock = recovery.torchrun(folder, processes, plan.torchrun, rng, SHARE_OFF, "off", START_LIMIT_S)
                return {**figures(stock), **lines("ddp_plain")}
            if way == "torchrun_defaults":
                return torchrun_defaults(folder, processes, plan, rng)
            environment, _, port = RIVALS[way]
            python = python_of(envs, environment, make=not (args.quick or args.smoke))
            start = Start(python, processes, Record(folder / way), folder, plan.rivals)
            return {"version": version(python, environment), **rival(way, start, rng), **lines(port)}
    except Skipped as why:
        say(f"  skipped: {why}")
        return {"skipped": str(why)}


# ── the ports of the example ────────────────────────────────────────────────────────────────────────────────────


def code(path: pathlib.Path) -> list[str]:
    """Lines of a script, without its docstring, comments and empty lines."""
    text = path.read_text()
    first = ast.parse(text).body[0]
    return [line for line in text.splitlines()[first.end_lineno :] if line.strip() and line.strip()[0] != "#"]


def lines(port: str) -> Result:
    """How many lines of `examples/ddp_plain.py` the port of this name has new or changed, and how many it has not."""
    path = PORTS / f"{port}.py"
    differing = list(difflib.ndiff(code(PLAIN), code(path if path.exists() else PLAIN.parent / f"{port}.py")))
    return {f"lines_{what}": sum(d.startswith(sign) for d in differing) for what, sign in (("new", "+"), ("gone", "-"))}


def start_port(python: pathlib.Path, port: str, folder: pathlib.Path, processes: Processes) -> None:
    """With two workers."""
    script, programs, at = PORTS / f"{port}.py", python.parent, free_port()
    commands: list[tuple[Command, dict[str, str]]] = []
    if port == "ddp_torchft":
        commands.append(([programs / "torchft_lighthouse", "--bind", f"0.0.0.0:{at}", "--min_replicas", "2"], {}))
        for group in range(2):
            env = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{at}", "REPLICA_GROUP_ID": str(group)}
            commands.append(([programs / "torchrun", f"--master-port={free_port()}", script], env))
    elif port == "ddp_nvrx":
        commands.append(([programs / "ft_launcher", "--nproc-per-node=2", "--ft-enable-nic-monitor=False", script], {}))
    elif port == "ddp_nvrx_inprocess":
        for rank in range(2):
            env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            commands.append(([python, script], {**env, "MASTER_PORT": str(at)}))
    else:
        commands.append(([python, script], RAY_ENV))
    for number, (command, env) in enumerate(commands):
        processes.start(f"{port}-{number}", command, {**NO_GPU, "EPOCHS": "2", **env}, folder)


def run_port(python: pathlib.Path, port: str) -> Result:
    """Raises Skipped unless it trains to the end of its second epoch."""
    with workplace() as (folder, processes):
        start_port(python, port, folder, processes)

        def printed() -> str:
            return "".join(path.read_text(errors="replace") for path in folder.glob("*.log"))

        try:
            wait_for(lambda: "epoch 1  loss" in printed(), PORT_LIMIT_S, "the second epoch", every_s=0.5)
        except TooLate as late:
            raise Skipped(f"{port}.py: {late}: {printed()[-300:]}") from late
    return lines(port)


def ports(envs: pathlib.Path) -> Result:
    result: Result = {"elasticd": lines("ddp")}
    for environment, _, port in dict.fromkeys(RIVALS.values()):
        say(f"{port}:")
        try:
            result[port] = run_port(python_of(envs, environment, make=True), port)
        except Skipped as why:
            result[port] = {"skipped": str(why)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under two minutes: elasticd, torchrun, what is installed")
    parser.add_argument("--smoke", action="store_true", help=SMOKE)
    parser.add_argument("--envs", type=pathlib.Path, help="environments of the others; without it, a temporary folder")
    parser.add_argument("--only", choices=WAYS, nargs="+", default=WAYS)
    parser.add_argument("--ports", action="store_true", help="run the ports of the example, and count their lines")
    parser.add_argument("--kills", type=int, help="under each of the others")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    args = parser.parse_args()
    plan = SMALLEST if args.smoke else QUICK if args.quick else FULL
    plan = replace(plan, rivals=args.kills or plan.rivals)
    print(machine())
    with tempfile.TemporaryDirectory(prefix="elastic-envs-") as temporary:
        envs = args.envs or pathlib.Path(temporary)
        result: Result = ports(envs) if args.ports else {}
        for way in () if args.ports else args.only:
            say(f"{way}:")
            load = os.getloadavg()[0]  # by others: it differs from way to way on a machine that others use
            result[way] = {**measure(way, envs, plan, args, random.Random(args.seed)), "load": round(load, 1)}
            print(f"{way}: {json.dumps(result[way])}", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
