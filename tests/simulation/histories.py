"""Random histories: a setting, and faults at instants. Each is a value, so that it can be played again, and shrunk."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from elastic.contract.records.job_records import Phase

from .cluster import Cluster, Setting
from .judge import Broken

MOST_FAULTS = 12
INCIDENT_S = 15.0
"""An incident that a lost leader has left open is closed by the next one within this many virtual seconds."""
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
        leader_candidates=1,
        managed=random.Random(f"managed {seed}").random() < 0.5,
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


def family(seed: int) -> History:
    """Histories that random draws seldom make: one kind after another, each with its own random instants."""
    rng = random.Random(f"family {seed}")
    return _FAMILIES[seed % len(_FAMILIES)](seed, rng)


def _worn(seed: int, rng: random.Random) -> History:
    """More failures than the budget allows, never within its window."""
    setting = Setting(seed=seed, nodes=2, slots=1, least=2, most=2, budget=3, window_s=20.0, setup_s=0.2)
    kills = [Fault(4.0 + 8 * n + rng.random(), "kill_worker", (n % 2, 0)) for n in range(6)]
    return History(setting, tuple(kills))


def _spoiled(seed: int, rng: random.Random) -> History:
    """Bad numbers, and a death while the job goes back from them."""
    setting = Setting(
        seed=seed, nodes=2, slots=1, least=1, most=2, rollback=True, checkpoint_every=7, setup_s=0.2, step_s=0.1
    )
    at_s = 5.0 + rng.random()
    faults = [Fault(at_s, "spoil", (1.0,))]
    faults += [Fault(at_s + 0.2 + 0.4 * rng.random(), "kill_worker", (rng.randrange(2), 0))]
    faults += [Fault(at_s, rng.choice(("kill_source", "kill_receiver")))]
    return History(setting, tuple(faults))


def _slow(seed: int, rng: random.Random) -> History:
    """Steps of several seconds, while etcd or a worker is away."""
    setting = Setting(seed=seed, nodes=3, slots=1, least=1, most=3, step_s=rng.choice((3.0, 6.0)), setup_s=0.2)
    if seed % 2:
        return History(setting, (Fault(15.0 + 6 * rng.random(), "kill_worker", (rng.randrange(3), 0)),))
    at_s = 15.0 + 6 * rng.random()
    return History(setting, (Fault(at_s, "cut", (rng.randrange(3),)), Fault(at_s + 20.0, "heal_etcd_links")), True)


def _unformed(seed: int, rng: random.Random) -> History:
    """Groups that fail while they form: nobody knows whose fault it is."""
    setting = Setting(seed=seed, nodes=3, slots=1, least=1, most=3, setup_s=0.2)
    return History(setting, (Fault(0.01, "fail_forming", (rng.randint(3, 5),)), Fault(30.0, "kill_worker", (1, 0))))


def _drained(seed: int, rng: random.Random) -> History:
    """A node leaves as planned, and a worker on another one dies at the same moment."""
    setting = Setting(seed=seed, nodes=3, slots=1, least=1, most=3, setup_s=0.2, step_s=0.2)
    at_s = 4.0 + rng.random()
    return History(
        setting,
        (Fault(at_s, "drain", (2, 1e6)), Fault(at_s + 0.6 * rng.random(), "kill_worker", (rng.randrange(2), 0))),
    )


def _together(seed: int, rng: random.Random) -> History:
    """Several workers die at nearly the same moment, and one more while the job recovers."""
    setting = Setting(seed=seed, nodes=2, slots=2, least=2, most=2, checkpoint_every=rng.choice((0, 7)), setup_s=0.2)
    at_s = 4.0 + rng.random()
    ranks = rng.sample(range(4), rng.randint(2, 4))
    faults = [Fault(at_s + 0.02 * rng.random(), "kill_worker", (r // 2, r % 2)) for r in ranks]
    return History(setting, (*sorted(faults, key=lambda f: f.at_s), Fault(at_s + 0.4, "kill_worker", (0, 0))))


def _repeated(seed: int, rng: random.Random) -> History:
    """What workers say comes twice, the second time late, while they die one after the other."""
    setting = Setting(seed=seed, nodes=2, slots=2, least=1, most=2, setup_s=0.2, repeats=True)
    kills = [Fault(4.0 + n * rng.choice((0.1, 0.5, 2.0)), "kill_worker", (rng.randrange(2), n % 2)) for n in range(4)]
    return History(setting, tuple(sorted(kills, key=lambda f: f.at_s)))


def _away(seed: int, rng: random.Random) -> History:
    """A node's agent dies while its lease has run out and etcd is away or wiped."""
    setting = Setting(seed=seed, nodes=3, slots=1, least=1, most=3, setup_s=0.2)
    node = rng.randrange(3)
    return History(
        setting,
        (Fault(4.0, "cut", (node,)), Fault(10.0 + rng.random(), "kill_agent", (node,)),
         Fault(10.2 + rng.random(), rng.choice(("compact", "wipe_etcd", "stop_etcd")))),
    )  # fmt: skip


def late(seed: int) -> History:
    """A worker dies while its agent stands still, and others before and after that agent reports it."""
    rng = random.Random(f"late {seed}")
    nodes, slots = rng.choice((2, 3)), rng.choice((2, 3))
    setting = Setting(
        seed=seed, nodes=nodes, slots=slots, least=rng.choice((1, nodes)), most=nodes, setup_s=0.2,
        checkpoint_every=rng.choice((0, 7)), step_s=rng.choice((0.1, 0.3)), shrink=rng.random() < 0.3,
    )  # fmt: skip
    at_s, (late, other) = 4.0 + rng.random(), rng.sample(range(nodes), 2)
    faults = [
        Fault(at_s, "pause_agent", (late, rng.choice((0.3, 1.0, 3.0, 9.0)))),
        Fault(at_s, "kill_worker", (late, 0)),
    ]
    for _ in range(rng.randint(1, 3)):
        at_s += rng.choice((0.0, 0.02, 0.3, 1.0)) * rng.random()
        faults.append(Fault(at_s, "kill_worker", (rng.choice((other, other, late)), rng.randrange(slots))))
    return History(setting, tuple(faults))


