"""torchrun's options at `elasticctl run`: those with a meaning set fields of the job, needless ones are accepted with a
note, and impossible ones refused with the way out. Pure, but for click's declarations.

Each option is also read from torchrun's environment variable, PET_NPROC_PER_NODE for --nproc-per-node; what is typed
comes first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import click

from elasticd.base.dotted import Raw

from .job_file import InvalidJob, put

TOGETHER = "elasticd brings the workers together"
OUTPUT = "each worker's output is printed here and kept on its node: see elasticctl logs"

WITHOUT_VIRTUAL = (
    "each worker sees all GPUs of its job on the node, and LOCAL_RANK is the index of its own: "
    "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), as under torchrun without this option"
)


@dataclass(frozen=True)
class Flag:
    """One option of torchrun."""

    name: str
    help: str = ""
    """Shown by --help; empty: not shown."""
    needless: str = ""
    """Why it is accepted and ignored."""
    refused: str = ""
    """Why it cannot be, and what to do instead."""
    short: str = ""
    is_flag: bool = False

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        return f"PET_{self.key.upper()}"


FLAGS = (
    Flag("nnodes", "As --nodes: N or MIN:MAX."),
    Flag("nproc-per-node", "As --workers: a number; gpu, cpu or auto: one for each slot of the node."),
    Flag("max-restarts", "As --set restarts.budget=N: failures allowed within restarts.window_s."),
    Flag("shutdown-timeout", "As --set stop_grace_s=SECONDS."),
    Flag("rdzv-id", "Name of the job. The same command on further nodes follows the job that runs."),
    Flag("role", "ROLE_NAME in the workers' environment."),
    Flag("no-python", "The first word is a program, such as a shell script, and no Python script.", is_flag=True),
    Flag("local-ranks-filter", "Print the output of these local ranks only: 0,1"),
    Flag("standalone", needless=TOGETHER, is_flag=True),
    Flag("rdzv-backend", needless=TOGETHER),
    Flag("rdzv-endpoint", needless=TOGETHER),
    Flag("rdzv-conf", needless=TOGETHER),
    Flag("master-addr", needless=TOGETHER),
    Flag("master-port", needless=TOGETHER),
    Flag("node-rank"),
    Flag("local-addr", needless="a node's address is a setting of its daemon (host, in elasticd.toml)"),
    Flag("log-dir", needless=OUTPUT),
    Flag("redirects", needless=OUTPUT, short="r"),
    Flag("tee", needless=OUTPUT, short="t"),
    Flag("duplicate-stdout-filters", needless=OUTPUT),
    Flag("duplicate-stderr-filters", needless=OUTPUT),
    Flag("monitor-interval", needless="a worker's death is an event, and nothing is polled"),
    Flag("start-method", needless="workers are forked by a process that has imported torch"),
    Flag("event-log-handler", needless="events are in the daemon's log and in elasticctl incidents"),
    Flag("signals-to-handle", needless="end a job with elasticctl stop"),
    Flag("run-path", needless="a script is always run as __main__", is_flag=True),
    Flag("virtual-local-rank", refused=WITHOUT_VIRTUAL, is_flag=True),
    Flag("logs-specs", refused=f"{OUTPUT}; leave it out"),
    Flag("numa-binding", refused="bind the worker yourself: --no-python -- numactl --cpunodebind=… python train.py"),
)

F = TypeVar("F", bound=Callable[..., Any])

BY_KEY = {flag.key: flag for flag in FLAGS}


@dataclass(frozen=True)
class Given:
    """An option's value, and what the user knows it by: '--nnodes' or 'PET_NNODES'."""

    value: str | bool
    by: str


@dataclass(frozen=True)
class Translation:
    """What torchrun's options come to."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Dotted fields of the job."""
    env: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    program: bool = False
    local_ranks: frozenset[int] | None = None
    """None: the output of all."""
    notes: tuple[str, ...] = ()


def options(command: F) -> F:
    """Decorator: declare all of torchrun's options. The command gets them as keyword arguments, by `Flag.key`."""
    for flag in reversed(FLAGS):
        names = dict.fromkeys([f"--{flag.name}", f"--{flag.key}", *([f"-{flag.short}"] if flag.short else [])])
        command = click.option(
            *names, flag.key, is_flag=flag.is_flag, default=None, envvar=flag.variable, hidden=not flag.help,
            help=f"torchrun's. {flag.help}", metavar=None if flag.is_flag else "TEXT",
        )(command)  # fmt: skip
    return command


