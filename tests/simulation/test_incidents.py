"""Each fault on virtual time, and the incident that comes of it compared with what was done and with what was
committed twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import structlog
from simulation.cluster import Cluster, Setting
from simulation.histories import Fault, History, draw, family, play, tardy
from simulation.node import Node
from simulation.run import many, silent
from simulation.training import Group
from support import says
from support.incidents import check_incident, on_record

from elastic.contract.origin import Origin
from elastic.contract.records.incident_account import IncidentAccount
from elastic.contract.records.job_records import Cause, IncidentRecord, Phase, encode
from elastic.contract.records.reasons import Code, reason
from elastic.contract.worker.messages import CollectiveFailed, GroupClosed
from elastic.etcd.client import Put
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.machine.events import (
    Event,
    GroupStuck,
    PeerReachable,
    PeerUnreachable,
    WorkerSaid,
)
from elastic.recovery.workers.announce import SAVE_S


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    silent()
    yield
    structlog.reset_defaults()


STRUCK_S = 5.0


def played(setting: Setting, *acts: Callable[[Cluster], None], until_s: float = 40.0) -> Cluster:
    cluster = Cluster(setting)
    cluster.run(STRUCK_S)
    for act in acts:
        act(cluster)
    cluster.run(until_s)
    return cluster


def incidents(cluster: Cluster) -> list[IncidentRecord]:
    return on_record(cluster.keys, cluster.etcd.kvs)


def failures(cluster: Cluster) -> list[IncidentRecord]:
    return [incident for incident in incidents(cluster) if incident.kind != "planned"]


TWO = Setting(calm=True, nodes=2, slots=2, most=2, least=2)
"""Two nodes of two workers, none can be spared: ranks 0 and 1 on n0, 2 and 3 on n1."""
THREE = Setting(calm=True, nodes=3, slots=1, most=3, least=1)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_killed_worker_is_named(rank: int) -> None:
    cluster = played(TWO, lambda c: c.kill_worker(rank // 2, rank % 2))
    (incident,) = incidents(cluster)
    check_incident(
        incident, kind="exit", nodes=[f"n{rank // 2}"], ranks=[rank], redone=cluster.judge.redone(), world_sizes=(4, 4),
        struck_wall_s=STRUCK_S, noticed_within_s=0.1,
    )  # fmt: skip
    assert incident.steps_lost == incident.steps_lost_at_most == 0


@pytest.mark.parametrize("ranks", [(0, 1), (2, 3), (0, 3), (1, 2, 3)])
def test_all_workers_that_are_killed_at_once_are_named(ranks: tuple[int, ...]) -> None:
    cluster = played(TWO, *(lambda c, r=rank: c.kill_worker(r // 2, r % 2) for rank in ranks))
    (incident,) = incidents(cluster)
    check_incident(
        incident, kind="exit", nodes={f"n{rank // 2}" for rank in ranks}, ranks=ranks, redone=cluster.judge.redone()
    )
    assert incident.text.endswith(f"(and {len(ranks) - 1} more)")
    assert cluster.state().restarts == 1, "one failure is charged"


@pytest.mark.parametrize("late_s", [0.0, 0.35, 1.0, 3.0])
def test_a_death_that_is_reported_late_is_the_cause_all_the_same(late_s: float) -> None:
    """The others' failed collectives are reported first: the agent of the dead is slow."""
    cluster = played(TWO, lambda c: (c.pause_agent(1, late_s) if late_s else None, c.kill_worker(1, 0))[-1])
    (incident,) = failures(cluster)
    check_incident(incident, kind="exit", nodes=["n1"], ranks=[2], redone=cluster.judge.redone())
    assert incident.causes[0].kind == "exit"


def test_a_killed_node_is_named_with_its_ranks() -> None:
    cluster = played(THREE, lambda c: c.kill_agent(1), until_s=6.5)
    (incident,) = failures(cluster)
    check_incident(incident, kind="lost", nodes=["n1"], ranks=[1], redone=cluster.judge.redone())
    assert incident.steps_lost == 0
    assert incident.steps_lost_at_most == 1, "rank 1 may have been a step ahead, and took that with it"


def test_a_node_that_vanishes_is_named_though_failed_collectives_come_first() -> None:
    cluster = played(THREE, lambda c: c.power_off(2), until_s=20.0)
    (incident,) = failures(cluster)
    check_incident(incident, kind="lost", nodes=["n2"], ranks=[2], redone=cluster.judge.redone())


def stand_stills(setting: Setting, act: Callable[[Cluster], None]) -> tuple[float, IncidentRecord]:
    """For how long no step was made around the only failure, and its incident."""
    cluster, instants_s = Cluster(setting), list[float]()
    committed = cluster.judge.committed

    def noted(group: Group) -> None:
        instants_s.append(cluster.clock.now_s)
        committed(group)

    cluster.judge.committed = noted  # type: ignore[method-assign]
    cluster.run(STRUCK_S)
    act(cluster)
    cluster.run(30.0)
    (incident,) = failures(cluster)
    return max(after - before for before, after in itertools.pairwise(instants_s)), incident


@pytest.mark.parametrize("node", [0, 2])
def test_an_incident_took_as_long_as_no_step_was_made_also_where_it_was_noticed_late(node: int) -> None:
    """The loss of a node that only falls silent is noticed when its lease ends."""
    true_s, incident = stand_stills(THREE, lambda c: c.power_off(node))
    assert true_s > 4.0
    assert incident.took_s == pytest.approx(true_s, abs=0.01)
    assert incident.still_s > 4.0


def test_an_incident_that_is_noticed_at_once_took_no_longer_than_no_step_was_made() -> None:
    true_s, incident = stand_stills(TWO, lambda c: c.kill_worker(1, 0))
    assert incident.took_s == pytest.approx(true_s, abs=0.01)


def test_a_hang_is_named() -> None:
    cluster = played(TWO, lambda c: c.stop_worker(1, 1))
    (incident,) = incidents(cluster)
    check_incident(incident, kind="hang", nodes=["n1"], ranks=[3], redone=cluster.judge.redone())


def test_a_further_failure_within_a_recovery_belongs_to_it() -> None:
    cluster = Cluster(TWO)
    cluster.run(STRUCK_S)
    cluster.kill_worker(0, 1)
    cluster.run(STRUCK_S + 0.05)
    cluster.kill_worker(1, 0)
    cluster.run(20.0)
    (incident,) = incidents(cluster)
    check_incident(incident, kind="exit", nodes=["n0"], ranks=[1], redone=cluster.judge.redone())
    assert [(cause.kind, cause.node) for cause in incident.causes] == [("exit", "n0"), ("exit", "n1")]
    assert "(and 1 more)" in incident.text


