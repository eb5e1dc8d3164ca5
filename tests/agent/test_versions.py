"""Which versions are warned of, and that the package allows those that the tests are run with and no others."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from elastic.agent.reports.reports import TESTED, untested
from elastic.checkpoint.saving.saver import versions

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_installed_versions_are_tested_versions() -> None:
    assert untested(versions()) == []


@pytest.mark.parametrize("python", ["3.11.7", "3.13.0"])
@pytest.mark.parametrize("torch", ["2.10.0", "2.13.0+cpu", "2.15.1+cu132", "unknown"])
def test_no_word_of_tested_versions(torch: str, python: str) -> None:
    assert untested({"torch": torch, "python": python, "elasticd": "0.1.0"}) == []


def test_versions_outside_are_named_with_the_range() -> None:
    assert untested({"torch": "2.16.0a0+git12", "python": "3.10.2"}) == [
        "torch 2.16.0a0+git12 is outside the versions that elasticd is tested with (2.10 to 2.15)",
        "python 3.10.2 is outside the versions that elasticd is tested with (3.11 to 3.13)",
    ]


def test_the_package_allows_the_tested_range() -> None:
    (_, oldest), (_, newest) = (TESTED["torch"][0], TESTED["torch"][1])
    assert f"torch>=2.{oldest},<2.{newest + 1}" in PROJECT["dependencies"]
    assert PROJECT["requires-python"] == f">=3.{TESTED['python'][0][1]}"
