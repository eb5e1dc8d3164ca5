"""A worker is killed: how long until every rank of the full world has committed a new step, and what is lost.

2 nodes × 2 workers on this machine, gloo, a model of about 10 MB; SIGKILL of a random rank at a random step. Beside it,
in the same run, stock torchrun (two agents, c10d) resuming from a checkpoint taken every 20 steps: with
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which is what makes it recover reliably, and as it comes. And the step time
without any failure, runs of both in turn: `steady_ratio` is the median of the rounds' ratios. How fast a run is lasts
as long as its processes, and a shared machine drifts by more within minutes, so the rounds are many and short.

    python benchmarks/recovery.py [--quick] [--seed N]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from _harness import (
    BIN,
    HERE,
    Node,
    Processes,
    Record,
    Recovery,
    TooLate,
    free_port,
    kill_and_measure,
    machine,
    spread,
    wait_for,
    workplace,
)

WORLD = 4
SCRIPT = HERE / "_train.py"
SHARE_OFF = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(frozen=True, slots=True)
class Plan:
    kills: int
    torchrun_kills: int
    default_tries: int
    default_limit_s: float
    rounds: int
    """Of the steady-state comparison, each one run of ours and one of torchrun."""
    steady_steps: int


FULL = Plan(kills=30, torchrun_kills=6, default_tries=2, default_limit_s=60.0, rounds=13, steady_steps=160)
QUICK = Plan(kills=6, torchrun_kills=1, default_tries=1, default_limit_s=10.0, rounds=2, steady_steps=60)


class Cluster:
    """Two nodes of two slots."""

    def __init__(self, folder: pathlib.Path, processes: Processes, forming: str = "new") -> None:
        self._folder = folder
        self._forming = forming
        self.a = Node(folder, processes, "a", slots=2)
        self.b = Node(folder, processes, "b", slots=2, etcd=self.a.etcd)
        self.a.start()
        self.b.start()

    def submit(self, name: str, record: Record, *args: str) -> None:
        job = self._folder / f"{name}.toml"
        words = json.dumps(["--record", str(record.folder), *args])
        job.write_text(
            f'name = "{name}"\nscript = "{SCRIPT}"\nargs = {words}\nnodes = "2:2"\nworkers_per_node = 2\n'
            f'workdir = "{self._folder}"\nforming = "{self._forming}"\n[restarts]\nbudget = 1000\n'
        )
        self.a.ctl("submit", job)

    def stop(self, name: str) -> None:
        self.a.ctl("stop", name, check=False)
        wait_for(lambda: self.phase(name) in ("stopped", "succeeded", "failed"), 30.0, f"{name} is over", every_s=0.1)

    def phase(self, name: str) -> str:
        jobs = self.a.json("jobs")["jobs"]
        return str(next(job["phase"] for job in jobs if job["job"] == name))


def ours(cluster: Cluster, folder: pathlib.Path, kills: int, rng: random.Random) -> list[Recovery]:
    record = Record(folder / "ours")
    cluster.submit("kills", record)
    found = kill_series(record, kills, rng, limit_s=30.0)
    incidents = [i for i in cluster.a.json("incidents", "kills")["incidents"] if not i["open"]][-kills:]
    seen_s = [i["wall_s"] - recovery.killed_wall_s for i, recovery in zip(incidents, found, strict=True)]
    say(f"  seen by the leader: {spread(seen_s)} s after the kill; then, after that:")
    for phase, times_s in phases(incidents).items():
        say(f"  {phase}: {spread(times_s)} s")
    cluster.stop("kills")
    return found


def phases(incidents: Sequence[Any]) -> dict[str, list[float]]:
    """phase of recovery -> seconds since detection, of each incident."""
    found: dict[str, list[float]] = {}
    for incident in incidents:
        for phase, at_s in sorted(incident["timeline_s"].items(), key=lambda item: float(item[1])):
            found.setdefault(phase, []).append(at_s)
    return found


def kill_series(record: Record, kills: int, rng: random.Random, limit_s: float) -> list[Recovery]:
    record.wait_step(15, WORLD, 90.0)
    found = []
    for number in range(kills):
        reached = max(c.step for c in record.newest().values())
        record.wait_step(reached + rng.randint(5, 40), WORLD, 60.0)
        found.append(recovery := kill_and_measure(record, WORLD, rng, limit_s))
        say(f"  kill {number + 1}: rank {recovery.rank} at step {recovery.step}: {recovery.seconds:.3f} s, "
            f"{recovery.steps_lost} steps lost")  # fmt: skip
    return found


def start_torchrun(processes: Processes, record: Record, env: dict[str, str], *args: str) -> list[str]:
    """Two agents on this machine; returns their tags."""
    port = free_port()
    agent = [
        BIN / "torchrun", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--max-restarts=100",
        f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={record.folder.name}",
        SCRIPT, "--stock", "--record", record.folder, *args,
    ]  # fmt: skip
    return [processes.start(f"{record.folder.name}-agent{i}", agent, env) for i in range(2)]


def torchrun(
    folder: pathlib.Path,
    processes: Processes,
    kills: int,
    rng: random.Random,
    env: dict[str, str],
    name: str,
    limit_s: float,
) -> list[Recovery]:
    """Raises TooLate when it does not recover within `limit_s`."""
    record = Record(folder / name)
    tags = start_torchrun(processes, record, env, "--checkpoint", str(folder / f"{name}.pt"))
    try:
        return kill_series(record, kills, rng, limit_s)
    finally:
        for tag in tags:
            processes.end(tag)


def torchrun_as_it_comes(
    folder: pathlib.Path, processes: Processes, plan: Plan, rng: random.Random
) -> list[float | None]:
    """Seconds of one recovery per fresh start; None where there was none within the limit."""
    found: list[float | None] = []
    for number in range(plan.default_tries):
        try:
            name = f"default{number}"
            found += [r.seconds for r in torchrun(folder, processes, 1, rng, {}, name, plan.default_limit_s)]
        except TooLate as late:
            say(f"  {late}")
            found.append(None)
    return found


def steady(cluster: Cluster, folder: pathlib.Path, processes: Processes, plan: Plan) -> list[tuple[float, float]]:
    """The median step time in seconds of each round: ours, torchrun's."""
    mine: list[float] = []
    theirs: list[float] = []
    skip = plan.steady_steps // 4
    for number in range(plan.rounds):
        for who in (("ours", "torchrun"), ("torchrun", "ours"))[number % 2]:
            record = Record(folder / f"steady-{who}{number}")
            steps = ["--steps", str(plan.steady_steps)]
            tags = []
            if who == "ours":
                cluster.submit(f"steady{number}", record, *steps)
            else:
                tags = start_torchrun(processes, record, SHARE_OFF, *steps)
            record.wait_step(plan.steady_steps, WORLD, 90.0)
            if who == "ours":
                cluster.stop(f"steady{number}")
            for tag in tags:
                processes.end(tag)
            step_s = statistics.median(record.step_times_s(skip))
            (mine if who == "ours" else theirs).append(step_s)
            say(f"  {who}: {step_s * 1e3:.2f} ms a step")
    return list(zip(mine, theirs, strict=True))


