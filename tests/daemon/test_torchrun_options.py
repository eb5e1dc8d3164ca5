"""torchrun's options at `elasticctl run`: each one means something, is not needed, or is refused with the way out."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import click
import pytest
from click.testing import CliRunner
from support.daemons import Node, Nodes
from torch.distributed.run import get_args_parser

from elasticd.ctl.jobs import follow as ctl_follow
from elasticd.ctl.jobs import job_file as ctl_jobs
from elasticd.ctl.jobs import torchrun as ctl_torchrun
from elasticd.ctl.jobs.job_file import InvalidJob
from elasticd.ctl.jobs.run_command import run
from elasticd.ctl.jobs.torchrun import FLAGS, Given, Translation


def typed(*words: str, env: dict[str, str] | None = None) -> dict[str, Given]:
    """The options of `words`, as click reads them."""
    found: dict[str, Given] = {}

    @click.command()
    @ctl_torchrun.options
    @click.pass_context
    def command(ctx: click.Context, /, **values: Any) -> None:
        found.update(ctl_torchrun.given(ctx, values))

    done = CliRunner().invoke(command, words, env=env or {}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return found


def meant(*words: str, env: dict[str, str] | None = None, gpus: bool = False) -> Translation:
    return ctl_torchrun.translate(typed(*words, env=env), gpus=gpus)


def test_every_option_of_torchrun_has_its_entry_in_every_spelling() -> None:
    ours = {name for param in run.params if isinstance(param, click.Option) for name in param.opts}
    theirs = {name for action in get_args_parser()._actions for name in action.option_strings}
    assert theirs - {"-h", "--help"} <= ours
    kinds = {flag.name: (bool(flag.needless), bool(flag.refused), bool(flag.help)) for flag in FLAGS}
    assert {name for name, kind in kinds.items() if sum(kind) != 1} == {"node-rank"}, "each is of one kind"


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["--nproc-per-node", "2"], {"workers_per_node": 2}),
        (["--nproc_per_node=2", "--nnodes=2:4"], {"workers_per_node": 2, "nodes": "2:4"}),
        (["--nproc-per-node", "auto", "--nnodes", "3"], {"workers_per_node": "auto", "nodes": "3"}),
        (["--nproc-per-node", "cpu"], {"workers_per_node": "auto"}),
        (["--max-restarts", "3", "--shutdown_timeout", "30"], {"restarts.budget": 3, "stop_grace_s": 30}),
        (["--standalone"], {}),
    ],
)
def test_options_with_a_meaning_set_fields_of_the_job(words: list[str], fields: dict[str, Any]) -> None:
    assert meant(*words).fields == fields


def test_gpu_and_cpu_are_held_against_the_nodes() -> None:
    assert meant("--nproc-per-node", "gpu", gpus=True).fields == {"workers_per_node": "auto"}
    with pytest.raises(InvalidJob, match="--nproc-per-node gpu: no node of this cluster has a GPU"):
        meant("--nproc-per-node", "gpu")
    with pytest.raises(InvalidJob, match="--nproc-per-node cpu: the slots of these nodes are GPUs"):
        meant("--nproc-per-node", "cpu", gpus=True)


def test_role_id_program_and_ranks() -> None:
    found = meant("--role", "trainer", "--rdzv-id", "run 7", "--no-python", "--local-ranks-filter", "0, 2")
    assert (found.env, found.name, found.program) == ({"ROLE_NAME": "trainer"}, "run 7", True)
    assert found.local_ranks == {0, 2}
    assert not found.notes


def test_needless_options_are_noted_once_for_each_reason() -> None:
    words = "--standalone --rdzv-backend=c10d --rdzv_endpoint x:1 --master-port 29500 --node-rank 0 -t 3 --log-dir /l"
    notes = meant(*words.split()).notes
    assert notes == (
        "--standalone, --rdzv-backend, --rdzv-endpoint, --master-port and --node-rank are not needed: elasticd brings "
        "the workers together",
        "--log-dir and --tee are not needed: each worker's output is printed here and kept on its node: see elasticctl "
        "logs",
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--node-rank", "1"], "--node-rank 1: run this command once, on any node, without it"),
        (["--virtual-local-rank"], "--virtual-local-rank: each worker sees all GPUs of its job"),
        (["--numa-binding", "node"], "--numa-binding: bind the worker yourself: --no-python -- numactl"),
        (["--logs-specs", "x"], "--logs-specs: "),
        (["--nproc-per-node", "two"], "--nproc-per-node two: a number, or one of gpu, cpu, auto"),
        (["--nproc-per-node", "-1"], "--nproc-per-node -1: a number"),
        (["--max-restarts", "many"], "--max-restarts many: a whole number from 0 on"),
        (["--local-ranks-filter", "0;1"], "--local-ranks-filter 0;1: local ranks with commas"),
    ],
)
def test_impossible_options_are_refused_with_the_way_out(words: list[str], says: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        meant(*words)
    assert str(refused.value).startswith(says)


def test_environment_variables_of_torchrun_are_read_and_named() -> None:
    shell = {"PET_NPROC_PER_NODE": "2", "PET_NNODES": "1:2", "PET_STANDALONE": "1", "PET_NO_PYTHON": "0"}
    found = meant("--nnodes", "3", env=shell)
    assert found.fields == {"workers_per_node": 2, "nodes": "3"}, "what is typed comes first"
    assert found.notes == ("PET_STANDALONE is not needed: elasticd brings the workers together",)
    assert not found.program
    with pytest.raises(InvalidJob, match="PET_NODE_RANK 1: run this command once"):
        meant(env={"PET_NODE_RANK": "1"})


def test_one_field_typed_in_both_families_is_refused_and_a_variable_gives_way() -> None:
    both = typed("--nproc-per-node", "2")
    fields = {"workers_per_node": 4, "nodes": None, "checkpoint.dir": "/c"}
    with pytest.raises(InvalidJob, match="--workers 4 and --nproc-per-node 2: they mean the same, give one"):
        ctl_torchrun.unite(meant("--nproc-per-node", "2"), fields, both)
    shell = typed(env={"PET_NPROC_PER_NODE": "2"})
    raw = ctl_torchrun.unite(ctl_torchrun.translate(shell, gpus=False), fields, shell)
    assert raw == {"workers_per_node": 4, "checkpoint": {"dir": "/c"}}


def test_program_is_found_as_the_shell_finds_it(tmp_path: pathlib.Path) -> None:
    raw = ctl_jobs.from_command(["sh", "-c", "true"], False, True)
    ctl_jobs.resolve(raw, tmp_path)
    assert os.path.isabs(raw["program"])
    assert (raw["args"], raw["name"]) == (["-c", "true"], "sh")
    (tmp_path / "go.sh").write_text("#!/bin/sh\n")
    for command, says in {
        "go.sh": "there is no such program on PATH: write ./go.sh",
        "./go.sh": "is not executable: chmod",
        "./gone": "there is no such file",
        "no-such-program-here": "there is no such program on PATH$",
    }.items():
        with pytest.raises(InvalidJob, match=says):
            ctl_jobs.resolve(ctl_jobs.from_command([command], False, True), tmp_path)
    with pytest.raises(InvalidJob, match="--no-python and --module"):
        ctl_jobs.from_command(["x"], True, True)


class Lines:
    """Stands in for the client: a log of three workers."""

    def lines(self, path: str, query: dict[str, object]) -> Iterator[dict[str, Any]]:
        yield from ({"rank": slot, "slot": slot, "file": "f", "line": f"line of {slot}"} for slot in range(3))
        yield {"end": True, "phase": "succeeded", "elsewhere": {}}


def test_output_of_the_local_ranks_asked_for_alone(capsys: pytest.CaptureFixture[str]) -> None:
    ctl_follow.show(Lines(), "x", follow=True, rank=None, tail=9, as_json=False, slots={0, 2})  # type: ignore[arg-type]
    assert capsys.readouterr().out == "[0] line of 0\n[2] line of 2\n"


BECOME = """
import os, sys
from elastic.worker.boot.bootstrap import become_program
ends = os.pipe()
os.environ["ELASTIC_CHANNEL_FD"], os.environ["ELASTIC_BEAT_FD"] = map(str, ends)
for end in ends:  # as in a worker
    os.set_inheritable(end, True)
