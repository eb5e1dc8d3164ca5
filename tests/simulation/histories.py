"""Random histories: a setting, and faults at instants. Each is a value, so that it can be played again, and shrunk."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from elastic.core.records import Phase

from .cluster import Cluster, Setting
from .judge import Broken

MOST_FAULTS = 12
LIVELY_S = 90.0
"""Once faults stop, the job steps again, or is over, within this many virtual seconds."""


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: str
    """A method of Cluster."""
    args: tuple[float, ...] = ()

    def __str__(self) -> str:
        return f"t={self.at_s:.3f} {self.kind} {' '.join(f'{a:g}' for a in self.args)}".rstrip()


@dataclass(frozen=True)
class History:
    setting: Setting
    faults: tuple[Fault, ...]
    only_etcd: bool = False

    def __str__(self) -> str:
        return "\n".join([str(self.setting), *map(str, self.faults)])


@dataclass(frozen=True)
class Outcome:
    history: History
    events: int
    steps: int
    generations: int
    phase: Phase
    failure: str = ""


ETCD_FAULTS = (
    "stop_etcd",
    "start_etcd",
    "wipe_etcd",
    "cut",
    "lose_answers",
    "heal_etcd_links",
    "compact",
    "slow_views",
)
NODE_FAULTS = (
    "kill_worker", "kill_worker", "kill_worker", "fail_worker", "stop_worker", "deafen_worker", "kill_agent",
    "kill_agent_after", "pause_agent", "pause_agent_after", "kill_source", "kill_receiver", "power_off", "power_on",
    "isolate", "heal_network", "drain", "undrain",
)  # fmt: skip
RARE = ("scale", "stop_job", "plant_bug")


def draw(seed: int) -> History:
    """The history of this seed."""
    rng = random.Random(seed)
    nodes = rng.choice((1, 2, 2, 3, 3, 3, 4))
    only_etcd = rng.random() < 0.15
    most = nodes if only_etcd else rng.randint(max(1, nodes - 1), nodes)
    setting = Setting(
        seed=seed,
        nodes=nodes,
        slots=rng.choice((1, 1, 2)) if nodes > 2 else rng.choice((1, 2, 3)),
        least=rng.randint(1, most),
        most=most,
        step_s=rng.choice((0.1, 0.3, 0.6)),
        steps=rng.choice((0, 0, 0, 12, 40)),
        standby=rng.choice((0, 0, 0, 1)),
        shrink=rng.random() < 0.25,
        checkpoint_every=rng.choice((0, 0, 7)),
        save_s=random.Random(f"save {seed}").choice((0.05, 0.05, 4.0)),
        setup_s=rng.choice((0.2, 1.0, 3.0)),
        drift=rng.choice((0.0, 0.05, 0.2)),
        crowd=random.Random(f"crowd {seed}").choice((64, 64, 1)),
        deputies=1,
    )
    count = 1 + min(int(rng.expovariate(0.35)), MOST_FAULTS - 1)
    at_s, faults = rng.uniform(0.0, 6.0), []
    for _ in range(count):
        kinds = ETCD_FAULTS if only_etcd or rng.random() < 0.3 else RARE if rng.random() < 0.06 else NODE_FAULTS
        faults.append(_fault(rng, at_s, rng.choice(kinds), setting))
        at_s += rng.choice((0.0, 0.01, 0.1, 0.5, 2.0, 7.0)) * rng.random() * 2
    return History(setting, tuple(faults), only_etcd)


def _fault(rng: random.Random, at_s: float, kind: str, setting: Setting) -> Fault:
    node = rng.randrange(setting.nodes)
    args: tuple[float, ...] = ()
    match kind:
        case "kill_worker" | "fail_worker" | "stop_worker" | "deafen_worker":
            args = (node, rng.randrange(setting.slots))
        case "kill_agent" | "power_off" | "power_on" | "cut" | "lose_answers" | "isolate" | "undrain":
            args = (node,)
        case "kill_agent_after":
            args = (node, rng.randrange(12))
        case "pause_agent_after":
            args = (node, rng.randrange(12), rng.choice((0.3, 3.0, 9.0)))
        case "pause_agent":
            args = (node, rng.choice((0.3, 3.0, 9.0)))
        case "slow_views":
            args = (rng.choice((0.1, 1.0, 3.0)),)
        case "drain":
            args = (node, rng.choice((1.0, 5.0, 1e6)))
        case "scale":
            least = rng.randint(1, setting.nodes)
            args = (least, rng.randint(least, setting.nodes))
        case "plant_bug":
            args = (rng.randrange(4),)
    return Fault(round(at_s, 3), kind, args)


def play(history: History) -> Outcome:
    """Never raises for a broken promise: it is the outcome."""
    cluster = Cluster(history.setting)
    cluster.judge.only_etcd = history.only_etcd
    kinds = [fault.kind for fault in history.faults]
    cluster.judge.plain_deaths = kinds in (["kill_worker"], ["fail_worker"])
    failure = ""
    try:
        for fault in history.faults:
            cluster.run(fault.at_s)
            getattr(cluster, fault.kind)(*(int(a) if float(a).is_integer() else a for a in fault.args))
        _must_go_on(cluster)
    except AssertionError as error:
        failure = str(error) or repr(error)
    latest = cluster.record()
    return Outcome(
        history,
        cluster.events,
        cluster.judge.top[1],
        latest.number if latest else 0,
        cluster.state().phase,
        failure,
    )


def _must_go_on(cluster: Cluster) -> None:
    cluster.run(cluster.clock.now_s + cluster.rng.choice((0.0, 1.0, 6.0)))
    cluster.heal()
    healed_s = cluster.clock.now_s
    goal = cluster.judge.commits + 3

    def lively() -> bool:
        return cluster.judge.commits >= goal and cluster.whole()

    cluster.clock.run(healed_s + LIVELY_S, lambda: lively() or cluster.over())
    if cluster.over():
        cluster.judge.ended(cluster.state())
        return
    if not lively():
        record = cluster.record()
        raise Broken("liveness", f"no whole world steps {LIVELY_S:g} s after the last fault; {record}")


def shrink(history: History) -> History:
    """A smaller history that still fails: fewer faults, then a plainer setting."""
    best = history
    smaller = True
    while smaller:
        smaller = False
        for index in range(len(best.faults)):
            fewer = replace(best, faults=best.faults[:index] + best.faults[index + 1 :])
            if play(fewer).failure:
                best, smaller = fewer, True
                break
    for change in (
        {"drift": 0.0},
        {"standby": 0},
        {"shrink": False},
        {"slots": 1},
        {"checkpoint_every": 0},
        {"steps": 0},
    ):
        plainer = replace(best, setting=replace(best.setting, **change))
        if plainer != best and play(plainer).failure:
            best = plainer
    return best
