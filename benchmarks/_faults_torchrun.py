"""The part of benchmarks/faults.py that does to stock torchrun what it does to elasticd."""

from __future__ import annotations

import os
import pathlib
import random
import statistics

import recovery
from _faults_run import Plan, Result, now_s, reachable
from _harness import BIN, Processes, Record, free_port, spread, wait_for, workplace


def torchrun(plan: Plan, dice: random.Random) -> Result:
    """What stock torchrun does about the two that it handles; its default time-outs, its shared store off."""
    with workplace() as (folder, processes):
        kills = recovery.torchrun(folder, processes, plan.torchrun_kills, dice, recovery.SHARE_OFF, "kills", 90.0)
        print(f"torchrun, worker exit: {spread([k.seconds for k in kills])} s, "
              f"steps lost {spread([k.steps_lost for k in kills], 0)}")  # fmt: skip
        node_s = torchrun_node(folder, processes)
        print(f"torchrun, node's process tree killed: {node_s:.1f} s")
    return {"torchrun_exit_median_s": statistics.median(k.seconds for k in kills), "torchrun_node_kill_s": node_s}


def torchrun_node(folder: pathlib.Path, processes: Processes) -> float:
    """The agent that does not host the store is killed with its workers. Raises TooLate."""
    port, record, tags = free_port(), Record(folder / "node"), []
    for index in range(2):
        agent: list[str | os.PathLike[str]] = [
            BIN / "torchrun", "--nnodes=1:2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--max-restarts=100",
            f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=node", recovery.SCRIPT, "--stock",
            "--record", record.folder, "--checkpoint", folder / "node.pt",
        ]  # fmt: skip
        tags.append(processes.start(f"node-agent{index}", agent, recovery.SHARE_OFF))
        wait_for(lambda: reachable("127.0.0.1", port), 60.0, "the store of torchrun", every_s=0.1)
    record.wait_step(25, 4, 120.0)
    struck_s = now_s()
    processes.end(tags[1])
    back: dict[int, float] = {}

    def there() -> bool:
        for commit in record.update():
            if commit.world_size == 2 and commit.at_s > struck_s:
                back.setdefault(commit.rank, commit.at_s)
        return len(back) == 2

    wait_for(there, 180.0, "torchrun steps on with one node", every_s=0.05)
    return max(back.values()) - struck_s
