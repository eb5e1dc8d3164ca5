"""Links that are cut, flap, lose and delay; a wrong clock: one world at most steps, none is torn in vain (G2, G9)."""

from __future__ import annotations

import pathlib
import statistics
import threading
from collections.abc import Iterator

import msgspec
import pytest
from chaos.harness import Cluster, Job, Node, now_s
from support.procs import alive
from support.wait import eventually

from elastic.agent.peers.peers import DIALS_S, OUT_KEEPALIVE
from elastic.contract.agent_files import AgentStatus
from elastic.recovery.leading import DISPUTE_S
from elastic.testing import Injection, Kill

netns = pytest.mark.netns
pytestmark = [pytest.mark.chaos, pytest.mark.etcd]

IDLE_S, PROBE_S, PROBES = OUT_KEEPALIVE
SEEN_S = IDLE_S + PROBE_S * PROBES + sum(DIALS_S) + DISPUTE_S
"""From a cut until it is acted upon, at most, on an idle machine."""


def node_of(cluster: Cluster, job: Job, rank: int) -> int:
    """The node (index) on which the worker runs that has `rank`."""
    pid = job.worker(rank)
    return next(i for i, node in enumerate(cluster.nodes) if pid in node.pids())


def world_size(job: Job) -> int:
    history = job.history
    return history.of(history.generations()[-1])[0].world_size


def generations(cluster: Cluster) -> list[dict[str, object]]:
    return [r for key, r in cluster.control_history("job") if key == "generation" and r is not None]


def complaints(cluster: Cluster) -> list[tuple[str, list[str]]]:
    """(node, unreachable node) of each member record ever written that had any."""
    records = [r for key, r in cluster.control_history("job") if key.startswith("members/") and r is not None]
    return [(r["node"], r["unreachable"]) for r in records if r.get("unreachable")]


@netns
@pytest.mark.parametrize(
    ("rank", "one_way"),
    [
        pytest.param(2, False, id="follower"),
        pytest.param(0, False, id="leader", marks=pytest.mark.long),
        pytest.param(2, True, id="one_way", marks=pytest.mark.long),
    ],
)
def test_cut_off_from_its_peers_alone(rank: int, one_way: bool) -> None:
    """Both sides reach etcd. The others go on without the one that is cut off, and take it back when it answers."""
    with Cluster(nodes=3, slots=1, network=True) as cluster:
        assert cluster.hosts is not None
        # On a busy machine a rank that cannot be reached must not be taken for hung before its node is missed.
        job = cluster.submit(nodes="1:3", steps=100_000, pace_s=0.03, hang={"floor_s": 30.0, "ceiling_s": 60.0})
        job.wait_step(20)
        victim = node_of(cluster, job, rank)
        others = [i for i in range(3) if i != victim]
        workers = set(job.workers().values())
        struck_s = now_s()
        for other in others:
            cluster.hosts.partition(victim, other, one_way=one_way)
        eventually(lambda: world_size(job) == 2, 60.0, "the two others go on")
        back_s = eventually(lambda: job.history.back_s(struck_s, 1), 30.0, "both have stepped")
        print(f"back {back_s:.2f} s after the cut")
        assert back_s < SEEN_S + 10.0  # the host may be busy; without a line to tell, it would be the group's time-out
        cut_off = cluster.nodes[victim]
        status = (cut_off.folder / "state" / "jobs" / "job" / "agent" / "status.json").read_bytes()
        assert "cannot be reached by" in str(msgspec.json.decode(status, type=AgentStatus).reason)
        cluster.hosts.heal()
        eventually(lambda: world_size(job) == 3, 60.0, "it is taken back")
        eventually(lambda: len(job.incidents()) >= 2, 20.0, "both are told")
        eventually(lambda: len(job.workers()) == 3, 20.0, "all three have committed")
        job.stop()
        unreachable = Injection(
            "unreachable", nodes=(cut_off.name,), struck_s=struck_s, within_s=SEEN_S + 10.0,
            words=("cannot be reached by",),
        )  # fmt: skip
        history = job.check(unreachable, Injection("planned"), frozen=[cut_off.name])
        assert len(history.generations()) == 3
        assert set(job.workers().values()) == workers  # it kept its process, and waited


