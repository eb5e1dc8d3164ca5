"""Random compositions of all faults, for as long as asked: `make chaos SEED=7 MINUTES=10`.

Each round is one job on four nodes, run to its end under faults drawn from the seed, and judged by its recorded
history; so is each incident that was told. Prints the seed of each round and, at the end, a table by kind of fault.
Exit code 1 when a history or an incident is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import pathlib
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from chaos.harness import Cluster, Job, Node, now_s
from support import machine
from support.history import History
from support.incidents import check_injection
from support.procs import kill
from support.wait import eventually

from elastic.contract.records.incident_account import weight
from elastic.contract.records.reasons import Code
from elastic.recovery.facts.restart_budget import BAD_NODE_FAILURES
from elastic.testing import Injection

NODES = 4


@dataclass
class Strike:
    kind: str
    node: str
    at_s: float
    step: int
    lost: int = 0
    """Committed steps that were done again after it."""
    recovered_s: float | None = None
    """Until every rank of a full world has stepped again, counted from the strike, or from the end of the fault
    where the node was away until then."""
    pids: tuple[int, ...] = ()
    """Workers that it struck, where it struck these alone."""


@dataclass
class Round:
    seed: int
    strikes: list[Strike] = field(default_factory=list)
    steps: int = 0
    redone: int = 0
    """Committed steps that were lost and done again."""
    goodput: float = 0.0
    trouble: str = ""


Fault = Callable[["Chaos", Node], float]
"""Strikes a node; returns the instant from which recovery counts."""


class Chaos:
    """One round."""

    def __init__(self, cluster: Cluster, job: Job, dice: random.Random) -> None:
        self.cluster, self.job, self.dice = cluster, job, dice
        self.hit: tuple[int, ...] = ()
        """Workers that were struck last."""

    def worker(self, node: Node) -> int:
        """The worker of `node` that committed last."""
        commits = [c for c in self.job.history.commits if c.process.startswith(f"{node.name}.")]
        return int(commits[-1].process.rpartition(".")[2])

    def wait(self, at_least_s: float, at_most_s: float) -> None:
        time.sleep(self.dice.uniform(at_least_s, at_most_s))


def worker_signal(number: int) -> Fault:
    def strike(chaos: Chaos, node: Node) -> float:
        at_s = now_s()
        chaos.hit = (chaos.worker(node),)
        kill(*chaos.hit, number)
        return at_s

    return strike


def two_workers(chaos: Chaos, node: Node) -> float:
    other = chaos.dice.choice([n for n in chaos.cluster.nodes if n is not node])
    chaos.hit = chaos.worker(node), chaos.worker(other)
    at_s = now_s()
    for pid in chaos.hit:
        kill(pid)
    return at_s


def zygote_killed(chaos: Chaos, node: Node) -> float:
    """And the worker: nobody is there to fork the next one."""
    zygote, chaos.hit = node.children()[0], (chaos.worker(node),)
    at_s = now_s()
    kill(zygote)
    kill(*chaos.hit)
    return at_s


def agent_killed(chaos: Chaos, node: Node) -> float:
    at_s = now_s()
    kill(node.agent_pid())
    return at_s


def daemon_killed(chaos: Chaos, node: Node) -> float:
    at_s = now_s()
    node.kill_daemon()
    chaos.wait(0.1, 2.0)
    node.start()
    return at_s


def tree_killed(chaos: Chaos, node: Node) -> float:
    node.kill_all()
    chaos.wait(0.1, 2.0)
    at_s = now_s()
    node.start()
    return at_s


def etcd_killed(chaos: Chaos, node: Node) -> float:
    at_s = now_s()
    chaos.cluster.etcd[0].kill()
    chaos.wait(0.5, 5.0)
    chaos.cluster.start_etcd()
    return at_s


def etcd_paused(chaos: Chaos, node: Node) -> float:
    at_s = now_s()
    chaos.cluster.etcd[0].pause()
    chaos.wait(0.5, 5.0)
    chaos.cluster.etcd[0].cont()
    return at_s


def drained(chaos: Chaos, node: Node) -> float:
    """Moved off in peace, and taken back."""
    chaos.cluster.api("POST", f"/v1/nodes/{node.name}/drain", {"reason": "chaos"})
    assert node.daemon is not None
    eventually(lambda: node.pids() == [node.daemon.pid], 30.0, f"{node.name} is empty")  # type: ignore[union-attr]
    at_s = now_s()
    chaos.cluster.api("POST", f"/v1/nodes/{node.name}/uncordon", {})
    return at_s


def powered_off(chaos: Chaos, node: Node) -> float:
    assert node.host is not None
    node.power_off()
    chaos.wait(0.5, 6.0)
    node.host.link_up()
    at_s = now_s()
    node.start()
    return at_s


def frozen(chaos: Chaos, node: Node) -> float:
    assert node.host is not None
    node.host.freeze()
    chaos.wait(0.2, 6.0)
    node.host.thaw()
    return now_s()


def cut_from_etcd(chaos: Chaos, node: Node) -> float:
    hosts = chaos.cluster.hosts
    assert hosts is not None
    hosts.partition(chaos.cluster.nodes.index(node), NODES, one_way=chaos.dice.random() < 0.5)
    chaos.wait(0.5, 6.0)
    hosts.heal()
    return now_s()


def link_flaps(chaos: Chaos, node: Node) -> float:
    assert node.host is not None
    for _ in range(3):
        node.host.link_down()
        chaos.wait(0.05, 0.3)
        node.host.link_up()
        chaos.wait(0.05, 0.3)
    return now_s()


ANYWHERE: dict[str, Fault] = {
    "worker SIGKILL": worker_signal(signal.SIGKILL),
    "worker SIGSEGV": worker_signal(signal.SIGSEGV),
    "worker SIGSTOP": worker_signal(signal.SIGSTOP),
    "two workers SIGKILL": two_workers,
    "zygote and worker SIGKILL": zygote_killed,
    "agent SIGKILL": agent_killed,
    "daemon SIGKILL": daemon_killed,
    "node's process tree killed": tree_killed,
    "etcd killed, back after up to 5 s": etcd_killed,
    "etcd stopped for up to 5 s": etcd_paused,
    "drained and taken back": drained,
}
ON_A_NETWORK: dict[str, Fault] = {
    "power off, back after up to 6 s": powered_off,
    "node frozen for up to 6 s": frozen,
    "cut off from etcd for up to 6 s": cut_from_etcd,
    "link flaps": link_flaps,
}
UNNOTICED = {
    "daemon SIGKILL",
    "etcd killed, back after up to 5 s",
    "etcd stopped for up to 5 s",
    "cut off from etcd for up to 6 s",
    "link flaps",
    "node frozen for up to 6 s",
}
"""Those that need not end a generation."""
GONE = ("lost", "unreachable")
ONE_INCIDENT: dict[str, tuple[str, ...]] = {
    "worker SIGKILL": ("exit",),
    "worker SIGSEGV": ("exit",),
    "worker SIGSTOP": ("hang",),
    "two workers SIGKILL": ("exit",),
    "zygote and worker SIGKILL": ("exit",),
    "agent SIGKILL": ("lost",),
    "node's process tree killed": ("lost",),
    "power off, back after up to 6 s": GONE,
}
"""Those that end a generation, and as what they are told."""
PERHAPS: dict[str, tuple[str, ...]] = {
    "cut off from etcd for up to 6 s": GONE,
    "link flaps": GONE,
    "node frozen for up to 6 s": (*GONE, "hang"),
}
"""Those that may do so, by their length. All others are no failure: no rank stops stepping."""
CLASSES: dict[str, tuple[str, ...]] = {
    "worker SIGKILL": ("node",),
    "worker SIGSEGV": ("user code",),
    "worker SIGSTOP": ("hang",),
    "two workers SIGKILL": ("node",),
    "zygote and worker SIGKILL": ("node",),
    "agent SIGKILL": ("node",),
    "node's process tree killed": ("node",),
    "power off, back after up to 6 s": ("node", "network"),
    "cut off from etcd for up to 6 s": ("node", "network"),
    "link flaps": ("node", "network"),
    "node frozen for up to 6 s": ("node", "network", "hang"),
}
"""Of the verdict on the incident of each."""
EXCLUDED = re.compile(re.escape(Code.EXCLUDED.sentence).replace(r"\{node\}", r"([\w.-]+)", 1).partition(r"\{node")[0])
"""The sentence about a node that is excluded."""
SLOWEST_S = 25.0
"""From a strike to its notice: the longest silence that a hang is given, and some more."""


def check_told(history: History, incidents: list[dict[str, Any]], strikes: list[Strike]) -> None:
    """Each incident belongs to the strike before it, and says of that what is true. Raises AssertionError."""
    wall_s = time.time() - time.monotonic()
    for strike, after in itertools.zip_longest(strikes, strikes[1:]):
        until_s = after.at_s if after else float("inf")
        mine = [i for i in incidents if strike.at_s <= i["wall_s"] - wall_s + 0.1 < until_s]
        failures = [i for i in mine if i["kind"] != "planned"]
        said = [(i["kind"], i["node"], i["ranks"], i["detail"][:100]) for i in failures]
        if kinds := ONE_INCIDENT.get(strike.kind):
            if strike.recovered_s is None and not failures:
                continue  # the job was over before
            assert len(failures) == 1, f"{strike}: {said}"
        else:
            kinds = PERHAPS.get(strike.kind, ())
            assert kinds or not failures, f"{strike} stops no rank: {said}"
        nodes = () if strike.pids else (strike.node,)
        injection = Injection(kinds, pids=strike.pids, nodes=nodes, struck_s=strike.at_s, within_s=SLOWEST_S)
        for incident in mine:
            planned = incident["kind"] == "planned"
            check_injection(history, incident, Injection("planned") if planned else injection)
            check_verdict(incident, strike, incidents)


def check_verdict(incident: dict[str, Any], strike: Strike, told: list[dict[str, Any]]) -> None:
    """`incident`, one of all that is `told`, comes after `strike` and before the next. Raises AssertionError."""
    verdict, planned = incident["verdict"], incident["kind"] == "planned"
    classes = ("planned",) if planned else CLASSES[strike.kind]
    if excluded := EXCLUDED.search(incident["detail"]):
        # No answer to this strike, which has an incident of its own: to all failures that are told of that node.
        check_exclusion(excluded[1], [i for i in told if i["wall_s"] <= incident["wall_s"] and i is not incident])
        classes = ("node",)
    assert verdict["class"] in classes, f"{strike}: {verdict}"
    assert not verdict["person"], f"{strike}: {verdict}"


def charged(kind: str) -> bool:
    """Whether a failure of this kind counts against its node."""
    return weight(kind) == weight("exit") and kind not in GONE


def check_exclusion(node: str, before: list[dict[str, Any]]) -> None:
    """A job leaves a node that has failed often, and more often than all others together. Raises AssertionError."""
    failed = [{c["node"] for c in i["causes"] if charged(c["kind"])} for i in before]
    there, others = sum(node in nodes for nodes in failed), sum(bool(nodes) and node not in nodes for nodes in failed)
    assert there >= BAD_NODE_FAILURES, f"{node} is excluded after {there} failures there"
    assert there > others, f"{node} is excluded after {there} failures there and {others} elsewhere"


def described(strike: Strike) -> str:
    return f"  step {strike.step:5}  {strike.kind} ({strike.node})"


def whole_again(job: Job, since_s: float, newer_than: int) -> float | None:
    """The instant at which the last of all ranks had stepped after `since_s`, in a world of full size: of all nodes but
    those that are excluded, on which too many faults have fallen."""
    history, size = job.history, NODES - len(job.row()["excluded_nodes"])
    first: dict[tuple[int, int], float] = {}
    for commit in history.commits:
        if commit.at_s > since_s and commit.generation > newer_than and commit.world_size == size:
            first.setdefault((commit.generation, commit.rank), commit.at_s)
    generations = sorted({g for g, _ in first}, reverse=True)
    for generation in generations:
        ranks = [at_s for (g, _), at_s in first.items() if g == generation]
        if len(ranks) == size:
            return max(ranks)
    return None


def one_round(
    seed: int, steps: int, every_s: float, network: bool, recover_s: float = 60.0, tell: Callable[[str], None] = print
) -> Round:
    """Run one job under faults. Raises nothing that the job does wrong: that is `trouble`, and the ends of all logs lie
    in a file whose name it ends with. `tell` hears of each fault."""
    dice = random.Random(seed)
    kinds = {**ANYWHERE, **(ON_A_NETWORK if network else {})}
    result = Round(seed, steps=steps)
    with Cluster(nodes=NODES, slots=1, network=network, timeouts={"lease_ttl_s": 2.5, "lease_renew_s": 0.6}) as cluster:
        job = cluster.submit(
            nodes=f"2:{NODES}", steps=steps, pace_s=0.03, hang={"floor_s": 1.0, "ceiling_s": 15.0},
            restarts={"budget": 5000, "same_failure": 1000},
        )  # fmt: skip
        chaos = Chaos(cluster, job, dice)
        try:
            job.wait_step(10, 90.0)
            while True:
                chaos.wait(0.2, 2 * every_s - 0.2)
                if job.history.step() > steps - 100:  # so that recovery can be seen
                    break
                kind = dice.choice(sorted(kinds))
                excluded = job.row()["excluded_nodes"]
                node = dice.choice([node for node in cluster.nodes if node.name not in excluded])
                strike = Strike(kind, node.name, now_s(), job.history.step())
                result.strikes.append(strike)
                generation, chaos.hit = job.history.generations()[-1], ()
                since_s = kinds[kind](chaos, node)
                strike.pids = chaos.hit
                newer_than = generation - 1 if kind in UNNOTICED else generation
                whole_s = eventually(
                    lambda s=since_s, n=newer_than: whole_again(job, s, n) or (job.phase() == "succeeded" and -1.0),
                    recover_s, f"recovery from {strike}", every_s=0.1,
                )  # type: ignore[misc]  # fmt: skip
                if whole_s < 0:
                    tell(f"{described(strike)}: the others were done before it was back")
                    break
                strike.recovered_s = whole_s - since_s
                tell(f"{described(strike)}: all step again after {strike.recovered_s:.2f} s")
            job.wait_over()
            # A node that is stopped or cut off may write down its last commit late.
            history = job.check(lost=len(result.strikes), frozen=[n.name for n in cluster.nodes])
            check_told(history, job.incidents(), result.strikes)
        except (AssertionError, RuntimeError) as error:
            logs = pathlib.Path(tempfile.gettempdir(), f"chaos-{seed}.log")
            with logs.open("w") as file, contextlib.redirect_stdout(file):
                cluster.tell(200)
            result.trouble = f"WRONG: {error}; logs: {logs}"
            return result
        charge_lost_steps(history, result)
        gaps = history.gaps_s()
        result.goodput = min(1.0, statistics.median(gaps) * len(gaps) / sum(gaps))
    return result


def charge_lost_steps(history: History, result: Round) -> None:
    """A step done again is booked on the strike that came last before."""
    first: dict[int, int] = {}
    for commit in history.commits:
        if commit.generation != first.setdefault(commit.step, commit.generation):
            first[commit.step] = commit.generation
            result.redone += 1
            if before := [s for s in result.strikes if s.at_s <= commit.at_s]:
                before[-1].lost += 1


def table(rounds: list[Round]) -> str:
    """Faults struck and recovered, and how long that took, by kind."""
    by_kind: dict[str, list[Strike]] = {}
    for one in rounds:
        for strike in one.strikes:
            by_kind.setdefault(strike.kind, []).append(strike)
    lines = [
        f"{'fault':36} {'struck':>6} {'recovered':>9} {'steps lost':>10} {'median s':>9} {'p99 s':>7} {'worst s':>8}"
    ]
    for kind, strikes in sorted(by_kind.items()):
        times = sorted(s.recovered_s for s in strikes if s.recovered_s is not None)
        p99 = times[min(len(times) - 1, int(len(times) * 0.99))] if times else 0.0
        middle = statistics.median(times) if times else 0.0
        worst = times[-1] if times else 0.0
        lost = sum(strike.lost for strike in strikes)
        lines.append(f"{kind:36} {len(strikes):6} {len(times):9} {lost:10} {middle:9.2f} {p99:7.2f} {worst:8.2f}")
    whole = [one for one in rounds if not one.trouble]
    goodput = statistics.mean(one.goodput for one in whole) if whole else 0.0
    lines.append(
        f"rounds {len(rounds)}, finished and right {len(whole)}; steps {sum(one.steps for one in whole)}, "
        f"committed and done again {sum(one.redone for one in whole)}; goodput {goodput:.0%}"
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--every-s", type=float, default=5.0, help="mean time between a recovery and the next fault")
    parser.add_argument("--steps", type=int, default=1500, help="of each round's job")
    args = parser.parse_args()
    network = not machine.no_netns()
    if not network:
        print(f"without faults of the network: {machine.no_netns()}")
    print(
        f"seed {args.seed}, {args.minutes:g} minutes: jobs of {args.steps} steps on {NODES} nodes, the next fault "
        f"{args.every_s:g} s on average after all step again",
        flush=True,
    )
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    end_s, rounds = time.monotonic() + args.minutes * 60, list[Round]()
    while not rounds or time.monotonic() < end_s:
        seed = args.seed * 1000 + len(rounds)
        print(f"round {len(rounds) + 1}, seed {seed}", flush=True)
        one = one_round(seed, args.steps, args.every_s, network, tell=lambda line: print(line, flush=True))
        rounds.append(one)
        print(f"round {len(rounds)}: {len(one.strikes)} faults, {one.trouble or 'its history is right'}", flush=True)
    print(table(rounds))
    return 1 if any(one.trouble for one in rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
