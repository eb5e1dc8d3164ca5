"""The environment and the files of a worker: torchrun's variables, our own, logs that no restart deletes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..core.agentfile import AgentConfig
from ..core.records import GenerationRecord
from ..core.spec import JobSpec

PATH_ENV = "PYTHONPATH"
PLAIN_ENV = "ELASTIC_PLAIN"
"""Set: the agent has taken the script for one that knows nothing of elastic. Should it import elastic after all,
through another module, it runs as under torchrun: nobody would tell it to form."""


@dataclass(frozen=True)
class WorkerFiles:
    log_file: str
    error_file: str


QUICK_DNS = "timeout:1 attempts:1"
"""glibc's RES_OPTIONS. torch's TCPStore asks DNS for the name of each peer that connects, on both ends: with the
resolver's own 5 s, one lost answer costs the forming of a group 5 s."""


def files(config: AgentConfig, slot: int, life: int, incarnation: str) -> WorkerFiles:
    """Names that no later worker takes: the slot, the agent's incarnation, the worker's number in it."""
    who = f"slot{slot}" if slot >= 0 else "standby"
    stem = Path(config.logs_dir) / f"{who}.{incarnation[:8]}.{life:04d}"
    return WorkerFiles(log_file=f"{stem}.log", error_file=f"{stem}.error.json")


def base(config: AgentConfig, spec: JobSpec, inherited: Mapping[str, str]) -> dict[str, str]:
    """For the zygote, and so for every worker: what must be set before torch is imported."""
    env = {k: v for k, v in inherited.items() if not k.startswith(("GRPC_", "PROTOCOL_BUFFERS_", "ELASTICD_"))}
    env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: workers share the cores
    env.setdefault("RES_OPTIONS", QUICK_DNS)
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # each connection cut on purpose is a page of C++ back trace else
    env["PYTHONUNBUFFERED"] = "1"
    if config.interface:
        env["GLOO_SOCKET_IFNAME"] = env["NCCL_SOCKET_IFNAME"] = config.interface
    if config.gpus:
        # LOCAL_RANK counts this job's own GPUs, as NVML numbers them. dict: two slots may share one.
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, dict.fromkeys(config.gpus)))
        env.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch.cuda.is_available() would start CUDA in the zygote
    env.update(spec.env)
    return env


def managed(
    config: AgentConfig, spec: JobSpec, zygote: Mapping[str, str], *, slot: int, error_file: str
) -> dict[str, str]:
    """For a worker that is given its rank later, when its generation forms."""
    env = dict(zygote)
    env.update(
        TORCHELASTIC_RUN_ID=config.job,
        TORCHELASTIC_MAX_RESTARTS=str(spec.restarts.budget),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_ERROR_FILE=error_file,
        GROUP_RANK="0",
        LOCAL_RANK=str(slot),
        LOCAL_WORLD_SIZE=str(config.slots),
        ROLE_NAME="default",
        ELASTIC_BACKEND=spec.backend,
        ELASTIC_FORM_TIMEOUT_S=str(config.timeouts.form_s),
        ELASTIC_FINGERPRINT_EVERY=str(spec.fingerprint_every_steps),
        ELASTIC_ON_BAD_NUMBERS=spec.on_bad_numbers,
    )
    if config.gpus:
        env["ELASTIC_GPU"] = "1"
    if spec.checkpoint.dir:
        env["ELASTIC_CHECKPOINT_DIR"] = spec.checkpoint.dir
        env["ELASTIC_CHECKPOINT_REMOTE"] = spec.checkpoint.remote
        env["ELASTIC_CHECKPOINT_EVERY_STEPS"] = str(spec.checkpoint.every_steps)
        env["ELASTIC_CHECKPOINT_EVERY_S"] = str(spec.checkpoint.every_s)
        env["ELASTIC_CHECKPOINT_SHARED"] = "1" if spec.checkpoint.shared else "0"
    return env


def plain(env: dict[str, str], config: AgentConfig, generation: GenerationRecord, slot: int) -> dict[str, str]:
    """torchrun's complete environment, for a script that knows nothing of elastic."""
    places = generation.places
    group_rank = next(i for i, place in enumerate(places) if place.node == config.node)
    ranks = generation.ranks(config.node)
    env.update(
        RANK=str(ranks[slot]),
        WORLD_SIZE=str(generation.world),
        LOCAL_RANK=str(slot),
        LOCAL_WORLD_SIZE=str(len(ranks)),
        GROUP_RANK=str(group_rank),
        GROUP_WORLD_SIZE=str(len(places)),
        ROLE_RANK=str(ranks[slot]),
        ROLE_WORLD_SIZE=str(generation.world),
        MASTER_ADDR=generation.store_host,
        MASTER_PORT=str(generation.store_port),
        TORCHELASTIC_RESTART_COUNT=str(generation.number - 1),
        **{PLAIN_ENV: "1"},
        # Stock torch aborts hung NCCL groups by itself only with this; nobody else would here.
        TORCH_NCCL_ASYNC_ERROR_HANDLING=env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    )
    return env


def uses_elastic(spec: JobSpec, workdir: str) -> bool:
    """Whether the script can be re-formed in place: it imports `elastic`. Only the text is looked at."""
    import ast

    path = Path(workdir, spec.script) if spec.script else _module_path(spec.module, workdir)
    if path is None or not path.is_file():
        return True  # the worker will say what is wrong with it
    try:
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    except SyntaxError:
        return True
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    return any(name == "elastic" or name.startswith("elastic.") for name in names)


def _module_path(module: str, workdir: str) -> Path | None:
    parts = module.split(".")
    for candidate in (Path(workdir, *parts).with_suffix(".py"), Path(workdir, *parts, "__main__.py")):
        if candidate.is_file():
            return candidate
    return None


def argv(spec: JobSpec) -> tuple[str, ...]:
    return (spec.script, *spec.args) if spec.script else ("-m", spec.module, *spec.args)


def workdir(spec: JobSpec) -> str:
    return spec.workdir or os.getcwd()
