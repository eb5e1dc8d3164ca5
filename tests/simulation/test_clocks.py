"""Clocks that are set while an incident is open: its length is that of a monotonic clock, and its beginning stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
from simulation.cluster import Cluster, Setting
from simulation.run import silent

from elastic.contract.records.job_records import IncidentRecord

STRUCK_S, SET_S = 5.0, 15.0
HOUR_S = 3600.0


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    silent()
    yield
    structlog.reset_defaults()


def waiting() -> Cluster:
    """n0 leads, and the job waits for n2."""
    cluster = Cluster(Setting(calm=True, nodes=3, slots=1, most=3, least=3))
    cluster.run(STRUCK_S)
    cluster.power_off(2)
    cluster.run(SET_S)
    assert [incident.open for incident in found(cluster)] == [True]
    return cluster


def found(cluster: Cluster) -> list[IncidentRecord]:
    return [each for each in cluster.judge.incidents().values() if each.kind != "planned"]


def check_dates(cluster: Cluster, *, began_wall_s: float, least_s: float) -> None:
    (incident,) = found(cluster)
    assert not incident.open
    assert incident.wall_s == began_wall_s
    lasted_s = max(incident.timeline_s.values())
    assert least_s <= lasted_s < 60.0 - STRUCK_S
    assert incident.ended_wall_s == pytest.approx(began_wall_s + lasted_s, abs=0.1)


@pytest.mark.parametrize("off_s", [-HOUR_S, HOUR_S])
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("lost", [False, True])
def test_a_clock_that_is_set_while_an_incident_is_open_does_not_date_it_anew(
    off_s: float, node: int, lost: bool
) -> None:
    """n0 leads, and with `lost` n1 takes the record over. By its beginning daemons know an incident that is written
    anew, and notify it once."""
    cluster = waiting()
    (began,) = found(cluster)
    cluster.nodes[node].wall_off_s = off_s
    cluster.run(SET_S + 5.0)
    if lost:
        cluster.kill_agent(0)
    cluster.power_on(2)
    cluster.run(60.0)
    # n1 does not know by its own monotonic clock how long n0's record has been there.
    check_dates(cluster, began_wall_s=began.wall_s, least_s=0.1 if lost else 10.0)
