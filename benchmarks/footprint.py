"""What looking at a large cluster costs: CPU of `elasticctl status`, memory of elasticd, with the records of N nodes.

    python benchmarks/footprint.py [--nodes 1000] [--runs 10] [--quick]

One real elasticd with a real etcd that holds N - 1 further nodes, and a job with a member on each of them. CPU is user
and system time of the child, as getrusage counts it; memory is VmRSS. Nothing else should run: CPU time grows on cores
that are shared.

And what a job costs beside its workers: the memory of elasticd, agent and zygote for one idle job of two workers, as
proportional set size (Pss in /proc/PID/smaps_rollup, in MiB). It shrinks where other processes of the same installation
run.

Last line: {"nodes", "runs", "status_cpu_s", "status_cpu_s_max", "status_few_cpu_s", "python_cpu_s",
"elasticd_rss_mb", "elasticd_few_rss_mb", "idle_pss_mb", "idle_pss_daemon_mb", "idle_pss_agent_mb",
"idle_pss_zygote_mb"}. `few`: before the records were written; the times are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from _harness import SMOKE  # noqa: E402
from _overhead_node import IDLE_S, idle_pss_mb  # noqa: E402
from support.daemons import Node, Nodes  # noqa: E402
from support.etcd_server import EtcdServer  # noqa: E402
from support.wait import eventually  # noqa: E402

import elastic  # noqa: E402
from elastic.contract.job.spec import JobSpec  # noqa: E402
from elastic.contract.keys import ClusterKeys  # noqa: E402
from elastic.contract.records.job_records import (  # noqa: E402
    GenerationNode,
    GenerationRecord,
    JobState,
    MemberRecord,
    Phase,
    ProgressRecord,
    RankRow,
    Record,
    SpecRecord,
    encode,
)
from elastic.contract.records.node_records import NodeRecord  # noqa: E402
from elastic.etcd.client import Etcd  # noqa: E402

SETTLE_S = 5.0
"""After the records have arrived."""


def records(keys: ClusterKeys, count: int) -> dict[str, Record]:
    """Of `count` nodes of 8 slots, and of one job that runs on all of them."""
    now_s = time.time()
    names = [f"gpu-node-{i:04}" for i in range(count)]
    job = keys.job("pretrain")
    spec = JobSpec(name="pretrain", script="/data/train.py", workdir="/", nodes=f"{count}:{count}", workers_per_node=8)
    places, found = [], dict[str, Record]()
    for i, name in enumerate(names):
        address = f"10.{i // 65536}.{i // 256 % 256}.{i % 256}"
        slots = tuple(range(8))
        places.append(GenerationNode(node=name, incarnation=f"{i:032x}", host=address, slots=slots, port=29400))
        found[keys.nodes + name] = NodeRecord(
            node=name, hostname=name, address=address, slots=8, gpus=8, version=elastic.__version__, pid=1234,
            started_wall_s=now_s,
        )  # fmt: skip
        found[job.members + name] = MemberRecord(
            node=name, incarnation=f"{i:032x}", host=address, port=29400, slots=8, ready=slots
        )
    ranks = tuple(
        RankRow(rank=r, node=names[0], slot=r, pid=100 + r, phase="computing", step=1000, incarnation=0)
        for r in range(8)
    )
    found[job.generation] = GenerationRecord(
        number=1, nodes=tuple(places), store_host=places[0].host, store_port=29400, leader=names[0], why="first"
    )
    found[job.progress] = ProgressRecord(
        generation=1, world_size=8 * count, step=1000, steps_per_s=2.5, loss=1.5, wall_s=now_s, ranks=ranks
    )
    found[job.state] = JobState(phase=Phase.RUNNING)
    found[job.spec] = SpecRecord(spec=spec, submitted_wall_s=now_s, submitted_by="benchmark", uid=os.getuid())
    return found


def write(etcd: Etcd, found: dict[str, Record]) -> None:
    for key, record in found.items():
        etcd.put(key, encode(record))


def cpu_s(argv: Sequence[str], runs: int) -> list[float]:
    """CPU of each run in seconds."""
    found = []
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return found


def rss_mb(pid: int) -> float:
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024 / 1e6


def measure(nodes: Nodes, server: EtcdServer, count: int, runs: int) -> dict[str, float]:
    node = nodes.add("here", etcd__endpoints=server.endpoint)
    status = [str(pathlib.Path(sys.executable).with_name("elasticctl")), "--socket", str(node.socket), "status"]
    few, few_mb = cpu_s(status, runs), rss_mb(node.pid)
    etcd = Etcd(server.access, call_s=10.0)
    try:
        write(etcd, records(ClusterKeys("main"), count - 1))
    finally:
        etcd.close()
    eventually(lambda: seen(node) == count, 60, "the daemon has read all records")
    time.sleep(SETTLE_S)
    many = cpu_s(status, runs)
    return {
        "nodes": count,
        "runs": runs,
        "status_cpu_s": round(statistics.median(many), 3),
        "status_cpu_s_max": round(max(many), 3),
        "status_few_cpu_s": round(statistics.median(few), 3),
        "python_cpu_s": round(statistics.median(cpu_s([sys.executable, "-c", "pass"], runs)), 3),
        "elasticd_rss_mb": round(rss_mb(node.pid), 1),
        "elasticd_few_rss_mb": round(few_mb, 1),
    }


def seen(node: Node) -> int:
    return len(node.get("/v1/nodes")["nodes"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="100 nodes, 3 runs")
    parser.add_argument("--smoke", action="store_true", help=SMOKE)
    options = parser.parse_args()
    if options.quick:
        options.nodes, options.runs = 100, 3
    if options.smoke:
        options.nodes, options.runs = 3, 1
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with EtcdServer() as server, Nodes() as nodes:
        figures = measure(nodes, server, options.nodes, options.runs)
    figures |= {name: round(value, 1) for name, value in idle_pss_mb(0.0 if options.smoke else IDLE_S).items()}
    print(json.dumps(figures), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
