"""The agent's parts, put together: one job on this node, as configured in DIR/config.json."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import TextIO, cast

import msgspec
import structlog

from elastic.agent.etcd.watch_scope import WatchScope
from elastic.agent.etcd.writer import EtcdWriter
from elastic.agent.peers.listening import listen
from elastic.agent.peers.peers import Peers
from elastic.agent.reports.status import left_behind, write_for_daemon
from elastic.agent.workers.first_zygote import FirstZygote, log_file
from elastic.agent.workers.pool import Pool
from elastic.contract.agent_files import AgentConfig, AgentStatus
from elastic.contract.keys import ClusterKeys, JobKeys
from elastic.contract.records.job_records import ProtocolVersionMismatch, SpecRecord, decode
from elastic.etcd.client import KV, Etcd, EtcdError, JobSigner, scrub_environment
from elastic.recovery.machine.model import Agent, IncidentState, Policy, ProgressState
from elastic.util.capped_log import LogFile
from elastic.util.files import locked_within

from .inbox import Inbox
from .loop import AgentLoop
from .workers import gpu_gate, worker_env

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
    file, problem = Path(config.agent_dir) / "status.json", ""
    while True:
        try:
            return etcd.get(keys.spec)
        except EtcdError as error:
            if time.monotonic() >= deadline_s:
                raise
            if str(error) != problem:
                problem = str(error)
                log.warning("agent.waits_for_etcd", error=problem)
            # The daemon sends SIGHUP for new orders to an agent with a status. A handler, as children inherit SIG_IGN.
            signal.signal(signal.SIGHUP, lambda *_: None)
            status = AgentStatus(
                pid=os.getpid(), job=config.job, node=config.node, phase="joining",
                reason=f"etcd does not answer: {problem}", written_wall_s=time.time(),
            )  # fmt: skip
            write_for_daemon(file, status)
        threading.Event().wait(AGAIN_S)


log = structlog.get_logger()

ALREADY_RUNS_EXIT = 4
NO_SPEC_EXIT = 5
LOCK_S = 1.0
"""A starting daemon may hold the lock for a moment, to check whether an agent lives."""


def run(directory: str, first: FirstZygote | None = None) -> int:
    """Returns the exit code. `first`: a zygote that was forked from this process."""
    folder = Path(directory)
    config = msgspec.json.decode((folder / "config.json").read_bytes(), type=AgentConfig)
    Path(config.logs_dir).mkdir(parents=True, exist_ok=True, mode=0o750)
    _log_to(folder / "agent.log")
    lock_fd = os.open(folder / "lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    lock = open(lock_fd, "w")  # noqa: SIM115 - held as long as the process lives
    if not locked_within(lock, LOCK_S):
        log.error("agent.already_runs", folder=str(folder))
        return ALREADY_RUNS_EXIT
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    threading.excepthook = _thread_failed
    signer = JobSigner(config.job_key) if config.job_key else None
    etcd = Etcd(config.etcd, call_s=config.timeouts.etcd_call_s, signer=signer)
    keys = ClusterKeys(config.cluster).job(config.job)
    try:
        kv = read_spec(etcd, keys, config)
        if kv is None:
            log.error("agent.no_spec", key=keys.spec)
            return NO_SPEC_EXIT
        return _run(config, etcd, keys, decode(SpecRecord, kv.value), first)
    except (EtcdError, ProtocolVersionMismatch, msgspec.MsgspecError, worker_env.InvalidEnvFile) as error:
        log.error("agent.cannot_start", error=str(error))
        return 1
    finally:
        etcd.close()


def _run(config: AgentConfig, etcd: Etcd, keys: JobKeys, spec: SpecRecord, first: FirstZygote | None) -> int:
    os.environ.setdefault("RES_OPTIONS", worker_env.QUICK_DNS)
    job = msgspec.structs.replace(spec.spec, python=spec.spec.python or sys.executable)
    incarnation = first.incarnation if first else uuid.uuid4().hex
    env = worker_env.base(config, job, scrub_environment(os.environ))
    pool = Pool(selectors.DefaultSelector(), job.python, worker_env.preload(job), job.stop_grace_s, job.exit_timeout_s)
    try:
        pool.start(env, log_file(config, incarnation), first)
        return _run_with(pool, env, incarnation, config, etcd, keys, msgspec.structs.replace(spec, spec=job))
    finally:
        pool.close()


def _run_with(
    pool: Pool,
    env: dict[str, str],
    incarnation: str,
    config: AgentConfig,
    etcd: Etcd,
    keys: JobKeys,
    spec: SpecRecord,
) -> int:
    # These import torch, which takes seconds; a zygote that is no fork of this process does the same in parallel.
    from elastic.agent.peers.store import Stores

    from . import torch_agent

    job = spec.spec
    inbox = Inbox()
    peers = Peers(incarnation, inbox.post, listen(config.address, config.ports))
    policy = Policy(
        node=config.node,
        incarnation=incarnation,
        host=config.address,
        port=peers.port,
        slots=config.slots,
        managed=False,
        spec=job,
        timeouts=config.timeouts,
        submitted_wall_s=spec.submitted_wall_s,
        code=worker_env.script_digest(env, job),
    )
    stores = Stores(config.address, config.address, config.ports)
    etcd_writer = EtcdWriter(etcd, keys, policy, stores, inbox.post, spec)
    watch_scope = WatchScope(etcd, keys, policy.crowd)
    reached, left_wall_s = left_behind(Path(config.agent_dir), spec.submitted_wall_s)
    agent = Agent(policy, progress=ProgressState(reached=reached), incidents=IncidentState(left_wall_s=left_wall_s))
    loop = AgentLoop(
        config, agent, inbox, etcd_writer, peers, watch_scope, keys, spec, pool, stores.overfull, torch_agent.count
    )
    log.info("agent.starts", job=config.job, node=config.node, incarnation=incarnation, pid=os.getpid())
    pool.gate = gpu_gate.gate(config.gpus, config.timeouts.respawn_s)
    etcd_writer.start()
    peers.start()
    watch_scope.start(inbox.post, time.monotonic())
    try:
        return torch_agent.run(torch_agent.NodeAgent(loop, env, worker_env.argv(job)))
    finally:
        watch_scope.close()
        etcd_writer.leave()
        peers.close()
        stores.close()


def _thread_failed(args: threading.ExceptHookArgs) -> None:
    """An exception in any thread ends the agent: an agent that works in part is worse than none."""
    log.critical("thread.failed", thread=args.thread.name if args.thread else "?", exc_info=args.exc_value)
    os._exit(70)


def _log_to(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
    output = LogFile(lambda raw: os.write(descriptor, raw))
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.DEBUG if os.environ.get("ELASTIC_DEBUG") else logging.INFO
        ),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, output)),
        cache_logger_on_first_use=True,
    )
