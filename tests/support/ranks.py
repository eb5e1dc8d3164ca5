"""Run a function of a test file as N ranks, each a real process.

    results = run_ranks(my_function, world_size=4, size=100)     # my_function(rank, world_size, port, size=100) -> JSON

The results come back by rank; a rank that died of a signal gives {"died": signal}; one that raises fails the test.
A TCPStore listens on `port`. torch is imported once per test session, in a process that does nothing but fork.
Import the fixture `ranks` as well: it ends that process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
_zygote: subprocess.Popen[str] | None = None


@pytest.fixture(scope="session", autouse=True)
def ranks() -> Iterator[None]:
    yield
    _end()


def run_ranks(function: Callable[..., Any], *, world_size: int, timeout_s: float = 60.0, **args: Any) -> list[Any]:
    """Raises AssertionError, with what the ranks said, when they are not done in time."""
    zygote = _started()
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    zygote.stdin.write(json.dumps([function.__code__.co_filename, function.__name__, world_size, args]) + "\n")
    zygote.stdin.flush()
    if not select.select([zygote.stdout], [], [], timeout_s)[0]:
        _end()
        raise AssertionError(f"{function.__name__}: ranks not done in {timeout_s} s")
    line = zygote.stdout.readline()
    assert line, f"{function.__name__}: the zygote died"
    results = json.loads(line)
    for rank, result in enumerate(results):
        assert not (isinstance(result, dict) and "raised" in result), f"rank {rank}: {result['raised']}"
    return list(results)


def _started() -> subprocess.Popen[str]:
    global _zygote
    if _zygote is None or _zygote.poll() is not None:
        path = os.pathsep.join([os.path.dirname(os.path.dirname(__file__)), os.environ.get("PYTHONPATH", "")])
        _zygote = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | _QUIET | {"PYTHONPATH": path},
            start_new_session=True,
        )
    return _zygote


def _end() -> None:
    global _zygote
    zygote, _zygote = _zygote, None
    if zygote is not None:
        if zygote.poll() is None:
            os.killpg(zygote.pid, signal.SIGKILL)
        zygote.communicate()


def _rank(function: Callable[..., Any], rank: int, world_size: int, port: int, args: dict[str, Any], pipe: int) -> None:
    os.dup2(2, 1)  # stdout is for the answer: gloo of some builds of torch 2.10 prints there
    try:
        result = function(rank, world_size, port, **args)
    except BaseException:  # noqa: BLE001 - the report of a process that ends here
        result = {"raised": traceback.format_exc()}
    os.write(pipe, json.dumps(result).encode())
    os._exit(0)


def _case(path: str, name: str, world_size: int, args: dict[str, Any]) -> None:
    """Fork the ranks first, while this process has no threads; then serve the store and collect."""
    import socket

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
    print(json.dumps(results), flush=True)
    del server
    os._exit(0)


def _main() -> None:
    import torch._dynamo  # noqa: F401 - AdamW wants it: seconds, once instead of in every rank

    import elastic.worker.comm.group
    import elastic.worker.state.handover.sync  # noqa: F401

    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            _case(*json.loads(line))
        os.waitpid(pid, 0)


if __name__ == "__main__":
    _main()
