"""Goodput against cluster size: a discrete-event model of a long run with failures. Writes docs/goodput.svg.

    python benchmarks/goodput.py [--quick]

Goodput is the share of wall time in which steps are made that are kept. What goes in, and where it comes from:

- Failures arrive as a Poisson process in proportion to the number of GPUs, at the rate that Meta reports for Llama 3
  (The Llama 3 Herd of Models, arxiv.org/abs/2407.21783): 466 interruptions in 54 days on 16,384 GPUs.
- SAME_NODE of them take one worker only; the others take its node. Assumed: the report's causes do not say it exactly.
- A failure that comes during a recovery begins the recovery anew.
- elasticd: a killed worker as in the record of benchmarks/recovery.py (2 cores, gloo, 4 workers, a small model: a CPU
  figure, not a GPU one), a silent node by its lease; plus TRANSFER for the state of a large model; nothing committed is
  lost. Without standbys the replacement's start-up (STARTUP) is waited for. One failure in CATASTROPHIC takes every
  copy of the state, and costs a restart from the checkpoint.
- torchrun: a killed worker as in the same record (share of the store off), plus STARTUP, plus the
  work since the last checkpoint, taken at the Young/Daly interval for the failure rate. A lost node is believed to be
  noticed by its peers' failing collectives as soon as a killed worker is; at defaults torch's own keep-alive
  takes NODE_DEFAULT_S instead (3 missed ones, 5 s apart, and the last call of 30 s).
- Checkpoints stall training for STALL seconds each.
- A published recovery time (PUBLISHED_STALLS) is put into the same model as it was published: the whole stall of a
  failure, at every size, with nothing else lost. Its authors measured it at one size.
- Published shares (PUBLISHED_SHARES) are points, not curves: other models, other hardware, other failure rates.

What it leaves out: slow nodes, failures that go unnoticed, maintenance, and the time to find a replacement node.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from _harness import SMOKE

FAILURES_PER_GPU_S = 466 / (54 * 86400 * 16384)
SAME_NODE = 0.4
STARTUP_S = 60.0
TRANSFER_S = 10.0
STALL_S = 2.0
CATASTROPHIC = 1000
SIZES = (64, 256, 1024, 4096, 16384, 65536, 131072)
DAYS = 54
LOWEST = 0.6
"""Where the plot begins."""
NODE_DEFAULT_S = 3 * 5.0 + 30.0


@dataclass(frozen=True)
class Share:
    """The published goodput of a run."""

    name: str
    gpus: int
    share: float
    source: str


PUBLISHED_SHARES = (
    Share("Llama 3", 16384, 0.90, "more than 90 % effective training time, arxiv.org/abs/2407.21783"),
    Share("ByteRobust", 9600, 0.97, "97 % ETTR over three months, arxiv.org/abs/2509.16293"),
    Share("FT-HSDP", 100000, 0.80, "44 % synchronous, 80 % with FT-HSDP, O(100K) GPUs, arxiv.org/abs/2602.00277"),
)


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


def stall(name: str, colour: str, seconds: float) -> System:
    return System(name, colour, seconds, seconds, 0.0, 0.0, 0.0)


RECOVERY = json.loads((Path(__file__).parent.parent / "docs" / "evidence" / "recovery.json").read_text())["figures"]
WORKER_S = RECOVERY["kill_median_s"]
"""SIGKILL of a worker until all have stepped."""
TORCHRUN_S = RECOVERY["torchrun_median_s"]
"""The same of torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."""
NODE_S = 6.0
"""A lease of 5 s ends at most 0.5 s late; a host that only closed its connections is noticed at once."""

SYSTEMS = (
    System("elasticd, standbys", "#1a7f37", 0.0, NODE_S, WORKER_S + TRANSFER_S, 0.0, 1 / CATASTROPHIC),
    System("elasticd, no standby", "#2f6fd6", 0.0, NODE_S, WORKER_S + TRANSFER_S, STARTUP_S, 1 / CATASTROPHIC),
    System("torchrun, tuned", "#bf6a02", 0.0, 0.0, TORCHRUN_S, STARTUP_S, 1.0),
    System("torchrun, defaults", "#c0392b", 0.0, NODE_DEFAULT_S, TORCHRUN_S, STARTUP_S, 1.0),
)

PUBLISHED_STALLS = (
    # 'training restoration on training cluster with 4,800 devices in 150 seconds', arxiv.org/abs/2509.03047
    stall("FlashRecovery's 150 s", "#8250df", 150.0),
    # stall of a failure at O(100K) GPUs, synchronous and with replicas as units, arxiv.org/abs/2602.00277
    stall("FT-HSDP's 3 minutes", "#57606a", 180.0),
    stall("its baseline's 10 minutes", "#a0a7af", 600.0),
)


def interval_s(system: System, gpus: int) -> float:
    """Young/Daly for those failures that go back to a checkpoint; infinite when none does."""
    if not system.from_checkpoint:
        return math.inf
    between_s = 1 / (FAILURES_PER_GPU_S * gpus * system.from_checkpoint)
    return math.sqrt(2 * STALL_S * between_s)


def goodput(system: System, gpus: int, rng: random.Random, days: float) -> float:
    """Plays `days` of wall time."""
    rate = FAILURES_PER_GPU_S * gpus
    every_s, end_s = interval_s(system, gpus), days * 86400
    now_s = kept_s = since_s = 0.0
    useful = 1 / (1 + STALL_S / every_s)
    while now_s < end_s:
        run_s = min(rng.expovariate(rate), end_s - now_s)
        now_s += run_s
        kept_s += run_s * useful
        since_s = math.fmod(since_s + run_s, every_s + STALL_S)
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
    width, height, left, right, top = 960, 440, 60, 230, 36

    def x(gpus: float) -> float:
        low, high = math.log(SIZES[0]), math.log(SIZES[-1])
        return left + (math.log(gpus) - low) / (high - low) * (width - left - right)

    def y(share: float) -> float:
        return top + (1 - max(share, LOWEST)) / (1 - LOWEST) * (height - top - 60)

    def text(at_x: float, at_y: float, words: str, more: str = "") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" font-family="sans-serif" font-size="12" {more}>{words}</text>'

    end = x(SIZES[-1])
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">']
    out += [f'<rect width="{width}" height="{height}" fill="white"/>', text(left, 18, "Goodput against GPUs (model)")]
    for percent in range(round(100 * LOWEST), 101, 10):
        at = y(percent / 100)
        out.append(f'<line x1="{left}" x2="{end:.1f}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        out.append(text(left - 8, at + 4, f"{percent} %", 'text-anchor="end"'))
    for gpus in SIZES:
        out.append(text(x(gpus), height - 40, f"{gpus:,}", 'text-anchor="middle"'))
    out.append(text((left + end) / 2, height - 16, "GPUs", 'text-anchor="middle"'))
    for index, system in enumerate((*SYSTEMS, *PUBLISHED_STALLS)):
        dashed = ' stroke-dasharray="5 4"' if system in PUBLISHED_STALLS else ""
        points = " ".join(
            f"{x(g):.1f},{y(v):.1f}" for g, v in zip(SIZES, curves[system.name], strict=True) if v > LOWEST
        )
        out.append(f'<polyline points="{points}" fill="none" stroke="{system.colour}" stroke-width="2"{dashed}/>')
        at = top + 16 + 20 * index
        stroke = f'stroke="{system.colour}" stroke-width="2"{dashed}'
        out.append(f'<line x1="{end + 14:.1f}" x2="{end + 40:.1f}" y1="{at - 4}" y2="{at - 4}" {stroke}/>')
        out.append(text(end + 46, at, system.name))
    at = top + 16 + 20 * (len(SYSTEMS) + len(PUBLISHED_STALLS))
    out.append(f'<circle cx="{end + 27:.1f}" cy="{at - 4}" r="4" fill="black"/>')
    out.append(text(end + 46, at, "reported of a real run"))
    for one in PUBLISHED_SHARES:
        out.append(f'<circle cx="{x(one.gpus):.1f}" cy="{y(one.share):.1f}" r="4" fill="black"/>')
        out.append(text(x(one.gpus) - 8, y(one.share) + 16, one.name, 'text-anchor="end"'))
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer runs, and the plot is left as it is")
    parser.add_argument("--smoke", action="store_true", help=SMOKE)
    options = parser.parse_args()
    runs = 1 if options.smoke else 3 if options.quick else 20
    curves = {}
    for system in (*SYSTEMS, *PUBLISHED_STALLS):
        rng = random.Random(7)
        curves[system.name] = [sum(goodput(system, g, rng, DAYS) for _ in range(runs)) / runs for g in SIZES]
        print(
            system.name.ljust(26), " ".join(f"{g:,}: {v:.4f}" for g, v in zip(SIZES, curves[system.name], strict=True))
        )
    if not (options.quick or options.smoke):
        (Path(__file__).parent.parent / "docs" / "goodput.svg").write_text(plot(curves))
    at = SIZES.index(16384)
    print(json.dumps({name: round(curve[at], 4) for name, curve in curves.items()}))


if __name__ == "__main__":
    main()
