"""The short, fixed part of `make chaos`: one round, its faults drawn from a seed."""

from __future__ import annotations

import pytest
from chaos.random_faults import Round, Strike, check_verdict, one_round, table
from support import machine

pytestmark = [pytest.mark.chaos, pytest.mark.etcd]


@pytest.mark.timeout(300)
@pytest.mark.long
def test_one_round_of_random_faults() -> None:
    result = one_round(seed=42, steps=800, every_s=2.0, network=not machine.no_netns(), recover_s=60.0)
    assert not result.trouble, result.trouble
    *before, last = result.strikes  # the job may be done before what the last one struck is back
    assert all(strike.recovered_s is not None for strike in before), result.strikes
    assert len(before) + (last.recovered_s is not None) >= 2, result.strikes


def test_an_exclusion_is_judged_by_all_strikes_that_have_fallen_on_the_node() -> None:
    strikes = [Strike("worker SIGKILL", "node1", float(at_s), 5) for at_s in range(3)]
    leaves = {
        "kind": "planned",
        "detail": "node1 leaves (node1 is excluded for job: its workers fail there)",
    }
    told = {**leaves, "verdict": {"class": "node", "person": False}}
    check_verdict(told, strikes[-1], strikes)
    drained = Strike("drained and taken back", "node2", 4.0, 5)
    check_verdict({**leaves, "detail": "node2 leaves", "verdict": {"class": "planned", "person": False}}, drained, [])
    with pytest.raises(AssertionError, match="node1 is excluded after 2 strikes"):
        check_verdict(told, strikes[1], strikes[:2])
    with pytest.raises(AssertionError, match="class"):
        check_verdict({**leaves, "verdict": {"class": "planned", "person": False}}, strikes[-1], strikes)
    with pytest.raises(AssertionError, match="class"):
        check_verdict({**told, "detail": "node1 leaves"}, strikes[-1], strikes)


def test_chaos_table_counts_faults_and_recoveries() -> None:
    strikes = [
        Strike("worker SIGKILL", "node1", 0.0, 5, lost=1, recovered_s=0.5),
        Strike("worker SIGKILL", "node2", 9.0, 70),
    ]
    said = table([Round(1, strikes, steps=100, redone=1, goodput=0.8), Round(2, [], trouble="a step back")])
    assert "worker SIGKILL                            2         1          1      0.50" in said
    assert "rounds 2, finished and right 1; steps 100, committed and done again 1; goodput 80%" in said
