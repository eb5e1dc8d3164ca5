"""Ranks as processes on one GPU.

    results = run(function, world_size=3, timeout_s=60.0, env={…}, size=100)  # function(rank, world_size, port, size)

`function` stands in a test file and returns what JSON can hold; results come by rank, {"died": N} for one that a signal
ended, {"raised": …} for one that raised. Nothing is forked: CUDA does not survive that. A TCPStore listens on `port`.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import smoke
import wheels

HERE = pathlib.Path(__file__).resolve()
ROOT = HERE.parents[2]

ONE_CARD = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
"""With a host id of its own for each rank, which `spawn` adds: NCCL refuses two ranks of one host on one GPU."""


def environment(rank: int, given: Mapping[str, str] = ONE_CARD, *, own_host: bool = True) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "TORCH_NCCL_"))}
    paths = [str(ROOT), str(ROOT / "tests"), str(HERE.parent), env.get("PYTHONPATH", ""), wheels.find()]
    env |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **given}
    env["GLOO_SOCKET_IFNAME"] = "lo"
    if own_host:
        env["NCCL_HOSTID"] = f"elastic-rank-{rank}"
    return env


def spawn(
    function: Callable[..., Any], rank: int, world_size: int, port: int, env: Mapping[str, str], **args: Any
) -> subprocess.Popen[str]:
    """One rank; what it printed last is its result. Its stderr is a file: torch's watchdog prints some kilobytes per
    collective that failed, and would block at a full pipe with a lock in hand."""
    code = function.__code__
    argv = [sys.executable, str(HERE), code.co_filename, code.co_name, str(rank), str(world_size), str(port)]
    errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - `last_errors` closes it
    process = subprocess.Popen(
        [*argv, json.dumps(args)],
        env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
        start_new_session=True,
    )  # fmt: skip
    process.stderr = errors
    return process


def collect(process: subprocess.Popen[str], deadline_s: float) -> Any:
    """The result of a rank; one that is not done by then is killed and says so."""
    assert process.stdout is not None
    done = True
    with concurrent.futures.ThreadPoolExecutor(1) as reader:
        printed = reader.submit(process.stdout.read)
        try:
            process.wait(max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            done = False
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        lines = printed.result().strip().splitlines()
    if not done:
        return {"raised": f"not done in time; printed last: {last_errors(process)}"}
    if process.returncode < 0:
        return {"died": -process.returncode}
    return json.loads(lines[-1]) if lines else {"raised": f"code {process.returncode}: {last_errors(process)}"}


def last_errors(process: subprocess.Popen[str], chars: int = 2000) -> str:
    assert process.stderr is not None
    with process.stderr as errors:
        errors.seek(0)
        return errors.read()[-chars:]


def run(
    function: Callable[..., Any],
    *,
    world_size: int,
    timeout_s: float = 90.0,
    env: Mapping[str, str] = ONE_CARD,
    own_hosts: bool = True,
    check: bool = True,
    stops: int = 0,
    **args: Any,
) -> list[Any]:
    """With `check`, raises AssertionError for a rank that raised. The last `stops` ranks are killed in the end."""
    if smoke.ON and check and not stops:
        return _run_forked(function, world_size, timeout_s, env, args)
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    deadline_s = time.monotonic() + timeout_s
    processes = [
        spawn(function, rank, world_size, server.port, environment(rank, env, own_host=own_hosts), **args)
        for rank in range(world_size)
    ]
    try:
        results = [collect(process, deadline_s) for process in processes[: world_size - stops]]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()  # else a warning of an unclosed file fails the test
    results += [{"killed": True}] * stops
    for rank, result in enumerate(results):
        assert not (check and isinstance(result, dict) and "raised" in result), f"rank {rank}: {result['raised']}"
    return results


def _run_forked(
    function: Callable[..., Any], world_size: int, timeout_s: float, env: Mapping[str, str], args: dict[str, Any]
) -> list[Any]:
    from support import ranks

    os.environ["PYTHONPATH"] = environment(0)["PYTHONPATH"]  # for the process that forks, at its start
    code = function.__code__
    given = {"path": code.co_filename, "name": code.co_name, "env": dict(env), "args": args}
    return ranks.run_ranks(in_fork, world_size=world_size, timeout_s=timeout_s, **given)


def in_fork(
    rank: int, world_size: int, port: int, path: str, name: str, env: dict[str, str], args: dict[str, Any]
) -> Any:
    os.environ.update(env)
    smoke.install()
    return getattr(_loaded(path), name)(rank, world_size, port, **args)


def _loaded(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("cards_case", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["cards_case"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _main(path: str, name: str, rank: str, world_size: str, port: str, args: str) -> None:
    if smoke.ON:
        smoke.install()
    try:
        result = getattr(_loaded(path), name)(int(rank), int(world_size), int(port), **json.loads(args))
    except BaseException:  # noqa: BLE001 - the report of a process that ends here
        result = {"raised": traceback.format_exc()[-4000:]}
    print(f"\n{json.dumps(result)}", flush=True)
    os._exit(0)  # an NCCL group that was cut short may not let the interpreter end


if __name__ == "__main__":
    _main(*sys.argv[1:])
