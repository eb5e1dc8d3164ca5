"""The environment and the files of a worker: torchrun's variables, elasticd's, logs that no restart deletes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
from collections.abc import Mapping
from pathlib import Path

import msgspec

from elastic.contract.agent_files import KEPT_CODE, MARK_ENV, SYSTEMD_VARIABLES, AgentConfig, mark
from elastic.contract.job.spec import Checkpoint, JobSpec
from elastic.contract.job.spec_values import parse_env_file
from elastic.contract.records.job_records import GenerationRecord
from elastic.contract.worker import messages
from elastic.contract.worker.worker_config import ERROR_FILE, JOB, RankVariables, WorkerConfig
from elastic.util import kept_code

NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
ACCELERATE_ON_CPU = "ACCELERATE_USE_CPU"
NO_RANK = -1
"""RANK of a process that waits for a place: a standby, or a worker of a node that is about to join."""


class WorkerFiles(msgspec.Struct, frozen=True):
    log_file: str
    error_file: str


QUICK_DNS = "timeout:1 attempts:1"
"""glibc's RES_OPTIONS. torch's TCPStore asks DNS for the name of each peer that connects, on both ends: with the
resolver's default time-out, one lost answer delays the forming of a process group by 5 s."""


def files(config: AgentConfig, slot: int, worker_id: int, incarnation: str) -> WorkerFiles:
    """Names that no later worker reuses: from the slot, the agent's incarnation, the worker id and the submission."""
    who = f"slot{slot}" if slot >= 0 else "standby"
    of = f".{config.submission[:8]}" if config.submission else ""
    stem = Path(config.logs_dir) / f"{who}.{incarnation[:8]}.{worker_id:04d}{of}"
    return WorkerFiles(log_file=f"{stem}.log", error_file=f"{stem}.error.json")


def base(config: AgentConfig, spec: JobSpec, inherited: Mapping[str, str]) -> dict[str, str]:
    """The zygote's environment, and so every worker's: variables that must be set before torch is imported."""
    stripped = ("GRPC_", "PROTOCOL_BUFFERS_", "ELASTICD_")
    env = {k: v for k, v in inherited.items() if not k.startswith(stripped) and k not in SYSTEMD_VARIABLES}
    env = _account() | env
    env.setdefault("SPT_NOENV", "1")  # a process title overwrites the arguments only: the environment stays readable
    env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: workers share the cores
    env.setdefault("RES_OPTIONS", QUICK_DNS)
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else each deliberately closed connection logs a page of C++ trace
    env["PYTHONUNBUFFERED"] = "1"
    env[MARK_ENV] = _mark(config.agent_dir)
    env[kept_code.ENV] = f"{config.submission}:{Path(config.agent_dir).absolute() / KEPT_CODE}"
    # Else torch.cuda.is_available(), at the import of a module, would initialise CUDA in the zygote. Not only for jobs
    # with GPUs: one without may run on a machine that has some.
    env.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if config.interface:
        env["GLOO_SOCKET_IFNAME"] = env["NCCL_SOCKET_IFNAME"] = config.interface
    if config.gpus:
        # LOCAL_RANK is an index into this job's GPUs, as NVML numbers them. dict: two slots may share one.
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, dict.fromkeys(config.gpus)))
    env[JOB] = config.job
    env.update(secrets(spec.env_file))
    env.update(spec.env)
    return env


def script_digest(env: Mapping[str, str], spec: JobSpec) -> str:
    """Of the script, kept now if no worker here has kept it yet; empty: it is a program, or cannot be read, which the
    workers report."""
    module = spec.module.replace(".", "/")
    names = [spec.script] if spec.script else [f"{module}.py", f"{module}/__main__.py"] if module else []
    for path in (os.path.abspath(os.path.join(workdir(spec), name)) for name in names):
        with contextlib.suppress(OSError):
            source = kept_code.KeptCode.named_by(env).keep(path).source
            return hashlib.blake2b(source, digest_size=8).hexdigest()
    return ""


class InvalidEnvFile(Exception):
    """The job's `env_file` cannot be used on this node."""


