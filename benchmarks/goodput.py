"""Goodput against cluster size: a discrete-event model of a long run with failures. Writes docs/goodput.svg.

    python benchmarks/goodput.py [--quick]

Goodput is the share of wall time in which steps are made that are kept. What goes in, and where it comes from:

- Failures arrive as a Poisson process in proportion to the number of GPUs, at the rate that Meta reports for Llama 3
  (The Llama 3 Herd of Models, 2024): 466 interruptions in 54 days on 16,384 GPUs.
- SAME_NODE of them take one worker only; the others take its node. Assumed: the report's causes do not say it exactly.
- A failure that comes during a recovery begins the recovery anew.
- elasticd: DETECT + RECOVER seconds, as benchmarks/recovery.py and the node-loss test measure them here (2 cores,
  gloo, a small model), plus TRANSFER for the state of a large model; nothing committed is lost. Without standbys the
  replacement's start-up (STARTUP) is waited for. One failure in CATASTROPHIC takes every copy of the state, and costs
  a restart from the checkpoint.
- torchrun: detection and restart as measured here (docs of this repository), plus STARTUP, plus the work since the last
  checkpoint, taken at the Young/Daly interval for the failure rate; a node's loss is noticed after 43.5 s at defaults.
- Checkpoints stall training for STALL seconds each.

What it leaves out: slow nodes, failures that nobody notices, maintenance, and the time to find a replacement node.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

FAILURES_PER_GPU_S = 466 / (54 * 86400 * 16384)
SAME_NODE = 0.4
STARTUP_S = 60.0
TRANSFER_S = 10.0
STALL_S = 2.0
CATASTROPHIC = 1000
SIZES = (64, 256, 1024, 4096, 16384, 65536, 131072)
DAYS = 54
LOWEST = 0.8
"""Where the plot begins."""
LLAMA3 = (16384, 0.90)
"""Published: more than 90 % effective training time."""


@dataclass(frozen=True)
class System:
    name: str
    colour: str
    detect_worker_s: float
    detect_node_s: float
    recover_s: float
    startup_s: float
    """Waited for in each recovery."""
    from_checkpoint: float
    """Share of failures that go back to a checkpoint."""


SYSTEMS = (
    System("elasticd, standbys", "#1a7f37", 0.02, 6.0, 0.3 + TRANSFER_S, 0.0, 1 / CATASTROPHIC),
    System("elasticd, no standby", "#2f6fd6", 0.02, 6.0, 0.3 + TRANSFER_S, STARTUP_S, 1 / CATASTROPHIC),
    System("torchrun, tuned", "#bf6a02", 5.0, 6.3, 5.0, STARTUP_S, 1.0),
    System("torchrun, defaults", "#c0392b", 10.0, 43.5, 5.0, STARTUP_S, 1.0),
)


def interval_s(system: System, gpus: int) -> float:
    """Young/Daly for those failures that go back to a checkpoint."""
    between_s = 1 / (FAILURES_PER_GPU_S * gpus * system.from_checkpoint)
    return math.sqrt(2 * STALL_S * between_s)


def goodput(system: System, gpus: int, rng: random.Random, days: float) -> float:
    """Plays `days` of wall time."""
    rate = FAILURES_PER_GPU_S * gpus
    every_s, end_s = interval_s(system, gpus), days * 86400
    now_s = kept_s = since_s = 0.0
    useful = every_s / (every_s + STALL_S)
    while now_s < end_s:
        run_s = min(rng.expovariate(rate), end_s - now_s)
        now_s += run_s
        kept_s += run_s * useful
        since_s = (since_s + run_s) % (every_s + STALL_S)
        if now_s >= end_s:
            break
        if rng.random() < system.from_checkpoint:
            kept_s -= min(kept_s, since_s * useful)
            since_s = 0.0
        while True:  # until a recovery gets through
            detect_s = system.detect_worker_s if rng.random() < SAME_NODE else system.detect_node_s
            takes_s = detect_s + system.recover_s + system.startup_s
            next_s = rng.expovariate(rate)
            now_s += min(takes_s, next_s)
            if next_s >= takes_s or now_s >= end_s:
                break
    return max(0.0, kept_s) / end_s


def plot(curves: dict[str, list[float]]) -> str:
    """The SVG as text."""
    width, height, left, top = 720, 400, 60, 30

    def x(gpus: float) -> float:
        low, high = math.log(SIZES[0]), math.log(SIZES[-1])
        return left + (math.log(gpus) - low) / (high - low) * (width - left - 190)

    def y(share: float) -> float:
        return top + (1 - max(share, LOWEST)) / (1 - LOWEST) * (height - top - 50)

    def text(at_x: float, at_y: float, words: str, more: str = "") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" font-family="sans-serif" font-size="12" {more}>{words}</text>'

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">']
    out += [f'<rect width="{width}" height="{height}" fill="white"/>', text(left, 18, "Goodput against GPUs (model)")]
    for percent in range(round(100 * LOWEST), 101, 5):
        at = y(percent / 100)
        out.append(f'<line x1="{left}" x2="{x(SIZES[-1]):.1f}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        out.append(text(left - 8, at + 4, f"{percent} %", 'text-anchor="end"'))
    for gpus in SIZES:
        out.append(text(x(gpus), height - 30, f"{gpus:,}", 'text-anchor="middle"'))
    for index, system in enumerate(SYSTEMS):
        points = " ".join(f"{x(g):.1f},{y(v):.1f}" for g, v in zip(SIZES, curves[system.name], strict=True))
        out.append(f'<polyline points="{points}" fill="none" stroke="{system.colour}" stroke-width="2"/>')
        out.append(text(x(SIZES[-1]) + 12, top + 40 + 20 * index, system.name, f'fill="{system.colour}"'))
    out.append(f'<circle cx="{x(LLAMA3[0]):.1f}" cy="{y(LLAMA3[1]):.1f}" r="4" fill="black"/>')
    out.append(text(x(SIZES[-1]) + 12, top + 40 + 20 * len(SYSTEMS), "● Llama 3, published"))
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer runs, and the plot is left as it is")
    options = parser.parse_args()
    runs = 3 if options.quick else 20
    curves = {}
    for system in SYSTEMS:
        rng = random.Random(7)
        curves[system.name] = [sum(goodput(system, g, rng, DAYS) for _ in range(runs)) / runs for g in SIZES]
        print(
            system.name.ljust(22), " ".join(f"{g:,}: {v:.4f}" for g, v in zip(SIZES, curves[system.name], strict=True))
        )
    if not options.quick:
        (Path(__file__).parent.parent / "docs" / "goodput.svg").write_text(plot(curves))
    at = SIZES.index(16384)
    print(json.dumps({name: round(curve[at], 4) for name, curve in curves.items()}))


if __name__ == "__main__":
    main()
