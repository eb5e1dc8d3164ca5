"""Every way to interrupt training: how long until it steps again, and what is lost.

Real daemons, agents, workers and etcd on this machine; nodes in network namespaces where we are root. Each fault
strikes several times. Times count from the instant of the fault to the instant at which *every* rank of the new world
has committed a step; gaps lie between two consecutive steps, each taken when its last rank has committed it. The model
has about 10 MB, except in the random chaos. A fault that did not strike is an error, and its number is null.

    python benchmarks/faults.py [--quick] [--seed N] [--only NAME …]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from _faults_chaos import four_nodes, random_chaos
from _faults_run import (
    RESTARTS,
    TEN_MB,
    NotStruck,
    Plan,
    Result,
    Run,
    cluster_of,
    now_s,
    reachable,
    say,
    slowest_ratio,
    stopped,
)
from _faults_torchrun import torchrun
from _harness import SMOKE, TooLate, machine, spread, wait_for
from chaos.harness import Node
from support import machine as able
from support.api import ApiError
from support.procs import alive, kill

from elastic.contract.timeouts import Timeouts
from elastic.testing import Fail, Kill

FULL = Plan(
    exits=4, times=5, setup_s=20.0, lease_ttl_s=Timeouts().lease_ttl_s, baseline_s=30.0, etcd_away_s=60.0,
    chaos_s=600.0, torchrun_kills=5,
)  # fmt: skip
QUICK = Plan(
    exits=1, times=1, setup_s=4.0, lease_ttl_s=3.0, baseline_s=4.0, etcd_away_s=10.0, chaos_s=20.0, torchrun_kills=1
)
SMALLEST = Plan(
    exits=1, times=1, setup_s=1.0, lease_ttl_s=3.0, baseline_s=1.0, etcd_away_s=2.0, chaos_s=0.0, torchrun_kills=0
)
PLACES = ("data", "forward", "backward", "optimizer", "commit")
ENDS: dict[str, Callable[..., Kill | Fail]] = {
    "SIGKILL": Kill,
    "SIGSEGV": functools.partial(Kill, signal="SIGSEGV"),
    "SIGABRT": functools.partial(Kill, signal="SIGABRT"),
    "exception": functools.partial(Fail, error="ValueError", message="ordered"),
    "exit 3": functools.partial(Fail, error="SystemExit", message="3"),
    "exit 0": functools.partial(Fail, error="SystemExit", message="0"),
}
ERRORS = (TooLate, NotStruck, AssertionError, RuntimeError, OSError, ApiError)


# ── processes ───────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def four_workers(plan: Plan, dice: random.Random) -> Iterator[Run]:
    with cluster_of(2, 2) as cluster:
        job = cluster.submit(steps=10**6, pace_s=0.02, env=TEN_MB, restarts=RESTARTS)
        yield Run(cluster, job, 4, dice)


def worker_exit(run: Run, plan: Plan) -> Result:
    """A worker ends, in each way: until the full world steps again."""
    found: list[float] = []
    for number in range(plan.exits):
        for name, how in ENDS.items():
            place = run.dice.choice(PLACES[:1] if name.startswith("ex") else PLACES)
            found.append(seconds := end_one(run, how, place))
            say(f"  {name} {number + 1} in {place}: {seconds:.3f} s")
    print(f"worker exit: {spread(found)} s")
    return {"exit_median_s": statistics.median(found)}


def end_one(run: Run, how: Callable[..., Kill | Fail], place: str) -> float:
    generation = run.steady(run.dice.randint(5, 20))
    struck_s, pid = run.order(how, run.dice.randrange(run.world_size), place)
    seconds = run.stepping(generation, run.world_size, 60.0) - struck_s
    if alive(pid):
        raise NotStruck(f"process {pid} lives on after {how}")
    run.incident(generation, "exit")
    return seconds


def worker_stopped(run: Run, plan: Plan) -> Result:
    """SIGSTOP: from the victim's last commit, with which the step that it did not finish began."""
    found = []
    for number in range(plan.times):
        generation = run.steady(run.dice.randint(20, 40))
        rank = run.dice.randrange(run.world_size)
        kill(pid := run.worker(rank), signal.SIGSTOP)
        wait_for(lambda pid=pid: stopped(pid), 1.0, f"{pid} stops", every_s=0.001)  # type: ignore[misc]
        whole_s = run.stepping(generation, run.world_size, 60.0)
        if (seen := run.incident(generation, "hang"))["ranks"] != [rank]:
            raise NotStruck(f"rank {rank} was stopped, {seen['ranks']} replaced")
        last_s = max(c.at_s for c in run.tail.commits if c.process.endswith(f".{pid}"))
        found.append(whole_s - last_s)
        say(f"  SIGSTOP {number + 1} of rank {rank}: {found[-1]:.3f} s")
    print(f"SIGSTOP of a worker: {spread(found)} s after its last step (hang.floor_s is 2 s)")
    return {"sigstop_median_s": statistics.median(found)}


