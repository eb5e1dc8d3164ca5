"""Run a function of a test file as N ranks, each a real process.

    results = run_ranks(my_function, world_size=4, size=100)     # my_function(rank, world_size, port, size=100) -> JSON

The results come back by rank; a rank that died of a signal gives {"died": signal}; one that raises fails the test.
A TCPStore listens on `port`. The ranks are forked from a process that does nothing else, itself a fork of the one that
has imported torch (support/forge.py). Import the fixture `ranks` as well: it ends that process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from . import warm
from .forge import LATE

_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
_MAIN = "import sys; sys.path[:0] = {path!r}; from support import ranks; ranks.main(3)"


class _Zygote:
    def __init__(self) -> None:
        path = [str(Path(__file__).parents[1]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        argv, env = ["-c", _MAIN.format(path=path)], os.environ | _QUIET | {LATE: ""}
        ours, theirs = socket.socketpair()
        with ours, theirs:
            forked = warm.ask(warm.forge().path, argv, env, os.getcwd(), [1, 2, theirs.fileno()])
            assert forked is not None, "the interpreter would start differently from that which forks"
            self.pid, self._ended = forked
            self.orders, self.answers = ours.makefile("w"), ours.makefile("r")

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._ended.recv(4096)
        self._ended.close()
        self.orders.close()
        self.answers.close()


_zygote: _Zygote | None = None


@pytest.fixture(scope="session", autouse=True)
def ranks() -> Iterator[None]:
    yield
    _end()


def run_ranks(function: Callable[..., Any], *, world_size: int, timeout_s: float = 60.0, **args: Any) -> list[Any]:
    """Raises AssertionError, with what the ranks said, when they are not done in time."""
    zygote = _started()
    zygote.orders.write(json.dumps([function.__code__.co_filename, function.__name__, world_size, args]) + "\n")
    zygote.orders.flush()
    if not select.select([zygote.answers], [], [], timeout_s)[0]:
        _end()
        raise AssertionError(f"{function.__name__}: ranks not done in {timeout_s} s")
    if not (line := zygote.answers.readline()):
        _end()
        raise AssertionError(f"{function.__name__}: the zygote died")
    results = json.loads(line)
    for rank, result in enumerate(results):
        assert not (isinstance(result, dict) and "raised" in result), f"rank {rank}: {result['raised']}"
    return list(results)


def _started() -> _Zygote:
    global _zygote
    if _zygote is None:
        _zygote = _Zygote()
    return _zygote


def _end() -> None:
    global _zygote
    zygote, _zygote = _zygote, None
    if zygote is not None:
        zygote.end()


def _rank(function: Callable[..., Any], rank: int, world_size: int, port: int, args: dict[str, Any], pipe: int) -> None:
    try:
        result = function(rank, world_size, port, **args)
    except BaseException:  # noqa: BLE001 - the report of a process that ends here
        result = {"raised": traceback.format_exc()}
    os.write(pipe, json.dumps(result).encode())
    os._exit(0)


def _case(answer: IO[str], path: str, name: str, world_size: int, args: dict[str, Any]) -> None:
    """Fork the ranks first, while this process has no threads; then serve the store and collect."""
    from torch.distributed import TCPStore

    spec = importlib.util.spec_from_file_location("ranks_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["ranks_module"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listener.getsockname()[1]
    children = []
    for rank in range(world_size):
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            listener.close()
            os.close(reading)
            _rank(getattr(module, name), rank, world_size, port, args, writing)
        os.close(writing)
        children.append((pid, reading))
    server = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    results = []
    for pid, reading in children:
        with open(reading, "rb") as pipe:
            raw = pipe.read()
        _, status = os.waitpid(pid, 0)
        results.append(json.loads(raw) if raw else {"died": os.WTERMSIG(status)})
    print(json.dumps(results), file=answer, flush=True)
    del server
    os._exit(0)


def main(descriptor: int) -> None:
    """Run a case for each line that is read from this socket, and write its result there."""
    import torch._dynamo  # noqa: F401 - AdamW wants it: seconds, once instead of in every rank

    import elastic.worker.comm.group
    import elastic.worker.state.handover.sync  # noqa: F401

    with open(descriptor, closefd=False) as orders, open(descriptor, "w", closefd=False) as answer:
        for line in orders:
            if (pid := os.fork()) == 0:
                _case(answer, *json.loads(line))
            os.waitpid(pid, 0)
