"""What elasticctl says where the one that listens on the socket ends the connection, or says something else."""

from __future__ import annotations

import contextlib
import pathlib
import socket
import threading
from collections.abc import Iterator

import pytest

from elasticd.ctl.client import Client, Unreachable


@contextlib.contextmanager
def answering(path: pathlib.Path, answer: bytes) -> Iterator[None]:
    """A server that sends this to its first client, and closes."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def serve() -> None:
            line, _ = server.accept()
            with line:
                line.recv(4096)
                line.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join(60.0)


@pytest.mark.parametrize(
    ("answer", "words"),
    [(b"", "ended the connection without an answer: its log says why"), (b"220 mail\r\n\r\n", "not an elasticd")],
)
def test_silence_is_told_from_a_stranger(tmp_path: pathlib.Path, answer: bytes, words: str) -> None:
    path = tmp_path / "s"
    with answering(path, answer), pytest.raises(Unreachable, match=words):
        Client(str(path)).get("/v1/status")


HEAD = b"HTTP/1.0 200 OK\r\n\r\n"


@pytest.mark.parametrize("answer", [HEAD, HEAD + b'{"jobs": [{"job": "tr', HEAD + b'{"note": "\xc3'])
def test_an_answer_that_breaks_off_is_a_broken_connection(tmp_path: pathlib.Path, answer: bytes) -> None:
    """As when elasticd is restarted while it sends."""
    path = tmp_path / "s"
    with answering(path, answer), pytest.raises(Unreachable, match="broke in the middle of its answer"):
        Client(str(path)).get("/v1/status")


def test_a_stream_that_breaks_off_in_a_line_gives_the_lines_before_it(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "s"
    with answering(path, HEAD + b'{"line": "one"}\n{"line": "tw'):
        lines = Client(str(path)).lines("/v1/jobs/j/logs", {})
        assert next(lines) == {"line": "one"}
        with pytest.raises(Unreachable, match="broke in the middle of its answer"):
            next(lines)