@pytest.mark.parametrize("every", [0, 7])
def test_all_workers_are_killed(every: int) -> None:
    """From the checkpoint, or from the beginning: as many steps as were really done again."""
    setting = Setting(calm=True, nodes=2, slots=1, most=2, least=2, checkpoint_every=every)
    cluster = Cluster(setting)
    cluster.run(STRUCK_S)
    at = cluster.judge.top[1]
    cluster.kill_worker(0, 0)
    cluster.kill_worker(1, 0)
    cluster.run(40.0)
    (incident,) = incidents(cluster)
    check_incident(incident, kind="exit", nodes=["n0", "n1"], ranks=[0, 1], redone=cluster.judge.redone())
    assert incident.steps_lost == incident.steps_lost_at_most == (at if every == 0 else at % every)
    assert incident.origin is (Origin.CHECKPOINT if every else Origin.SETUP)
    assert ("all state was lost" in incident.text) == (every == 0)


@pytest.mark.parametrize("every", [0, 7])
def test_all_agents_are_killed(every: int) -> None:
    """Of what was done before, the new agents know what stands on record: nothing is called certain."""
    setting = Setting(calm=True, nodes=2, slots=1, most=2, least=2, checkpoint_every=every)
    cluster = played(setting, lambda c: c.kill_agent(0), lambda c: c.kill_agent(1), until_s=7.0)
    cluster.heal()
    cluster.run(40.0)
    (incident,) = failures(cluster)
    check_incident(
        incident, kind="lost", nodes=["n0", "n1"], ranks=[0, 1], redone=cluster.judge.redone(),
        struck_wall_s=STRUCK_S - 3.0, noticed_within_s=3.1,
    )  # fmt: skip
    assert incident.steps_lost_at_most is None
    assert max(incident.timeline_s.values()) >= (incident.ended_wall_s or 0.0) - incident.wall_s - 0.1
    if every == 0:
        assert (incident.steps_lost or 0) > 0


def test_a_checkpoint_that_is_complete_only_after_a_first_try_from_setup_loses_nothing() -> None:
    """The first try of the recovery found no checkpoint and died in its turn; the second resumed from one."""
    setting = Setting(
        seed=197,
        nodes=1,
        slots=1,
        most=1,
        least=1,
        step_s=0.3,
        standby=1,
        checkpoint_every=7,
        save_s=4.0,
        setup_s=3.0,
    )
    cluster = Cluster(setting)
    cluster.run(2.807)
    cluster.kill_agent(0)
    cluster.run(6.5)
    assert cluster.training.newest_checkpoint() is None
    cluster.kill_worker(0, 0)
    cluster.run(40.0)
    (incident,) = incidents(cluster)
    assert cluster.judge.redone() == incident.steps_lost == 0
    assert incident.origin is Origin.CHECKPOINT
    assert "all state was lost" not in incident.text


def test_a_node_that_comes_back_with_older_state_after_a_first_try_from_setup_loses_only_what_came_after_that() -> None:
    """n0 is away while n1 goes on alone and loses its worker. The first try begins from setup, since n0 has just come
    back only, and dies before its first step; the second resumes from the state of n0."""
    cluster = Cluster(Setting(calm=True, nodes=2, slots=1, most=2, least=1, step_s=1.0))
    cluster.run(STRUCK_S)
    cluster.cut(0)
    cluster.isolate(0)
    cluster.run(20.0)
    at = cluster.judge.top[1]
    cluster.kill_worker(1, 0)
    cluster.run(20.4)
    cluster.heal_etcd_links()
    cluster.heal_network()
    cluster.run(20.8)
    cluster.kill_worker(1, 0)
    cluster.run(60.0)
    incident = incidents(cluster)[-1]
    assert (incident.kind, incident.step, incident.origin) == ("exit", at, Origin.LIVE)
    assert [cause.generation for cause in incident.causes] == [2, 3]
    assert 0 < cluster.judge.redone() < at
    assert incident.steps_lost == cluster.judge.redone()
    assert incident.steps_lost_at_most == at, "the try from setup may have committed steps anew"
    assert "all state was lost" not in incident.text


def test_incident_is_open_while_the_outage_lasts() -> None:
    cluster = played(TWO, lambda c: c.power_off(1), until_s=20.0)
    (incident,) = incidents(cluster)
    assert (incident.open, incident.kind, incident.node, incident.ranks) == (True, "lost", "n1", (2, 3))
    assert (incident.steps_lost, incident.ended_wall_s, incident.world_size_after) == (None, None, 0)
    cluster.power_on(1)
    cluster.run(40.0)
    (incident,) = failures(cluster)
    check_incident(incident, kind="lost", nodes=["n1"], ranks=[2, 3], redone=cluster.judge.redone(), world_sizes=(4, 4))
    assert incident.wall_s < 12.0, "it began when the node was lost, not when it came back"


def test_incident_is_continued_by_the_next_leader() -> None:
    """n0 leads, and is killed while the job waits for n2."""
    setting = Setting(calm=True, nodes=3, slots=1, most=3, least=3)
    cluster = played(setting, lambda c: c.power_off(2), until_s=15.0)
    assert [incident.open for incident in incidents(cluster)] == [True]
    cluster.kill_agent(0)
    cluster.power_on(2)
    cluster.run(60.0)
    (incident,) = failures(cluster)
    check_incident(incident, kind="lost", redone=cluster.judge.redone())
    assert {cause.node for cause in incident.causes if cause.kind == "lost"} == {"n0", "n2"}


@pytest.mark.parametrize("off_s", [-400.0, 400.0])
def test_an_incident_that_another_clock_began_lasts_as_long_as_it_did(off_s: float) -> None:
    """n0 leads, its time of day is wrong, and it is killed while the job waits for n2."""
    cluster = Cluster(Setting(calm=True, nodes=3, slots=1, most=3, least=3))
    cluster.nodes[0].wall_off_s = off_s
    cluster.run(STRUCK_S)
    cluster.power_off(2)
    cluster.run(15.0)
    (begun,) = incidents(cluster)
    assert begun.open
    assert STRUCK_S <= begun.wall_s - off_s <= 15.0, "by the clock of n0"
    cluster.kill_agent(0)
    cluster.power_on(2)
    cluster.run(60.0)
    (incident,) = failures(cluster)
    lasted_s = max(incident.timeline_s.values())
    assert not incident.open
    assert 0.0 < lasted_s < 60.0 - STRUCK_S
    assert (incident.ended_wall_s or 0.0) - incident.wall_s == pytest.approx(lasted_s, abs=0.5)
    assert incident.wall_s == pytest.approx(begun.wall_s)