@netns
@pytest.mark.long
def test_two_that_cannot_reach_each_other_wait_below_min() -> None:
    """Nothing is torn: when the link is back, the step that hung goes through."""
    with Cluster(nodes=2, slots=1, network=True) as cluster:
        assert cluster.hosts is not None
        job = cluster.submit(nodes="2:2", steps=200)
        job.wait_step(20)
        workers = job.workers()
        struck_s = now_s()
        cluster.hosts.partition(0, 1)
        eventually(lambda: job.phase() == "waiting", 60.0, "it waits")
        outage = eventually(job.open_incident, 10.0, "it is on record")
        assert (outage["kind"], outage["ended_wall_s"]) == ("unreachable", None)
        assert "cannot be reached by" in job.row()["reason"]
        cluster.hosts.heal()
        eventually(lambda: job.phase() in ("running", "succeeded"), 60.0, "it goes on")
        job.wait_over()
        # Neither reaches the other: the first says it of the second, or the second of the first.
        cut = Injection("unreachable", nodes=(outage["node"],), struck_s=struck_s, within_s=SEEN_S + 10.0, waited=True)
        job.check(cut)
        assert job.workers() == workers


@netns
@pytest.mark.long
def test_cut_off_while_the_group_forms() -> None:
    """The first group is still to be formed, and one of three cannot be reached."""
    with Cluster(nodes=3, slots=1, network=True) as cluster:
        assert cluster.hosts is not None
        cluster.hosts.isolate(1, keep=[3])
        job = cluster.submit(nodes="2:3", steps=60)
        job.wait_over(deadline_s=90.0)
        job.check(Injection("unreachable", nodes=("node1",)))
        last = job.history.of(job.history.generations()[-1])
        assert {c.node for c in last} == {"node0", "node2"}


@netns
@pytest.mark.long
def test_a_flapping_link() -> None:
    """Away for two seconds of every four: the job gets to its end, without a new group for each flap."""
    with Cluster(nodes=3, slots=1, network=True) as cluster:
        assert cluster.hosts is not None
        job = cluster.submit(nodes="1:3", steps=400, pace_s=0.03)
        job.wait_step(20)
        still = threading.Event()
        for _ in range(4):
            cluster.hosts.isolate(2, keep=[3])
            still.wait(2.0)
            cluster.hosts.heal()
            still.wait(2.0)
        job.wait_over(deadline_s=120.0)
        job.check(frozen=["node2"])
        assert len(generations(cluster)) <= 3


@netns
@pytest.mark.long
def test_a_slow_and_lossy_link_is_no_cut() -> None:
    """A tenth of a second there and back, one frame in twenty lost: slow, but nothing is torn and nobody complains."""
    with Cluster(nodes=3, slots=1, network=True, quality=True, timeouts={"lease_ttl_s": 5.0}) as cluster:
        assert cluster.hosts is not None
        job = cluster.submit(nodes="3:3", steps=50)
        job.wait_step(5)
        cluster.hosts.set_quality(2, delay_s=0.05, loss=0.05)
        job.wait_over(deadline_s=150.0)
        history = job.check()
        assert history.generations() == [1]
        assert complaints(cluster) == []
        assert statistics.median(history.gaps_s()) > 0.1, "the link was not slow"


def faketime() -> pathlib.Path | None:
    found = sorted(pathlib.Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    return found[0] if found else None


def wrong_clock(node: Node, offset: str) -> None:
    """What `node` starts from now on has a wall clock that is off by `offset`."""
    library = faketime()
    assert library is not None
    # Under it, the `time.sleep` of Python 3.11 is refused by the kernel; the scripts of the tests sleep.
    (node.folder / "sitecustomize.py").write_text(
        "import select, time\ntime.sleep = lambda seconds: select.select([], [], [], seconds) and None\n"
    )
    node.env = {
        "LD_PRELOAD": str(library), "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "PYTHONPATH": str(node.folder),
    }  # fmt: skip


@pytest.fixture
def faketime_leaves_nothing() -> Iterator[None]:
    """It has shared memory for each process, which those that are killed leave behind."""
    shared = pathlib.Path("/dev/shm")
    before = set(shared.glob("*faketime_*"))
    yield
    for path in set(shared.glob("*faketime_*")) - before:
        if not alive(int(path.name.rpartition("_")[2])):
            path.unlink()


@pytest.mark.skipif(faketime() is None, reason="libfaketime is not installed")
@pytest.mark.usefixtures("faketime_leaves_nothing")
@pytest.mark.long
def test_job_recovers_with_a_wrong_clock_on_one_node() -> None:
    """Nothing is decided by the time of day: a group forms, workers are replaced, steps go on."""
    with Cluster(nodes=2, slots=1) as cluster:
        node = cluster.nodes[1]
        assert node.stop_daemon() == 0
        wrong_clock(node, "-400s")
        node.start()
        job = cluster.submit(steps=120)
        job.order("there", Kill(rank=1, step=30))
        job.order("here", Kill(rank=0, step=70))
        job.wait_over()
        history = job.check(job.injection("there"), job.injection("here"), clock=False)
        assert history.generations() == [1, 2, 3]
        since = {row["node"]: row["up_since_wall_s"] for row in cluster.api("GET", "/v1/nodes")["nodes"]}
        assert abs(since["node1"] - since["node0"]) > 300.0, "the clock was right"
