"""The stack of a worker that is suspected: whatever py-spy prints, the thread that asks must not end the agent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic.agent.workers import stacks


def test_a_dump_that_is_no_text_is_shown_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the agent's locale is not UTF-8, in which py-spy prints the names of files and functions."""
    tool = tmp_path / "py-spy"
    tool.write_text("#!/bin/sh\nprintf 'train (caf\\351.py:3)\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setattr(stacks.shutil, "which", lambda name, path=None: str(tool))
    monkeypatch.setattr(stacks, "QUICK_S", 60.0)
    assert stacks.stack(os.getpid(), native=False) == "train (caf\ufffd.py:3)\n"
