"""Agent, zygote and NCCL together, as the product runs them: two nodes of one slot each, on one card.

Everything is real, etcd too (`make gpu-bundle` brings it along). In a smoke run the job is an ordinary one on the CPU,
with gloo: agent, zygote, recovery and the comparison of the states are as on a GPU, CUDA and NCCL are not there.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cards
import pytest
import smoke
import wheels

wheels.find()
NEEDED = ("grpc", "etcd3", "google.protobuf", "msgspec", "structlog", "xxhash", "psutil", "tenacity", "numpy")
if missing := [name for name in NEEDED if not wheels.there(name)]:
    pytest.skip(f"an agent needs {', '.join(missing)}: make gpu-bundle", allow_module_level=True)

from support.agents import Job  # noqa: E402
from support.wait import eventually  # noqa: E402

from elastic.contract.records.job_records import Phase  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[1] / "support" / "train_on_card.py"
STEPS = 100 if not smoke.ON else 60
EXACT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents find elasticd and what it needs where these tests do."""
    monkeypatch.setenv("PYTHONPATH", cards.environment(0)["PYTHONPATH"])


@contextlib.contextmanager
def on_card(nodes: int, backend: str = "nccl", read_loss: bool = False, **spec: Any) -> Iterator[Job]:
    """A job of one worker on each node, all on the first GPU; a gloo job there sees that GPU too."""
    given = {
        "backend": "gloo" if smoke.ON else backend,
        "env": {**({} if nodes == 1 else cards.ONE_CARD), **EXACT},
        "hang": {"floor_s": 10.0},  # the first steps on a card may take seconds
        **spec,
    }
    with Job(
        nodes=f"{nodes}:{nodes}", workers=1, script=SCRIPT, spec=given,
        gpus=(0,) if backend == "nccl" and not smoke.ON else (),
        warm=False,  # zygotes as the product starts them
        args={"steps": STEPS, "step-ms": 20, "record": "record", "read-loss": int(read_loss)},
    ) as job:  # fmt: skip
        yield job


def processes(job: Job) -> dict[int, int]:
    """rank -> process."""
    return {row.rank: row.pid for status in job.statuses().values() for row in status.ranks if row.pid}


def forked(job: Job) -> None:
    """The zygotes were fit: each worker was forked from one."""
    for node in job.agents:
        events = [json.loads(line)["event"] for line in (job.folder / node / "agent.log").read_text().splitlines()]
        assert "zygote.unfit" not in events, job.story()
    assert not [status.why_fresh for status in job.statuses().values() if status.why_fresh]


def end(job: Job) -> str:
    """Waits for the end; returns the digest of the state, the same on all ranks."""
    job.wait_phase(Phase.SUCCEEDED, 120.0)
    forked(job)
    devices = {line["device"] for line in job.commits()}
    assert devices == {"cpu" if smoke.ON or job.spec.backend == "gloo" else "cuda:0"}
    (digest,) = job.weights()
    return digest


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_job_of_one_rank_trains_beside_a_gpu(backend: str, measured: dict[str, object]) -> None:
    """What a zygote that had started CUDA would spoil first, for a job on the CPU as well."""
    begun_s = time.monotonic()
    with on_card(1, backend) as job:
        job.wait_step(1, 120.0)
        measured["first_step_s"] = round(time.monotonic() - begun_s, 2)
        end(job)


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """Digest of the state after all steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", cards.environment(0)["PYTHONPATH"])
        with on_card(2) as job:
            digest = end(job)
            assert not job.incidents()
    return digest


@pytest.mark.parametrize(
    ("how", "read_loss"),
    [(signal.SIGKILL, False), (signal.SIGSTOP, False), (signal.SIGSTOP, True)],
    ids=["killed", "stopped", "stopped, the other reads its loss"],
)
def test_two_nodes_on_one_card_lose_a_worker_and_not_a_step(
    how: signal.Signals, read_loss: bool, undisturbed: str, measured: dict[str, object]
) -> None:
    """The survivor keeps its process, and weights and BatchNorm's statistics end up as if nothing had happened."""
    with on_card(2, read_loss=read_loss, **({"hang": {"floor_s": 2.0}} if how is signal.SIGSTOP else {})) as job:
        job.wait_step(20, 120.0)
        before = eventually(lambda: len(found := processes(job)) == 2 and found, 10.0, "two ranks")
        job.kill_rank(1, how)
        eventually(lambda: job.incidents(), 60.0, "recovery")
        job.wait_step(job.steps() + 5, 60.0)
        digest = end(job)
        (incident,) = job.incidents()
        measured |= {"timeline_s": incident.timeline_s}
        assert incident.kind == ("hang" if how is signal.SIGSTOP else "exit")
        assert (incident.ranks, incident.steps_lost, incident.restored_from) == ((1,), 0, "live")
        again = {line["rank"]: line["pid"] for line in job.commits() if line["generation"] == 2}
        assert again[0] == before[0], "the survivor was replaced as well"
        assert again[1] != before[1]
        assert digest == undisturbed
