"""A process that has torch imported and forks workers in milliseconds. One thread, no CUDA, no gRPC.

    python -m elastic.worker.boot.zygote CONTROL_FD AGENT_PID PRELOAD

PRELOAD is JSON: a `contract.messages.Preload`.

Workers are forked twice, so that they become children of the agent (a child subreaper): it can wait for them, and they
outlive this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence

from elastic.contract.worker import messages
from elastic.contract.worker.worker_config import JOB
from elastic.util.processes import die_with

from . import fork_safety, kept_imports, random_state
from .script_imports import preloads
from .title import title

WARM_MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch._dynamo",  # the first optimizer step would import it: two seconds
    "torch.utils.data",
    "torch.distributed.elastic.multiprocessing.errors",
    "elastic.worker.run",
    "elastic.worker.boot.bootstrap",
)

THREADLESS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""What keeps libraries from starting a thread at import: pyarrow's jemalloc does, which `datasets` brings into every
process that imports transformers' Trainer. Set here alone; a worker gets its own environment."""


def main(argv: Sequence[str]) -> int:
    control_fd, agent_pid, wanted = int(argv[0]), int(argv[1]), messages.to_preload(argv[2].encode())
    if not die_with(agent_pid):
        return 0
    title(f"elastic zygote of {os.environ.get(JOB, '?')}")
    control = socket.socket(fileno=control_fd)
    began_s = time.monotonic()
    for name, value in THREADLESS.items():
        os.environ.setdefault(name, value)
    imports = preloads(wanted.argv, wanted.workdir, wanted.skip)
    preload = [*wanted.modules, *(name for name in imports if name not in wanted.modules)]
    problems, starters = _import(WARM_MODULES, {})
    kept_imports.install()
    with random_state.watched():
        more_problems, more_starters = _import(preload, imports)
    problems += more_problems
    starters += more_starters
    _load_cuda_libraries(os.environ)
    with random_state.torch_unchanged():
        _warm()
    if unfit := fork_safety.unfit():
        unfit = "; ".join([unfit, *starters])
    gc.collect()
    gc.freeze()  # collections in the children leave the shared pages alone
    _send(
        control,
        messages.ZygoteReady(
            seconds=time.monotonic() - began_s,
            preloaded=tuple(m for m in preload if m in sys.modules),
            problems=tuple(problems),
            unfit=unfit,
        ),
    )
    while True:
        raw, descriptors, _, _ = socket.recv_fds(control, messages.MAX_MESSAGE_BYTES, 8)
        if not raw:
            return 0
        order = messages.to_zygote(raw)
        if unfit := unfit or fork_safety.unfit_by_threads():
            answer: messages.Message = messages.ForkRefused(ticket=order.ticket, why=unfit)
        else:
            answer = messages.Forked(ticket=order.ticket, pid=_fork(control, order, descriptors, agent_pid))
        for descriptor in descriptors:
            os.close(descriptor)
        _send(control, answer)


def _send(control: socket.socket, message: messages.Message) -> None:
    control.send(messages.encode(message))


def _import(modules: Sequence[str], names: Mapping[str, Sequence[str]]) -> tuple[list[str], list[str]]:
    """Import `modules`, and `names` out of them. Returns a line for each failed import, and one for each that started
    threads or CUDA, which no fork survives."""
    problems, starters = [], []
    threads, cuda = fork_safety.threads(), False
    for name in modules:
        try:
            # As the statement does it: a package may load a part of its own when it is asked for a name.
            importlib.__import__(name, fromlist=names.get(name, ()))
        except Exception as error:  # noqa: BLE001 - the user's module: any mistake in it is reported, the worker meets it again
            problems.append(f"{name}: {type(error).__name__}: {error}")
        if (now := fork_safety.threads()) > threads:
            starters.append(f"the import of {name} started {now - threads} of them")
            threads = now
        if not cuda and "torch" in sys.modules and fork_safety.cuda_started():
            starters.append(f"the import of {name} started CUDA")
            cuda = True
    return problems, starters


def _warm() -> None:
    """Run code paths that are slow the first time, as far as a fork survives it.

    A backward and an optimizer step only if torch has no accelerator: otherwise the former starts autograd's threads
    for the devices, and the latter queries the current stream, which initialises CUDA.
    """
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        loss = torch.nn.functional.cross_entropy(model(torch.ones(2, 4)), torch.zeros(2, dtype=torch.int64))
        if not fork_safety.cpu_build():
            return
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _load_cuda_libraries(environment: Mapping[str, str]) -> None:
    """Load the driver's library, which a worker's first CUDA call would load. That starts nothing: `cuInit` does.

    CUDA's other libraries come with `import torch`, which is linked against them.
    """
    if environment.get("CUDA_VISIBLE_DEVICES"):
        with contextlib.suppress(OSError):  # a worker that needs it reports what is missing
            ctypes.CDLL("libcuda.so.1")


def _fork(control: socket.socket, order: messages.Fork, descriptors: list[int], agent_pid: int) -> int:
    """Fork twice; return the pid of the worker."""
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        worker = os.fork()
        if worker == 0:
            os.close(reader)
            os.close(writer)
            control.close()
            from . import bootstrap

            bootstrap.become(order, descriptors, agent_pid)  # never returns
        os.write(writer, worker.to_bytes(8, "little"))
        os._exit(0)
    os.close(writer)
    pid = int.from_bytes(os.read(reader, 8), "little")
    os.close(reader)
    os.waitpid(middle, 0)
    return pid


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
