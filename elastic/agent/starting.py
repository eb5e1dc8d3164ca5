"""An agent's start-up: it has yet to read its job's spec, and etcd may be slow, busy or unreachable."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import structlog

from elastic.contract.agent_files import AgentConfig, AgentStatus
from elastic.contract.keys import JobKeys
from elastic.etcd.client import KV, Etcd, EtcdError

from .status import StatusFile

log = structlog.get_logger()

ETCD_S = 300.0
"""How long an agent tries to read its job from etcd before it exits and its daemon starts another."""
AGAIN_S = 1.0
"""Pause between attempts."""


def read_spec(etcd: Etcd, keys: JobKeys, config: AgentConfig) -> KV | None:
    """The job's spec record, None if there is none. Raises EtcdError after `ETCD_S` seconds of trying.

    While etcd does not answer, the status file says so: the daemon then sees that this agent lives and what it waits
    for, and does not count that against the node.
    """
    deadline_s = time.monotonic() + ETCD_S
    file, said = StatusFile(Path(config.agent_dir)), ""
    while True:
        try:
            return etcd.get(keys.spec)
        except EtcdError as error:
            if time.monotonic() >= deadline_s:
                raise
            if str(error) != said:
                said = str(error)
                log.warning("agent.waits_for_etcd", error=said)
            # The daemon sends SIGHUP for new orders to an agent with a status. A handler, as children inherit SIG_IGN.
            signal.signal(signal.SIGHUP, lambda *_: None)
            file.write(_status(config, f"etcd does not answer: {said}"))
        threading.Event().wait(AGAIN_S)


def _status(config: AgentConfig, reason: str) -> AgentStatus:
    return AgentStatus(
        pid=os.getpid(),
        incarnation="",
        job=config.job,
        node=config.node,
        phase="joining",
        reason=reason,
        leader=False,
        generation=0,
        etcd_ok=False,
        written_wall_s=time.time(),
    )
