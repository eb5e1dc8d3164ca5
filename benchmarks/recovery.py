"""A worker is killed: how long until every rank of the full world has committed a new step, and what is lost.

2 nodes × 2 workers on this machine, gloo, a model of about 10 MB; SIGKILL of a random rank at a random step. Beside it,
in the same run, stock torchrun (two agents, c10d) resuming from a checkpoint taken every 20 steps: with
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which is what makes it recover reliably, and as it comes. And the step time
without any failure: both jobs run at the same time and train in turns of 2.8 s, the other one's processes stopped, as a
shared machine drifts by several percent within seconds. Both elasticds and etcd run throughout. `steady_ratio` is the
ratio of the two medians over all steps, `steady_mean_ratio` that of the means, where a step with a snapshot
counts with all its time. `job.ddp` lays out the buckets of the gradients in another way than stock DDP: with
`--same-buckets` both have its layout.

    python benchmarks/recovery.py [--quick] [--seed N]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from _harness import (
    BIN,
    HERE,
    SMOKE,
    Node,
    Processes,
    Record,
    Recovery,
    TooLate,
    free_port,
    kill,
    kill_and_measure,
    machine,
    spread,
    wait_for,
    workplace,
)

WORLD = 4
SCRIPT = HERE / "_train.py"
SETTLE_S, TURN_S = 0.4, 2.4
"""The first part of each turn does not count: the caches still hold the data of the other job. The turns are long, as
a snapshot, which goes by the time of day, is overdue at the beginning of each; but stopped agents must keep their
leases."""
SAME_BUCKETS = ("--bucket-cap-mb", "25")
"""As `bucket_options` in elastic/worker/comm/ddp_models.py decides for this model."""
RESAMPLES = 200
"""For the standard error of the ratio (bootstrap)."""
SKIPPED = 30
"""Steps of each job before its first turn."""
SHARE_OFF = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(frozen=True, slots=True)
class Plan:
    kills: int
    torchrun_kills: int
    default_tries: int
    default_limit_s: float
    rounds: int
    """Of the steady-state comparison, each with fresh processes."""
    turns: int
    """Of each of the two jobs in a round."""
    stock: tuple[str, ...] = ()
    """Arguments of torchrun's script in the steady-state comparison."""


FULL = Plan(kills=30, torchrun_kills=6, default_tries=2, default_limit_s=60.0, rounds=6, turns=11)
QUICK = Plan(kills=6, torchrun_kills=1, default_tries=1, default_limit_s=10.0, rounds=1, turns=4)
SMALLEST = Plan(kills=1, torchrun_kills=1, default_tries=0, default_limit_s=0.0, rounds=1, turns=2)


