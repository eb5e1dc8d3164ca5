"""Scripts that know nothing of elastic lose a worker: under `elasticctl run`, and under stock torchrun in the same run.

One node × 2 workers, or with --nodes 2 two nodes of this machine × 1 worker, then also under torchrun with our
rendezvous; gloo. Rank 1 kills itself right after an optimizer step. The time is from the kill until new
processes of all ranks have made a step; the steps between the script's own last checkpoint and the kill are done again.
The scripts are those of tests/compat/scripts/unchanged; those of a framework need `make test-compat`'s environment.
The last line is one of JSON; it has also torchrun's time divided by elasticd's.

    python benchmarks/unchanged.py [--quick | --only SCRIPT] [--nodes 2] [--json FILE]
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

from _harness import BIN, HERE, SMOKE, Node, Processes, TooLate, free_port, machine, wait_for, workplace

SCRIPTS = HERE.parent / "tests" / "compat" / "scripts" / "unchanged"
KILL_AT = {
    "ddp_tutorial": 30, "mingpt_ddp": 30, "trainer_plain": 30, "accelerate_plain": 30, "lightning_plain": 30,
    "fabric_plain": 30,
}  # fmt: skip
ON_TWO_NODES = ("ddp_tutorial", "mingpt_ddp", "trainer_plain", "accelerate_plain")
"""The others name the number of their node's workers themselves."""
FRAMEWORKS = re.compile(r"^(?:from|import) (transformers|accelerate|lightning)\b", re.MULTILINE)
QUICK = "ddp_tutorial"
LIMIT_S = {"elasticd": 90.0, "torchrun": 90.0}
LIMIT_TWO_NODES_S = {"elasticd": 90.0, "torchrun": 90.0, "torchrun with elastic": 90.0}
"""From the start of a run until it counts as not recovering."""
SMOKE_LIMIT_S = {"elasticd": 60.0}
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
        found = f"not in {self.limit_s:.0f} s" if self.seconds is None else f"{self.seconds:.2f} s, {self.again:2}"
        return f"{found:>21}"


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


def measure(unknown: Result, nodes: list[Node], folder: pathlib.Path, processes: Processes) -> Result:
    """One run of its script by its launcher."""
    probe = folder / f"{unknown.script}-{unknown.launcher}".replace(" ", "-")
    probe.mkdir()
    path, name = SCRIPTS / f"{unknown.script}.py", probe.name.replace("_", "-")
    settings = {"PROBE": str(probe), "PROBE_KILL_AT": str(KILL_AT[unknown.script])}
    tags = []
    if unknown.launcher == "elasticd":
        env = [word for pair in settings.items() for word in ("-e", "=".join(pair))]
        words = [f"--nnodes={len(nodes)}", f"--nproc-per-node={WORLD // len(nodes)}", "--max-restarts=3"]
        nodes[0].ctl("run", "--detach", "--name", name, *env, *words, path)
    else:
        words = torchruns(unknown.launcher, nodes, name)
        tags = [
            processes.start(f"{probe.name}-{number}", [BIN / "torchrun", *words, path], {**os.environ, **settings})
            for number in range(len(nodes))
        ]
    try:
        return wait_for(lambda: result(unknown, probe), unknown.limit_s, "", every_s=0.1)
    except TooLate:
        return unknown
    finally:
        for tag in tags:
            processes.end(tag)
        if unknown.launcher == "elasticd":
            nodes[0].ctl("stop", name, check=False)


def torchruns(launcher: str, nodes: list[Node], name: str) -> list[str]:
    """The options of each of its agents."""
    words = [f"--nproc-per-node={WORLD // len(nodes)}", "--max-restarts=3"]
    if len(nodes) == 1:
        return ["--standalone", *words]
    words += [f"--nnodes={len(nodes)}", f"--rdzv-id={name}"]
    if launcher == "torchrun":
        return [*words, "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    return [*words, "--rdzv-backend=elastic", f"--rdzv-endpoint={nodes[0].etcd}"]


def row(results: list[Result]) -> str:
    finals = [found.final for found in results if found.seconds is not None]
    same = "the same" if len(set(finals)) == 1 < len(finals) else " / ".join(repr(final) for final in finals)
    return f"{results[0].script:23} {'  '.join(str(found) for found in results)}   {same}"


def missing(script: str) -> str:
    """The framework that this script needs and that is not installed; '' if there is none."""
    found = FRAMEWORKS.findall((SCRIPTS / f"{script}.py").read_text())
    return next((name for name in found if importlib.util.find_spec(name) is None), "")


def ratios(results: list[Result]) -> dict[str, float | None]:
    """torchrun's time / elasticd's, by script; None: one of the two did not recover."""
    seconds = {(each.script, each.launcher): each.seconds for each in results}
    found: dict[str, float | None] = {}
    for script in dict.fromkeys(each.script for each in results):
        ours, stock = (seconds.get((script, launcher)) for launcher in ("elasticd", "torchrun"))
        found[f"{script}_torchrun_to_elasticd"] = round(stock / ours, 2) if ours and stock else None
    return found


def summary(results: list[Result]) -> dict[str, float | None]:
    """For the last line; None: did not recover."""
    found: dict[str, float | None] = {}
    for each in results:
        known = each.seconds is not None
        name = f"{each.script}_{each.launcher}".replace(" ", "_")
        found[f"{name}_s"] = round(each.seconds, 3) if known and each.seconds is not None else None
        found[f"{name}_steps_again"] = each.again if known else None
    return found | ratios(results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", choices=sorted(KILL_AT))
    which.add_argument("--quick", action="store_true", help=f"{QUICK} alone; under two minutes")
    which.add_argument("--smoke", action="store_true", help=SMOKE)
    parser.add_argument("--nodes", type=int, choices=(1, 2), default=1)
    parser.add_argument("--json", type=pathlib.Path, help="write the results there, too")
    args = parser.parse_args()
    full = LIMIT_S if args.nodes == 1 else LIMIT_TWO_NODES_S
    limits_s = SMOKE_LIMIT_S if args.smoke else QUICK_LIMIT_S if args.quick else full
    only = QUICK if args.quick or args.smoke else args.only
    scripts = [name for name in (KILL_AT if args.nodes == 1 else ON_TWO_NODES) if only in (None, name)]
    results = []
    print(machine())
    print(f"{'time, steps done again':23} {'  '.join(f'{how:>21}' for how in limits_s)}   final weights")
    with workplace() as (folder, processes):
        nodes = [Node(folder, processes, "n0", slots=WORLD // args.nodes)]
        nodes += [Node(folder, processes, "n1", slots=1, etcd=nodes[0].etcd)] * (args.nodes - 1)
        for node in nodes:
            node.start()
        for script in scripts:
            if name := missing(script):
                print(f"{script:23} needs {name}: see make test-compat")
                continue
            measured = [measure(Result(script, how, limits_s[how]), nodes, folder, processes) for how in limits_s]
            print(row(measured), flush=True)
            results += measured
    print(machine())
    if args.json:
        args.json.write_text(json.dumps([asdict(found) for found in results]))
    print(json.dumps(summary(results) or {"skipped": "a framework is not installed: see make test-compat"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