@contextlib.contextmanager
def slow_starters(plan: Plan, dice: random.Random) -> Iterator[Run]:
    with cluster_of(2, 1) as cluster:
        job = cluster.submit(
            steps=10**6, pace_s=0.05, setup_s=plan.setup_s, env=TEN_MB, standby=1, restarts=RESTARTS,
            join_wait_s=plan.setup_s + 30.0,
        )  # fmt: skip
        yield Run(cluster, job, 2, dice)


def standby_exit(run: Run, plan: Plan) -> Result:
    """As a worker's exit, where `setup` takes long and each node has a standby."""
    found = []
    for number in range(plan.times):
        run.steady(5, 90.0 + plan.setup_s)
        ready = lambda: all(run.standbys(node) for node in run.cluster.nodes)  # noqa: E731
        wait_for(ready, 60.0 + 2 * plan.setup_s, "a standby on each node", every_s=0.1)
        found.append(end_one(run, Kill, run.dice.choice(PLACES)))
        say(f"  SIGKILL {number + 1}: {found[-1]:.3f} s")
    print(f"worker exit, setup takes {plan.setup_s:g} s, one standby: {spread(found)} s")
    return {"standby_exit_median_s": statistics.median(found)}


# ── nodes ───────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def three_nodes(plan: Plan, dice: random.Random) -> Iterator[Run]:
    timeouts = {"lease_ttl_s": plan.lease_ttl_s, "lease_renew_s": 0.3 * plan.lease_ttl_s}
    with cluster_of(3, 1, network=not able.no_netns(), timeouts=timeouts) as cluster:
        job = cluster.submit(nodes="2:3", steps=10**6, pace_s=0.03, env=TEN_MB, restarts=RESTARTS)
        yield Run(cluster, job, 3, dice)


def node_killed(run: Run, plan: Plan) -> Result:
    """All processes of a node at once; its host answers with refusals."""
    found = [lose(run, Node.kill_all) for _ in range(plan.times)]
    print(f"node's process tree killed: {spread(found)} s until the others step")
    return {"node_kill_median_s": statistics.median(found)}


def node_silent(run: Run, plan: Plan) -> Result:
    """Link and processes of a node gone at once; without namespaces its processes are only stopped."""
    network = run.cluster.hosts is not None
    found = [lose(run, Node.power_off if network else stop_tree) for _ in range(plan.times)]
    how = "powered off" if network else "stopped (in place of power off: " + able.no_netns() + ")"
    print(f"node {how}: {spread(found)} s until the others step; lease {plan.lease_ttl_s:g} s")
    return {
        "node_silent_median_s": statistics.median(found),
        "node_silent_over_ttl_s": statistics.median(found) - plan.lease_ttl_s,
    }


def stop_tree(node: Node) -> None:
    for pid in node.pids():
        kill(pid, signal.SIGSTOP)


def lose(run: Run, how: Callable[[Node], None]) -> float:
    """Until the other two step on; then the node comes back and the world is whole again."""
    generation = run.steady(run.dice.randint(10, 30))
    node = run.dice.choice(run.cluster.nodes)
    before = node.pids()
    struck_s = now_s()
    how(node)
    seconds = run.stepping(generation, 2, 60.0) - struck_s
    if not before or any(alive(pid) and not stopped(pid) for pid in before):
        raise NotStruck(f"processes of {node.name} live on")
    say(f"  {how.__name__} {node.name}: {seconds:.3f} s")
    node.kill_all()
    if node.host is not None:
        node.host.link_up()
    node.start()
    run.steady(5, 90.0)
    return seconds