def given(ctx: click.Context, values: Mapping[str, str | bool | None]) -> dict[str, Given]:
    """Those of `values` that are set, with the name each was given by."""
    shell = click.core.ParameterSource.ENVIRONMENT
    return {
        key: Given(value, flag.variable if ctx.get_parameter_source(key) is shell else f"--{flag.name}")
        for key, flag in BY_KEY.items()
        if (value := values.get(key)) is not None and value is not False
    }


def translate(options: Mapping[str, Given], *, gpus: bool) -> Translation:
    """`gpus`: whether any node of the cluster has a GPU. Raises InvalidJob for an option that is refused, or has a
    wrong value."""
    for key, option in options.items():
        if why := BY_KEY[key].refused:
            raise InvalidJob(f"{option.by}: {why}")
    if (rank := options.get("node_rank")) and str(rank.value) not in ("0", "auto"):
        raise InvalidJob(
            f"{rank.by} {rank.value}: run this command once, on any node, without it: the daemons of the other nodes "
            f"start their workers themselves"
        )
    fields: dict[str, Any] = {}
    if nodes := options.get("nnodes"):
        fields["nodes"] = nodes.value
    if workers := options.get("nproc_per_node"):
        fields["workers_per_node"] = _workers(workers, gpus)
    for key, target in (("max_restarts", "restarts.budget"), ("shutdown_timeout", "stop_grace_s")):
        if number := options.get(key):
            fields[target] = _number(number)
    ranks = options.get("local_ranks_filter")
    return Translation(
        fields=fields,
        env={"ROLE_NAME": str(role.value)} if (role := options.get("role")) else {},
        name=str(run.value) if (run := options.get("rdzv_id")) else "",
        program="no_python" in options,
        local_ranks=_ranks(ranks) if ranks else None,
        notes=_notes(options),
    )


def unite(translated: Translation, typed: Mapping[str, Any], by: Mapping[str, Given]) -> Raw:
    """The job's fields from both families of options. `typed`: those of elasticctl by field, None where not typed.

    Raises InvalidJob if one field is typed in both; a PET_ variable gives way.
    """
    raw: Raw = {}
    for name, key in (("nodes", "nnodes"), ("workers_per_node", "nproc_per_node")):
        if typed.get(name) is not None and key in by and by[key].by.startswith("--"):
            ours = "--workers" if name == "workers_per_node" else f"--{name}"
            raise InvalidJob(f"{ours} {typed[name]} and {by[key].by} {by[key].value}: they mean the same, give one")
    for name, value in {**translated.fields, **{k: v for k, v in typed.items() if v is not None}}.items():
        put(raw, name, value)
    if translated.env:
        raw["env"] = dict(translated.env)
    return raw


def _workers(option: Given, gpus: bool) -> int | str:
    text = str(option.value)
    if re.fullmatch("[0-9]{1,30}", text):
        return int(text)
    if text not in ("gpu", "cpu", "auto"):
        raise InvalidJob(f"{option.by} {text}: a number, or one of gpu, cpu, auto")
    if text == "gpu" and not gpus:
        raise InvalidJob(f"{option.by} gpu: no node of this cluster has a GPU that its daemon sees; cpu or a number")
    if text == "cpu" and gpus:
        raise InvalidJob(f"{option.by} cpu: the slots of these nodes are GPUs; give a number of workers")
    return "auto"


def _number(option: Given) -> int:
    if not re.fullmatch("[0-9]{1,30}", str(option.value)):
        raise InvalidJob(f"{option.by} {option.value}: a whole number from 0 on")
    return int(option.value)


def _ranks(option: Given) -> frozenset[int]:
    words = str(option.value).split(",")
    if not all(re.fullmatch(" *[0-9]{1,9} *", word) for word in words):
        raise InvalidJob(f"{option.by} {option.value}: local ranks with commas between them, as in 0,1")
    return frozenset(map(int, words))


def _notes(options: Mapping[str, Given]) -> tuple[str, ...]:
    """One sentence for each reason why options are needless."""
    reasons: dict[str, list[str]] = {}
    for key, option in options.items():
        if why := TOGETHER if key == "node_rank" else BY_KEY[key].needless:
            reasons.setdefault(why, []).append(option.by)
    return tuple(f"{_listed(names)} not needed: {why}" for why, names in reasons.items())


def _listed(names: Sequence[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} are"
