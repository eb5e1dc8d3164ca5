"""Scripts that know nothing of elastic lose a worker: under `elasticctl run`, and under stock torchrun in the same run.

One node × 2 workers, gloo; rank 1 kills itself right after an optimizer step. The time is from the kill until new
processes of all ranks have made a step; the steps between the script's own last checkpoint and the kill are done again.
The scripts are those of tests/compat/scripts/unchanged; those of Lightning need `make test-compat`'s environment.
The last line is one of JSON.

    python benchmarks/unchanged.py [--quick | --only SCRIPT] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import re
import sys
from dataclasses import asdict, dataclass, replace

from _harness import BIN, HERE, Node, Processes, TooLate, machine, wait_for, workplace

SCRIPTS = HERE.parent / "tests" / "compat" / "scripts" / "unchanged"
KILL_AT = {"ddp_tutorial": 30, "mingpt_ddp": 30, "lightning_plain": 30, "fabric_plain": 30}
QUICK = "ddp_tutorial"
LIMIT_S = {"elasticd": 90.0, "torchrun": 90.0}
"""From the start of a run until it counts as not recovering."""
QUICK_LIMIT_S = {"elasticd": 30.0, "torchrun": 50.0}
"""torchrun gives the survivor 30 s after SIGTERM."""
WORLD = 2


@dataclass(frozen=True, slots=True)
class Result:
    script: str
    launcher: str
    limit_s: float
    seconds: float | None = None
    """None: it did not recover within the limit."""
    again: int = 0
    """Steps that were done again."""
    final: float = 0.0
    """Sum of the final weights."""

    def __str__(self) -> str:
        return f"not in {self.limit_s:.0f} s     " if self.seconds is None else f"{self.seconds:9.2f} s {self.again:4}"


def lines(folder: pathlib.Path) -> list[dict[str, float]]:
    texts = [path.read_text().rpartition("\n")[0] for path in folder.glob("*.jsonl")]
    return sorted((json.loads(line) for text in texts for line in text.splitlines()), key=lambda line: line["at_s"])


def result(unknown: Result, folder: pathlib.Path) -> Result | None:
    """`unknown` with what was measured; None until all ranks are done."""
    found = lines(folder)
    finals = {line["rank"]: line["final"] for line in found if "final" in line}
    killed = next((line for line in found if "killed" in line), None)
    if len(finals) < WORLD or killed is None:
        return None
    old = {line["pid"] for line in found if line["at_s"] <= killed["at_s"]}
    first: dict[float, dict[str, float]] = {}
    for line in found:
        if "step" in line and line["pid"] not in old:
            first.setdefault(line["rank"], line)
    seconds = max(line["at_s"] for line in first.values()) - killed["at_s"]
    again = int(killed["killed"] - min(line["step"] for line in first.values()) + 1)
    if len(set(finals.values())) != 1:
        where = f"{unknown.script} under {unknown.launcher}"
        raise RuntimeError(f"{where}: the ranks end with different weights: {finals}")
    return replace(unknown, seconds=seconds, again=again, final=finals[0])


def measure(unknown: Result, node: Node, folder: pathlib.Path, processes: Processes) -> Result:
    """One run of its script by its launcher."""
    probe = folder / f"{unknown.script}-{unknown.launcher}"
    probe.mkdir()
    path, name = SCRIPTS / f"{unknown.script}.py", probe.name.replace("_", "-")
    words = ["--standalone", f"--nproc-per-node={WORLD}", "--max-restarts=3"]
    settings = {"PROBE": str(probe), "PROBE_KILL_AT": str(KILL_AT[unknown.script])}
    if unknown.launcher == "elasticd":
        env = [word for pair in settings.items() for word in ("-e", "=".join(pair))]
        node.ctl("run", "--detach", "--name", name, *env, *words, path)
    else:
        tag = processes.start(probe.name, [BIN / "torchrun", *words, path], {**os.environ, **settings})
    try:
        return wait_for(lambda: result(unknown, probe), unknown.limit_s, "", every_s=0.1)
    except TooLate:
        return unknown
    finally:
        if unknown.launcher == "torchrun":
            processes.end(tag)
        else:
            node.ctl("stop", name, check=False)


def row(ours: Result, stock: Result) -> str:
    known = None not in (ours.seconds, stock.seconds)
    same = "" if not known else "the same" if ours.final == stock.final else f"{ours.final!r} / {stock.final!r}"
    return f"{ours.script:16} {ours} {stock}   {same}"


def runnable(script: str) -> bool:
    imports = re.search(r"^(from|import) lightning\b", (SCRIPTS / f"{script}.py").read_text(), re.MULTILINE)
    return imports is None or importlib.util.find_spec("lightning") is not None


def summary(results: list[Result]) -> dict[str, float | None]:
    """For the last line; None: did not recover."""
    found: dict[str, float | None] = {}
    for each in results:
        known = each.seconds is not None
        found[f"{each.script}_{each.launcher}_s"] = round(each.seconds, 3) if known else None
        found[f"{each.script}_{each.launcher}_steps_again"] = each.again if known else None
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", choices=sorted(KILL_AT))
    which.add_argument("--quick", action="store_true", help=f"{QUICK} alone; under two minutes")
    parser.add_argument("--json", type=pathlib.Path, help="write the results there, too")
    args = parser.parse_args()
    limits_s = QUICK_LIMIT_S if args.quick else LIMIT_S
    only = QUICK if args.quick else args.only
    results = []
    print(machine())
    print(f"{'script':16} {'elasticd':>11} {'again':>4} {'torchrun':>9}   again   final weights")
    with workplace() as (folder, processes):
        node = Node(folder, processes, "n0", slots=WORLD)
        node.start()
        for script in (script for script in KILL_AT if only in (None, script)):
            if not runnable(script):
                print(f"{script:16} needs lightning: see make test-compat")
                continue
            pair = [measure(Result(script, how, limits_s[how]), node, folder, processes) for how in limits_s]
            print(row(*pair), flush=True)
            results += pair
    if args.json:
        args.json.write_text(json.dumps([asdict(found) for found in results]))
    print(json.dumps(summary(results) or {"skipped": "lightning is not installed: see make test-compat"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