def drain_and_growth(run: Run, plan: Plan) -> Result:
    """A node is drained and taken back: the longest gap between two steps, from the request until all is done."""
    drains, growths = [], []
    for number in range(plan.times):
        run.steady(20)
        node = run.dice.choice(run.cluster.nodes)
        drains.append(planned(run, f"/v1/nodes/{node.name}/drain", {"reason": "benchmark"}, 2))
        own = node.daemon.pid if node.daemon else 0
        wait_for(lambda n=node, d=own: set(n.pids()) <= {d}, 30.0, "it is empty", every_s=0.1)  # type: ignore[misc]
        growths.append(planned(run, f"/v1/nodes/{node.name}/uncordon", {}, 3))
        say(f"  {number + 1}, {node.name}: drain {drains[-1]:.3f} s, growth {growths[-1]:.3f} s")
    steps_s = statistics.median(run.gaps_s(0.0, now_s()))
    print(f"planned drain: gap {spread(drains)} s; growth: gap {spread(growths)} s; a step takes {steps_s:.3f} s")
    return {"drain_gap_median_s": statistics.median(drains), "growth_gap_median_s": statistics.median(growths)}


def planned(run: Run, url: str, body: dict[str, str], world_size: int) -> float:
    generation = run.generation()
    asked_s = now_s()
    run.cluster.api("POST", url, body)
    there_s = run.stepping(generation, world_size, 60.0)
    run.incident(generation, "planned")
    time.sleep(max(0.0, there_s + 0.5 - now_s()))
    return max(run.gaps_s(asked_s, there_s + 0.5))


# ── the control plane ───────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def two_workers(plan: Plan, dice: random.Random) -> Iterator[Run]:
    with cluster_of(2, 1) as cluster:
        job = cluster.submit(steps=10**6, pace_s=0.05, env=TEN_MB, restarts=RESTARTS)
        yield Run(cluster, job, 2, dice)


def etcd_away(run: Run, plan: Plan) -> Result:
    """etcd is killed, and started again after a while."""
    undisturbed, generation = run.undisturbed(plan.baseline_s), run.generation()
    (etcd,) = run.cluster.etcd
    struck_s = now_s()
    etcd.kill()
    time.sleep(plan.etcd_away_s / 2)
    if alive(etcd.pid) or reachable(etcd.address, etcd.port):
        raise NotStruck("etcd answers while it is away")
    time.sleep(plan.etcd_away_s / 2)
    etcd.start(etcd.peer)
    gaps_s = after(run, struck_s)
    return said(run, "etcd_outage", f"etcd away for {plan.etcd_away_s:g} s", generation, undisturbed, gaps_s)


def daemon_killed(run: Run, plan: Plan) -> Result:
    """elasticd of one node after the other: SIGKILL, and started again a second later."""
    undisturbed, generation, gaps_s = run.undisturbed(plan.baseline_s), run.generation(), []
    for number in range(plan.times):
        node = run.cluster.nodes[number % 2]
        struck_s = now_s()
        node.kill_daemon()
        if node.daemon is None or alive(node.daemon.pid):
            raise NotStruck(f"the daemon of {node.name} lives on")
        time.sleep(1.0)
        node.start(wait=False)
        gaps_s += after(run, struck_s)
    return said(run, "daemon_kill", "elasticd killed and restarted", generation, undisturbed, gaps_s)


def after(run: Run, struck_s: float) -> list[float]:
    """Step times since then, until a little after all daemons see etcd again."""

    def back() -> bool:
        return all(node.socket.exists() and node.state() == "ready" for node in run.cluster.nodes)

    wait_for(back, 60.0, "all nodes are ready", every_s=0.25)
    time.sleep(3.0)
    return run.gaps_s(struck_s, now_s())