def secrets(path: str) -> dict[str, str]:
    """The variables in a job's `env_file`; none without one. Raises InvalidEnvFile."""
    if not path:
        return {}
    try:
        return parse_env_file(Path(path).read_text())
    except OSError as error:
        raise InvalidEnvFile(f"env_file = {path!r}: cannot be read on this node: {error.strerror}") from error
    except UnicodeDecodeError:
        raise InvalidEnvFile(f"env_file = {path!r}: is not UTF-8 text") from None
    except ValueError as error:
        raise InvalidEnvFile(f"env_file = {path!r}: {error}") from None


def _account() -> dict[str, str]:
    """Variables that a login sets, and systemd does not for a system service."""
    try:
        entry = pwd.getpwuid(os.geteuid())
    except KeyError:  # a user id without an entry, as in containers
        return {}
    return {"HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name, "SHELL": entry.pw_shell or "/bin/sh"}


def _mark(folder: str) -> str:
    try:
        found = os.stat(folder)
    except OSError:
        return ""
    return mark(found.st_dev, found.st_ino, os.path.abspath(folder))


def worker(
    config: AgentConfig,
    spec: JobSpec,
    zygote: Mapping[str, str],
    *,
    slot: int,
    error_file: str,
    generation: GenerationRecord | None,
) -> dict[str, str]:
    """torchrun's environment, and the variables that `elastic.run` reads.

    Rank and store are those of `generation`: the one that the process is started for, or the newest. So a worker that
    replaces another starts with the other's rank; while it has none RANK is -1. `elastic.run` sets them again in each
    generation.
    """
    env = dict(zygote)
    env.update(
        {
            ERROR_FILE: error_file,
            "TORCHELASTIC_MAX_RESTARTS": str(spec.restarts.budget),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "ROLE_NAME": spec.env.get("ROLE_NAME", "default"),
        }
    )
    # For a plain script. Stock torch aborts hung NCCL groups by itself only with the first, and nothing else does.
    # Without the second, ranks of Accelerate or Trainer on a node without GPUs form no group: each trains for itself.
    defaults = {NCCL_ERRORS: "1"} | ({} if config.gpus else {ACCELERATE_ON_CPU: "true"})
    defaults = {name: value for name, value in defaults.items() if name not in env}
    checkpoint = spec.checkpoint if spec.checkpoint.dir else Checkpoint()
    told = WorkerConfig(
        job=config.job,
        slot=slot,
        backend=spec.backend,
        gpu=bool(config.gpus),
        forming=spec.forming,
        exit_timeout_s=spec.exit_timeout_s,
        stop_grace_s=spec.stop_grace_s,
        form_timeout_s=config.timeouts.form_s,
        fingerprint_every_steps=spec.fingerprint_every_steps,
        on_bad_numbers=spec.on_bad_numbers,
        snapshots=spec.snapshots,
        debug_gradients=spec.debug.gradients_every_steps,
        debug_layers=spec.debug.layers,
        checkpoint_dir=checkpoint.dir,
        checkpoint_remote=checkpoint.remote,
        checkpoint_every_steps=checkpoint.every_steps,
        checkpoint_every_s=checkpoint.every_s,
        checkpoint_shared=checkpoint.shared,
        plain_defaults=",".join(defaults),
    )
    env = told.environment(env | defaults)
    if generation is not None:
        env.update(_ranks(config, generation, slot))
    return env


def _ranks(config: AgentConfig, generation: GenerationRecord, slot: int) -> dict[str, str]:
    ranks = generation.ranks(config.node)
    at = generation.at(config.node)
    return RankVariables(
        rank=ranks.get(slot, NO_RANK),
        world_size=generation.world_size,
        local_world_size=len(ranks) or config.slots,
        group_rank=NO_RANK if at is None else at,
        group_world_size=len(generation.nodes),
        store_host=generation.store_host,
        store_port=generation.store_port,
        generation=generation.number,
    ).environment()


def preload(spec: JobSpec) -> messages.Preload:
    return messages.Preload(modules=spec.preload, argv=argv(spec), workdir=workdir(spec), skip=spec.preload_skip)


def argv(spec: JobSpec) -> tuple[str, ...]:
    if spec.program:
        return messages.PROGRAM, spec.program, *spec.args
    return (spec.script, *spec.args) if spec.script else ("-m", spec.module, *spec.args)


def workdir(spec: JobSpec) -> str:
    return spec.workdir or os.getcwd()
