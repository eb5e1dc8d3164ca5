"""The short, fixed part of `make chaos`: one round, its faults drawn from a seed."""

from __future__ import annotations

from typing import Any

import pytest
from chaos.random_faults import Round, Strike, check_verdict, one_round, table
from support import machine

from elastic.contract.records.reasons import Code, Text, reason

pytestmark = [pytest.mark.chaos, pytest.mark.etcd]


@pytest.mark.timeout(300)
@pytest.mark.long
def test_one_round_of_random_faults() -> None:
    result = one_round(seed=42, steps=800, every_s=2.0, network=not machine.no_netns(), recover_s=60.0)
    assert not result.trouble, result.trouble
    *before, last = result.strikes  # the job may be done before what the last one struck is back
    assert all(strike.recovered_s is not None for strike in before), result.strikes
    assert len(before) + (last.recovered_s is not None) >= 2, result.strikes


def incident(kind: str, *nodes: str, at_s: float, cls: str = "node", detail: Text = "") -> dict[str, Any]:
    causes = [{"kind": kind, "node": node} for node in nodes]
    verdict = {"class": cls, "person": False}
    return {"kind": kind, "causes": causes, "wall_s": at_s, "detail": str(detail), "verdict": verdict}


def test_an_exclusion_is_judged_by_the_failures_that_are_told_of_the_node_and_answers_no_strike() -> None:
    """Four of five faults fell on node1, one of them told as a hang, one as a loss, which is not charged."""
    strikes = [
        Strike("worker SIGKILL", "node1", 1.0, 5), Strike("node frozen for up to 6 s", "node1", 2.0, 5),
        Strike("agent SIGKILL", "node1", 3.0, 5), Strike("worker SIGKILL", "node2", 4.0, 5),
        Strike("zygote and worker SIGKILL", "node1", 5.0, 5),
    ]  # fmt: skip
    kinds = ("exit", "hang", "lost", "exit", "exit")
    told = [incident(kind, s.node, at_s=s.at_s + 0.1) for kind, s in zip(kinds, strikes, strict=True)]
    why = reason(Code.LEAVES, reason(Code.EXCLUDED, reason(Code.FAILS_MORE), node="node1"), node="node1")
    leaves = incident("planned", at_s=5.2, detail=why)
    check_verdict(leaves, strikes[-1], [*told, leaves])
    with pytest.raises(AssertionError, match="node1 is excluded after 2 failures there"):
        check_verdict(leaves, strikes[-1], [*told[1:], leaves])
    elsewhere = [incident("exit", "node0", at_s=float(at_s)) for at_s in range(2)]
    with pytest.raises(AssertionError, match="after 3 failures there and 3 elsewhere"):
        check_verdict(leaves, strikes[-1], [*told, *elsewhere])
    with pytest.raises(AssertionError, match="class"):
        check_verdict(incident("planned", at_s=5.2, cls="planned", detail=why), strikes[-1], told)
    drained = incident("planned", at_s=6.0, cls="planned", detail=reason(Code.LEAVES, node="node2"))
    check_verdict(drained, Strike("drained and taken back", "node2", 6.0, 5), told)


def test_chaos_table_counts_faults_and_recoveries() -> None:
    strikes = [
        Strike("worker SIGKILL", "node1", 0.0, 5, lost=1, recovered_s=0.5),
        Strike("worker SIGKILL", "node2", 9.0, 70),
    ]
    said = table([Round(1, strikes, steps=100, redone=1, goodput=0.8), Round(2, [], trouble="a step back")])
    assert "worker SIGKILL                            2         1          1      0.50" in said
    assert "rounds 2, finished and right 1; steps 100, committed and done again 1; goodput 80%" in said
