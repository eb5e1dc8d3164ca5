"""What elasticd says of itself and does where the machine gives it no more descriptors."""

from __future__ import annotations

import errno
import os
import pathlib

import pytest

from elastic.contract.records.reasons import Code, reason
from elasticd.machine import host


def refusing(code: int) -> object:
    def open_(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return open_


def test_no_descriptors_make_a_node_unwell(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "LEAST_FREE_MB", 0.0)
    assert host.StateFolder(str(tmp_path)).look() == ""
    nowhere = str(tmp_path / "nowhere")
    assert host.StateFolder(nowhere).look() == reason(Code.STATE_DIR, os.strerror(errno.ENOENT), folder=nowhere)
    for code, whose in ((errno.EMFILE, "elasticd"), (errno.ENFILE, "this machine")):
        monkeypatch.setattr(os, "open", refusing(code))
        assert host.StateFolder(str(tmp_path)).look() == reason(Code.NO_DESCRIPTORS, who=whose)
