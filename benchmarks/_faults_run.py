"""What benchmarks/faults.py measures with: a cluster of tests/chaos/harness.py with one job, read while it runs."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import random
import signal
import socket
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

sys.path.insert(0, os.fspath(pathlib.Path(__file__).resolve().parents[1] / "tests"))
from _harness import wait_for
from chaos.harness import Cluster, Job, Node
from chaos.harness import now_s as now_s
from support.history import Commit, History
from support.procs import alive, state

from elastic.testing import Fail, Kill

TEN_MB = {"WIDTH": "262144"}
"""Environment of train_chaos.py for a model of that size."""
RESTARTS = {"budget": 5000, "same_failure": 1000}
Result = dict[str, float | int | None]


@dataclass(frozen=True, slots=True)
class Plan:
    exits: int
    """Of each kind."""
    times: int
    """Repetitions of each other fault."""
    setup_s: float
    """What `setup` of the slow starter takes."""
    lease_ttl_s: float
    baseline_s: float
    """How long steps are watched before something is done to the control plane."""
    etcd_away_s: float
    chaos_s: float
    torchrun_kills: int


class NotStruck(Exception):
    """A fault did not do what it was to do: there is nothing to measure."""


class Tail(History):
    """Reads only what is new, so that reading does not disturb what it measures."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        self._read: dict[str, int] = {}

    def read(self) -> Tail:
        for path in self.folder.glob("commits.*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path.name, 0))
                raw = file.read()
            whole = raw.rfind(b"\n") + 1
            self._read[path.name] = self._read.get(path.name, 0) + whole
            process = path.name.removeprefix("commits.").removesuffix(".jsonl")
            for line in raw[:whole].splitlines():
                fields = json.loads(line)
                self.commits.append(Commit(**{**fields, "ids": tuple(fields["ids"])}, process=process))
        self.commits.sort(key=lambda c: c.at_s)
        return self


class Run:
    """One job. `world`: its ranks when it is whole."""

    def __init__(self, cluster: Cluster, job: Job, world_size: int, dice: random.Random) -> None:
        self.cluster, self.job, self.world_size, self.dice = cluster, job, world_size, dice
        self.tail = Tail(job.folder)
        self._orders = itertools.count()
        self._undisturbed: list[float] = []
        self._lost = 0

    def steady(self, steps: int, limit_s: float = 90.0) -> int:
        """Wait until the newest generation is whole and all its ranks have taken `steps` more steps; its number."""
        self.tail.read()
        goal = self.tail.step() + steps

        def there() -> bool:
            self.tail.read()
            newest = self.generation()
            return (
                len({c.rank for c in self.tail.commits if c.generation == newest and c.step >= goal}) == self.world_size
            )

        wait_for(there, limit_s, f"step {goal} on {self.world_size} ranks", every_s=0.02)
        return self.generation()

    def generation(self) -> int:
        return max((c.generation for c in self.tail.commits), default=0)

    def worker(self, rank: int) -> int:
        """Id of the living process that committed as `rank` last. Raises NotStruck."""
        pid = int([c for c in self.tail.read().commits if c.rank == rank][-1].process.rpartition(".")[2])
        if not alive(pid):
            raise NotStruck(f"rank {rank} is gone before the fault")
        return pid

    def order(self, how: Callable[..., Kill | Fail], rank: int, place: str) -> tuple[float, int]:
        """Have the worker with `rank` strike itself a few steps ahead; when it did, and its process id."""
        name = f"fault{next(self._orders)}"
        self.job.order(name, how(rank=rank, step=self.tail.read().step() + 10, place=place))
        struck = self.job.wait_struck(name, 30.0)
        return struck.at_s, struck.pid

    def stepping(self, after: int, world_size: int, limit_s: float) -> float:
        """Wait for a generation newer than `after` with `world` ranks, all of which have committed a step in it.
        Returns when the last of them did. Raises TooLate."""

        def there() -> float | None:
            firsts: dict[int, dict[int, float]] = {}
            for commit in self.tail.read().commits:
                if commit.generation > after and commit.world_size == world_size:
                    firsts.setdefault(commit.generation, {}).setdefault(commit.rank, commit.at_s)
            return min((max(ranks.values()) for ranks in firsts.values() if len(ranks) == world_size), default=None)

        return wait_for(there, limit_s, f"{world_size} ranks stepping in a generation after {after}", every_s=0.02)

    def incident(self, generation: int, kind: str) -> dict[str, Any]:
        """The newest incident, once there is one of a generation after `generation`. Raises NotStruck: another kind."""

        def told() -> dict[str, Any] | None:
            found = [i for i in self.job.incidents() if not i["open"] and i["generation"] > generation]
            return found[0] if found else None

        seen = wait_for(told, 10.0, f"an incident after generation {generation}", every_s=0.1)
        if seen["kind"] != kind:
            raise NotStruck(f"the incident is {seen['kind']}, not {kind}: {seen['detail']}")
        return seen

    def instants(self) -> dict[int, float]:
        """step -> when the last rank had committed it, in the newest generation that did."""
        found: dict[int, tuple[int, float]] = {}
        for commit in self.tail.read().commits:
            found[commit.step] = max(found.get(commit.step, (0, 0.0)), (commit.generation, commit.at_s))
        return {step: at_s for step, (_, at_s) in sorted(found.items())}

    def gaps_s(self, since_s: float, until_s: float) -> list[float]:
        """Time between consecutive steps, all those that touch the span."""
        return [b - a for a, b in itertools.pairwise(self.instants().values()) if b > since_s and a < until_s]

    def undisturbed(self, seconds: float) -> list[float]:
        """Step times while nothing happens, measured once for this job."""
        if not self._undisturbed:
            self.steady(5)
            began_s = now_s()
            wait_for(lambda: now_s() >= began_s + seconds, seconds + 5.0, "", every_s=0.25)
            self._undisturbed = self.gaps_s(began_s, now_s())
        return self._undisturbed

    def standbys(self, node: Node) -> int:
        """Workers that wait there, ready; none as long as the agent's status is from before the newest generation: it
        still shows the standby that went into that."""
        path = node.folder / "state" / "jobs" / self.job.name / "agent" / "status.json"
        try:
            status = json.loads(path.read_text())
        except FileNotFoundError:
            return 0
        return int(status["standbys"]) if status["generation"] >= self.generation() else 0

    def lost(self) -> int:
        """Committed steps that were done again. Raises AssertionError: a step is missing."""
        generations: dict[int, set[int]] = {}
        for commit in self.tail.read().commits:
            generations.setdefault(commit.step, set()).add(commit.generation)
        assert set(generations) == set(range(len(generations))), "the history of commits has holes"
        return sum(len(of_step) > 1 for of_step in generations.values())

    def lost_since(self) -> int:
        """As `lost`, only those since this was asked last."""
        before, self._lost = self._lost, self.lost()
        return self._lost - before


@contextlib.contextmanager
def cluster_of(nodes: int, slots: int, **more: Any) -> Iterator[Cluster]:
    """Ended in one go: a second Ctrl-C does not break into it."""
    with contextlib.ExitStack() as last_first:
        last_first.callback(signal.signal, signal.SIGINT, signal.default_int_handler)
        cluster = last_first.enter_context(Cluster(nodes=nodes, slots=slots, warm=False, **more))
        last_first.callback(signal.signal, signal.SIGINT, signal.SIG_IGN)
        yield cluster


def stopped(pid: int) -> bool:
    return state(pid) in ("T", "t")


def slowest_ratio(gaps_s: list[float], undisturbed_s: list[float]) -> float:
    return max(gaps_s) / statistics.median(undisturbed_s)


def reachable(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), 1.0):
        return True
    return False


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
