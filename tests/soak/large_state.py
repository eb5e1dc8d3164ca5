"""A large state on two nodes, saved again and again, while ranks are killed: no step is lost, no survivor replaced.

    PYTHONPATH=tests python -m soak.large_state --minutes 10 --megabytes 2000 --busy 2

A checkpoint every 20 s and a kill every 30 s, by default; `--busy` runs so many endless loops beside. Each incident is
told when it is over. Exits 1, after the end of all logs, when a step was lost, when a process ended that was not killed
here, or when there is another incident than one for each kill. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.agents import Job
from support.wait import eventually

from elastic.contract.records.job_records import IncidentRecord

SCRIPT = Path(__file__).parent.parent / "support" / "train_large.py"
NO_END = 100_000_000


def pids(job: Job) -> dict[int, int]:
    """rank -> process, of all that have made a step in the newest generation."""
    rows = [row for status in job.statuses().values() for row in status.ranks]
    return {row.rank: row.pid for row in rows if row.rank >= 0 and row.pid}


def newest(job: Job) -> dict[int, tuple[int, int]]:
    """rank -> (generation, step)."""
    found: dict[int, tuple[int, int]] = {}
    for line in job.lines():
        at = line["generation"], line["step"]
        found[line["rank"]] = max(found.get(line["rank"], at), at)
    return found


def told(incident: IncidentRecord, began_s: float) -> str:
    """`began_s`: when the run began, by the clock on the wall."""
    lines = [
        f"{incident.wall_s - began_s:6.1f} s: {'OPEN ' if incident.open else ''}{incident.kind} on {incident.node}, "
        f"rank {', '.join(map(str, incident.ranks)) or 'none'}, at step {incident.step}: {incident.text}; "
        f"{incident.steps_lost} steps lost, from {incident.restored_from or 'nowhere yet'}"
    ]
    lines += [f"         {c.kind} on {c.node}, ranks {c.ranks}: {c.detail}" for c in incident.causes[1:]]
    lines += [f"{name}:\n{stack}" for name, stack in incident.stacks.items()]
    return "\n".join(lines)


class Teller:
    """Prints each incident once, when it is over."""

    def __init__(self, job: Job) -> None:
        self._job, self._told = job, set[int]()
        self._began_s = time.time()

    def tell(self, *, all_of_them: bool = False) -> list[IncidentRecord]:
        """Those told now. `all_of_them`: also what is not over."""
        new = [i for i in self._job.all_incidents() if i.generation not in self._told and (all_of_them or not i.open)]
        for incident in new:
            self._told.add(incident.generation)
            print(told(incident, self._began_s), flush=True)
        return new


def run(args: argparse.Namespace, folder: str) -> dict[str, object]:
    chance = random.Random(args.seed)
    record = Path(folder) / "record"
    record.mkdir()
    spec = {
        "args": [str(record), str(args.megabytes), str(args.step_ms), str(NO_END)],
        "checkpoint": {"dir": str(Path(folder) / "checkpoints"), "every_s": args.save_s, "keep": 1},
        "restarts": {"budget": 1000},
    }
    replaced = kills = 0
    worst_s = 0.0
    with Job(nodes="2:2", workers=1, script=SCRIPT, spec=spec) as job:
        job.record = record
        eventually(lambda: len(newest(job)) == 2, 120.0, "the first steps")
        teller, incidents = Teller(job), list[IncidentRecord]()
        until_s = time.monotonic() + 60 * args.minutes
        while time.monotonic() < until_s:
            time.sleep(max(0.0, min(args.kill_s, until_s - time.monotonic())))
            before, generation = pids(job), max(g for g, _ in newest(job).values())
            victim = chance.choice((0, 1))
            began_s = time.monotonic()
            killed = job.kill_rank(victim)
            kills += 1

            def stepping(than: int = generation) -> bool:
                return len([g for g, _ in newest(job).values() if g > than]) == 2

            eventually(stepping, 120.0, "both ranks to step again")
            worst_s = max(worst_s, time.monotonic() - began_s)
            survivors = set(before.values()) - {killed}
            replaced += len(survivors - set(pids(job).values()))
            print(f"kill {kills}: rank {victim}, {time.monotonic() - began_s:.2f} s", flush=True)
            incidents += teller.tell()
        time.sleep(2.0)  # the last record is written when the job steps again
        incidents += teller.tell(all_of_them=True)
        progress = job.progress()
        wrong = kills != len(incidents) or replaced or any(i.kind != "exit" or i.steps_lost != 0 for i in incidents)
        if wrong:
            print(job.story(200), flush=True)
    kinds: dict[str, int] = {}
    for incident in incidents:
        kinds[incident.kind] = kinds.get(incident.kind, 0) + 1
    return {
        "kills": kills,
        "incidents": kinds,
        "steps_lost": sum(incident.steps_lost or 0 for incident in incidents),
        "wrong": bool(wrong),
        "survivors_replaced": replaced,
        "worst_s": round(worst_s, 2),
        "checkpoint_step": progress.checkpoint_step if progress else None,
        "snapshot": f"step {progress.snapshot_step}, {progress.snapshot_interval}" if progress else "",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--step-ms", type=int, default=100)
    parser.add_argument("--save-s", type=float, default=20.0)
    parser.add_argument("--kill-s", type=float, default=30.0)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.busy)]
    try:
        with tempfile.TemporaryDirectory(prefix="elt-large-") as folder:
            found = run(args, folder)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    print(json.dumps(found))
    return int(bool(found["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
