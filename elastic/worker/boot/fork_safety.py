"""Whether forks of this process can train: no CUDA started, no thread running, and a trial fork can run a backward.

CUDA does not survive a fork. Neither do autograd's device threads, which the first backward starts in any build of
torch that sees a GPU, even for tensors on the CPU: the first backward in every child would then raise.
"""

from __future__ import annotations

import os
import select
import signal

from elastic.worker.comm import sockets

TRIAL_S = 30.0
"""Limit of the wait for the trial fork. On a machine with GPUs it starts the driver, which may take seconds."""
MAX_REPORT_BYTES = 500
EXIT_UNFIT = 3
"""Exit code of a trial fork that says what is wrong."""


def cpu_build() -> bool:
    """Whether this build of torch has no accelerator, so that a backward and an optimizer step start nothing.

    Only names set at build time are read: a query of torch.cuda or torch.accelerator would start the driver.
    """
    import torch

    from elastic.worker.torch_internals.torch_private import registered_device

    version = torch.version
    accelerators = (version.cuda, getattr(version, "hip", None), getattr(version, "xpu", None))
    return not any(accelerators) and not registered_device()


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def cuda_started() -> bool:
    """Whether CUDA runs in this process, started through torch or not: it opens the driver's memory device."""
    import torch

    return torch.cuda.is_initialized() or "/dev/nvidia-uvm" in sockets.links().values()  # type: ignore[no-untyped-call]


def unfit() -> str:
    """Why no worker may be forked from this process; empty: it is fit. Runs a trial fork."""
    if cuda_started():
        return "CUDA was started in it: a fork cannot use its GPU"
    if reason := _trial():
        return reason
    # After the trial: some libraries (OpenBLAS) end their threads when a process forks, and survive that.
    return unfit_by_threads()


def unfit_by_threads() -> str:
    """As `unfit`, as far as it can be determined without a trial."""
    count = threads()
    return f"{count} threads run in it: a fork has only one of them, and locks that none opens" if count > 1 else ""


def _trial() -> str:
    """Fork, and run a backward in the child. Returns the error; empty if there was none."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _in_child(writer)
    os.close(writer)
    readable, _, _ = select.select([reader], [], [], TRIAL_S)
    if not readable:
        os.kill(pid, signal.SIGKILL)
    reason = os.read(reader, MAX_REPORT_BYTES).decode(errors="replace") if readable else ""
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    if not readable:
        return f"a trial fork of it did not run a backward within {TRIAL_S:g} s"
    code = os.waitstatus_to_exitcode(status)
    if code == EXIT_UNFIT:
        return f"a trial fork of it failed: {reason}"
    return f"a trial fork of it died with status {code}" if code else ""


def _in_child(writer: int) -> None:
    """Never returns."""
    code, reason = EXIT_UNFIT, "no answer"
    try:
        import torch

        from elastic.worker.torch_internals.torch_private import cuda_was_forked

        if cuda_was_forked():
            reason = "CUDA was started before the fork"
        else:
            weight = torch.ones(1, requires_grad=True)
            torch.autograd.backward((weight * 2.0).sum())
            code, reason = 0, ""
    except (RuntimeError, AssertionError, ImportError, AttributeError, OSError) as error:
        # A worker's backward would raise it too.
        reason = f"{type(error).__name__}: {error}"
    finally:
        os.write(writer, reason.encode()[:MAX_REPORT_BYTES])
        os._exit(code)
