"""The stacks of a job's workers on this node, read by py-spy from outside without pausing them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from elastic.contract.records.job_records import RankRow
from elasticd.base.answers import Stack
from elasticd.cluster.published_state import LocalAgent

AT_ONCE = 8
"""Dumps at a time: those of processes that do not answer must not add up to more than another node waits for."""
MOST_WORKERS = 64
DUMP_S = 5.0
"""Time limit of one dump; it takes 0.1 s on an idle machine."""
STACK_CHARS = 20_000
NO_STACK = "no stack could be read"


def of_workers(agent: LocalAgent | None, rank: int | None, dump: Callable[[int], str]) -> list[Stack]:
    """A row per worker of this node's agent, or that of `rank` alone; of the first MOST_WORKERS."""
    if agent is None or agent.status is None:
        return []
    wanted = [row for row in agent.status.ranks if rank is None or row.rank == rank][:MOST_WORKERS]

    def one(row: RankRow) -> Stack:
        # The agent's file names the process, and a job's user may write that file: it must not make root look at the
        # processes of other users.
        theirs = 0 < row.pid < 1 << 31 and same_user(row.pid, agent.pid)
        stack = dump(row.pid) if theirs else f"process {row.pid} is no worker of this job"
        return Stack(row.rank, row.node, row.slot, row.pid, row.phase, row.step, stack)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, wanted))


def same_user(pid: int, other: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.stat(f"/proc/{other}").st_uid
    except OSError:
        return False


def dump(pid: int, environment: Mapping[str, str] = os.environ) -> str:
    """The Python stack of each thread of a process; why there is none, if it cannot be read."""
    tool = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if tool is None:
        return "py-spy is not installed: pip install py-spy"
    argv = [tool, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(argv, env=dict(environment), capture_output=True, timeout=DUMP_S, check=False)
    except (subprocess.TimeoutExpired, OSError) as error:
        return f"{NO_STACK}: {error}"
    if done.returncode:
        return f"{NO_STACK}: {(done.stderr.decode(errors='replace').strip() or str(done.returncode))[-500:]}"
    return done.stdout.decode(errors="replace")[:STACK_CHARS]
