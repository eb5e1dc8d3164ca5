"""What one user can put upon a daemon: large jobs, thousands of jobs that are over, slow connections.

.venv/bin/python benchmarks/bounds.py [--large 1000] [--over 10000] [--slow 100] [--quick]

The last line is one JSON object with all figures. --quick: a tenth or less of each, in less than two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import psutil
from _harness import SMOKE

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.daemons import Node, Nodes, rss_mb

from elastic.contract.agent_files import EtcdAccess
from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import JobState, Phase, encode
from elastic.etcd.client import ClusterSigner, Etcd
from elasticd.access.authority import Authority, Peer
from elasticd.api import actions
from elasticd.base.settings import PerUserSettings
from elasticd.cluster.published_state import PublishedState

LARGE = {"args": ["x" * 60_000]}
ROOT = Peer(0, 0, "root")


FIGURES: dict[str, dict[str, float]] = {}


def say(what: str, **numbers: float) -> None:
    FIGURES[what] = {name: round(value, 3) for name, value in numbers.items()}
    print(what, *(f"{name} {value}" for name, value in FIGURES[what].items()), sep="  ", flush=True)


def took_s(work: Callable[[], object]) -> float:
    began_s = time.monotonic()
    work()
    return time.monotonic() - began_s


def submit(node: Node, count: int, over: bool, **fields: Any) -> None:
    """By the daemon's own code, in this process, without waiting for its view after each."""
    keys = ClusterKeys("main")
    signer = ClusterSigner(keys.root, bytes.fromhex((node.state / "cluster.key").read_text().strip()))
    etcd = Etcd(EtcdAccess(endpoints=(f"unix:{node.state}/etcd/client:0",)), call_s=10.0, signer=signer)
    cast(Any, actions).SEEN_S = 0.0
    acts = actions.Actions(etcd, keys, PublishedState(), Authority(0), lambda record: "", PerUserSettings())
    for number in range(count):
        name = f"j{number:05d}"
        acts.submit({"name": name, "script": "/t.py", "nodes": "99"} | fields, ROOT, ROOT)
        if over:
            etcd.get(keys.job(name).spec)  # the signer learns which submission the state is of
            state = JobState(phase=Phase.SUCCEEDED, since_wall_s=time.time())
            etcd.put(keys.job(name).state, encode(state))
    etcd.close()


def cpu_share(node: Node, over_s: float = 10.0) -> float:
    process = psutil.Process(node.pid)
    before = sum(process.cpu_times()[:2])
    time.sleep(over_s)
    return (sum(process.cpu_times()[:2]) - before) / over_s


def shown(node: Node, what: str) -> None:
    say(
        f"{what}: status", seconds=took_s(lambda: node.get("/v1/status")),
        kb=len(json.dumps(node.get("/v1/status"))) / 1e3,
        lines=len(node.ctl("status", timeout_s=120).stdout.splitlines()), daemon_rss_mb=rss_mb(node.pid),
        core=cpu_share(node),
    )  # fmt: skip


def again(node: Node, what: str) -> None:
    node.kill()
    node.start(wait_s=0)

    def answers() -> None:
        end_s = time.monotonic() + 120
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError):
                if node.get("/v1/status")["etcd"]["revision"]:
                    return
            time.sleep(0.05)
        raise AssertionError("the daemon does not start")

    say(f"{what}: elasticd starts again", seconds=took_s(answers), daemon_rss_mb=rss_mb(node.pid))


def forgotten(node: Node, what: str, count: int) -> None:
    spent_s = took_s(lambda: node.ctl("forget", "--over", "--json", timeout_s=600))
    left = len(node.get("/v1/status?all=1")["jobs"])
    rss = rss_mb(node.pid)
    say(f"{what}: forget --over", seconds=spent_s, a_second=(count - left) / spent_s, left=left, daemon_rss_mb=rss)


def slow(node: Node, count: int) -> None:
    url = node.get("/v1/status")["metrics"]
    host, _, port = url.removeprefix("http://").rpartition(":")
    with contextlib.ExitStack() as held:
        for _ in range(count):
            line = held.enter_context(socket.create_connection((host, int(port)), 10))
            line.sendall(b"GET /metrics HTT")
        for path in ("/healthz", "/metrics"):
            times = [took_s(lambda path=path: urllib.request.urlopen(url + path, timeout=10).read()) for _ in range(50)]  # type: ignore[misc]
            say(f"slow connections: {path}", median_ms=sorted(times)[25] * 1e3, longest_ms=max(times) * 1e3)


def loaded(what: str, count: int, over: bool, **fields: Any) -> None:
    with Nodes() as nodes:
        node = nodes.add("a", retention__over_jobs=0)
        say(f"{what}: submitted", seconds=took_s(lambda: submit(node, count, over, **fields)))
        time.sleep(3.0)
        shown(node, what)
        again(node, what)
        shown(node, f"{what}, started again")
        if over:
            forgotten(node, what, count)
        else:
            spent_s = took_s(lambda: [node.post(f"/v1/jobs/j{n:05d}/stop") for n in range(min(20, count))])
            say(f"{what}: stop", each_s=spent_s / min(20, count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", type=int, default=1000)
    parser.add_argument("--over", type=int, default=10_000)
    parser.add_argument("--slow", type=int, default=100)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--smoke", action="store_true", help=SMOKE)
    args = parser.parse_args()
    counts = (args.slow, args.large, args.over)
    if args.quick or args.smoke:
        counts = (3, 2, 3) if args.smoke else (args.slow, 50, 200)
    with Nodes() as nodes:
        slow(nodes.add("a"), counts[0])
    loaded("jobs of 60 kB", counts[1], False, **LARGE)
    loaded("jobs that are over", counts[2], True)
    keys = ("slow_connections", "large_jobs", "jobs_over")
    print(json.dumps(dict(zip(keys, counts, strict=True)) | {"quick": args.quick, "figures": FIGURES}))


if __name__ == "__main__":
    main()
