"""The part of benchmarks/overhead.py that needs a node: elasticd, an agent and two workers."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from _harness import HERE, Node, Processes, wait_for, workplace

SCRIPT = HERE / "_overhead_train.py"
START_S = 120.0
IDLE_S = 10.0
"""After its first step a job's agent, zygote and daemon are left alone for so long."""


@contextmanager
def job(*args: str) -> Iterator[tuple[Node, Processes, pathlib.Path]]:
    """A job of two workers on a node of its own, as soon as it has made a step."""
    with workplace() as (folder, processes):
        node = Node(folder, processes, "n", slots=2)
        node.start()
        node.ctl("run", "--detach", "--name", "job", "--workers", "2", "--", SCRIPT, *args)
        wait_for(lambda: (node.json("status", "job").get("step") or 0) >= 1, START_S, "the first step", every_s=0.5)
        yield node, processes, folder


def snapshots_on_over_off(pairs: int, span_s: float) -> dict[str, float]:
    """Time of a step with snapshots as they come by default, over that without: spans of `span_s` of one run, in turn.
    The sums of all are compared: a snapshot is dear and seldom."""
    with workplace() as (folder, processes):
        out = folder / "spans"
        node = Node(folder, processes, "n", slots=2)
        node.start()
        node.ctl("run", "--detach", "--name", "job", "--workers", "2", "--", SCRIPT, "turns", str(out), str(span_s))

        def done() -> list[dict[str, float]] | None:
            rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
            return rows[2 : 2 + 2 * pairs] if len(rows) >= 2 + 2 * pairs else None  # the first two: caches and pages

        rows = wait_for(done, START_S + (2 * pairs + 2) * (span_s + 5.0), "all spans", every_s=0.5)
        step_s = {}
        for on in (True, False):
            of = [row for row in rows if row["on"] is on]
            step_s[on] = sum(row["seconds"] for row in of) / sum(row["steps"] for row in of)
        taken = [row for row in rows if row["on"]]
        return {
            "snapshots_on_over_off": step_s[True] / step_s[False],
            "snapshot_step_ms": 1e3 * step_s[False],
            "snapshot_every_s": sum(row["seconds"] for row in taken) / max(1, sum(row["taken"] for row in taken)),
            "snapshot_cost_ms": 1e3 * taken[-1]["cost_s"],
        }


def idle_pss_mb() -> dict[str, float]:
    """Proportional set size of elasticd, agent and zygote of one job of two workers that does nothing."""
    with job("idle") as (_, processes, _):
        time.sleep(IDLE_S)
        found: dict[str, psutil.Process] = {}
        for process in sorted(map(psutil.Process, processes.pids()), key=lambda p: p.create_time()):
            told = " ".join(process.cmdline())
            if name := next((name for name, sign in SIGNS if sign in told), ""):
                found.setdefault(name, process)  # the zygote is older than its forks
        figures = {f"idle_pss_{name}_mb": found[name].memory_full_info().pss / 2**20 for name, _ in SIGNS}
    return {"idle_pss_mb": sum(figures.values()), **figures}


SIGNS = (
    ("daemon", "elasticd --config"),
    ("agent", "-m elastic.agent"),
    ("zygote", "zygote"),
)
"""What the command line of each has."""