@contextlib.contextmanager
def explained(cluster: Cluster) -> Iterator[None]:
    """What the daemon says of it, when something does not happen in its time."""
    try:
        yield
    except TooLate:
        say(cluster.a.ctl("status", check=False).stdout)
        raise


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=["ours", "torchrun", "steady"], help="one part of it")
    parser.add_argument("--forming", default="new", help="the job's setting; 'reconfigure' needs torch 2.14 or newer")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    args = parser.parse_args()
    plan = QUICK if args.quick else FULL
    rng = random.Random(args.seed)
    print(f"machine: {machine()}; seed {args.seed}")
    result: dict[str, Any] = {}
    mine: list[Recovery] = []
    stock: list[Recovery] = []
    with workplace(args.keep) as (folder, processes):
        if args.only != "torchrun":
            cluster = Cluster(folder, processes, args.forming)
        if args.only in (None, "ours"):
            say("elasticd, 2 nodes × 2 workers:")
            with explained(cluster):
                mine = ours(cluster, folder, plan.kills, rng)
        if args.only in (None, "steady"):
            say("steady state, in turn:")
            with explained(cluster):
                rounds = steady(cluster, folder, processes, plan)
            middle_ms = [statistics.median(steps) * 1e3 for steps in zip(*rounds, strict=True)]
            print(f"median step: elasticd {middle_ms[0]:.2f} ms, torchrun {middle_ms[1]:.2f} ms; "
                  f"ratio {spread([a / b for a, b in rounds])}")  # fmt: skip
            result["steady_ratio"] = round(statistics.median(a / b for a, b in rounds), 4)
        if args.only in (None, "torchrun"):
            say("torchrun, shared store off:")
            stock = torchrun(folder, processes, plan.torchrun_kills, rng, SHARE_OFF, "off", 90.0)
            say("torchrun as it comes:")
            tries = torchrun_as_it_comes(folder, processes, plan, rng)
            good = [t for t in tries if t is not None]
            print(
                f"torchrun as it comes: {len(good)} of {len(tries)} recovered within {plan.default_limit_s:g} s: {good}"
            )
            print(f"torchrun, shared store off: {spread([r.seconds for r in stock])} s, "
                  f"steps lost {spread([r.steps_lost for r in stock], 0)}")  # fmt: skip
            result["torchrun_median_s"] = round(statistics.median(r.seconds for r in stock), 3)
    if mine:
        seconds = [r.seconds for r in mine]
        print(f"elasticd: {spread(seconds)} s; first rank {spread([r.first_s for r in mine])} s")
        result["kill_median_s"] = round(statistics.median(seconds), 3)
        result["kill_seconds"] = [round(s, 3) for s in seconds]
        result["kill_worst_s"] = round(max(seconds), 3)
        result["steps_lost"] = sum(r.steps_lost for r in mine)
    if mine and stock:
        result["torchrun_ratio"] = round(result["torchrun_median_s"] / result["kill_median_s"], 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
