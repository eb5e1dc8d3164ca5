"""Rank 0's buffers on their way into a process that is stopped: an abort frees the rank, and it keeps its process."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import termios
import threading
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from support.forming import both, make
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture
from support.wait import eventually
from torch import nn

from elastic.worker.comm import sockets
from elastic.worker.comm.ddp import GradientWeight, wrap
from elastic.worker.comm.errors import is_communication_error
from elastic.worker.link.link import Link

pytestmark = pytest.mark.slow

LARGER_THAN_SOCKETS = 16 << 20
"""Elements of 4 bytes; Linux keeps at most some 10 MB on the way between two local sockets."""
UNDER_WAY = 1 << 12
"""Bytes that a socket holds only while rank 0 sends its buffers: more than a header of gloo's."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("large", torch.ones(LARGER_THAN_SOCKETS))


def most_bytes(question: int) -> int:
    """In one socket of gloo's: written and not read by the peer (TIOCOUTQ), or received and not read (FIONREAD)."""
    answers = [fcntl.ioctl(sock.fd, question, b"\0" * 4) for sock in sockets.gloo_sockets()]
    return max(struct.unpack("i", answer)[0] for answer in answers)


def stop_within_the_message() -> None:
    """Gloo sends no byte of it before the receiver asks for it, so the receiver stops itself."""
    for sock in sockets.gloo_sockets():
        with socket.socket(fileno=os.dup(sock.fd)) as theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * UNDER_WAY)  # the message takes its time
    while most_bytes(termios.FIONREAD) < UNDER_WAY:
        pass
    os.kill(os.getpid(), signal.SIGSTOP)


def sends_to_a_stopped_rank(rank: int, world_size: int, port: int, forming: str) -> Any:
    group = make(forming, rank, world_size, port, 1, timeout_s=30.0, form_timeout_s=20.0)
    group.form()
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    peer = psutil.Process(int(pids[1]))

    def abort_within_the_message() -> None:
        eventually(lambda: peer.status() == psutil.STATUS_STOPPED, 20.0, "rank 1 has stopped")
        eventually(lambda: most_bytes(termios.TIOCOUTQ) > UNDER_WAY, 20.0, "the message waits for rank 1")
        group.abort("rank 1 is lost")

    strikes = threading.Thread(target=stop_within_the_message if rank == 1 else abort_within_the_message)
    share = GradientWeight()
    link = Link()
    link.contributed = strikes.start  # type: ignore[method-assign]
    wrap(Model(), weight=share, link=link)
    with pytest.raises(RuntimeError) as caught:
        share.share_buffers()
    strikes.join()
    group.close()
    peer.kill()
    group = make(forming, 0, 1, port, 2, timeout_s=30.0, form_timeout_s=20.0)
    group.form()
    dist.all_reduce(torch.ones(1))
    return [str(caught.value).splitlines()[0], is_communication_error(caught.value)]


@both
def test_rank_0_is_freed_and_forms_the_next_group(forming: str) -> None:
    said, died = run_ranks(sends_to_a_stopped_rank, world_size=2, forming=forming)
    assert "has been aborted: rank 1 is lost" in said[0]
    assert said[1]
    assert died == {"died": signal.SIGKILL}
