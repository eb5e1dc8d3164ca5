"""Generation numbers after etcd has lost its data: newer state has the larger number."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
from simulation.cluster import Cluster, Setting
from simulation.histories import Fault, History, play
from simulation.run import silent


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    silent()
    yield
    structlog.reset_defaults()


def test_what_an_agent_that_was_away_writes_back_does_not_set_the_numbers_back() -> None:
    """A spare knows generation 1 only, and is the only agent left when etcd loses its data. The job goes on from the
    newest checkpoint, and what it does from then on is newer than that: the next loss of all agents shows it."""
    cluster = Cluster(Setting(calm=True, nodes=4, slots=1, most=3, least=2, checkpoint_every=7))
    cluster.run(1.0)
    formed = cluster.record()
    assert formed is not None
    inside = [int(place.node[1:]) for place in formed.nodes]
    (spare,) = set(range(4)) - set(inside)
    cluster.cut(spare)
    for failure in range(6):
        cluster.run(3.0 + 2 * failure)
        cluster.kill_worker(inside[-1], 0)
    cluster.run(17.0)
    saved = cluster.training.newest_checkpoint()
    assert saved is not None
    assert saved[0][0] > 3
    for node in inside:
        cluster.kill_agent(node)
    cluster.wipe_etcd()
    cluster.run(19.0)
    cluster.heal_etcd_links()
    cluster.run(40.0)
    later, reached = cluster.training.newest_checkpoint(), cluster.judge.top[1]
    assert later is not None
    assert later[0][0] > saved[0][0]
    assert later[0][1] > saved[0][1]
    for node in range(4):
        cluster.kill_agent(node)
    cluster.run(70.0)
    assert cluster.judge.redone(since=later[0][0] + 1) <= reached - later[0][1]


def test_a_number_is_used_again_if_nothing_is_left_of_the_generation_that_had_it() -> None:
    """The job is stopped and saves nothing, etcd loses its data, and the agent that was away knows generation 1."""
    setting = Setting(seed=978986661, nodes=4, slots=1, least=2, most=3, step_s=0.1, steps=0, setup_s=3.0)
    faults = (
        Fault(0.845, "kill_receiver"),
        Fault(0.923, "lose_answers", (0,)),
        Fault(0.923, "kill_worker", (2, 0)),
        Fault(2.811, "stop_job"),
        Fault(3.425, "wipe_etcd"),
    )
    assert play(History(setting, faults)).failure == ""
