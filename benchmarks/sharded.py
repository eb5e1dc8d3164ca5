"""A rank of a sharded job is killed: how long until every rank has committed a new step, and how many steps are lost.

2 nodes × 2 workers on this machine, gloo: FSDP2 over 4 ranks, HSDP 2 × 2, FSDP 2 × TP 2; SIGKILL of a random rank at
a random step; under FSDP2 also of all processes of a node, where the job holds a third one as a spare, and where that
is idle. Beside it, in the same run, FSDP2 under stock torchrun, resuming from torch's distributed checkpoint (DCP)
taken every 20 steps; and the step time of both without a failure, in turns (see recovery.py).
`fsdp_lost_over_snapshot_steps`: steps lost in the mean, over the steps between two snapshots in memory.

    python benchmarks/sharded.py [--quick] [--seed N]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import statistics
from dataclasses import replace
from typing import Any

import recovery
from _harness import (
    HERE,
    SMOKE,
    Node,
    Processes,
    Record,
    Recovery,
    kill,
    kill_and_measure,
    machine,
    spread,
    wait_for,
    workplace,
)
from recovery import WORLD, say

recovery.SCRIPT = HERE / "_sharded_train.py"
SNAPSHOT_S = 1.0
"""As elasticd takes them where a copy is cheap."""


FULL = replace(recovery.FULL, kills=20, torchrun_kills=5, rounds=4, turns=8)
QUICK = replace(recovery.QUICK, kills=3, turns=3)


def series(
    cluster: recovery.Cluster, folder: pathlib.Path, mesh: str, kills: int, rng: random.Random
) -> tuple[list[Recovery], float]:
    """(recoveries, seconds of a step)."""
    record = Record(folder / mesh)
    cluster.submit(mesh, record, "--mesh", mesh)
    found = []
    try:
        record.wait_step(15, WORLD, 90.0)
        for number in range(kills):
            reached = max(c.step for c in record.newest().values())
            record.wait_step(reached + rng.randint(5, 5 + 8 * min(4, kills)), WORLD, 60.0)
            found.append(one := kill_and_measure(record, WORLD, rng, 30.0))
            say(
                f"  {mesh} {number + 1}: rank {one.rank} at step {one.step}: {one.seconds:.3f} s, {one.steps_lost} lost"
            )
        return found, statistics.median(record.step_times_s(skip=15))
    finally:
        cluster.stop(mesh)


def nodes(
    cluster: recovery.Cluster, spare: Node, folder: pathlib.Path, processes: Processes, kills: int, held: bool,
    rng: random.Random,
) -> list[Recovery]:  # fmt: skip
    """All processes of a node are killed at once; another one takes its place. Node a has etcd, and stays. `held`: the
    job holds it ready (`spare_nodes`); else it is idle, and an agent and workers are started there."""
    name = "held" if held else "idle"
    record = Record(folder / name)
    cluster.submit(name, record, "--mesh", "fsdp", spare_nodes=int(held))
    found: list[Recovery] = []
    try:
        record.wait_step(15, WORLD, 90.0)
        while len(found) < kills:
            reached = max(c.step for c in record.newest().values())
            record.wait_step(reached + rng.randint(20, 40), WORLD, 60.0)
            wait_for(lambda: not held or _ready(cluster, name) == 3, 60.0, "the spare node is ready", every_s=0.2)
            trees = {node: processes.pids(node.tag) for node in (cluster.a, cluster.b, spare)}

            def strike(pid: int, trees: dict[Node, list[int]] = trees) -> None:
                for each in next(pids for pids in trees.values() if pid in pids):
                    kill(each)

            found.append(one := kill_and_measure(record, WORLD, rng, 60.0, strike=strike, spared=trees[cluster.a]))
            say(f"  {name} node for that of rank {one.rank}: {one.seconds:.3f} s, {one.steps_lost} lost")
            lost = next(node for node in (cluster.b, spare) if not set(trees[node]) & set(processes.pids(node.tag)))
            processes.end(lost.tag)
            lost.start()
        return found
    finally:
        cluster.stop(name)


def _ready(cluster: recovery.Cluster, name: str) -> int:
    """Nodes of the job whose workers are all ready."""
    members = cluster.a.json("status", name)["member_nodes"].values()
    return sum(len(member["ready"]) == member["slots"] for member in members)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    parser.add_argument("--smoke", action="store_true", help=SMOKE)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    args = parser.parse_args()
    plan = recovery.SMALLEST if args.smoke else QUICK if args.quick else FULL
    rng = random.Random(args.seed)
    print(f"machine: {machine()}; seed {args.seed}")
    result: dict[str, Any] = {}
    with workplace(args.keep) as (folder, processes):
        cluster = recovery.Cluster(folder, processes)
        for mesh in ("fsdp", "hsdp", "tp"):
            found, step_s = series(cluster, folder, mesh, plan.kills, rng)
            seconds, lost = [one.seconds for one in found], [one.steps_lost for one in found]
            print(f"{mesh}: {spread(seconds)} s, steps lost {spread(lost, 0)}, a step takes {step_s * 1e3:.0f} ms")
            result[f"{mesh}_kill_s"] = round(statistics.median(seconds), 3)
            result[f"{mesh}_lost"] = sum(lost)
            if mesh != "hsdp":
                result[f"{mesh}_lost_over_snapshot_steps"] = round(statistics.mean(lost) * step_s / SNAPSHOT_S, 2)
        spare = Node(folder, processes, "c", slots=2, etcd=cluster.a.etcd)
        spare.start()
        for held, key, kills in ((True, "node", plan.kills), (False, "idle_node", plan.kills // 4)):
            gone = nodes(cluster, spare, folder, processes, max(1, kills), held, rng)
            seconds, lost = [one.seconds for one in gone], [one.steps_lost for one in gone]
            print(f"{key} of fsdp: {spread(seconds)} s, steps lost {spread(lost, 0)}")
            result[f"{key}_kill_s"], result[f"{key}_lost"] = round(statistics.median(seconds), 3), sum(lost)
        say("steady state, in turn:")
        recovery.report_steady(recovery.steady(cluster, folder, processes, plan), rng, result)
        say("torchrun and DCP:")
        stock = recovery.torchrun(folder, processes, plan.torchrun_kills, rng, recovery.SHARE_OFF, "dcp", 90.0)
    print(f"torchrun and DCP: {spread([o.seconds for o in stock])} s, lost {spread([o.steps_lost for o in stock], 0)}")
    result["torchrun_s"] = round(statistics.median(one.seconds for one in stock), 3)
    result["torchrun_lost"] = sum(one.steps_lost for one in stock)
    result["torchrun_ratio"] = round(result["torchrun_s"] / result["fsdp_kill_s"], 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
