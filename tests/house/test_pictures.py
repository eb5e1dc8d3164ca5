"""The pictures in the documentation are those of this program: `docs/pictures/make.py` makes them again."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from support.source import ROOT

PICTURES = ROOT / "docs" / "pictures"
DOCS = sorted((ROOT / "docs").rglob("*.md"))


def test_pictures_are_those_of_this_program(tmp_path: Path) -> None:
    subprocess.run([sys.executable, PICTURES / "make.py", tmp_path], timeout=100, check=True)
    for name in ("page.html", "report.html"):
        assert (tmp_path / name).read_text() == (PICTURES / name).read_text(), f"{name}: `make golden` writes it anew"
    drawn = (tmp_path / "top.svg").read_text()  # another rich draws it otherwise
    assert drawn.startswith("<svg")
    assert "train" in drawn


def test_no_line_of_a_diagram_ends_at_a_semicolon() -> None:
    """mermaid takes what follows one as the next statement, and draws nothing of such a diagram."""
    diagrams = {path: re.findall(r"```mermaid\n(.*?)```", path.read_text(), re.DOTALL) for path in DOCS}
    assert sum(map(len, diagrams.values())) > 5
    assert not {path.name: each for path, found in diagrams.items() for each in found if ";" in each}