def tardy(seed: int) -> History:
    """A node is to leave, the ranks learn it after the step at which they were to stop, and the step under way is a
    long one; the node that leaves, or another one, may die then."""
    rng = random.Random(f"tardy {seed}")
    nodes, step_s = rng.choice((2, 3)), rng.choice((0.1, 0.3))
    setting = Setting(seed=seed, nodes=nodes, slots=rng.choice((1, 2)), least=1, most=nodes, setup_s=0.2, step_s=step_s)
    at_s, leaver = 4.0 + rng.random(), rng.randrange(nodes)
    faults = [
        Fault(at_s, "slow_views", (rng.choice((1.0, 3.0)),)),
        Fault(at_s, "drain", (leaver, 1e6)),
        Fault(at_s + 4 * rng.random(), "slow_step", (rng.choice((1.0, 3.0)),)),
    ]
    if rng.random() < 0.5:
        victim = rng.choice((leaver, rng.randrange(nodes)))
        struck_s = at_s + 5 * rng.random()
        kinds = Fault(struck_s, "kill_worker", (victim, 0)), Fault(struck_s, "kill_agent", (victim,))
        faults.append(rng.choice(kinds))
    return History(setting, tuple(sorted(faults, key=lambda f: f.at_s)))


def leaving(seed: int) -> History:
    """A node of several workers is to leave, and one of them dies at the same moment."""
    rng = random.Random(f"leaving {seed}")
    nodes = rng.choice((2, 3))
    setting = Setting(
        seed=seed, nodes=nodes, slots=2, least=1, most=nodes, setup_s=rng.choice((0.05, 0.2)),
        step_s=rng.choice((0.1, 0.3)), standby=rng.choice((0, 1)), shrink=rng.random() < 0.3,
    )  # fmt: skip
    at_s, leaver = 4.0 + rng.random(), rng.randrange(nodes)
    faults = [Fault(at_s, "drain", (leaver, 1e6))]
    faults.append(Fault(at_s + 0.6 * rng.random(), "kill_worker", (leaver, rng.randrange(2))))
    if rng.random() < 0.3:
        faults.append(Fault(faults[-1].at_s + 0.4 * rng.random(), "kill_worker", (rng.randrange(nodes), 0)))
    return History(setting, tuple(faults))


def starving(seed: int) -> History:
    """On some nodes no process can be started for a while, and workers die there meanwhile, or at the very start."""
    rng = random.Random(f"starving {seed}")
    nodes = rng.choice((1, 2, 2, 3))
    most = rng.randint(1, nodes)
    setting = Setting(
        seed=seed, nodes=nodes, slots=rng.choice((1, 2)), least=rng.randint(1, most), most=most, setup_s=0.2,
        standby=rng.choice((0, 0, 1)), shrink=rng.random() < 0.3, managed=rng.random() < 0.5,
        checkpoint_every=rng.choice((0, 7)),
    )  # fmt: skip
    at_s = rng.choice((0.0, 4.0 + rng.random()))
    faults = [Fault(at_s, "starve", (n, rng.choice((1.0, 8.0, 40.0)))) for n in range(nodes) if rng.random() < 0.7]
    for _ in range(rng.randint(1, 4)):
        at_s += rng.choice((0.0, 0.1, 1.0, 5.0)) * rng.random()
        kind = rng.choice(("kill_worker", "kill_worker", "kill_agent"))
        slot = (rng.randrange(setting.slots),) if kind == "kill_worker" else ()
        faults.append(Fault(at_s, kind, (rng.randrange(nodes), *slot)))
    return History(setting, tuple(faults))


_FAMILIES = (_worn, _spoiled, _slow, _unformed, _drained, _together, _repeated, _away)


def play(history: History) -> Outcome:
    """Never raises for a broken promise: it is the outcome."""
    cluster = Cluster(history.setting)
    cluster.judge.only_etcd = history.only_etcd
    kinds = [fault.kind for fault in history.faults]
    cluster.judge.obedient = {"kill_worker", "fail_worker", "drain"}.issuperset(kinds)
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
    if lively():
        _incidents_end(cluster)
    else:
        record = cluster.record()
        raise Broken("liveness", f"no whole world steps {LIVELY_S:g} s after the last fault; {record}")


def _incidents_end(cluster: Cluster) -> None:
    """Where the job steps again, no incident stays open or untold; and what each says of lost steps is true."""

    def none_is_open() -> bool:
        return not any(i.open and i.kind != "planned" for i in cluster.judge.incidents().values())

    def all_are_told() -> bool:
        """A leader that stood still beyond its lease tells what it knows once it is a member again."""
        try:
            cluster.judge.failures_told()
        except Broken:
            return False
        return none_is_open()

    cluster.clock.run(cluster.clock.now_s + INCIDENT_S, all_are_told)
    if not none_is_open() and cluster.whole() and not cluster.over():
        raise Broken("incidents", f"one stays open: {cluster.judge.incidents()}")
    cluster.judge.steps_told()
    cluster.judge.deaths_told()
    cluster.judge.told_once()
    cluster.judge.failures_told()


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
