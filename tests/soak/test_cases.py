"""The fixed cases with real processes: all is as without the kill, or what was lost is told, or it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from soak.fixed import EDGES, FIXED, OFTEN
from soak.grammar import Case
from soak.runner import Soak

pytestmark = [pytest.mark.chaos, pytest.mark.etcd]


@pytest.fixture(scope="module")
def soak() -> Iterator[Soak]:
    with Soak() as made:
        yield made


def marked(case: Case) -> Any:
    marks = () if case.number in OFTEN else pytest.mark.long
    return pytest.param(case, marks=marks, id=f"case{case.number}")


@pytest.mark.parametrize("case", [marked(case) for case in (*FIXED, *EDGES)])
def test_a_kill_loses_nothing_without_a_word(soak: Soak, case: Case) -> None:
    verdict = soak.run(case)
    assert verdict.right, f"{case}\n{verdict.said}\nmake soak SEED=0 CASE={case.number}"
