"""What training scripts, tests and plug-ins call by name is in `public_names.txt`, and is what the documents show."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

import pytest
from support import public_names
from support.public_names import documented, exported
from support.source import ROOT, modules

CHANGED = (
    "a line that changes in tests/house/public_names.txt is a change for users: if it is meant, run `make golden`, "
    "read the difference, and name it in CHANGELOG.md with what to write instead"
)
DOCS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.py")])
LOOP = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("loop", "training-state", "frameworks"))]
FILES = ("toml", "py", "md")


def test_no_public_name_or_signature_has_changed() -> None:
    page = public_names.page()
    if os.environ.get("ELASTIC_REWRITE"):
        public_names.PAGE.write_text(page)
    assert page.splitlines() == public_names.PAGE.read_text().splitlines(), CHANGED


REFERRED = [name for name in public_names.PLACES if name == "elastic" or name.startswith("elastic.integrations.")]


@pytest.mark.parametrize("module", REFERRED)
def test_the_reference_has_all_names_of_training_scripts(module: str) -> None:
    there = {entry.name for entry in documented().values() if entry.name.rpartition(".")[0] == module}
    assert there == {f"{module}.{name}" for name in exported(module) if name != "__version__"}


def test_the_reference_has_the_calls_that_the_documents_show() -> None:
    members = documented()["elastic.worker.job.job.Job"].members
    assert members is not None
    texts = {path: path.read_text() for path in LOOP}
    shown = {name for text in texts.values() for name in re.findall(r"(?<![\w-])job\.([a-z_]+)", text)} - set(FILES)
    assert shown - set(members) == set(), "docs/reference.md lists the public members of Job"
    calls = {name for name in members if callable_on_job(name)}
    assert {"commit", "ddp", "log"} <= calls
    assert calls - shown == set(), "none of these pages shows them"


def callable_on_job(name: str) -> bool:
    return re.search(rf"^    (@contextlib\.\w+ )?{name}\(", public_names.PAGE.read_text(), re.MULTILINE) is not None


def imported(texts: Iterable[str]) -> set[tuple[str, str]]:
    """(module, name) of what these texts import from us, or write as elastic.x."""
    found = set()
    for text in texts:
        for module, names in re.findall(r"^ *from (elastic[\w.]*) import ([\w, ]+)", text, re.MULTILINE):
            found |= {(module, name.strip()) for name in names.split(",")}
        found |= {("elastic", name) for name in re.findall(r"(?<![\w./@-])elastic\.(\w+)", text)}
        found |= {("elastic.testing", name) for name in re.findall(r"(?<![\w./@-])testing\.([A-Za-z]\w*)", text)}
    return found


def unknown(names: Iterable[tuple[str, str]]) -> list[str]:
    return [
        f"{module}.{name}"
        for module, name in sorted(names)
        if name not in FILES
        and f"{module}.{name}" not in modules()
        and not (module in public_names.PLACES and name in exported(module))
    ]


def test_what_the_documents_and_examples_import_is_public() -> None:
    found = imported(path.read_text() for path in DOCS)
    assert {("elastic", "run"), ("elastic.testing", "Cluster"), ("elasticd.plugins", "HealthCheck")} <= found
    assert unknown(found) == []


def test_an_unknown_name_is_seen() -> None:
    text = "from elastic.testing import Cluster, Bomb\nstate = elastic.Sate(model=model)\n"
    assert unknown(imported([text])) == ["elastic.Sate", "elastic.testing.Bomb"]
