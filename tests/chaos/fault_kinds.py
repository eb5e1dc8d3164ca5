"""Every kind of fault, injected for real, and the class and fix that its incident must get.

    PYTHONPATH=tests python -m chaos.fault_kinds --times 1            # all kinds once, with a table
    PYTHONPATH=tests python -m chaos.fault_kinds --kinds sigbus,spin --times 10

Each injection is one job of two nodes with real agents and workers (`support/train_faulty.py`); the injection is known
from the file that the struck process wrote. Exit code 1 if a fault did not strike or its verdict is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.harness import Cluster, Job
from support.procs import kill
from support.wait import eventually

SCRIPT = Path(__file__).parents[1] / "support" / "train_faulty.py"
EVERY_S = 0.1


@dataclass(frozen=True)
class Kind:
    cls: str
    """Class of the verdict."""
    rules: tuple[str, ...]
    """The rules, and so the fixes, that are right."""
    do: Callable[[Cluster, Job], None] | None = None
    """Injected from outside; None: by the script, in rank 1."""
    spec: Mapping[str, object] = field(default_factory=dict)
    ends: str = "succeeded"
    """The phase in which the job ends."""
    person: bool = False
    rank: int | None = 1
    """Which rank the incident must name; None: not checked."""


def _started(cluster: Cluster, job: Job, step: int = 8) -> None:
    eventually(lambda: (job.row()["step"] or 0) >= step, 60.0, f"step {step}", every_s=EVERY_S)


def _agent_killed(cluster: Cluster, job: Job) -> None:
    _started(cluster, job)
    kill(cluster.nodes[1].agent_pid(job.name))


def _zygote_killed(cluster: Cluster, job: Job) -> None:
    _started(cluster, job)
    zygote, worker = cluster.nodes[1].children(job.name)[:2]
    kill(zygote)
    kill(worker)


def _drained(cluster: Cluster, job: Job) -> None:
    _started(cluster, job)
    cluster.api("POST", "/v1/nodes/node1/drain", {"reason": "a fault kind"})
    eventually(lambda: job.incidents(), 30.0, "the drain is told", every_s=EVERY_S)
    cluster.api("POST", "/v1/nodes/node1/uncordon", {})


def _scaled(cluster: Cluster, job: Job) -> None:
    _started(cluster, job)
    cluster.api("POST", f"/v1/jobs/{job.name}/scale", {"nodes": "1"})


_HANG = {"hang": {"floor_s": 1.0, "ceiling_s": 4.0}}
_SMALL = {"nodes": "1:2", "join_wait_s": 20.0}

KINDS: dict[str, Kind] = {
    "key_error": Kind("user code", ("python",)),
    "assertion": Kind("user code", ("assertion",)),
    "syntax_error": Kind("user code", ("syntax",)),
    "no_file": Kind("user code", ("no_file",)),
    "size_mismatch": Kind("user code", ("state_dict",)),
    "exit_code": Kind("user code", ("exit_code",)),
    "early_end": Kind("user code", ("early_end",)),
    "no_module": Kind("environment", ("missing_module",)),
    "no_name": Kind("environment", ("wrong_version",)),
    "disk_full": Kind("storage", ("disk_full",)),
    "io_error": Kind("storage", ("io_error",)),
    "read_only": Kind("storage", ("read_only",)),
    "not_permitted": Kind("storage", ("permission",)),
    "stale_mount": Kind("storage", ("stale_mount",)),
    "raised_damaged": Kind("storage", ("checkpoint_damaged",)),
    "open_files": Kind("limit", ("open_files",)),
    "threads": Kind("limit", ("processes",)),
    "allocation": Kind("out of memory", ("allocation",)),
    "torch_allocation": Kind("out of memory", ("allocation",)),
    "bad_alloc": Kind("out of memory", ("allocation",)),
    "truncated_map": Kind("out of memory", ("sigbus", "shm_full")),
    "raised_gpu_memory": Kind("out of memory", ("gpu_memory",)),
    "raised_gpu_lost": Kind("GPU", ("gpu_lost",)),
    "raised_ecc": Kind("GPU", ("gpu_memory_error",)),
    "raised_illegal_access": Kind("GPU", ("cuda_error",)),
    "raised_device_assert": Kind("user code", ("device_assert",)),
    "raised_driver": Kind("environment", ("driver",)),
    "no_host": Kind("network", ("name_resolution",)),
    "port_in_use": Kind("network", ("port_in_use",)),
    "refused": Kind("network", ("refused",)),
    "sigkill": Kind("node", ("sigkill",)),
    "sigterm": Kind("node", ("sigterm",)),
    "sigint": Kind("planned", ("interrupted",)),
    "sigsegv": Kind("user code", ("sigsegv",)),
    "sigabrt": Kind("user code", ("sigabrt",)),
    "sigill": Kind("environment", ("sigill",)),
    "sigfpe": Kind("user code", ("sigfpe",)),
    "sigstop": Kind("hang", ("stopped",), spec=_HANG),
    "spin": Kind("hang", ("hang",), spec=_HANG),
    "long_wait": Kind("hang", ("hang_sleep",), spec=_HANG),
    "child": Kind("hang", ("hang_sleep",), spec=_HANG),
    "deadlock": Kind("hang", ("hang_lock",), spec=_HANG),
    "pipe": Kind("hang", ("hang_sleep",), spec=_HANG),
    "interpreter": Kind("hang", ("hang_interpreter", "hang_sleep"), spec=_HANG),
    "no_batch": Kind("hang", ("hang_data", "hang_sleep"), spec=_HANG),
    "nan": Kind("numerics", ("bad_loss",), ends="failed", person=True),
    "drift": Kind("numerics", ("diverged",), spec={"fingerprint_every_steps": 1}, ends="failed", person=True,
                  rank=None),
    "outlives": Kind("hang", ("late_exit",), spec={"exit_timeout_s": 1.0}, ends="failed", person=True),
    "agent_killed": Kind("node", ("node_down", "agent_replaced", "lease_expired"), _agent_killed),
    "zygote_killed": Kind("node", ("sigkill",), _zygote_killed),
    "drained": Kind("planned", ("drained", "left", "joined"), _drained, spec=_SMALL),
    "scaled": Kind("planned", ("scaled_down",), _scaled, spec=_SMALL),
}  # fmt: skip


@dataclass
class Result:
    kind: str
    struck: bool = False
    verdict: str = ""
    """'class/rule' of the first incident."""
    trouble: str = ""
    took_s: float = 0.0


def inject(cluster: Cluster, name: str, number: int) -> Result:
    """One job with one fault. Raises nothing that the job or its verdict does wrong: that is `trouble`."""
    kind, began_s, result = KINDS[name], time.monotonic(), Result(name)
    steps = 30 if kind.do is None else 150
    job = cluster.submit(
        f"{name.replace('_', '-')}-{number}",
        **({"nodes": "2", "script": str(SCRIPT), "steps": steps, "restarts": {"backoff_s": 0.05}}
           | dict(kind.spec)),  # type: ignore[arg-type]
        env={"FAULT": "" if kind.do else name},
    )  # fmt: skip
    try:
        if kind.do is not None:
            kind.do(cluster, job)
            result.struck = True
        if kind.ends == "failed":  # one that fails after training has succeeded until then
            eventually(lambda: job.phase() == "failed", 90.0, "the job fails")
        job.wait_over(kind.ends)
        eventually(lambda: told(job), 10.0, "an incident is told", every_s=EVERY_S)
        result.struck = result.struck or (job.folder / "struck").exists()
        judge(kind, job, result)
    except (AssertionError, RuntimeError, OSError) as error:
        result.trouble = f"{type(error).__name__}: {error}"
        if job.phase() not in ("succeeded", "failed", "stopped"):
            job.stop()
    result.took_s = time.monotonic() - began_s
    return result


def told(job: Job) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = job.cluster.api("GET", f"/v1/incidents?job={job.name}")["incidents"]
    return rows


def judge(kind: Kind, job: Job, result: Result) -> None:
    """Compare the first incident with what was injected. Raises AssertionError."""
    first = told(job)[0]
    verdict = first["verdict"]
    result.verdict = f"{verdict['class']}/{verdict['rule']}"
    assert result.struck, "the fault did not strike"
    said = f"{verdict['what']!r} ({first['kind']}: {first['detail'][:200]!r}) on {verdict['evidence'][:2]}"
    assert verdict["class"] == kind.cls, f"class {verdict['class']}, not {kind.cls}: {said}"
    assert verdict["rule"] in kind.rules, f"rule {verdict['rule']}, not {' or '.join(kind.rules)}: {said}"
    if kind.do is None and kind.rank is not None:
        assert first["ranks"] == [kind.rank], f"ranks {first['ranks']}, not rank {kind.rank}"
    assert verdict["person"] == kind.person, f"person is {verdict['person']}: {said}"


def table(results: list[Result]) -> str:
    """Injections, right verdicts and what they were, by kind."""
    lines = [f"{'kind':24} {'injected':>8} {'right':>6} {'mean s':>7}  verdicts"]
    for name in dict.fromkeys(result.kind for result in results):
        mine = [result for result in results if result.kind == name]
        said = ", ".join(sorted({result.verdict or "none" for result in mine}))
        mean_s = sum(result.took_s for result in mine) / len(mine)
        right = sum(not result.trouble for result in mine)
        lines.append(f"{name:24} {sum(r.struck for r in mine):8} {right:6} {mean_s:7.1f}  {said}")
    right = sum(not result.trouble for result in results)
    lines.append(
        f"kinds {len({r.kind for r in results})}, injected {sum(r.struck for r in results)}, right verdicts {right}"
    )
    return "\n".join(lines)


def run_all(names: list[str], times: int, tell: Callable[[str], None]) -> list[Result]:
    """Inject each of `names` so many times, one after the other; `tell` hears of each."""
    results: list[Result] = []
    with Cluster(nodes=2, slots=1, warm=False) as cluster:
        for number in range(times):
            for name in names:
                one = inject(cluster, name, number)
                results.append(one)
                tell(f"{name:24} {one.took_s:5.1f} s  {one.verdict:28} {one.trouble or 'right'}")
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=1, help="injections of each kind")
    parser.add_argument("--kinds", default="", help="names, comma-separated; default: all")
    args = parser.parse_args()
    chosen = args.kinds.split(",") if args.kinds else list(KINDS)
    if unknown := [name for name in chosen if name not in KINDS]:
        parser.error(f"unknown kinds: {', '.join(unknown)}")
    results = run_all(chosen, args.times, lambda line: print(line, flush=True))
    print(table(results))
    return 1 if any(result.trouble or not result.struck for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
