"""The loss of a job that loses a random worker about every second, on that of the same job undisturbed.

    python benchmarks/thousand_kills.py [--quick] [--kills 1000] [--plot docs/losses.svg]

2 nodes × 2 workers on this machine, gloo, a model with dropout. The job runs once undisturbed and once with a SIGKILL
of a random worker, a random number of steps after the one before it and once every rank has made one since.
Every rank writes down its loss of every step as the 8 bytes that it is. `equal` says whether all of them, and the final
weights, are the same in both runs; `steps_lost` is what the job's incidents say.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import struct
import sys
import time
from dataclasses import dataclass

from _harness import HERE, SMOKE, Node, Processes, kill, machine, wait_for, workplace

RANKS = 4
LOSS = struct.Struct("<qd")
"""As the job writes it: step, loss."""
STEPS_A_KILL = 20
"""Mean number of steps from one kill to the next: about a second with the recovery."""
SPARE = 1.05
"""More steps than the kills need on average, so that the job ends after the last one."""
POINTS = 600
"""Of each curve."""
Losses = dict[tuple[int, int], bytes]
"""(step, rank) → its loss."""


@dataclass(frozen=True, slots=True)
class Run:
    losses: Losses
    weights: tuple[str, ...]
    kills_at: tuple[int, ...] = ()
    """The step that was under way at each kill."""
    steps_lost: int = 0
    seconds: float = 0.0


class Job:
    def __init__(self, nodes: tuple[Node, Node], folder: pathlib.Path, name: str, steps: int) -> None:
        self.name, self.folder, self._node = name, folder / name, nodes[0]
        self.folder.mkdir()
        file = folder / f"{name}.toml"
        file.write_text(
            f'name = "{name}"\nscript = "{HERE / "_losses_train.py"}"\nargs = ["{self.folder}", "{steps}"]\n'
            f'nodes = "2:2"\nworkers_per_node = 2\nworkdir = "{folder}"\n[restarts]\nbudget = 5000\n'
        )
        self._node.ctl("submit", file)

    def steps(self) -> dict[pathlib.Path, int]:
        """File of each process → steps that it has written."""
        return {path: path.stat().st_size // LOSS.size for path in self.folder.glob("[0-9].*")}

    def over(self) -> bool:
        return len(list(self.folder.glob("weights.*"))) == RANKS

    def run(self, kills: int, rng: random.Random) -> Run:
        began_s, kills_at = time.monotonic(), list[int]()
        wait_for(lambda: len(self.steps()) >= RANKS, 60.0, f"{self.name} steps", every_s=0.05)
        while len(kills_at) < kills and (moved := self.all_moved(rng.randint(1, 2 * STEPS_A_KILL - 1))):
            kills_at.append(max(self.last_step(path) for path in moved))
            kill(int(rng.choice(moved).suffix[1:]))
        wait_for(self.over, 3600.0, f"{self.name} is over", every_s=0.2)
        seconds = time.monotonic() - began_s
        wait_for(self.succeeded, 60.0, f"{self.name} has succeeded", every_s=0.5)
        incidents = self._node.json("incidents", self.name)["incidents"]
        lost = sum(incident["steps_lost"] or 0 for incident in incidents)
        weights = tuple((self.folder / f"weights.{rank}").read_text() for rank in range(RANKS))
        return Run(self.losses(), weights, tuple(kills_at), lost, seconds)

    def all_moved(self, by: int) -> list[pathlib.Path]:
        """The files of all ranks' processes, once each has grown and one by `by` steps; empty: the job is over. Raises
        TooLate."""
        before, moved = self.steps(), list[pathlib.Path]()

        def enough() -> bool:
            nonlocal moved
            now = self.steps()
            moved = [path for path, steps in now.items() if steps > before.get(path, 0)]
            farthest = max((now[path] - before.get(path, 0) for path in moved), default=0)
            return self.over() or (len(moved) == RANKS and farthest >= by)

        wait_for(enough, 120.0, "every rank steps", every_s=0.01)
        return [] if self.over() else moved

    def last_step(self, path: pathlib.Path) -> int:
        whole = path.read_bytes()
        return int(LOSS.unpack(whole[len(whole) // LOSS.size * LOSS.size - LOSS.size :][: LOSS.size])[0])

    def succeeded(self) -> bool:
        return any(job["job"] == self.name and job["phase"] == "succeeded" for job in self._node.json("jobs")["jobs"])

    def losses(self) -> Losses:
        """Raises RuntimeError if a rank has had two losses in one step."""
        losses: Losses = {}
        for path in self.folder.glob("[0-9].*"):
            rank, raw = int(path.stem), path.read_bytes()
            for step, value in LOSS.iter_unpack(raw[: len(raw) // LOSS.size * LOSS.size]):
                bits = LOSS.pack(0, value)[8:]
                if losses.setdefault((step, rank), bits) != bits:
                    raise RuntimeError(f"{self.name}: rank {rank} has two losses of step {step}")
        return losses


def compare(plain: Run, killed: Run, steps: int) -> dict[str, object]:
    both = plain.losses.keys() & killed.losses.keys()
    return {
        "kills": len(killed.kills_at),
        "steps": steps,
        "losses_compared": len(both),
        "steps_seen": len({step for step, _ in both}),
        "different": sum(plain.losses[key] != killed.losses[key] for key in both),
        "weights_equal": len({*plain.weights, *killed.weights}) == 1,
        "steps_lost": killed.steps_lost,
        "seconds": round(killed.seconds, 1),
        "seconds_undisturbed": round(plain.seconds, 1),
        "equal": (
            len({*plain.weights, *killed.weights}) == 1
            and all(plain.losses[key] == killed.losses[key] for key in both)
            and {step for step, _ in both} == set(range(steps))
        ),
    }


# ── the picture ─────────────────────────────────────────────────────────────────────────────────────────────


def plot(plain: Run, killed: Run, steps: int) -> str:
    """Mean loss over the ranks and over each of at most POINTS stretches of steps; below, a mark for each kill."""
    width, height, left, bottom = 900, 380, 60, 70
    curves = [means(run, steps) for run in (plain, killed)]
    highest = max(max(curve) for curve in curves)

    def x(step: float) -> float:
        return left + step / steps * (width - left - 20)

    def y(loss: float) -> float:
        return 40 + (1 - loss / highest) * (height - 40 - bottom)

    def text(at_x: float, at_y: float, words: str, more: str = "") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" font-family="sans-serif" font-size="13" {more}>{words}</text>'

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">']
    title = f"Loss of one training run: undisturbed, and with {len(killed.kills_at):,} workers killed"
    out += [f'<rect width="{width}" height="{height}" fill="white"/>', text(left, 22, title)]
    for part in range(5):
        loss = highest * part / 4
        out.append(f'<line x1="{left}" x2="{width - 20}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="#ddd"/>')
        out.append(text(left - 8, y(loss) + 4, f"{loss:.2f}", 'text-anchor="end"'))
        out.append(text(x(steps * part / 4), height - 14, f"{steps * part // 4:,}", 'text-anchor="middle"'))
    for curve, style in zip(
        curves, ('stroke="#9ec5e8" stroke-width="7"', 'stroke="#b3261e" stroke-width="1.5"'), strict=True
    ):
        dots = " ".join(f"{x((i + 0.5) * steps / len(curve)):.1f},{y(loss):.1f}" for i, loss in enumerate(curve))
        out.append(f'<polyline points="{dots}" fill="none" {style}/>')
    marks = "".join(f"M{x(step):.1f} {height - 52}v14" for step in killed.kills_at)
    out.append(f'<path d="{marks}" stroke="#b3261e" stroke-width="0.5" opacity="0.5"/>')
    begin, end = width - 320, width - 290
    for at, colour, name in ((56, "#9ec5e8", "undisturbed"), (76, "#b3261e", "a worker killed at each mark below")):
        line = f'x1="{begin}" x2="{end}" y1="{at - 4}" y2="{at - 4}"'
        out.append(f'<line {line} stroke="{colour}" stroke-width="4"/>')
        out.append(text(width - 282, at, name))
    return "\n".join([*out, "</svg>", ""])


def means(run: Run, steps: int) -> list[float]:
    points = min(POINTS, steps)
    stretches: list[list[float]] = [[] for _ in range(points)]
    for (step, _), bits in run.losses.items():
        stretches[step * points // steps].append(LOSS.unpack(bytes(8) + bits)[1])
    return [sum(stretch) / len(stretch) for stretch in stretches if stretch]


def start(folder: pathlib.Path, processes: Processes) -> tuple[Node, Node]:
    first = Node(folder, processes, "a", slots=2)
    second = Node(folder, processes, "b", slots=2, etcd=first.etcd)
    first.start()
    second.start()
    return first, second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=pathlib.Path, help="write the picture there")
    parser.add_argument("--quick", action="store_true", help="30 kills")
    parser.add_argument("--smoke", action="store_true", help=SMOKE)
    options = parser.parse_args()
    kills = 3 if options.smoke else 30 if options.quick else options.kills
    steps = round(kills * STEPS_A_KILL * SPARE) + 2 * STEPS_A_KILL
    print(machine(), file=sys.stderr)
    with workplace() as (folder, processes):
        nodes = start(folder, processes)
        plain = Job(nodes, folder, "undisturbed", steps).run(0, random.Random(options.seed))
        killed = Job(nodes, folder, "killed", steps).run(kills, random.Random(options.seed))
    if options.plot:
        options.plot.write_text(plot(plain, killed, steps))
    print(json.dumps(compare(plain, killed, steps)))


if __name__ == "__main__":
    main()
