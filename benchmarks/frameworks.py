"""A worker of a Trainer, of Accelerate's loop, of Lightning's Trainer or of Fabric's loop is killed: how long until all
ranks step again, and what is lost.

1 node × 2 workers on this machine, gloo, a GPT-2 of about 3 MB (Lightning: a network of 1 MB); SIGKILL of a random rank
at a random step. Ours uses
elastic.integrations; beside it, in the same run, the unchanged script under stock torchrun (one agent, standalone),
which resumes from a checkpoint taken every 20 steps. Needs the environment of `make test-compat`. The last line is one
of JSON.

    .venv-compat/bin/python benchmarks/frameworks.py [--quick] [--only KIND] [--kills N] [--seed N]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import pathlib
import random
import statistics
import sys
import time

from _harness import (
    BIN,
    HERE,
    Node,
    Processes,
    Record,
    Recovery,
    TooLate,
    kill_and_measure,
    machine,
    spread,
    wait_for,
    workplace,
)

SCRIPTS = {
    "trainer": HERE / "_frameworks_train.py",
    "accelerate": HERE / "_frameworks_train.py",
    "lightning": HERE / "_lightning_train.py",
    "fabric": HERE / "_lightning_train.py",
}
WORLD = 2
KILLS, STOCK_KILLS = 20, 3
QUICK = ("trainer", "accelerate")
QUICK_S, QUICK_LIMIT_S = 48.0, 12.0
"""With --quick: so long after the start, and again after as long, no worker of the first and the second of QUICK is
killed any more; and how long a recovery may take."""


def ours(
    node: Node, folder: pathlib.Path, kind: str, kills: int, rng: random.Random, end_s: float = math.inf
) -> list[Recovery]:
    record = Record(folder / f"ours-{kind}")
    words = json.dumps(["--kind", kind, "--record", str(record.folder), "--out", str(folder / f"out-{kind}")])
    job = folder / f"{kind}.toml"
    job.write_text(
        f'name = "{kind}"\nscript = "{SCRIPTS[kind]}"\nargs = {words}\nnodes = "1"\nworkers_per_node = {WORLD}\n'
        f'workdir = "{folder}"\npython = "{sys.executable}"\n[restarts]\nbudget = 1000\n'
    )
    node.ctl("submit", job)
    try:
        return series(record, kills, rng, limit_s=60.0 if end_s == math.inf else QUICK_LIMIT_S, end_s=end_s)
    except TooLate:
        say(node.ctl("status", kind, check=False).stdout)
        raise
    finally:
        node.ctl("stop", kind, check=False)
        wait_for(lambda: _is_over(node, kind), 30.0, f"{kind} is over", every_s=0.2)


def _is_over(node: Node, name: str) -> bool:
    return any(j["job"] == name and j["phase"] in ("stopped", "failed") for j in node.json("jobs")["jobs"])


def torchrun(folder: pathlib.Path, processes: Processes, kind: str, kills: int, rng: random.Random) -> list[Recovery]:
    """Raises TooLate when it does not recover in time."""
    record = Record(folder / f"torchrun-{kind}")
    tag = processes.start(
        record.folder.name,
        [
            BIN / "torchrun", "--standalone", f"--nproc-per-node={WORLD}", "--max-restarts=100", SCRIPTS[kind],
            "--stock", "--kind", kind, "--record", record.folder, "--out", folder / f"stock-{kind}",
        ],
    )  # fmt: skip
    try:
        return series(record, kills, rng, limit_s=120.0)
    finally:
        processes.end(tag)


def series(record: Record, kills: int, rng: random.Random, limit_s: float, end_s: float = math.inf) -> list[Recovery]:
    """The recoveries from `kills` kills; fewer, but at least one, if there is no time for them before the instant
    `end_s`. Raises TooLate if there is none by then, or one takes longer than `limit_s`."""

    def left(most_s: float) -> float:
        return max(0.0, min(most_s, end_s - time.monotonic()))

    record.wait_step(25, WORLD, left(150.0))
    found: list[Recovery] = []
    for number in range(kills):
        reached = max(c.step for c in record.newest().values())
        try:
            record.wait_step(reached + rng.randint(5, 30), WORLD, left(60.0))
        except TooLate:
            if found and time.monotonic() >= end_s:
                return found
            raise
        found.append(recovery := kill_and_measure(record, WORLD, rng, limit_s))
        say(f"  kill {number + 1}: rank {recovery.rank} at step {recovery.step}: {recovery.seconds:.2f} s, "
            f"{recovery.steps_lost} steps lost")  # fmt: skip
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def summary(name: str, found: list[Recovery]) -> dict[str, float | int]:
    """Prints it, and returns it for the last line; {} if it did not recover."""
    if not found:
        print(f"{name}: did not step again in time", flush=True)
        return {}
    seconds, lost = [r.seconds for r in found], [r.steps_lost for r in found]
    print(f"{name}: {spread(seconds, 2)} s, steps lost {spread(lost, 0)}", flush=True)
    return {
        f"{name}_kills": len(found),
        f"{name}_median_s": round(statistics.median(seconds), 3),
        f"{name}_worst_s": round(max(seconds), 3),
        f"{name}_steps_lost": sum(lost),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without torchrun; under two minutes")
    parser.add_argument("--only", choices=list(SCRIPTS))
    parser.add_argument("--kills", type=int, default=KILLS, help="of ours; of torchrun's at most 3")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    args = parser.parse_args()
    for name in ("transformers", "lightning"):
        if importlib.util.find_spec(name) is None:
            print(json.dumps({"skipped": f"{name} is not installed: see make test-compat"}))
            return
    kinds = QUICK if args.quick else [args.only] if args.only else list(SCRIPTS)
    kills = 4 if args.quick else args.kills
    rng, began_s = random.Random(args.seed), time.monotonic()
    print(f"machine: {machine()}; seed {args.seed}")
    result: dict[str, float | int] = {}
    with workplace(args.keep) as (folder, processes):
        node = Node(folder, processes, "a", slots=WORLD)
        node.start()
        for number, kind in enumerate(kinds, 1):
            say(f"elasticd, {kind}:")
            end_s = began_s + number * QUICK_S if args.quick else math.inf
            measured = {"elasticd": ours(node, folder, kind, kills, rng, end_s)}
            if not args.quick:
                say(f"torchrun, {kind}:")
                try:
                    measured["torchrun"] = torchrun(folder, processes, kind, min(kills, STOCK_KILLS), rng)
                except TooLate as late:
                    say(f"  {late}")
                    measured["torchrun"] = []
            for name, found in measured.items():
                result |= summary(f"{kind}_{name}", found)
    print(machine())
    print(json.dumps(result))


if __name__ == "__main__":
    main()