def test_an_incident_that_a_spare_takes_over_lasts_as_long_as_it_did() -> None:
    """Their clocks are 1 h apart. The spare has made no step itself, and has seen those of the job on record."""
    cluster = Cluster(Setting(calm=True, nodes=2, slots=1, most=1, least=1))
    cluster.nodes[0].wall_off_s, cluster.nodes[1].wall_off_s = -3600.0, 0.0
    cluster.run(STRUCK_S)
    formed = cluster.record()
    assert formed is not None
    assert [place.node for place in formed.nodes] == ["n0"]
    cluster.kill_worker(0, 0)
    cluster.run(STRUCK_S + 0.1)
    assert [incident.open for incident in incidents(cluster)] == [True]
    cluster.kill_agent(0)
    cluster.run(30.0)
    (incident,) = failures(cluster)
    assert not incident.open
    assert 0.0 < max(incident.timeline_s.values()) < 20.0


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("late_s", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("stop_after_s", [0.02, 0.05, 0.1])
def test_a_job_that_is_stopped_just_after_a_kill_has_had_an_incident(
    rank: int, late_s: float, stop_after_s: float
) -> None:
    """`late_s`: how long the agent of the dead worker stands still, while the leader sees failed collectives only."""
    cluster = Cluster(TWO)
    cluster.run(STRUCK_S)
    if late_s:
        cluster.pause_agent(rank // 2, late_s)
    cluster.kill_worker(rank // 2, 0)
    cluster.run(STRUCK_S + stop_after_s)
    cluster.stop_job()
    cluster.run(20.0)
    (incident,) = incidents(cluster)
    assert (incident.open, incident.kind, incident.ranks) == (False, "exit", (rank,))
    assert (incident.world_size_after, incident.origin, incident.steps_lost) == (0, Origin.NOTHING, None)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("late_s", [0.01, 0.03, 0.1, 0.3])
def test_a_stop_that_reaches_one_node_later_is_no_failure(late: int, late_s: float) -> None:
    """The workers of the other one have ended by then, as told."""
    cluster = Cluster(TWO)
    cluster.run(STRUCK_S)
    cluster.cut(late)
    cluster.stop_job()
    cluster.run(STRUCK_S + late_s)
    cluster.heal_etcd_links()
    cluster.run(20.0)
    assert cluster.state().phase is Phase.STOPPED
    assert incidents(cluster) == []


@pytest.mark.parametrize(
    ("fault", "stop_after_s"),
    [(Cluster.kill_agent, 1.0), (Cluster.power_off, 6.0), (Cluster.power_off, 10.0), (Cluster.power_off, 20.0)],
)
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_is_lost_just_before_the_job_is_stopped_is_the_cause(
    node: int, fault: Callable[[Cluster, int], None], stop_after_s: float
) -> None:
    cluster = Cluster(TWO)
    cluster.run(STRUCK_S)
    fault(cluster, node)
    cluster.run(STRUCK_S + stop_after_s)
    cluster.stop_job()
    cluster.run(60.0)
    (incident,) = incidents(cluster)
    assert (incident.open, incident.kind, incident.node) == (False, "lost", f"n{node}")
    assert (incident.ranks, incident.world_size_after) == ((2 * node, 2 * node + 1), 0)


def test_a_planned_change_and_a_kill_at_the_same_moment() -> None:
    """The kill is what is told; the step that only the rank on the drained node had committed is not done again."""
    for seed, offset_s in itertools.product(range(12), (0.0, 0.15, 0.3, 0.45, 0.6)):
        cluster = Cluster(Setting(seed=seed, nodes=3, slots=1, most=3, least=1, step_s=0.2, setup_s=0.2))
        cluster.run(STRUCK_S + seed / 50)
        cluster.drain(2, 1e6)
        cluster.run(cluster.clock.now_s + offset_s)
        cluster.kill_worker(1, 0)
        cluster.run(40.0)
        told = [incident for incident in failures(cluster) if "n1" in incident.node]
        assert told, (seed, offset_s, incidents(cluster))
        assert not any(incident.open for incident in incidents(cluster))
        assert cluster.judge.redone() == sum(incident.steps_lost or 0 for incident in incidents(cluster))


@pytest.mark.parametrize("offset_s", [0.1, 0.2, 0.3])
def test_a_worker_that_is_killed_on_the_node_that_leaves_is_named(offset_s: float) -> None:
    """Its agent has taken on the generation without it already, and the old one steps on to the boundary."""
    cluster = played(replace(THREE, setup_s=0.2), lambda c: c.drain(2, 1e6), until_s=STRUCK_S + offset_s)
    world_size = cluster.judge.newest
    assert max(world_size) == 1, "the boundary is not reached yet"
    cluster.kill_worker(2, 0)
    cluster.run(30.0)
    (incident,) = incidents(cluster)
    check_incident(incident, kind="exit", nodes=["n2"], ranks=[2], redone=cluster.judge.redone(), world_sizes=(3, 2))
    assert cluster.state().restarts == 1, "one failure is charged"


def test_a_worker_that_is_killed_while_it_lets_go_on_the_node_that_leaves_is_named() -> None:
    """The generation without it has just broken: its agent counts that as an incident of its own, without a rank."""
    setting = Setting(seed=830141033, nodes=4, slots=1, least=2, most=3, step_s=0.1, steps=0, standby=1,
                      checkpoint_every=7, setup_s=0.2)  # fmt: skip
    faults = Fault(1.570, "drain", (3, 1e6)), Fault(1.707, "fail_worker", (1, 0)), Fault(1.716, "kill_worker", (3, 0))
    assert play(History(setting, faults)).failure == ""


def test_a_death_that_is_reported_after_a_second_generation_has_broken_is_named() -> None:
    """The record of the generation in which it died is older than that of the newest failure by then."""
    cluster = played(TWO, lambda c: c.pause_agent(1, 1.5), lambda c: c.kill_worker(1, 0), lambda c: c.kill_worker(0, 1),
                     until_s=STRUCK_S + 0.9)  # fmt: skip
    cluster.kill_worker(0, 0)
    cluster.run(30.0)
    (incident,) = incidents(cluster)
    assert {(c.generation, c.node, c.ranks) for c in incident.causes if c.kind == "exit"} >= {
        (1, "n0", (1,)), (1, "n1", (2,)), (2, "n0", (0,)),
    }  # fmt: skip


@pytest.mark.parametrize("away_s", [0.0, 0.5, 3.0])
def test_bad_numbers_stop_the_job_though_etcd_is_away_at_that_moment(away_s: float) -> None:
    cluster = Cluster(TWO)
    cluster.run(STRUCK_S)
    cluster.spoil(1)
    if away_s:
        cluster.stop_etcd()
        cluster.clock.after(away_s, cluster.start_etcd)
    cluster.run(30.0)
    (incident,) = incidents(cluster)
    state = cluster.state()
    assert state.phase is Phase.FAILED
    assert state.reason == reason(
        Code.BAD_NUMBERS,
        "loss is nan",
        kind="bad loss",
        ranks="0",
        step=incident.step,
    )
    assert (incident.kind, incident.ranks, incident.world_size_after) == ("bad loss", (0,), 0)
    assert cluster.training.latest is not None
    assert cluster.training.latest.generation == 1, "no further generation was formed"


@pytest.mark.parametrize("away_s", [0.0, 1.0, 3.0])
def test_bad_numbers_take_the_job_back_though_etcd_is_away_at_that_moment(away_s: float) -> None:
    """When etcd is back, the other agent's failed collective may be reported first."""
    cluster = Cluster(replace(TWO, rollback=True, checkpoint_every=5))
    cluster.run(STRUCK_S)
    cluster.spoil(1)
    if away_s:
        cluster.stop_etcd()
        cluster.clock.after(away_s, cluster.start_etcd)
    cluster.run(30.0)
    (incident,) = incidents(cluster)
    check_incident(incident, kind="bad loss", nodes=["n0"], ranks=[0], redone=cluster.judge.redone())
    assert (cluster.record().number, cluster.record().restore) == (2, "snapshot")


def test_bad_numbers_that_are_reported_late_do_not_break_the_generation_that_goes_back_from_them() -> None:
    """They have spread to rank 2, whose report arrives when that generation is formed and its worker still aborts."""
    cluster = Cluster(replace(TWO, rollback=True, checkpoint_every=5))
    late, event = cluster.nodes[1], None

    def poll() -> None:
        nonlocal event
        assert late.agent is not None
        formed = late.agent.formed.generation
        if event is None and formed is not None and formed.restore == "snapshot":
            worker = late.agent.local.workers[0]
            assert worker.generation == 1, "it is still in the generation with the bad numbers"
            event = says.bad_numbers(0, worker.worker_id, 1, cluster.judge.top[1], "bad loss", "loss is nan", (2,))
            late.take(event)
        elif event is None:
            cluster.clock.after(0.0005, poll)

    cluster.run(STRUCK_S)
    cluster.spoil(2)
    for worker in late.processes.values():
        worker.deaf = True
    poll()
    cluster.run(STRUCK_S + 1.2)
    assert event is not None
    for worker in late.processes.values():
        worker.deaf = False
    cluster.run(20.0)
    (incident,) = incidents(cluster)
    check_incident(incident, kind="bad loss", nodes=["n0", "n1"], ranks=[0, 2], redone=cluster.judge.redone())
    assert {cause.generation for cause in incident.causes} == {1}
    assert (cluster.record().number, cluster.record().restore) == (2, "snapshot")
    assert cluster.state().restarts == 1, "one failure is charged"


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("after_s", [0.01, 0.05, 0.2, 0.3])
def test_an_incident_during_which_etcd_is_wiped_is_on_record(node: int, after_s: float) -> None:
    """Its first report may be lost with etcd's data; and it ends while no agent is a member again, and none leads."""
    cluster = Cluster(TWO)
    cluster.run(STRUCK_S)
    cluster.kill_worker(node, 0)
    cluster.clock.after(after_s, cluster.wipe_etcd)
    cluster.run(30.0)
    (incident,) = incidents(cluster)
    check_incident(
        incident, kind="exit", nodes=[f"n{node}"], ranks=[2 * node], redone=cluster.judge.redone(), world_sizes=(4, 4),
        struck_wall_s=STRUCK_S, noticed_within_s=0.1,
    )  # fmt: skip
    assert not incident.open


def test_the_newest_incident_is_on_record_again_where_etcd_has_lost_its_data_after_it() -> None:
    """After the wipe the agents write the job's state again, with its count of restarts, and the incident that this
    restart was for."""
    cluster = played(THREE, lambda c: c.kill_worker(1, 0), until_s=12.0)
    (told,) = incidents(cluster)
    cluster.wipe_etcd()
    cluster.run(30.0)
    (again,) = incidents(cluster)
    assert (again.id, again.causes, again.open, again.steps_lost) == (told.id, told.causes, False, told.steps_lost)
    assert cluster.state().restarts == 1


def test_an_incident_that_a_lost_leader_has_left_open_is_over_once_a_later_generation_steps() -> None:
    """None of the agents that are there now knows of it."""
    cluster = played(TWO, until_s=STRUCK_S)
    left = IncidentAccount(
        first=1,
        last=1,
        gone=(Cause(generation=1, node="n1", kind="lost", ranks=(2,)),),
        reached=(1, 3),
        noticed_wall_s=4.0,
    )
    cluster.etcd.put_all([Put(cluster.keys.account(1, "n9", "n9.1"), encode(left))])
    cluster.etcd_changed()
    cluster.run(10.0)
    (incident,) = incidents(cluster)
    assert (incident.open, incident.kind) == (True, "lost")
    cluster.kill_worker(0, 0)
    cluster.run(20.0)
    (incident,) = incidents(cluster)
    assert (incident.open, incident.wall_s, incident.world_size_after) == (False, 4.0, 4)
    assert [(cause.kind, cause.node) for cause in incident.causes] == [("exit", "n0")], "n1 has kept its place"


def test_a_recovery_that_ends_while_the_agents_lease_has_lapsed_is_closed() -> None:
    """The agent stands still for longer than its lease; the only one, it does not lead when the job steps again."""
    cluster = Cluster(Setting(nodes=1, slots=1, most=1, least=1, step_s=0.1, setup_s=1.0))
    cluster.run(STRUCK_S)
    cluster.fail_worker(0, 0)
    cluster.run(STRUCK_S + 0.06)
    assert cluster.record().number == 2
    cluster.pause_agent(0, 6.0)
    cluster.run(30.0)
    (incident,) = incidents(cluster)
    assert not incident.open
    assert incident.ended_wall_s == pytest.approx(incident.wall_s + incident.timeline_s["stepping"], abs=0.01)
    check_incident(incident, kind="exit", nodes=["n0"], ranks=[0], redone=cluster.judge.redone())


def test_the_loss_of_the_node_that_took_over_from_an_absent_agent_is_an_incident_of_its_own() -> None:
    """n1 stands still while the job recovers without it; the node that goes on is lost, and n1 resumes from its own
    older state: steps are lost, which the closed incident of the first recovery cannot say."""
    setting = Setting(
        seed=37923171, nodes=3, slots=1, most=2, step_s=0.6, save_s=4.0, setup_s=3.0, leader_candidates=1, managed=False
    )
    faults = (
        Fault(3.671, "pause_agent", (2, 9)),
        Fault(12.295, "lose_answers", (1,)),
        Fault(12.491, "pause_agent", (1, 9)),
        Fault(12.5, "fail_worker", (2, 0)),
        Fault(14.0, "drain", (0, 1e6)),
        Fault(20.033, "power_off", (2,)),
        Fault(29.272, "heal_etcd_links"),
    )
    assert play(History(setting, faults)).failure == ""


def test_a_step_that_only_a_later_report_of_the_same_recovery_names_counts_as_lost() -> None:
    """The second generation of a recovery commits a step and breaks; the third resumes from setup."""
    setting = Setting(seed=223144358, slots=1, step_s=0.6, setup_s=0.2, shrink=True, leader_candidates=1)
    faults = (
        Fault(0.384, "kill_worker", (1, 0)),
        Fault(0.54, "cut", (0,)),
        Fault(0.694, "kill_worker", (2, 0)),
        Fault(1.108, "kill_worker", (0, 0)),
    )
    assert play(History(setting, faults)).failure == ""


DRAWN = Setting(
    steps=0, shrink=False, checkpoint_every=0, save_s=0.05, budget=20, window_s=3600.0, crowd=64, leader_candidates=1,
)  # fmt: skip
"""What the histories below, which were drawn at random, have in common."""


def test_no_step_is_lost_when_a_job_is_scaled_down_at_the_moment_of_a_failure() -> None:
    """Only the node beyond the new maximum has committed the last step, by a worker that had replaced another."""
    setting = replace(
        DRAWN, seed=844811428, nodes=3, slots=1, least=2, most=3, step_s=0.6, standby=1, setup_s=0.2, managed=False
    )
    faults = (
        Fault(1.316, "kill_worker", (2, 0)),
        Fault(1.848, "kill_worker", (0, 0)),
        Fault(1.848, "scale", (1, 1)),
    )
    assert play(History(setting, faults)).failure == ""


def test_an_absent_leader_does_not_write_the_step_from_which_the_job_was_set_back() -> None:
    """It stands still for 9 s, in which the other node begins again from setup, and then leads for a moment more."""
    setting = replace(
        DRAWN, seed=198891508, nodes=2, slots=1, least=1, most=2, step_s=0.6, standby=0, setup_s=3.0, managed=True
    )
    faults = (
        Fault(8.656, "pause_agent_after", (1, 4, 9)),
        Fault(8.664, "plant_bug", (0,)),
        Fault(18.804, "drain", (1, 5)),
        Fault(18.863, "power_off", (0,)),
    )
    assert play(History(setting, faults)).failure == ""


def test_a_failure_after_a_false_alarm_in_the_same_generation_has_a_record_of_its_own() -> None:
    """A node whose lease had run out was alive; the generation stepped on, and then failed."""
    setting = replace(
        DRAWN, seed=729505087, nodes=2, slots=1, least=2, most=2, step_s=0.1, standby=0, setup_s=3.0, crowd=1,
        managed=False,
    )  # fmt: skip
    faults = (Fault(0.844, "pause_agent", (1, 9)), Fault(11.953, "kill_worker", (0, 0)))
    assert play(History(setting, faults)).failure == ""
    cluster = Cluster(setting)
    cluster.run(0.844)
    cluster.pause_agent(1, 9)
    cluster.run(11.953)
    cluster.kill_worker(0, 0)
    cluster.run(30.0)
    told = sorted((i.kind, i.node, i.open) for i in incidents(cluster))
    assert told == [("exit", "n0", False), ("lost", "n1", False)]


def hear(cluster: Cluster, index: int, event: type[PeerUnreachable | PeerReachable]) -> None:
    """The agents of node `index` and of each other node no longer reach each other, or do so again."""
    node = cluster.nodes[index]
    for other in (other for other in cluster.nodes if other is not node and other.up):
        for one, peer in ((node, other), (other, node)):
            said = ("no answer",) if event is PeerUnreachable else ()
            one.take(event(peer.name, peer.incarnation, *said))


def cut(cluster: Cluster, from_s: float, until_s: float) -> None:
    """The two nodes do not reach each other from `from_s` on until `until_s`: the job falls below its minimum."""
    cluster.run(from_s)
    cluster.isolate(1)
    cluster.run(from_s + 3.5)
    hear(cluster, 1, PeerUnreachable)
    cluster.run(until_s)
    assert cluster.state().phase is Phase.WAITING
    cluster.heal_network()
    hear(cluster, 1, PeerReachable)


def told(cluster: Cluster) -> list[tuple[str, str, int, bool]]:
    """Of each incident, in the order in which they began."""
    found = sorted(incidents(cluster), key=lambda incident: incident.wall_s)
    return [(incident.kind, incident.node, incident.generation, incident.open) for incident in found]


CUT = ("unreachable", "n1", 1, False)


def test_each_of_several_cuts_that_end_has_a_record_of_its_own() -> None:
    """The generation steps on each time, and then fails: all records are of generation 2, the next one."""
    cluster = Cluster(TWO)
    for at_s in (5.0, 30.0, 55.0):
        cut(cluster, at_s, at_s + 15.0)
    cluster.run(75.0)
    assert told(cluster) == [CUT] * 3
    began_s = [incident.wall_s for incident in incidents(cluster)]
    assert began_s == pytest.approx([8.5, 33.5, 58.5], abs=0.2)
    assert [incident.ended_wall_s for incident in incidents(cluster)] == pytest.approx([20.0, 45.0, 70.0], abs=0.2)
    cluster.kill_worker(0, 0)
    cluster.run(90.0)
    assert told(cluster) == [CUT] * 3 + [("exit", "n0", 2, False)]
    cluster.judge.failures_told()


def test_a_cut_that_lasts_is_on_record_while_it_lasts_though_one_before_it_is_over() -> None:
    cluster = Cluster(TWO)
    cut(cluster, 5.0, 20.0)
    cluster.run(30.0)
    cluster.isolate(1)
    cluster.run(33.5)
    hear(cluster, 1, PeerUnreachable)
    cluster.run(45.0)
    assert told(cluster) == [CUT, ("unreachable", "n1", 2, True)]


def test_a_lease_that_runs_out_twice_is_told_twice() -> None:
    cluster = Cluster(replace(TWO, slots=1))
    for at_s in (5.0, 25.0):
        cluster.run(at_s)
        cluster.isolate(1)
        cluster.pause_agent(1, 9.0)
        cluster.run(at_s + 9.0)
        cluster.heal_network()
    cluster.run(45.0)
    assert told(cluster) == [("lost", "n1", 1, False)] * 2


def test_a_failed_collective_after_a_cut_that_has_ended_has_a_record_of_its_own() -> None:
    cluster = Cluster(TWO)
    cut(cluster, 5.0, 20.0)
    cluster.run(30.0)
    node = cluster.nodes[1]
    assert node.agent is not None
    node.take(GroupStuck(0, node.agent.local.workers[0].worker_id, "has waited for other ranks for 300 s"))
    cluster.run(45.0)
    assert told(cluster) == [CUT, ("comm", "n1", 2, False)]
    cluster.judge.failures_told()


def test_a_planned_change_after_a_cut_that_has_ended_has_a_record_of_its_own() -> None:
    cluster = Cluster(replace(TWO, nodes=3, most=3))
    cluster.power_off(2)
    cut(cluster, 5.0, 20.0)
    cluster.run(30.0)
    cluster.power_on(2)
    cluster.run(45.0)
    assert cluster.record().world_size == 6
    assert told(cluster) == [CUT, ("planned", "", 2, False)]


@pytest.mark.parametrize(("off_s", "again_s"), [(-400.0, 26.0), (0.0, 26.0), (400.0, 26.0), (-400.0, 40.0)])
def test_the_next_leader_tells_its_own_incident_from_that_of_the_leader_before(off_s: float, again_s: float) -> None:
    """n0 led when the first cut began and ended, and its clock is wrong; it is lost to etcd, and n1 leads."""
    cluster = Cluster(replace(TWO, slots=1))
    cluster.nodes[0].wall_off_s = off_s
    cut(cluster, 5.0, 20.0)
    cluster.run(21.0)
    cluster.cut(0)
    cluster.run(again_s)
    node = cluster.nodes[1]
    assert node.agent is not None
    node.take(GroupStuck(0, node.agent.local.workers[0].worker_id, "has waited for other ranks for 300 s"))
    cluster.run(again_s + 2.0)
    assert sorted(incident.repeat for incident in incidents(cluster)) == [0, 1], "n1 has written it"
    cluster.heal_etcd_links()
    cluster.run(70.0)
    first, second = sorted(incidents(cluster), key=lambda incident: incident.generation)
    assert (first.kind, first.node, first.generation, first.open) == CUT
    assert (second.generation, second.open, second.repeat) == (2, False, 1)
    assert ("comm", "n1") in {(cause.kind, cause.node) for cause in second.causes}
    assert ("unreachable", "n1") not in {(cause.kind, cause.node) for cause in second.causes}


@pytest.mark.parametrize("after_s", [0.05, 0.2])
def test_a_cause_that_only_the_leader_before_has_learnt_of_stays_on_record(after_s: float) -> None:
    """n0 has written that n1 is lost, and is lost itself; n2, which had no place with n1, leads."""
    cluster = played(replace(THREE, most=2), lambda c: c.kill_agent(1), until_s=STRUCK_S + after_s)
    cluster.power_off(0)
    cluster.run(40.0)
    (incident,) = incidents(cluster)
    assert [(c.generation, c.node, c.kind) for c in incident.causes] == [(1, "n1", "lost"), (2, "n0", "lost")]
    assert (incident.node, incident.ranks, incident.open) == ("n1", (1,), False)


def test_a_death_on_a_node_that_leaves_is_named_by_that_node_if_the_leader_is_lost() -> None:
    """The leader stands still while it is reported. The node that was to leave goes on, and continues its record."""
    setting = replace(DRAWN, seed=264325583, nodes=2, slots=1, least=2, most=2, step_s=0.6, setup_s=1.0)
    faults = (
        Fault(4.38, "pause_agent_after", (0, 6, 9)),
        Fault(6.33, "scale", (1, 1)),
        Fault(6.338, "isolate", (1,)),
        Fault(8.478, "kill_worker", (1, 0)),
        Fault(10.019, "kill_agent", (0,)),
    )
    assert play(History(setting, faults)).failure == ""


def test_the_record_of_a_leader_that_dies_at_once_is_not_closed_before_the_others_learn_of_the_failure() -> None:
    """They take it for one that was left open: their steps still count as recent."""
    setting = replace(
        DRAWN, seed=299386685, nodes=3, slots=1, least=3, most=3, step_s=0.6, standby=1, setup_s=1.0, drift=0.2,
        managed=False,
    )  # fmt: skip
    faults = (
        Fault(4.149, "kill_agent_after", (1, 9)),
        Fault(7.6, "kill_source"),
        Fault(8.406, "stop_worker", (1, 0)),
    )
    assert play(History(setting, faults)).failure == ""


def test_a_spare_waits_for_the_node_that_alone_holds_the_state_when_etcd_has_lost_its_data() -> None:
    """The spare stood still while both nodes that have stepped left, and is the first that registers again."""
    setting = replace(
        DRAWN, seed=351687295, nodes=3, slots=1, least=1, most=2, step_s=0.3, standby=1, setup_s=3.0, managed=False
    )
    faults = (
        Fault(3.943, "drain", (0, 1e6)),
        Fault(3.962, "drain", (1, 1)),
        Fault(3.966, "pause_agent", (2, 3)),
        Fault(6.907, "wipe_etcd"),
    )
    assert play(History(setting, faults)).failure == ""


def test_a_node_that_leaves_is_waited_for_when_etcd_has_lost_its_data_and_the_others_may_hold_a_part_only() -> None:
    """The state is on its way to the second worker of the node that stays when its source is killed."""
    setting = replace(
        DRAWN, seed=520760541, nodes=2, slots=2, least=1, most=2, step_s=0.3, standby=0, setup_s=3.0, managed=False
    )
    faults = (
        Fault(5.845, "drain", (0, 1e6)),
        Fault(5.966, "wipe_etcd"),
        Fault(5.966, "kill_source"),
        Fault(6.262, "fail_worker", (0, 1)),
        Fault(31.462, "kill_worker", (0, 0)),
    )
    assert play(History(setting, faults)).failure == ""


def test_an_agent_that_does_not_know_the_generation_that_failed_does_not_say_how_many_steps_exactly_are_lost() -> None:
    """Its node had no answer of etcd's while the only other one trained and was lost."""
    setting = replace(DRAWN, seed=334552625, nodes=2, slots=1, least=1, most=1, step_s=0.1, save_s=4.0, setup_s=0.2,
                      standby=0, crowd=1, managed=True)  # fmt: skip
    faults = (
        Fault(0.226, "lose_answers", (1,)),
        Fault(0.943, "drain", (0, 1)),
        Fault(1.046, "kill_worker", (0, 0)),
        Fault(2.864, "scale", (1, 2)),
    )
    assert play(History(setting, faults)).failure == ""


def test_a_new_agent_does_not_count_the_steps_of_a_generation_before_the_one_that_failed() -> None:
    """That one had begun from setup, and its progress was not on record yet when the agent was killed."""
    setting = replace(DRAWN, seed=498933035, nodes=1, slots=1, least=1, most=1, step_s=0.3, setup_s=3.0, standby=0,
                      crowd=1, managed=True)  # fmt: skip
    faults = (
        Fault(5.538, "kill_worker", (0, 0)),
        Fault(6.605, "kill_agent_after", (0, 3)),
        Fault(8.039, "cut", (0,)),
    )
    assert play(History(setting, faults)).failure == ""


def test_a_node_that_is_back_before_the_generation_without_it_is_seen_was_lost_all_the_same() -> None:
    """It trained on, cut off from etcd, in a generation in which the other node had no place."""
    setting = replace(DRAWN, seed=824355553, nodes=3, slots=1, least=1, most=3, step_s=0.6, setup_s=0.2, standby=0,
                      drift=0.05, crowd=1, managed=True)  # fmt: skip
    faults = (
        Fault(0.871, "drain", (2, 5)),
        Fault(1.040, "slow_views", (3,)),
        Fault(1.447, "pause_agent_after", (0, 0, 9)),
        Fault(2.980, "heal_etcd_links"),
        Fault(13.591, "cut", (1,)),
    )
    assert play(History(setting, faults)).failure == ""


def test_a_node_that_drains_hands_its_state_over_when_only_a_newcomer_is_left() -> None:
    """n2 steps once without n0, which does not know it yet; n1 joins, and n2's worker dies at its next step."""
    setting = replace(
        DRAWN, seed=816676169, nodes=3, slots=1, least=1, most=2, step_s=0.6, setup_s=1.0, standby=0, managed=False
    )
    faults = (
        Fault(3.845, "kill_agent_after", (2, 5)),
        Fault(3.863, "pause_agent", (2, 3)),
        Fault(16.038, "power_off", (1,)),
        Fault(22.558, "lose_answers", (2,)),
        Fault(22.680, "drain", (0, 1e6)),
        Fault(57.342, "plant_bug", (1,)),
    )
    assert play(History(setting, faults)).failure == ""


def test_a_newcomer_asks_for_state_though_it_has_not_seen_the_job_step() -> None:
    """n1 and n2 drain after a step that n0, which has just come, does not know of. n2 leaves while n0 takes its place:
    n0 leads then, has received nothing, and n1 has the state."""
    setting = replace(DRAWN, seed=901525532, nodes=3, slots=2, least=1, most=2, step_s=0.6, setup_s=1.0, standby=0,
                      save_s=4.0, managed=False)  # fmt: skip
    faults = (
        Fault(1.144, "drain", (2, 1)),
        Fault(1.764, "drain", (1, 1e6)),
        Fault(22.752, "deafen_worker", (2, 1)),
    )
    assert play(History(setting, faults)).failure == ""


def test_a_worker_that_dies_on_its_way_into_a_planned_generation_does_not_lose_the_state() -> None:
    """n0 alone is to go on after n1 has left. Its worker is killed before that: n1 has the state."""
    setting = replace(DRAWN, seed=277077251, nodes=2, slots=1, least=1, most=1, step_s=0.6, steps=12, setup_s=1.0,
                      standby=0, managed=True)  # fmt: skip
    faults = (Fault(0.157, "wipe_etcd", ()), Fault(7.781, "deafen_worker", (0, 0)), Fault(11.014, "drain", (1, 1e6)))
    assert play(History(setting, faults)).failure == ""


def test_a_job_that_is_complete_in_an_older_generation_has_succeeded() -> None:
    """n2 begins again from setup, as n1, which has completed, cannot be reached, and is gone after a step."""
    setting = replace(DRAWN, seed=656311885, nodes=3, slots=1, least=1, most=2, step_s=0.1, steps=12, setup_s=1.0,
                      standby=0, managed=False)  # fmt: skip
    faults = (
        Fault(2.167, "cut", (1,)),
        Fault(2.171, "isolate", (2,)),
        Fault(2.765, "kill_agent_after", (0, 2)),
        Fault(3.766, "kill_agent_after", (2, 6)),
    )
    assert play(History(setting, faults)).failure == ""


def left_out_and_set_back() -> Cluster:
    """n2 reaches step 57 in generation 1 and is cut off; the two others go on, lose all workers, and begin again from
    setup, in generation 3: that is one incident, and its steps are counted there. Then n2 is taken back."""
    cluster = Cluster(replace(THREE, setup_s=0.3))
    cluster.run(12.0)
    cluster.isolate(2)
    cluster.run(12.2)
    hear(cluster, 2, PeerUnreachable)
    cluster.run(16.0)
    cluster.kill_worker(0, 0)
    cluster.kill_worker(1, 0)
    cluster.run(20.0)
    assert (cluster.record().number, cluster.judge.top[0]) == (3, 3)
    agent = cluster.nodes[2].agent
    assert agent is not None
    assert agent.progress.reached[0] == 1
    assert agent.progress.step > cluster.judge.top[1]
    return cluster


def test_a_worker_that_dies_before_it_has_newer_state_says_nothing_of_steps_that_were_given_up_before() -> None:
    """Its last step is that of a generation before the one that the job was set back to."""
    cluster = left_out_and_set_back()

    def strike() -> None:
        agent = cluster.nodes[2].agent
        assert agent is not None
        worker = agent.local.workers[0]
        if worker.generation == 4 and worker.stage is Stage.FORMING:
            assert (worker.synced, worker.step) == (1, agent.progress.step)
            cluster.kill_worker(2, 0)
        else:
            cluster.clock.after(0.001, strike)

    strike()
    cluster.heal_network()
    hear(cluster, 2, PeerReachable)
    cluster.run(40.0)
    cluster.judge.steps_told()
    incident = incidents(cluster)[-1]
    check_incident(incident, kind="exit", nodes=["n2"], ranks=[2], redone=0)
    assert incident.steps_lost_at_most == 0


def test_a_failed_collective_says_nothing_of_steps_that_were_given_up_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent of n2 is the first that reports it, and has not stepped since."""
    cluster, soon = left_out_and_set_back(), Node.soon

    def slow(node: Node, event: Event, worker_id: int = 0) -> None:
        closed = isinstance(event, WorkerSaid) and isinstance(event.message, GroupClosed | CollectiveFailed)
        late_s = 0.5 if closed and node.name != "n2" else 0.0
        cluster.clock.after(late_s, soon, node, event, worker_id) if late_s else soon(node, event, worker_id)

    monkeypatch.setattr(Node, "soon", slow)
    cluster.fail_forming(1)
    cluster.heal_network()
    hear(cluster, 2, PeerReachable)
    cluster.run(40.0)
    cluster.judge.steps_told()
    incident = incidents(cluster)[-1]
    assert [(cause.kind, cause.node) for cause in incident.causes] == [("comm", "n2")]
    assert (incident.open, incident.steps_lost, incident.steps_lost_at_most) == (False, 0, 0)


def test_a_step_that_the_progress_record_has_from_an_earlier_generation_is_not_lost_again() -> None:
    """It shows the newest generation, and until that steps the step of the one before, from which it went back."""
    assert play(family(445)).failure == ""


def test_lost_steps_are_not_exact_if_a_worker_was_set_back_and_died_before_its_state_was_known() -> None:
    """Node 0 has committed a step more than node 1, goes back with it, and dies before node 1 learns of it."""
    assert play(family(801)).failure == ""


@pytest.mark.parametrize("effects", range(3, 10))
def test_the_death_of_a_leader_that_has_just_closed_an_incident_is_another_incident(effects: int) -> None:
    """The next leader learns of the death before it sees the record closed."""
    setting = Setting(
        seed=614887687, nodes=3, slots=1, most=2, step_s=0.6, shrink=True, checkpoint_every=7, save_s=4.0, setup_s=3.0,
        drift=0.05, leader_candidates=1,
    )  # fmt: skip
    faults = (
        Fault(5.333, "power_off", (1,)),
        Fault(9.242, "stop_worker", (2, 0)),
        Fault(10.054, "kill_source"),
        Fault(10.626, "kill_agent_after", (0, effects)),
    )
    assert play(History(setting, faults)).failure == ""


def test_the_incident_of_an_agent_that_was_away_when_the_generation_failed_is_closed() -> None:
    """The job has gone on without it and failed, and goes on with it alone."""
    assert play(draw(201819)).failure == ""


def test_lost_steps_of_a_planned_change_are_not_exact_if_it_ends_before_its_boundary() -> None:
    """The node that is to leave has committed a step more than the other one, and dies with it."""
    assert play(draw(95431)).failure == ""


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_drain_whose_checkpoint_fails_takes_another_one(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have stopped at the step that was to be saved."""
    cluster = Cluster(replace(TWO, checkpoint_every=10_000))
    durable, results = cluster.training._saved, itertools.count()
    monkeypatch.setattr(cluster.training, "_saved", lambda saved: durable(saved) if next(results) >= failing else None)
    cluster.run(STRUCK_S)
    cluster.drain(1, 1e6)
    cluster.run(STRUCK_S + 10.0 + SAVE_S * failing)
    assert cluster.nodes[1].agent is None
    assert cluster.record().number == 1 + failing
    assert sum(incident.open for incident in incidents(cluster)) == 1
    assert all((incident.steps_lost or 0) == 0 for incident in incidents(cluster))


@pytest.mark.parametrize("crowd", [64, 2])
def test_a_drain_waits_for_its_checkpoint_also_where_most_agents_do_not_see_that_a_node_drains(crowd: int) -> None:
    setting = Setting(
        calm=True, nodes=4, slots=1, most=4, least=4, crowd=crowd, leader_candidates=1, checkpoint_every=10_000,
        save_s=8.0,
    )  # fmt: skip
    cluster = Cluster(setting)
    cluster.run(8.0)
    cluster.drain(3, 1e6)
    cluster.run(40.0)
    assert cluster.nodes[3].agent is None
    assert cluster.record().number == 1
    (incident,) = incidents(cluster)
    assert (incident.kind, incident.open) == ("drain", True)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("histories", [100, pytest.param(400, marks=pytest.mark.long)])
def test_lost_steps_of_a_planned_change_are_exact_only_if_a_rank_has_stopped_between_two_steps(histories: int) -> None:
    """All ranks learn of it in the middle of a long step and abort; a node that leaves may have completed it alone."""
    for outcome in many(range(histories), drawn=tardy, processes=1):
        assert outcome.failure == "", outcome.history


def test_lost_steps_of_a_planned_change_are_exact_where_no_order_comes_late() -> None:
    cluster = played(THREE, lambda c: c.drain(2, 1e6))
    (incident,) = incidents(cluster)
    assert (incident.steps_lost, incident.steps_lost_at_most, cluster.judge.redone()) == (0, 0, 0)


def test_a_worker_that_is_killed_while_it_aborts_is_named_in_a_job_that_shrinks() -> None:
    """It was not its agent that killed it: that it did not abort in time is not true."""
    assert play(draw(25580)).failure == ""


def test_a_death_on_a_node_that_was_cut_off_is_added_to_an_incident_that_another_one_has_followed() -> None:
    assert play(draw(1507168)).failure == ""


def test_a_failure_after_etcd_has_lost_a_false_alarm_has_one_record() -> None:
    """The leader took its own new record for that of the false alarm that it had closed, and wrote another one."""
    assert play(draw(1521727)).failure == ""


def test_a_leader_that_stands_still_while_it_goes_on_alone_tells_the_loss_when_it_is_a_member_again() -> None:
    assert play(draw(394023202)).failure == ""


def test_a_step_before_a_group_failed_does_not_show_that_the_job_goes_on() -> None:
    """The leader, just awake, heard first of a node's death and then that its own group had failed, with a step made
    shortly before: it told the death as a false alarm, and a moment later as an incident of its own."""
    assert play(draw(825548803)).failure == ""


def test_steps_of_before_a_set_back_are_not_counted_by_a_node_that_joins_as_planned() -> None:
    """The progress on record is of the generation before the one that began again from setup."""
    assert play(draw(786425160)).failure == ""


def test_a_node_that_learns_late_of_a_planned_change_and_then_of_a_loss_tells_the_loss_apart() -> None:
    """It continued the record of the change, which was closed, and nothing told what the loss had cost."""
    assert play(draw(677826875)).failure == ""


def test_an_agent_that_learns_late_of_a_failure_does_not_count_the_steps_of_the_recovery_as_lost_by_it() -> None:
    assert play(draw(484073779)).failure == ""


def test_one_loss_that_two_leaders_tell_is_one_incident() -> None:
    assert play(draw(225099662)).failure == ""
