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
