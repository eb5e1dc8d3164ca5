"""etcd of three members that loses them, and an etcd that is full, forgets its tokens, or throws its history away: no
step waits for it, and a failure meanwhile is repaired as soon as it can be (G4)."""

from __future__ import annotations

import signal

import pytest
from chaos.harness import Cluster, Job, Node, now_s
from chaos.reference import undisturbed
from support.history import final_sha256
from support.procs import alive, kill
from support.wait import eventually, holds

from elastic.testing import Injection

pytestmark = [pytest.mark.chaos, pytest.mark.etcd]


def steps_on(job: Job, more: int = 40) -> None:
    there = job.history.step()
    eventually(lambda: job.history.step() >= there + more, 30.0, f"{more} steps after {there}")


def until_generation(job: Job, number: int, deadline_s: float = 40.0) -> None:
    """Until both ranks have stepped in it."""
    eventually(lambda: set(job.workers_of(number)) == {0, 1}, deadline_s, f"generation {number} steps")


def states(node: Node) -> set[str]:
    """Of all nodes, as the daemon of this one sees them."""
    return {row["state"] for row in node.api("GET", "/v1/nodes")["nodes"]}


@pytest.mark.long
def test_three_members_lose_their_leader_and_then_their_quorum() -> None:
    steps, pace_s = 300, 0.04
    with Cluster(nodes=2, slots=1, members=3) as cluster:
        job = cluster.submit(steps=steps, pace_s=pace_s)
        job.wait_step(20)
        survivor, first = job.worker(0), job.worker(1)

        (leader,) = (member for member in cluster.etcd if member.leads())
        leader.kill()
        while_electing = Injection("exit", pids=(first,), struck_s=now_s())
        kill(first)  # while the other two elect
        until_generation(job, 2)
        assert survivor in job.workers_of(2).values()
        assert not leader.running()
        cluster.start_etcd()

        for member in cluster.etcd[:2]:
            member.kill()
        steps_on(job, int(1.2 * cluster.timeouts["lease_ttl_s"] / pace_s))
        without_quorum = Injection("exit", pids=(job.worker(1),), struck_s=now_s())
        kill(*without_quorum.pids)
        there = eventually(lambda: job.history.step(), 5.0)
        holds(lambda: job.history.step() <= there + 3, 2.0, "nobody steps on alone")
        assert alive(survivor)
        cluster.start_etcd()
        until_generation(job, 3)
        assert survivor in job.workers_of(3).values()

        job.wait_over()
        history = job.check(while_electing, without_quorum)
        assert history.generations() == [1, 2, 3]
        assert final_sha256(history) == undisturbed(2, steps)


def said(cluster: Cluster, *words: str) -> bool:
    """Whether a problem with all of these is in `elasticctl status`."""
    problems: list[str] = cluster.api("GET", "/v1/status")["problems"]
    return any(all(word in problem for word in words) for problem in problems)


@pytest.mark.long
def test_out_of_space() -> None:
    """It answers reads and renewals and refuses writes: the daemon says which, and what to do."""
    with Cluster(nodes=2, slots=1, etcd_args=["--quota-backend-bytes=4000000"]) as cluster:
        (etcd,) = cluster.etcd
        job = cluster.submit(steps=100_000, pace_s=0.03)
        job.wait_step(20)
        workers = job.workers()
        etcd.fill()
        steps_on(job, int(1.5 * cluster.timeouts["lease_ttl_s"] / 0.03))
        assert job.workers() == workers
        eventually(lambda: said(cluster, "etcd is out of space", "etcdctl alarm disarm"), 20.0, "status says so")

        killed = Injection("exit", pids=(workers[1],), struck_s=now_s())
        kill(workers[1])
        there = eventually(lambda: job.history.step(), 5.0)
        holds(lambda: job.history.step() <= there + 3, 2.0, "the failure waits")
        assert alive(workers[0])
        compacted = etcd.make_room()
        until_generation(job, 2)
        assert workers[0] in job.workers_of(2).values()
        eventually(lambda: not said(cluster, "etcd"), 20.0, "all is well")
        job.stop()
        job.check(killed, since=compacted + 1)


@pytest.mark.long
def test_the_token_of_a_login_runs_out_again_and_again() -> None:
    """etcd forgets a token that is not used for a second: each time a client has to log in anew."""
    with Cluster(
        nodes=2, slots=1, password="secret", etcd_args=["--auth-token-ttl=1"],
        timeouts={"lease_ttl_s": 6.0, "lease_renew_s": 2.0},
    ) as cluster:  # fmt: skip
        (etcd,) = cluster.etcd
        job = cluster.submit(steps=100_000, pace_s=0.03)
        job.wait_step(20)
        workers = job.workers()
        eventually(lambda: etcd.log().count("invalid auth token") >= 3, 30.0, "tokens have run out")
        assert job.workers() == workers
        killed = Injection("exit", pids=(workers[1],), struck_s=now_s())
        kill(workers[1])
        until_generation(job, 2)
        job.stop()
        history = job.check(killed)
        assert history.generations() == [1, 2]


@pytest.mark.long
def test_history_thrown_away_past_the_watches() -> None:
    """Nobody looks while etcd is started again, goes on and is compacted: what is missing is read anew."""
    with Cluster(nodes=2, slots=1, timeouts={"lease_ttl_s": 20.0, "lease_renew_s": 2.0}, signed=False) as cluster:
        (etcd,) = cluster.etcd
        job = cluster.submit(steps=100_000, pace_s=0.03)
        job.wait_step(20)
        workers = job.workers()
        watching = [node.agent_pid() for node in cluster.nodes]
        watching += [node.daemon.pid for node in cluster.nodes if node.daemon]
        progress = "/elastic/chaos/jobs/job/progress"
        for pid in watching:
            kill(pid, signal.SIGSTOP)
        try:
            etcd.kill()
            cluster.start_etcd()
            seen = etcd.revision()
            record = etcd.ctl("get", "--print-value-only", progress).stdout.rstrip("\n")
            for _ in range(3):
                etcd.ctl("put", progress, said=record)
            etcd.ctl("put", "/elastic/chaos/cordons/node1", said='{"protocol": 7, "reason": "x", "since_wall_s": 0}')
            etcd.ctl("compact", str(etcd.revision()))
            assert etcd.revision() > seen + 3
        finally:
            for pid in watching:
                kill(pid, signal.SIGCONT)
        compacted = etcd.revision()
        for node in cluster.nodes:
            eventually(lambda n=node: "cordoned" in states(n), 15.0, f"{node.name} sees what was written meanwhile")  # type: ignore[misc]
        steps_on(job, 20)
        assert job.workers() == workers
        killed = Injection("exit", pids=(workers[1],), struck_s=now_s())
        kill(workers[1])
        until_generation(job, 2)
        job.stop()
        assert job.check(killed, since=compacted + 1).generations() == [1, 2]
