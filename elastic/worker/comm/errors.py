"""Errors that end a generation in a worker, and how to distinguish them from errors of the script."""

from __future__ import annotations

import dis
import os
import re
from types import TracebackType

import torch
import torch.distributed as dist

from elastic.contract.records.reasons import Reason
from elastic.worker.link.misuse import causes

COMPLAINT_CHARS = 2000
"""At most so much of an error's message is sent to the agent."""


class GroupAborted(BaseException):
    """The group was aborted: this generation is over; the process and its state remain. No Exception, as
    `session.GenerationEnded`."""


class FormError(Exception):
    """The group could not be formed in time. `why` names what was missing."""

    def __init__(self, why: Reason) -> None:
        super().__init__(str(why))
        self.why = why


_SAYS_IT_FAILED = re.compile(
    r"gloo/|Gloo |NCCL|nccl|Connection closed by peer|Connection reset by peer|Broken pipe|Socket closed"
    r"|Connection refused|[Tt]imed out waiting|process group has been aborted|communicator was aborted"
    r"|Default process group has not been initialized|failed to pass monitoredBarrier"
)
_NAMES_ITSELF = re.compile(r"gloo/|Gloo |NCCL|ProcessGroup|process group has been aborted|communicator was aborted")

_TORCH = os.path.dirname(torch.__file__)
_COLLECTIVE_PLACES = (
    os.path.join(_TORCH, "distributed", ""),
    os.path.join(_TORCH, "nn", "parallel", "distributed.py"),
    os.path.join(_TORCH, "autograd", ""),  # a backward waits for the gradients' all-reduce
    os.path.join(_TORCH, "_ops.py"),
    os.path.join(os.path.dirname(__file__), ""),
)
"""Not all of torch: its data loader re-raises the script's own errors."""

_RAISE = dis.opmap["RAISE_VARARGS"]


def is_communication_error(error: BaseException) -> bool:
    """Whether `error` (or its cause or context) was raised by a collective, and not by the user's own code."""
    return any(
        isinstance(each, GroupAborted | dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError)
        or (isinstance(each, RuntimeError | ValueError) and _from_a_collective(each))
        for each in causes(error)
    )


def _from_a_collective(error: BaseException) -> bool:
    """By its message and by where it was raised: the script may use connections of its own, which break as well."""
    text, where = str(error), _innermost(error.__traceback__)
    if where is None or not _SAYS_IT_FAILED.search(text):
        return False
    code = where.tb_frame.f_code
    if code.co_filename.startswith(_COLLECTIVE_PLACES):
        return True
    # ``work.wait()`` leaves no frame of torch. The line is not a `raise` either.
    return code.co_code[where.tb_lasti] != _RAISE and _NAMES_ITSELF.search(text) is not None


def _innermost(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace
