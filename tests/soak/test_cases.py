"""The fixed cases with real processes: all is as without the kill, or what was lost is told, or it is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from soak.fixed import EDGES, FIXED
from soak.grammar import Case
from soak.runner import Soak

pytestmark = [pytest.mark.chaos, pytest.mark.etcd]


@pytest.fixture(scope="module")
def soak() -> Iterator[Soak]:
    with Soak() as made:
        yield made


@pytest.mark.parametrize("case", [*FIXED, *EDGES], ids=lambda case: f"case{case.number}")
def test_a_kill_loses_nothing_without_a_word(soak: Soak, case: Case) -> None:
    verdict = soak.run(case)
    assert verdict.right, f"{case}\n{verdict.said}\nmake soak SEED=0 CASE={case.number}"