sys.exit(become_program(sys.argv[1:]))
"""


def became(*command: str, cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", BECOME, *command]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False, cwd=cwd)


def test_program_keeps_the_channel_and_gets_default_signals(tmp_path: pathlib.Path) -> None:
    ask = 'echo "$1" $$; readlink /proc/$$/fd/$ELASTIC_CHANNEL_FD; grep SigIgn /proc/$$/status'
    done = became("sh", "-c", ask, "sh", "a b", cwd=tmp_path)
    words = done.stdout.split()
    assert words[:2] == ["a", "b"]
    assert words[3].startswith("pipe:")
    assert int(words[5], 16) & (1 << 12) == 0, "SIGPIPE is not ignored"


def test_program_that_cannot_be_run_says_why_and_exits_as_in_a_shell(tmp_path: pathlib.Path) -> None:
    gone = became("./gone", cwd=tmp_path)
    assert (gone.returncode, gone.stderr) == (127, "elastic: ./gone: No such file or directory\n")
    (tmp_path / "headless").write_text("echo\n")
    (tmp_path / "headless").chmod(0o755)
    odd = became("./headless", cwd=tmp_path)
    assert odd.returncode == 126
    assert "such as #!/bin/sh" in odd.stderr


TRAIN = """
import os, sys
import torch.distributed as dist
import torch
dist.init_process_group("gloo")
total = torch.ones(1) * dist.get_rank()
dist.all_reduce(total)
print("rank", os.environ["RANK"], "total", int(total), "args", sys.argv[1:], os.environ["ROLE_NAME"], flush=True)
"""

MANAGED = """
import elastic, torch
DATA = torch.utils.data.TensorDataset(torch.ones(8, 1), torch.ones(8, 1))
def setup(job):
    model = torch.nn.Linear(1, 1)
    return elastic.State(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
def train(job, state):
    model = job.ddp(state.model)
    for batch in job.batches(DATA, state, batch_size=2, epochs=1):
        model(batch.x).sum().backward(); state.optimizer.step(); job.commit(state)
    print("managed world", job.world_size, "step", state.step, flush=True)
elastic.run(setup, train)
"""


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Nodes() as nodes:
        yield nodes.add("desk", slots=2)


@pytest.mark.etcd
@pytest.mark.long
@pytest.mark.timeout(300)
def test_torchruns_command_lines_run(node: Node, tmp_path: pathlib.Path) -> None:
    """An unchanged script, a shell script that calls Python, and one that becomes a managed worker by exec."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "managed.py").write_text(MANAGED)
    (tmp_path / "go.sh").write_text(f'#!/bin/sh\necho "shell $RANK of $WORLD_SIZE"\n{sys.executable} train.py "$@"\n')
    (tmp_path / "go.sh").chmod(0o755)
    torchrun = ["--standalone", "--nproc_per_node=2", "--role", "trainer"]
    done = node.ctl("run", *torchrun, "train.py", "--lr", "0.1", cwd=tmp_path, timeout_s=90)
    assert done.returncode == 0, done.stderr
    assert "[1] rank 1 total 1 args ['--lr', '0.1'] trainer\n" in done.stdout
    assert "--standalone is not needed: elasticd brings the workers together\n" in done.stderr

    done = node.ctl(
        "run", *torchrun, "--local-ranks-filter", "1", "--no-python", "./go.sh", "x y", cwd=tmp_path, timeout_s=90
    )
    assert done.returncode == 0, done.stderr
    assert "[1] shell 1 of 2\n" in done.stdout
    assert "[1] rank 1 total 1 args ['x y'] trainer\n" in done.stdout
    assert "[0]" not in done.stdout

    command = f"echo to be managed; exec {sys.executable} managed.py"
    done = node.ctl(
        "run",
        "--nproc-per-node=2",
        "--rdzv-id",
        "Our Run",
        "--no-python",
        "bash",
        "-c",
        command,
        cwd=tmp_path,
        timeout_s=90,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "[1] managed world 2 step 4\n" in done.stdout
    assert node.job("our-run")["managed"]
    assert json.loads(node.ctl("status", "our-run", "--json").stdout)["spec"]["program"].endswith("/bash")
