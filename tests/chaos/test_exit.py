"""A worker ends, in any way: the others keep their process, and nothing that was committed is lost (G1, G7, G8)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from chaos.harness import Cluster, now_s
from chaos.reference import undisturbed
from support.history import final_sha256
from support.memory import limited
from support.procs import alive, describe, kill
from support.wait import eventually

from elastic.testing import Call, Fail, Hang, Injection, Kill

pytestmark = [pytest.mark.chaos, pytest.mark.etcd]

STEPS = 40
NORM = {"NORM": "1"}
"""A model whose forward changes buffers: a step that is taken again must not change them twice."""


@pytest.mark.long
def test_undisturbed() -> None:
    with Cluster(nodes=2, slots=1) as cluster:
        job = cluster.submit(steps=STEPS)
        job.wait_over()
        history = job.check()
        assert history.generations() == [1]
        assert final_sha256(history) == undisturbed(2, STEPS)
        cluster.workers_gone()


def test_killed_at_every_place_of_a_step() -> None:
    """One after the other, each time another rank, rank 0 and the store's host among them.

    The fingerprint has BatchNorm's statistics in it, as they were on rank 0, which is killed first.
    """
    steps, places = 100, ["forward", "backward", "optimizer", "commit", "data"]
    with Cluster(nodes=2, slots=2) as cluster:
        job = cluster.submit(steps=steps, env=NORM)
        for index, place in enumerate(places):
            job.order(place, Kill(rank=index % 4, step=15 * (index + 1), place=place))
        before = job.wait_step(5) and job.workers()
        for index, place in enumerate(places):
            struck = job.wait_struck(place)
            generation = index + 2
            eventually(lambda g=generation: set(job.workers_of(g)) == {0, 1, 2, 3}, 10.0, f"generation {generation}")  # type: ignore[misc]
            now = job.workers_of(generation)
            assert struck.pid in before.values()
            assert set(before.values()) - {struck.pid} == set(now.values()) & set(before.values())
            before = now
        job.wait_over()
        history = job.check(*(job.injection(place) for place in places))
        assert history.generations() == [1, 2, 3, 4, 5, 6]
        assert final_sha256(history) == undisturbed(4, steps, **NORM)
        back_s = [history.back_s(job.struck(p).at_s, i + 1) for i, p in enumerate(places)]
        assert max(back_s) < 3.0, back_s  # on a busy machine; benchmarks/recovery.py has the real number
        incidents = job.incidents()
        assert [i["steps_lost"] for i in incidents] == [0] * len(places)
        assert [i["restored_from"] for i in incidents] == ["live"] * len(places)
        cluster.workers_gone()


SAID = dict(zip(("segv", "abort", "exit3", "exit0", "exception"),
                ("SIGSEGV", "SIGABRT", "3", "0", "a fault of the script"), strict=True))  # fmt: skip
"""The evidence of each."""
ENDS: dict[str, Callable[..., Kill | Fail]] = {
    "segv": functools.partial(Kill, signal="SIGSEGV"),
    "abort": functools.partial(Kill, signal="SIGABRT"),
    "exit3": functools.partial(Fail, error="SystemExit", message="3"),
    "exit0": functools.partial(Fail, error="SystemExit", message="0"),
    "exception": functools.partial(Fail, error="ValueError", message="a fault of the script"),
}


@pytest.mark.long
def test_every_other_end() -> None:
    steps = 100
    with Cluster(nodes=2, slots=1) as cluster:
        job = cluster.submit(steps=steps)
        for index, (name, how) in enumerate(ENDS.items()):
            job.order(name, how(rank=index % 2, step=15 * (index + 1)))
        job.wait_over()
        history = job.check(*(job.injection(name, words=(SAID[name],)) for name in ENDS))
        assert final_sha256(history) == undisturbed(2, steps)


@pytest.mark.long
def test_again_while_a_recovery_is_under_way() -> None:
    with Cluster(nodes=2, slots=2) as cluster:
        job = cluster.submit(steps=STEPS)
        job.order("first", Kill(rank=1, step=12))
        job.order("second", Kill(rank=2, step=12, place="optimizer"))
        job.order("third", Kill(rank=3, step=13))
        job.wait_over()
        # Rank 3 may be the only one that got through step 12 when rank 2 died, and dies with it: then nobody has
        # that step, and it is done again, to the last bit.
        history = job.check(lost=1)
        injections = [job.injection(name) for name in ("first", "second", "third")]
        told = job.incidents()
        named = [(c["node"], c["detail"]) for incident in told for c in incident["causes"] if c["kind"] == "exit"]
        assert sorted(node for node, _ in named) == sorted(
            job.struck(name).node for name in ("first", "second", "third")
        )
        assert len(injections) >= len(told) >= 1
        assert final_sha256(history) == undisturbed(4, STEPS)


@pytest.mark.long
def test_the_first_to_commit_dies_while_the_others_still_apply() -> None:
    """They have seen the same all-reduce complete: they finish the step, so that it is not lost with the dead."""
    with Cluster(nodes=2, slots=2) as cluster:
        job = cluster.submit(steps=STEPS)
        job.order("kill", Kill(rank=3, step=21, place="data"))
        for rank in range(3):
            job.order(f"late{rank}", Hang(rank=rank, step=20, place="optimizer", for_s=0.7))
        job.wait_over()
        history = job.check(job.injection("kill"), lost=0)
        assert {c.rank for c in history.of(1) if c.step == 20} == {0, 1, 2, 3}
        assert final_sha256(history) == undisturbed(4, STEPS)


DETACHES = """
import subprocess
prepare = t.setup