class Cluster:
    """Two nodes of two slots."""

    def __init__(self, folder: pathlib.Path, processes: Processes, forming: str = "new") -> None:
        self._folder = folder
        self._forming = forming
        self.a = Node(folder, processes, "a", slots=2)
        self.b = Node(folder, processes, "b", slots=2, etcd=self.a.etcd)
        self.a.start()
        self.b.start()

    def submit(self, name: str, record: Record, *args: str, spare_nodes: int = 0) -> None:
        job = self._folder / f"{name}.toml"
        words = json.dumps(["--record", str(record.folder), *args])
        job.write_text(
            f'name = "{name}"\nscript = "{SCRIPT}"\nargs = {words}\nnodes = "2:2"\nworkers_per_node = 2\n'
            f'spare_nodes = {spare_nodes}\nworkdir = "{self._folder}"\nforming = "{self._forming}"\n'
            "[restarts]\nbudget = 1000\n"
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
    agent: list[str | os.PathLike[str]] = [
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


@dataclass
class Contender:
    """A job that trains in turns with another one: between its turns its processes are stopped."""

    name: str
    record: Record
    pids: list[int]
    """In the order of their start: agents before their workers."""
    tags: list[str] = field(default_factory=list)
    """Of processes that end with the round."""
    turns: list[list[float]] = field(default_factory=list)
    """Step times of each turn in seconds."""

    def go_on(self) -> None:
        for pid in reversed(self.pids):
            kill(pid, signal.SIGCONT)

    def stand_still(self) -> None:
        for pid in self.pids:
            kill(pid, signal.SIGSTOP)

    def take_turn(self) -> None:
        self.go_on()
        time.sleep(SETTLE_S)
        since_s = time.monotonic()
        time.sleep(TURN_S)
        until_s = time.monotonic()
        self.stand_still()
        self.record.update()
        at_s = [c.at_s for c in self.record.commits if c.rank == 0 and since_s <= c.at_s <= until_s]
        self.turns.append([b - a for a, b in itertools.pairwise(at_s)])


Pair = tuple[list[float], list[float]]
"""Step times in seconds of one turn of ours, and of the turn of torchrun beside it."""


def steady(cluster: Cluster, folder: pathlib.Path, processes: Processes, plan: Plan) -> list[list[Pair]]:
    """The turns of each round of fresh processes. Agents are stopped between the turns of their job, as
    its workers are. Raises RuntimeError if that has disturbed either job: its steps would show it."""
    rounds = []
    for number in range(plan.rounds):
        both = [_under_elasticd(cluster, folder, processes, number), _under_torchrun(folder, processes, number, plan)]
        both[1].stand_still()
        both[0].stand_still()
        order = both if number % 2 == 0 else both[::-1]
        for _ in range(plan.turns):
            for contender in order:
                contender.take_turn()
        for contender in both:
            contender.go_on()
        cluster.stop(f"steady{number}")
        for contender in both:
            for tag in contender.tags:
                processes.end(tag)
            if not {c.pid for c in contender.record.commits} <= set(contender.pids):
                raise RuntimeError(f"{contender.name} was disturbed: workers were started anew")
        if incidents := cluster.a.json("incidents", f"steady{number}")["incidents"]:
            raise RuntimeError(f"steady{number} was disturbed: {incidents}")
        rounds.append(list(zip(both[0].turns, both[1].turns, strict=True)))
        medians_ms = [statistics.median(itertools.chain(*contender.turns)) * 1e3 for contender in both]
        say(f"  round {number + 1}: elasticd {medians_ms[0]:.2f} ms a step, torchrun {medians_ms[1]:.2f} ms")
    return rounds


def _under_elasticd(cluster: Cluster, folder: pathlib.Path, processes: Processes, number: int) -> Contender:
    before, record = set(processes.pids()), Record(folder / f"steady-ours{number}")
    cluster.submit(f"steady{number}", record)
    record.wait_step(SKIPPED, WORLD, 90.0)
    return Contender("ours", record, sorted(set(processes.pids()) - before))


def _under_torchrun(folder: pathlib.Path, processes: Processes, number: int, plan: Plan) -> Contender:
    record = Record(folder / f"steady-torchrun{number}")
    tags = start_torchrun(processes, record, SHARE_OFF, *plan.stock)
    record.wait_step(SKIPPED, WORLD, 90.0)
    return Contender("torchrun", record, sorted(pid for tag in tags for pid in processes.pids(tag)), tags)


def report_steady(rounds: list[list[Pair]], rng: random.Random, result: dict[str, Any]) -> None:
    pairs = [pair for one in rounds for pair in one]
    for key, middle in (("steady_ratio", statistics.median), ("steady_mean_ratio", statistics.mean)):
        # By rounds, then turns within them: some of what differs lasts as long as the processes of a round.
        drawn = [
            _ratio(
                [pair for one in rng.choices(rounds, k=len(rounds)) for pair in rng.choices(one, k=len(one))], middle
            )[2]
            for _ in range(RESAMPLES)
        ]
        ours_s, torchrun_s, ratio = _ratio(pairs, middle)
        print(f"{middle.__name__} of the steps: elasticd {ours_s * 1e3:.2f} ms, torchrun {torchrun_s * 1e3:.2f} ms; "
              f"ratio {ratio:.4f}, standard error {statistics.stdev(drawn):.4f}; "
              f"by round {', '.join(f'{_ratio(one, middle)[2]:.3f}' for one in rounds)}")  # fmt: skip
        result[key] = round(ratio, 4)
        result[f"{key}_error"] = round(statistics.stdev(drawn), 4)


def _ratio(pairs: Sequence[Pair], middle: Callable[[Iterable[float]], float]) -> tuple[float, float, float]:
    """(middle step time of ours, of torchrun, ratio), over all steps of these turns."""
    ours_s, torchrun_s = (middle(itertools.chain(*turns)) for turns in zip(*pairs, strict=True))
    return ours_s, torchrun_s, ours_s / torchrun_s


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
    parser.add_argument("--smoke", action="store_true", help=SMOKE)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=["ours", "torchrun", "steady"], help="one part of it")
    parser.add_argument("--same-buckets", action="store_true", help="steady: stock DDP with the buckets of job.ddp")
    parser.add_argument("--forming", default="new", help="the job's setting; 'reconfigure' needs torch 2.14 or newer")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    args = parser.parse_args()
    plan = SMALLEST if args.smoke else QUICK if args.quick else FULL
    if args.same_buckets:
        plan = replace(plan, stock=SAME_BUCKETS)
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
            report_steady(rounds, rng, result)
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
