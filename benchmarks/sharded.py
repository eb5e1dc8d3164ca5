"""A rank of a sharded job is killed: how long until every rank has committed a new step, and how many steps are lost.

2 nodes × 2 workers on this machine, gloo: FSDP2 over 4 ranks, HSDP 2 × 2, FSDP 2 × TP 2; SIGKILL of a random rank at
a random step; under FSDP2 of all processes of a node, where a third node is spare. Beside it, in the same run, FSDP2
under stock torchrun, resuming from torch's distributed checkpoint (DCP) taken every 20 steps; and the step time of both
without a failure, in turns (see recovery.py).
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
    cluster: recovery.Cluster, folder: pathlib.Path, processes: Processes, kills: int, rng: random.Random
) -> tuple[list[Recovery], list[float]]:
    """All processes of a node are killed at once; a spare node takes its place. Node a has etcd, and stays.

    (recoveries, seconds of each from the spare node's being there until all ranks step)."""
    spare = Node(folder, processes, "c", slots=2, etcd=cluster.a.etcd)
    spare.start()
    record = Record(folder / "nodes")
    cluster.submit("nodes", record, "--mesh", "fsdp")
    found: list[Recovery] = []
    try:
        record.wait_step(15, WORLD, 90.0)
        while len(found) < kills:
            reached = max(c.step for c in record.newest().values())
            record.wait_step(reached + rng.randint(20, 40), WORLD, 60.0)
            trees = {node: processes.pids(node.tag) for node in (cluster.a, cluster.b, spare)}

            def strike(pid: int, trees: dict[Node, list[int]] = trees) -> None:
                for each in next(pids for pids in trees.values() if pid in pids):
                    kill(each)

            found.append(one := kill_and_measure(record, WORLD, rng, 60.0, strike=strike, spared=trees[cluster.a]))
            say(f"  node of rank {one.rank} at step {one.step}: {one.seconds:.3f} s, {one.steps_lost} lost")
            lost = next(node for node in (cluster.b, spare) if not set(trees[node]) & set(processes.pids(node.tag)))
            processes.end(lost.tag)
            lost.start()
        timelines = [each["timeline_s"] for each in cluster.a.json("incidents", "nodes")["incidents"]]
        return found, [at_s["stepping"] - at_s["published"] for at_s in timelines if "stepping" in at_s]
    finally:
        cluster.stop("nodes")


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
        lost_nodes, formed_s = nodes(cluster, folder, processes, 1 if plan.kills < 10 else plan.kills // 2, rng)
        seconds, lost = [one.seconds for one in lost_nodes], [one.steps_lost for one in lost_nodes]
        print(f"node of fsdp: {spread(seconds)} s, steps lost {spread(lost, 0)}; once a spare one is there")
        print(f"  {spread(formed_s)} s")
        result["node_kill_s"], result["node_lost"] = round(statistics.median(seconds), 3), sum(lost)
        result["node_form_s"] = round(statistics.median(formed_s), 3)
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
