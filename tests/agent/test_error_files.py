"""Whatever a worker leaves as its error file or its log, its agent reads it in bounded time and can write it down."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.agent.workers.pool import Exited
from elastic.agent.workers.worker_error import MESSAGE_CHARS, TRACEBACK_CHARS, read_error
from elastic.contract.records.job_records import BrokenRecord, WorkerError, decode, encode

TEXT = st.text(st.characters(), max_size=20) | st.just("\ud800")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["message", "extraInfo", "py_callstack"]) | TEXT, inner, max_size=3)
    ),
    max_leaves=8,
)


def read(folder: pathlib.Path) -> WorkerError | None:
    ended = Exited(5, 1, None, 3, str(folder / "e.json"), str(folder / "log"))
    _, error, fingerprint = read_error(ended, node="a", slot=0, rank=0, step=1)
    record = BrokenRecord(generation=1, node="a", kind="exit", detail="", error=error, fingerprint=fingerprint)
    assert decode(BrokenRecord, encode(record)) == record
    return error


@given(content=JSON)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_error_file(tmp_path: pathlib.Path, content: Any) -> None:
    (tmp_path / "e.json").write_text(json.dumps(content))
    error = read(tmp_path)
    assert error is None or (len(error.message) <= MESSAGE_CHARS and len(error.traceback) <= TRACEBACK_CHARS)


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"message": ' + b'{"a":' * 50_000, b"\xff", b"9" * 5000, b""])
def test_an_error_file_that_is_none(tmp_path: pathlib.Path, raw: bytes) -> None:
    (tmp_path / "e.json").write_bytes(raw)
    (tmp_path / "log").write_bytes(b"last words \xff\n")
    error = read(tmp_path)
    assert error is not None
    assert error.message == "exit code 1: last words \ufffd"


@pytest.mark.parametrize("name", ["e.json", "log"])
def test_a_link_or_a_pipe_in_place_of_a_file_is_not_read(tmp_path: pathlib.Path, name: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"message": "root:x"}')
    (tmp_path / name).symlink_to(secret)
    error = read(tmp_path)
    assert error is None or "root" not in error.message
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    read(tmp_path)
