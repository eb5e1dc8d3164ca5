"""What an agent finds in its environment: elasticd's, but for what could not be handed on to workers."""

from __future__ import annotations

import os

import pytest

from elastic.core import messages
from elasticd import launch


def test_what_is_no_text_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of the shell that elasticd was started from, in another encoding, must not keep jobs from running."""
    monkeypatch.setitem(os.environ, "ELT_LATIN", os.fsdecode(b"caf\xe9"))
    monkeypatch.setitem(os.environ, "ELT_TEXT", "café")
    monkeypatch.setitem(os.environ, "NOTIFY_SOCKET", "/run/x")
    env = launch.environment()
    assert env["ELT_TEXT"] == "café"
    assert not {"ELT_LATIN", "NOTIFY_SOCKET"} & env.keys()
    messages.encode(messages.Fork(ticket=1, env=env, argv=("train.py",), workdir="/"))