def said(
    run: Run, name: str, words: str, generation: int, undisturbed: Sequence[float], gaps_s: Sequence[float]
) -> Result:
    restarts = run.generation() - generation
    ratio = slowest_ratio(list(gaps_s), list(undisturbed))
    calm = slowest_ratio(list(undisturbed), list(undisturbed))
    print(f"{words}: slowest of {len(gaps_s)} steps {ratio:.2f} × the median of {statistics.median(undisturbed):.3f} s "
          f"(of {len(undisturbed)} undisturbed ones: {calm:.2f} ×), {restarts} restarts")  # fmt: skip
    return {
        f"{name}_slowest_step_ratio": ratio,
        f"{name}_restarts": restarts,
        f"{name}_undisturbed_slowest_step_ratio": calm,
    }


# ── all of it ───────────────────────────────────────────────────────────────────────────────────────────────────

Opened = Callable[[Plan, random.Random], contextlib.AbstractContextManager[Run]]
Scenario = Callable[[Run, Plan], Result]
GROUPS: tuple[tuple[Opened, dict[str, Scenario]], ...] = (
    (four_workers, {"exit": worker_exit, "sigstop": worker_stopped}),
    (slow_starters, {"standby": standby_exit}),
    (three_nodes, {"node_kill": node_killed, "node_silent": node_silent, "drain": drain_and_growth}),
    (two_workers, {"etcd": etcd_away, "daemon": daemon_killed}),
    (four_nodes, {"chaos": random_chaos}),
)
NAMES = [*(name for _, scenarios in GROUPS for name in scenarios), "torchrun"]
KEYS = (
    "exit_median_s", "standby_exit_median_s", "node_kill_median_s", "node_silent_over_ttl_s", "sigstop_median_s",
    "drain_gap_median_s", "growth_gap_median_s", "etcd_outage_slowest_step_ratio", "daemon_kill_slowest_step_ratio",
    "chaos_goodput", "steps_lost",
)  # fmt: skip


class Bench:
    """What was measured, and what went wrong."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan, self.dice = plan, random.Random(seed)
        self.result: Result = dict.fromkeys(KEYS)
        self.errors: dict[str, str] = {}

    def group(self, opened: Opened, scenarios: dict[str, Scenario]) -> None:
        """One after the other on one cluster; after an error the rest have a new one."""
        left = dict(scenarios)
        while left:
            name = next(iter(left))
            try:
                with opened(self.plan, self.dice) as run:
                    try:
                        run.steady(10)
                        for name in list(left):
                            say(f"{name}:")
                            scenario = left.pop(name)
                            found = scenario(run, self.plan)
                            lost = run.lost_since()
                            self.result.update(found, steps_lost=(self.result["steps_lost"] or 0) + lost)
                    except ERRORS:
                        with contextlib.redirect_stdout(sys.stderr):
                            run.cluster.tell()
                        raise
            except ERRORS as error:
                left.pop(name, None)
                self.failed(name, error)

    def torchrun(self) -> None:
        say("torchrun:")
        try:
            self.result.update(torchrun(self.plan, self.dice))
        except ERRORS as error:
            self.failed("torchrun", error)

    def rounded(self) -> dict[str, object]:
        numbers = {k: round(v, 3) if isinstance(v, float) else v for k, v in self.result.items()}
        return {**numbers, **({"errors": self.errors} if self.errors else {})}

    def failed(self, name: str, error: Exception) -> None:
        self.errors[name] = f"{type(error).__name__}: {error}"
        say(f"{name}: {self.errors[name]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under two minutes; without torchrun")
    parser.add_argument("--smoke", action="store_true", help=SMOKE)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=NAMES, action="append", help="this scenario; may be given several times")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    print(f"machine: {machine()}; seed {args.seed}")
    if why := able.no_netns():
        print(f"without network namespaces: {why}")
    if args.smoke:
        args.only = ["exit", "daemon"]
    bench = Bench(SMALLEST if args.smoke else QUICK if args.quick else FULL, args.seed)
    for opened, scenarios in GROUPS:
        bench.group(opened, {n: s for n, s in scenarios.items() if not args.only or n in args.only})
    if "torchrun" in (args.only or (() if args.quick else NAMES)):
        bench.torchrun()
    print(json.dumps(bench.rounded()))
    return 1 if bench.errors else 0


if __name__ == "__main__":
    sys.exit(main())
