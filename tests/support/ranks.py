"""Run a function of a test file as N ranks: one process imports torch once, then forks a real process per rank.

    results = run_ranks(my_function, world=4, size=100)     # my_function(rank, world, port, size=100) -> JSON

The results come back by rank; a rank that died of a signal gives {"died": signal}; one that raises fails the test.
A TCPStore listens on `port`. Every process is ended by the time this returns.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any


def run_ranks(
    function: Callable[..., Any], *, world: int, timeout_s: float = 40.0, env: dict[str, str] | None = None, **args: Any
) -> list[Any]:
    """Raises AssertionError, with what the ranks said, when they are not done in time."""
    command = [sys.executable, __file__, function.__code__.co_filename, function.__name__, str(world), json.dumps(args)]
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
    quiet["PYTHONPATH"] = os.pathsep.join(
        [os.path.dirname(os.path.dirname(__file__)), os.environ.get("PYTHONPATH", "")]
    )
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | quiet | (env or {}),
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{function.__name__}: ranks not done in {timeout_s} s\n{out}\n{err}") from None
    assert process.returncode == 0, f"{function.__name__}: {err}"
    results = json.loads(out.splitlines()[-1])
    if err.strip():
        print(err)  # shown by pytest when the test fails
    for rank, result in enumerate(results):
        assert not (isinstance(result, dict) and "raised" in result), f"rank {rank}: {result['raised']}"
    return list(results)


def _child(function: Callable[..., Any], rank: int, world: int, port: int, args: dict[str, Any], pipe: int) -> None:
    try:
        result = function(rank, world, port, **args)
    except BaseException:
        result = {"raised": traceback.format_exc()}
    os.write(pipe, json.dumps(result).encode())
    os._exit(0)


def _main() -> None:
    import socket

    import torch.distributed as dist

    import elastic.worker.sync  # noqa: F401 - the imports that ranks then share

    path, name, world, args = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
    spec = importlib.util.spec_from_file_location("ranks_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ranks_module"] = module
    spec.loader.exec_module(module)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listener.getsockname()[1]
    children = []
    for rank in range(world):
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            listener.close()
            os.close(reading)
            _child(getattr(module, name), rank, world, port, args, writing)
        os.close(writing)
        children.append((pid, reading))
    server = dist.TCPStore(
        "127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )
    results = []
    for pid, reading in children:
        with open(reading, "rb") as pipe:
            raw = pipe.read()
        _, status = os.waitpid(pid, 0)
        results.append(json.loads(raw) if raw else {"died": os.WTERMSIG(status)})
    print(json.dumps(results), flush=True)
    del server


if __name__ == "__main__":
    _main()