def setup(job):
    subprocess.Popen(["sleep", "601"], start_new_session=True)
    return prepare(job)

t.setup = setup
"""


def test_the_agent_dies_and_the_daemon_starts_another() -> None:
    with Cluster(nodes=2, slots=1) as cluster:
        job = cluster.submit(steps=120, script=cluster.script("detaches", DETACHES))
        job.wait_step(10)
        node = cluster.nodes[1]
        agent, workers = node.agent_pid(), set(node.pids())
        assert "sleep 601" in describe(workers), "a process in a session of its own, which outlives its worker"
        struck_s = now_s()
        kill(agent)
        eventually(lambda: not any(alive(p) for p in workers if p != node.daemon.pid), 5.0, "its workers die with it")  # type: ignore[union-attr]
        job.wait_over()
        history = job.check(Injection("lost", nodes=(node.name,), struck_s=struck_s))
        assert node.agent_pid() != agent
        assert final_sha256(history) == undisturbed(2, 120)


HOARDER = """
def hoard():
    held = []
    while True:
        held.append(b"x" * (1 << 20))
"""


@pytest.mark.long
def test_killed_by_the_kernel_for_want_of_memory() -> None:
    """Its own doing, in a group with a limit: replaced as any other, and the incident says what it was."""
    with limited(64) as group, Cluster(nodes=2, slots=1) as cluster:
        job = cluster.submit(steps=120, script=cluster.script("hoarder", HOARDER))
        job.wait_step(10)
        job.order("hoard", Call(rank=1, step=job.history.step() + 20, function="__main__:hoard"))
        group.take(job.worker(1))
        job.wait_over()
        history = job.check(job.injection("hoard", words=("SIGKILL", "out of memory"), within_s=60.0))
        assert group.kills() == 1
        assert history.generations() == [1, 2]
        assert final_sha256(history) == undisturbed(2, 120)


@pytest.mark.long
def test_the_zygote_dies_and_then_a_worker() -> None:
    """Nobody notices that the process is gone which forks the workers; the next worker comes from the next one."""
    with Cluster(nodes=2, slots=1) as cluster:
        job = cluster.submit(steps=300)
        job.wait_step(10)
        node, workers = cluster.nodes[1], job.workers()
        zygote = node.children()[0]
        assert zygote not in workers.values()
        kill(zygote)
        there = job.history.step()
        eventually(lambda: job.history.step() >= there + 20, 20.0, "it trains on")
        assert job.workers() == workers
        survivor = job.worker_on(cluster.nodes[0])
        first = Injection("exit", pids=(job.worker_on(node),), struck_s=now_s())
        kill(*first.pids)
        eventually(lambda: set(job.workers_of(2)) == {0, 1}, 30.0, "the world is whole again")
        second = Injection("exit", pids=(job.worker_on(node),), struck_s=now_s())
        kill(node.children()[0])  # and both at once
        kill(*second.pids)
        job.wait_over()
        history = job.check(first, second)
        assert history.generations() == [1, 2, 3]
        assert survivor in job.workers().values()
        assert final_sha256(history) == undisturbed(2, 300)
