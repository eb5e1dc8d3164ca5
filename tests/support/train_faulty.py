"""The training script of `chaos.fault_kinds`: rank 1 fails once, at step 12, in the way that FAULT names.

The environment: RECORD_DIR (folder shared by all nodes), FAULT (a function below, or '' for none), STEPS. A file
RECORD_DIR/struck says that the fault was injected, and by which process. What can be made for real is made for real:
the kernel, libc, Python or torch raises the error; `raised_*` raise the text that a GPU's driver or NCCL would give.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

import elastic

FOLDER = pathlib.Path(os.environ["RECORD_DIR"])
FAULT = os.environ.get("FAULT", "")
STEPS = int(os.environ.get("STEPS", "30"))
AT, RANK = 12, 1
LONG_S = 600.0


def signalled(number):
    os.kill(os.getpid(), number)
    time.sleep(0.5)


# ── errors of the script and its environment ──────────────────────────────────────────────────────────────────


def key_error():
    return {}["label"]


def assertion():
    assert not sys.argv, "the loss went up"


def syntax_error():
    compile("x = = 1", "train.py", "exec")


def no_module():
    __import__("a_module_that_is_not_installed")


def no_name():
    exec("from torch import a_name_of_a_later_version")


def no_file():
    open(FOLDER / "missing" / "train.bin").close()


def size_mismatch():
    torch.nn.Linear(2, 2).load_state_dict(torch.nn.Linear(3, 3).state_dict())


def exit_code():
    sys.exit(3)


def early_end():
    sys.exit(0)


# ── limits and storage ────────────────────────────────────────────────────────────────────────────────────────


def disk_full():
    descriptor = os.open("/dev/full", os.O_WRONLY)
    os.write(descriptor, b"x")


def io_error():
    os.pread(os.open("/proc/self/mem", os.O_RDONLY), 1, 0)


def read_only():
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/data/out")


def not_permitted():
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/data/out")


def stale_mount():
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/nfs/data/7")


def open_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    held = []
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))


def allocation():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 34, 1 << 34))
    bytearray(1 << 36)


def torch_allocation():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 34, 1 << 34))
    torch.empty(1 << 36)


def threads():
    threading.stack_size(1 << 40)
    threading.Thread(target=print).start()


def truncated_map():
    with tempfile.TemporaryFile() as file:
        file.truncate(1 << 16)
        page = mmap.mmap(file.fileno(), 1 << 16)
        file.truncate(0)
        page[1 << 15]


# ── network ───────────────────────────────────────────────────────────────────────────────────────────────────


def no_host():
    socket.getaddrinfo("no-such-host.invalid", 80)


def port_in_use():
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        first.listen()
        second.bind(first.getsockname())


def refused():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    socket.create_connection(address)


def no_route():
    socket.create_connection(("127.0.0.1", 9), source_address=("192.0.2.1", 0))


# ── what only a GPU, NCCL or etcd can give for real ───────────────────────────────────────────────────────────


def raised_gpu_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB")


def raised_gpu_lost():
    raise RuntimeError("CUDA error: unspecified; NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off the bus.")


def raised_ecc():
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def raised_device_assert():
    raise RuntimeError("CUDA error: device-side assert triggered")


def raised_illegal_access():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def raised_driver():
    raise RuntimeError("The NVIDIA driver on your system is too old: CUDA driver version is insufficient")


def raised_damaged():
    raise RuntimeError("PytorchStreamReader failed reading zip archive: failed finding central directory")


# ── deaths ────────────────────────────────────────────────────────────────────────────────────────────────────


def sigkill():
    signalled(signal.SIGKILL)


def sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signalled(signal.SIGTERM)


def sigint():
    signalled(signal.SIGINT)


def sigsegv():
    ctypes.string_at(0)


def sigabrt():
    os.abort()


def sigill():
    signalled(signal.SIGILL)


def sigfpe():
    signalled(signal.SIGFPE)


def bad_alloc():
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n")
    os.abort()


# ── hangs ─────────────────────────────────────────────────────────────────────────────────────────────────────


def sigstop():
    signalled(signal.SIGSTOP)


def spin():
    while True:
        pass


def long_wait():
    time.sleep(LONG_S)


def child():
    subprocess.run(["sleep", str(LONG_S)], check=False)


def deadlock():
    held = threading.Lock()
    held.acquire()
    held.acquire()


def pipe():
    os.read(os.pipe()[0], 1)


def interpreter():
    ctypes.PyDLL(None).sleep(int(LONG_S))  # unlike CDLL it does not release the lock


def collective():
    dist.all_reduce(torch.ones(3))  # which the other rank does not enter


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, i):
        if FAULT == "no_batch" and Script.rank == RANK and Script.step == AT and struck():
            time.sleep(LONG_S)
        return torch.full((4,), i / 10_000), torch.ones(1)


class Script:
    rank = step = -1


def struck():
    """True once in the job's life."""
    try:
        with open(FOLDER / "struck", "x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True


def setup(job):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    return elastic.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))


def train(job, state):
    model = job.ddp(state.model)
    Script.rank, Script.step = job.rank, state.step
    for batch in job.batches(Data(), state, batch_size=8, steps=STEPS, epochs=1000):
        hit = job.rank == RANK and state.step == AT
        if hit and FAULT in globals() and FAULT not in ("no_batch", "nan", "drift", "outlives") and struck():
            globals()[FAULT]()
        loss = F.mse_loss(model(batch.x), batch.y)
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        time.sleep(0.02)
        if hit and FAULT == "drift" and struck():
            with torch.no_grad():
                state.model[0].weight[0, 0] += 1.0
        if hit and FAULT == "nan" and struck():
            loss = loss * float("nan")
        Script.step = state.step + 1
        job.commit(state, loss=loss)


if __name__ == "__main__":
    elastic.run(setup, train)
    if FAULT == "outlives" and Script.rank == RANK and struck():
        time.sleep(LONG_S)
