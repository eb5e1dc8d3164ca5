"""The part of benchmarks/overhead.py that needs a node: elasticd, an agent and two workers."""

from __future__ import annotations

import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil
from _harness import HERE, Node, Processes, wait_for, workplace

SCRIPT = HERE / "_overhead_train.py"
START_S = 120.0
AFTER_S = 0.2
"""A snapshot makes the steps slower for so long at most: its copy, and then the agents' work on its report."""

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


def snapshots_on_over_off(span_s: float, width: int) -> dict[str, float]:
    """Time of a step with snapshots as they come by default, over that without, in `span_s` seconds of one run."""
    with workplace() as (folder, processes):
        out = folder / "trace"
        node = Node(folder, processes, "n", slots=2)
        node.start()
        node.ctl(
            "run", "--detach", "--name", "job", "--workers", "2", "--", SCRIPT, *map(str, ("trace", out, span_s, width))
        )
        wait_for(out.exists, START_S + 2 * span_s, "the durations of all steps", every_s=0.5)
        found = json.loads(out.read_text())
    seconds, kept = [row[0] for row in found["rows"]], [row[1] for row in found["rows"]]
    total_s, excess_s, counted, steps = excess(seconds, kept)
    if not counted:
        raise RuntimeError(f"{sum(kept)} snapshots in {sum(seconds):.0f} s: too few to tell what they cost")
    return {
        "snapshots_on_over_off": total_s / (total_s - excess_s),
        "snapshot_step_ms": 1e3 * (total_s - excess_s) / steps,
        "snapshot_every_s": total_s / counted,
        "snapshot_excess_ms": 1e3 * excess_s / counted,
        "snapshot_cost_ms": 1e3 * found["cost_s"],
    }


def excess(seconds: Sequence[float], kept: Sequence[bool]) -> tuple[float, float, int, int]:
    """Of steps that took `seconds`, with a snapshot begun at the end of those in `kept`: their time, how much of it is
    due to the snapshots, and how many snapshots and steps that is.

    A step is a snapshot's from the one before (the ranks agree on the snapshot there) until AFTER_S after its copy was
    begun. The steps between the snapshots on both sides of it say how long it would have taken otherwise: a machine's
    speed differs more from minute to minute than by a snapshot.
    """
    total_s = excess_s = 0.0
    counted = steps = 0
    starts = [i for i, at in enumerate(kept) if at]
    for before, start, after in zip(starts, starts[1:], starts[2:], strict=False):
        ends = _after(seconds, start)
        own = seconds[start - 1 : ends]
        sides = seconds[_after(seconds, before) : start - 1], seconds[ends : after - 1]
        if all(sides):
            total_s += sum(seconds[start:after])
            excess_s += sum(own) - len(own) * statistics.mean(map(statistics.mean, sides))
            counted += 1
            steps += after - start
    return total_s, excess_s, counted, steps


def _after(seconds: Sequence[float], start: int) -> int:
    """The first step that is not part of the snapshot begun at the end of step `start`."""
    spent_s = itertools.accumulate(seconds[start + 1 :])
    return start + 1 + next((i for i, since_s in enumerate(spent_s, 1) if since_s >= AFTER_S), 0)


def idle_pss_mb(idle_s: float = IDLE_S) -> dict[str, float]:
    """Proportional set size of elasticd, agent and zygote of one job of two workers that does nothing."""
    with job("idle") as (_, processes, _):
        time.sleep(idle_s)
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
