"""Nodes are lost, cut off, hang and come back, on a network of their own (G2, G9)."""

from __future__ import annotations

import pytest
from chaos.harness import Cluster, Job, now_s
from support.wait import eventually, holds

from elastic.testing import Injection

pytestmark = [pytest.mark.chaos, pytest.mark.etcd, pytest.mark.netns]


def world_size(job: Job) -> int:
    """Size of the newest generation that commits."""
    history = job.history
    return history.of(history.generations()[-1])[0].world_size


def until_world(job: Job, size: int, deadline_s: float = 40.0) -> None:
    eventually(lambda: world_size(job) == size, deadline_s, f"a world of {size}")


@pytest.mark.long
def test_power_off_shrinks_and_power_on_grows() -> None:
    """Silent loss: the lease must run out. Then the job goes on smaller, and takes the node back at a boundary."""
    with Cluster(nodes=3, slots=1, network=True) as cluster:
        job = cluster.submit(nodes="2:3", steps=1200, pace_s=0.03, join_wait_s=30.0)
        job.wait_step(20)
        assert world_size(job) == 3
        before = job.history.step()
        struck_s = now_s()
        cluster.nodes[2].power_off()
        until_world(job, 2)
        back_s = job.history.back_s(struck_s, 1)
        assert back_s < cluster.timeouts["lease_ttl_s"] + 4.0, back_s
        assert job.history.step() >= before

        assert cluster.hosts is not None
        cluster.hosts.heal()
        cluster.nodes[2].start()
        until_world(job, 3)
        job.wait_over(deadline_s=120.0)
        within_s = cluster.timeouts["lease_ttl_s"] + 2.0
        history = job.check(
            Injection("lost", nodes=("node2",), struck_s=struck_s, within_s=within_s), Injection("planned")
        )
        assert len(history.generations()) == 3
        cluster.workers_gone()


def test_process_tree_killed_is_seen_at_once() -> None:
    """The host answers with refusals: no lease is waited for."""
    with Cluster(nodes=2, slots=1, network=True, timeouts={"lease_ttl_s": 8.0, "form_s": 60.0}) as cluster:
        job = cluster.submit(nodes="1:2", steps=100_000)
        job.wait_step(20)
        struck_s = now_s()
        cluster.nodes[1].kill_all()
        until_world(job, 1, deadline_s=15.0)
        assert job.history.back_s(struck_s, 1) < 5.0
        eventually(job.incidents, 20.0, "it is told")
        job.stop()
        job.check(Injection("lost", nodes=("node1",), struck_s=struck_s))


@pytest.mark.long
def test_job_below_min_nodes_waits_and_keeps_its_state() -> None:
    with Cluster(nodes=2, slots=1, network=True) as cluster:
        job = cluster.submit(nodes="2:2", steps=300)
        job.wait_step(20)
        survivor = job.worker(0)
        victim = next(n for n in cluster.nodes if survivor not in n.pids())
        struck_s = now_s()
        victim.power_off()
        eventually(lambda: job.phase() == "waiting", 20.0, "the job waits")
        eventually(lambda: job.row()["waiting_for"], 10.0, "status says for what")
        at = job.history.step()
        holds(lambda: job.history.step() == at, 1.5, "no step below min")
        outage = job.open_incident()
        assert (outage["kind"], outage["node"], outage["ended_wall_s"]) == ("lost", victim.name, None)
        assert cluster.hosts is not None
        cluster.hosts.heal()
        victim.start()
        job.wait_over()
        within_s = cluster.timeouts["lease_ttl_s"] + 2.0
        job.check(Injection("lost", nodes=(victim.name,), struck_s=struck_s, within_s=within_s))
        assert survivor in job.workers().values()


@pytest.mark.parametrize(
    "one_way", [pytest.param(False, id="both_ways"), pytest.param(True, id="one_way", marks=pytest.mark.long)]
)
def test_cut_off_from_etcd_alone(one_way: bool) -> None:
    """Its lease runs out though it works on with the others: steps prove its life, and nobody is condemned."""
    with Cluster(nodes=2, slots=1, network=True) as cluster:
        assert cluster.hosts is not None
        job = cluster.submit(nodes="1:2", steps=100_000, pace_s=0.05)
        job.wait_step(20)
        workers = job.workers()
        cluster.hosts.partition(1, 2, one_way=one_way)  # host 2 is etcd's
        member = ["get", "--keys-only", "/elastic/chaos/jobs/job/members/node1"]
        assert cluster.etcd[0].ctl(*member).stdout.strip()
        eventually(lambda: not cluster.etcd[0].ctl(*member).stdout.strip(), 40.0, "its lease runs out", every_s=0.2)
        there = job.history.step()
        eventually(lambda: job.history.step() >= there + 40, 40.0, "it trains on without a lease")
        cluster.hosts.heal()
        there = job.history.step()
        eventually(lambda: job.history.step() >= there + 40, 20.0, "and after it is back")
        job.stop()
        assert job.check(told=True).generations() == [1]
        assert job.workers() == workers


def test_frozen_node_is_left_out_and_does_no_harm_after_thaw() -> None:
    with Cluster(nodes=3, slots=1, network=True) as cluster:
        job = cluster.submit(nodes="2:3", steps=100_000, pace_s=0.03, hang={"floor_s": 1.0, "ceiling_s": 15.0})
        job.wait_step(20)
        host = cluster.nodes[2].host
        assert host is not None
        struck_s = now_s()
        host.freeze()
        until_world(job, 2)
        there = job.history.step()
        eventually(lambda: job.history.step() >= there + 20, 20.0)
        host.thaw()
        until_world(job, 3)
        eventually(lambda: len(job.incidents()) >= 2, 20.0, "both are told")
        job.stop()
        within_s = cluster.timeouts["lease_ttl_s"] + 2.0
        left = Injection(("lost", "unreachable"), nodes=("node2",), struck_s=struck_s, within_s=within_s)
        job.check(left, Injection("planned"), frozen=["node2"])
