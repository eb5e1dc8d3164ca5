"""What an agent writes into a worker's environment is what the worker reads, field by field."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.source import ROOT

from elastic.contract.worker.worker_config import RankVariables, WorkerConfig, variable

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
CONFIGS = st.builds(
    WorkerConfig,
    job=TEXT, slot=st.integers(-1, 99), backend=st.sampled_from(["auto", "gloo", "nccl"]), gpu=st.booleans(),
    forming=st.sampled_from(["new", "reconfigure"]), exit_timeout_s=st.floats(0.0), stop_grace_s=st.floats(0.0),
    form_timeout_s=st.floats(0.0), fingerprint_every_steps=st.integers(0, 10**9), checkpoint_dir=TEXT,
    checkpoint_remote=TEXT, checkpoint_every_steps=st.integers(0, 10**9), checkpoint_every_s=st.floats(0.0),
    checkpoint_shared=st.booleans(),
)  # fmt: skip


@given(CONFIGS)
def test_worker_reads_the_config_that_the_agent_writes(config: WorkerConfig) -> None:
    assert WorkerConfig.read(config.environment({})) == config


@given(CONFIGS, CONFIGS)
def test_nothing_that_was_inherited_reaches_the_worker(config: WorkerConfig, inherited: WorkerConfig) -> None:
    """Such as a remote end in the environment of the agent, for a job that has none."""
    env = config.environment({"PATH": "/bin", **inherited.environment({})})
    assert (WorkerConfig.read(env), env["PATH"]) == (config, "/bin")


def test_missing_variables_have_their_defaults_and_wrong_ones_are_refused() -> None:
    assert WorkerConfig.read({}) == WorkerConfig()
    with pytest.raises(msgspec.ValidationError):
        WorkerConfig.read({variable("gpu"): "perhaps"})


@pytest.mark.parametrize(
    ("backend", "gpu", "chosen"),
    [("auto", True, "nccl"), ("auto", False, "gloo"), ("gloo", True, "gloo"), ("nccl", False, "nccl")],
)
def test_back_end_is_chosen_by_the_nodes_gpus(backend: str, gpu: bool, chosen: str) -> None:
    assert WorkerConfig(backend=backend, gpu=gpu).process_group == chosen  # type: ignore[arg-type]


def test_no_other_module_spells_these_variables() -> None:
    names = [variable(field) for field in WorkerConfig.__struct_fields__ if variable(field).startswith("ELASTIC_")]
    names += [
        name
        for name in RankVariables(
            rank=0,
            world_size=1,
            local_world_size=1,
            group_rank=0,
            group_world_size=1,
            store_host="",
            store_port=0,
            generation=1,
        ).environment()
        if name.startswith("TORCHELASTIC_")
    ]
    spelled = re.compile("[\"'](" + "|".join(names) + ")[\"']")
    found = [
        f"{path.relative_to(ROOT)}: {match[1]}"
        for folder in ("agent", "worker", "contract")
        for path in (ROOT / "elastic" / folder).rglob("*.py")
        if path.name != "worker_config.py"
        for match in spelled.finditer(path.read_text())
    ]
    assert not found
