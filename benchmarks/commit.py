"""What it costs each step to know the state of the last commit: CPU time of the calls, beside a whole step.

    python benchmarks/commit.py       one minute on an idle machine

One process, one thread, no process group. `commit` is `State.committed`, `step hook` what each optimizer step calls,
`next batch` the comparison before a batch is loaded. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from _harness import SMOKE, machine
from torch import nn

from elastic.worker.state.state import State


def cpu_us(call: Callable[[], object], times: int, rounds: int) -> float:
    """CPU time of this thread per call, the least of some rounds: other processes do not count."""
    call()
    best = float("inf")
    for _ in range(rounds):
        began_s = time.thread_time()
        for _ in range(times):
            call()
        best = min(best, (time.thread_time() - began_s) / times)
    return best * 1e6


class Chain(nn.Module):
    """Many small modules on one input, as the cost per tensor shows best."""

    def __init__(self, make: Callable[[], nn.Module], count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(make() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(x).mean() for part in self.parts]).sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "4 parameters": lambda: Chain(lambda: nn.Linear(16, 16), 2),
    "100 parameters": lambda: Chain(lambda: nn.Linear(16, 16), 50),
    "53 BatchNorms": lambda: Chain(lambda: nn.BatchNorm1d(16), 53),
    "1,000 parameters": lambda: Chain(lambda: nn.Linear(16, 16), 500),
    "10,000 parameters": lambda: Chain(lambda: nn.Linear(16, 16), 5000),
}


def measure(make: Callable[[], nn.Module], rounds: int) -> dict[str, float]:
    net = make()
    optimizer = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    state = State(model=net, optimizer=optimizer, scheduler=scheduler)
    state.begin()
    x = torch.randn(8, 16)

    def step() -> None:
        net(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
        state.committed(1)
    few = 3 if sum(1 for _ in net.parameters()) > 200 else 50

    def hook() -> None:
        state.changing()
        state._changing = False

    def whole() -> None:
        step()
        state.committed(1)
        state.turned()

    next_batch = cpu_us(state.turned, 10 * few, rounds)
    hooks, commits = cpu_us(hook, 10 * few, rounds), cpu_us(lambda: state.committed(1), 10 * few, rounds)
    return {"commit": commits, "step hook": hooks, "next batch": next_batch, "step": cpu_us(whole, few, rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help=SMOKE)
    smoke = parser.parse_args().smoke
    torch.set_num_threads(1)
    print(
        f"{machine()}\n\n{'':18s}{'commit':>10s}{'step hook':>12s}{'next batch':>12s}{'whole step':>12s}{'share':>8s}"
    )
    shares, costs_us = dict[str, float](), dict[str, float]()
    for name, make in list(MODELS.items())[: 2 if smoke else None]:
        found = measure(make, 1 if smoke else 5)
        ours = found["commit"] + found["step hook"] + found["next batch"]
        costs_us[name] = round(ours, 1)
        shares[name] = round(100 * ours / found["step"], 2)
        row = "".join(
            f"{found[key]:{width}.0f}" for key, width in (("commit", 10), ("step hook", 12), ("next batch", 12))
        )
        print(f"{name:18s}{row}{found['step']:12.0f}{shares[name]:7.2f} %   (microseconds of CPU time)")
    print(json.dumps({"percent_of_a_step": shares, "us_a_step": costs_us}))


if __name__ == "__main__":
    main()
