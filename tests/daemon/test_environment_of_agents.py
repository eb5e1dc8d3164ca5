"""What an agent finds in its environment: elasticd's, but for what could not be handed on to workers."""

from __future__ import annotations

import os
import pathlib
import pwd

import msgspec
import pytest

from elastic.agent.workers import worker_env
from elastic.contract.agent_files import AgentConfig, EtcdAccess
from elastic.contract.job.spec import Checkpoint, JobSpec
from elastic.contract.worker import messages
from elastic.contract.worker.worker_config import WorkerConfig
from elasticd.machine.processes import launch


def test_agent_environment_omits_variables_that_are_not_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of the shell that elasticd was started from, in another encoding, must not keep jobs from running."""
    monkeypatch.setitem(os.environ, "ELT_LATIN", os.fsdecode(b"caf\xe9"))
    monkeypatch.setitem(os.environ, "ELT_TEXT", "café")
    monkeypatch.setitem(os.environ, "NOTIFY_SOCKET", "/run/x")
    env = launch.environment()
    assert env["ELT_TEXT"] == "café"
    assert not {"ELT_LATIN", "NOTIFY_SOCKET"} & env.keys()
    messages.encode(messages.Fork(ticket=1, env=env, argv=("train.py",), workdir="/"))


CONFIG = AgentConfig(
    cluster="c", node="n", job="train", address="127.0.0.1", slots=1, etcd=EtcdAccess(endpoints=()),
    agent_dir="/absent", logs_dir="/l",
)  # fmt: skip


def test_worker_environment_has_login_variables_and_no_systemd_service_variables() -> None:
    """systemd starts an agent as a unit of its own, with variables of its own, and sets no HOME for a service."""
    told = dict.fromkeys(("INVOCATION_ID", "JOURNAL_STREAM", "MEMORY_PRESSURE_WATCH", "STATE_DIRECTORY"), "x")
    env = worker_env.base(CONFIG, JobSpec(name="train", script="x.py"), {"PATH": "/bin", **told})
    assert not told.keys() & env.keys()
    entry = pwd.getpwuid(os.geteuid())
    assert (env["HOME"], env["USER"], env["LOGNAME"]) == (entry.pw_dir, entry.pw_name, entry.pw_name)
    assert env["PATH"] == "/bin"
    kept = worker_env.base(CONFIG, JobSpec(name="train", script="x.py"), {"HOME": "/mine", "USER": "ada"})
    assert (kept["HOME"], kept["USER"]) == ("/mine", "ada")


def test_env_file_is_below_env_and_a_file_that_cannot_be_used_is_named(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "secrets"
    file.write_text("TOKEN=x\nLR=1\n")
    job = JobSpec(name="train", script="x.py", env={"LR": "2"}, env_file=str(file))
    env = worker_env.base(CONFIG, job, {})
    assert (env["TOKEN"], env["LR"]) == ("x", "2")
    file.write_text("TOKEN=x\nsecret")
    with pytest.raises(worker_env.InvalidEnvFile, match=r"secrets': line 2: write NAME=VALUE"):
        worker_env.base(CONFIG, job, {})
    file.unlink()
    with pytest.raises(worker_env.InvalidEnvFile, match="cannot be read on this node: No such file"):
        worker_env.base(CONFIG, job, {})


def test_accelerate_forms_a_group_on_a_node_without_gpus() -> None:
    """Without the variable each rank of an unchanged Trainer or Accelerate script would train for itself."""
    job = JobSpec(name="train", script="x.py")

    def of_worker(config: AgentConfig, zygote: dict[str, str]) -> dict[str, str]:
        return worker_env.worker(config, job, zygote, slot=0, error_file="/e", generation=None)

    env = of_worker(CONFIG, {})
    assert env["ACCELERATE_USE_CPU"] == "true"
    assert "ACCELERATE_USE_CPU" in WorkerConfig.read(env).plain_defaults.split(",")  # `elastic.run` takes it back
    assert of_worker(CONFIG, {"ACCELERATE_USE_CPU": "0"})["ACCELERATE_USE_CPU"] == "0"
    assert "ACCELERATE_USE_CPU" not in of_worker(msgspec.structs.replace(CONFIG, gpus=(0,)), {})


def test_a_setting_that_the_job_leaves_empty_is_not_inherited_by_its_workers() -> None:
    job = JobSpec(name="train", script="x.py", checkpoint=Checkpoint(dir="/ckpt"))
    inherited = {"ELASTIC_CHECKPOINT_REMOTE": "s3://of-another-job", "PATH": "/bin"}
    env = worker_env.worker(CONFIG, job, inherited, slot=0, error_file="/l/e.json", generation=None)
    assert WorkerConfig.read(env).checkpoint_remote == ""
    assert (env["ELASTIC_CHECKPOINT_DIR"], env["PATH"]) == ("/ckpt", "/bin")
