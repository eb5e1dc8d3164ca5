"""The part of benchmarks/faults.py in which faults of all kinds strike at random, also during recoveries."""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import time
from collections.abc import Iterator

import psutil
from _faults_run import RESTARTS, NotStruck, Plan, Result, Run, cluster_of, now_s, say, stopped
from chaos import random_faults
from chaos.harness import Node
from support import machine as able
from support.procs import alive

PACE_S = 0.03
EVERY_S = 5.0
"""Mean time from one fault to the next."""


class Striker(random_faults.Chaos):
    """Finds living victims without reading the whole history."""

    def worker(self, node: Node) -> int:
        path = node.folder / "state" / "jobs" / self.job.name / "agent" / "status.json"
        try:
            pids = [row["pid"] for row in json.loads(path.read_text())["ranks"] if row["pid"]]
        except FileNotFoundError:
            pids = []
        if not pids or not alive(pids[0]) or stopped(pids[0]):
            raise NotStruck(f"no worker on {node.name} now")
        return int(pids[0])

    def strike(self, kind: str, node: Node, fault: random_faults.Fault) -> None:
        """Raises NotStruck when there is nothing to strike just now."""
        if kind in ("agent SIGKILL", "zygote and worker SIGKILL"):
            try:
                there = alive(node.agent_pid(self.job.name)) and node.children(self.job.name)
            except (OSError, KeyError, psutil.NoSuchProcess):
                there = False
            if not there:
                raise NotStruck(f"no agent on {node.name} now")
        fault(self, node)


@contextlib.contextmanager
def four_nodes(plan: Plan, dice: random.Random) -> Iterator[Run]:
    timeouts = {"lease_ttl_s": 2.5, "lease_renew_s": 0.6}
    with cluster_of(4, 1, network=not able.no_netns(), timeouts=timeouts) as cluster:
        # No step is shorter than the pace: the job cannot be over before the faults are.
        job = cluster.submit(
            nodes="2:4", steps=int(plan.chaos_s / PACE_S) + 300, pace_s=PACE_S,
            hang={"floor_s": 1.0, "ceiling_s": 15.0}, restarts=RESTARTS,
        )  # fmt: skip
        yield Run(cluster, job, 4, dice)


def random_chaos(run: Run, plan: Plan) -> Result:
    """All faults, drawn at random, also while others are being recovered from; then the job goes on to its end."""
    calm_s = statistics.median(run.undisturbed(4.0))
    kinds = {**random_faults.ANYWHERE, **(random_faults.ON_A_NETWORK if run.cluster.hosts else {})}
    striker = Striker(run.cluster, run.job, run.dice)
    began_s = now_s()
    first = run.tail.step()
    struck: dict[str, int] = {}
    next_s = began_s + run.dice.uniform(0.2, EVERY_S)
    while next_s < began_s + plan.chaos_s:
        time.sleep(max(0.0, next_s - now_s()))
        kind, node = run.dice.choice(sorted(kinds)), run.dice.choice(run.cluster.nodes)
        try:
            striker.strike(kind, node, kinds[kind])
        except NotStruck as why:
            say(f"  {now_s() - began_s:6.1f} s: {kind}: {why}; another")
            time.sleep(0.1)
            continue
        struck[kind] = struck.get(kind, 0) + 1
        say(f"  {now_s() - began_s:6.1f} s: {kind} on {node.name}")
        next_s = max(now_s(), next_s + run.dice.uniform(0.2, 2 * EVERY_S - 0.2))
    time.sleep(max(0.0, began_s + plan.chaos_s - now_s()))
    if not struck:
        raise NotStruck("no fault in the time of the chaos")
    span_s = now_s() - began_s
    steps = run.tail.read().step() - first
    run.job.wait_over(deadline_s=120.0 + 2 * plan.chaos_s)
    redone = finished(run, sum(struck.values()))
    calm_s = min(calm_s, statistics.median(run.gaps_s(began_s, began_s + span_s)))
    goodput = min(1.0, steps * calm_s / span_s)
    count = sum(struck.values())
    print(f"random chaos: {count} faults in {span_s:.0f} s, one every {span_s / count:.1f} s, of {len(struck)} kinds; "
          f"{steps} steps of {calm_s * 1e3:.0f} ms: goodput {goodput:.1%}; {redone} steps done again; "
          "the job finished, its history is right")  # fmt: skip
    return {"chaos_goodput": goodput, "chaos_faults": count}


def finished(run: Run, faults: int) -> int:
    """Judge the history of the whole job; steps done again. Raises AssertionError when it is wrong."""
    run.job.check(lost=faults, frozen=[node.name for node in run.cluster.nodes])
    return run.lost()
