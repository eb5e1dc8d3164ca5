"""Sharded state, kind of loop by kind of loop: after two deaths, each rank's part is as plain torch trains it without
any. The deaths strike at a rank, a step and a place that are drawn by the loop's name."""

from __future__ import annotations

import functools
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import procs, scratch
from support.agents import Job
from support.wait import eventually

from elastic.contract.records.job_records import Phase

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]

SCRIPT = Path(__file__).parents[1] / "support" / "train_sharded_loops.py"
STEPS = 16
PLACES = ("forward", "gather", "backward", "reduce", "optimizer", "commit", "committed")

CORE = (
    "fp16+accumulate+clip+schedule+ema+uneven+frozen",
    "lora+meta+columns+adagrad",
    "in_backward+tied+offload",
)
"""Each feature that is cheap, in few jobs."""

LONG = (
    "hsdp+bf16+accumulate_hsdp+dropout+ema_values",
    "tp+sgd+recompute+counted",
    *("accumulate+clip+schedule+ema", "fp16+clip+uneven+frozen"),
    *("accumulate", "accumulate_scaled", "accumulate_each", "hsdp+accumulate_scaled+clip", "clip", "schedule"),
    *(
        "ema",
        "ema_values",
        "hsdp+ema",
        "hsdp+ema_values",
        "tp+ema",
        "fp16",
        "hsdp+fp16+clip",
        "bf16",
        "bf16+accumulate",
    ),
    *("frozen", "tied", "hsdp+tied", "lora", "hsdp+lora", "uneven", "hsdp+uneven", "tp+uneven", "columns"),
    *("recompute", "unsharded", "offload", "meta", "hsdp+meta", "dropout", "counted", "hsdp+counted"),
    *("changes_first+ema_values", "hsdp+changes_first+ema_values", "hsdp+changes_first+ema_object", "tp+changes_first"),
    *("sgd", "adagrad", "foreach", "fused", "amsgrad", "muon", "hsdp+muon", "in_backward", "hsdp+in_backward"),
    *("tp", "tp+fused", "tp+schedule+accumulate_each", "tp_alone", "tp_alone+sgd", "tp+own_draws"),
    *(
        "own+disk",
        "statistics+disk",
        "hsdp+ema_values+disk",
        "tp+uneven+own+disk",
        "in_backward+disk",
        "lora+tied+disk",
    ),
    *("fp16+columns+disk", "muon+disk", "meta+offload+ema+disk"),
    *("compile", "hsdp+compile", "tp+compile", "inductor", "hsdp+inductor", "tp+inductor"),
    *("context", "context+dropout+clip+ema", "context+disk"),
)


def job_of(of: str, *, die: str = "", steps: int = STEPS, step_ms: float = 10.0, **spec: Any) -> Job:
    job = Job(script=SCRIPT, spec=spec)
    given = ("--record", job.record, "--steps", steps, "--step-ms", step_ms, "--of", of, "--die", die)
    spec = {name: getattr(job.spec, name) for name in job.spec.__struct_fields__}
    job.spec = type(job.spec)(**{**spec, "args": tuple(map(str, given))})
    return job


@functools.cache
def undisturbed(of: str, steps: int = STEPS, world: int = 4) -> dict[str, str]:
    """Rank -> digest of what it has in the end, in plain torch."""
    folder = Path(scratch.folder("plain"))
    argv = [str(SCRIPT), "--plain", "--record", str(folder), "--of", of, "--steps", str(steps), "--step-ms", "0"]
    argv += ["--world", str(world)]
    try:
        with procs.Procs() as started, open(folder / "out", "ab") as output:
            code = started.python(argv, output=output).wait(100 + steps)
        assert code == 0, (folder / "out").read_text()[-3000:]
        return finals(folder)
    finally:
        shutil.rmtree(folder)


def finals(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("final-*.txt")}


def drawn(of: str, *, node: bool, total: int) -> list[str]:
    draw = random.Random(of)
    features = set(of.split("+"))
    places = [place for place in PLACES if not (place == "optimizer" and "fp16" in features)]  # which may skip the step
    if "tp_alone" in features:
        places = [place for place in places if place not in ("gather", "reduce")]
    steps = sorted(draw.sample(range(4, total - 1), 3 if node else 2))
    where = [draw.choice(places) for _ in steps]
    if node:
        where[1] = "node"
    return [f"{draw.randrange(4)}:{step}:{place}" for step, place in zip(steps, where, strict=True)]


def assert_alike(of: str, folder: Path, *, node: bool = False, steps: int = STEPS) -> None:
    """Two ranks die, with `node` a node between them, and every rank ends with the bits of plain torch."""
    deaths = drawn(of, node=node, total=steps)
    disk = of.endswith("+disk")
    spec = {"checkpoint": {"dir": str(folder), "every_steps": 2}, "snapshots": "off" if disk else "auto"}
    with job_of(of, die=",".join(deaths), steps=steps, step_ms=40 if disk else 10, **spec) as job:
        if node:
            marker = job.record / f"died.{deaths[1]}"
            eventually(lambda: marker.exists() or job.state().phase.over, 180.0, f"the wait before {deaths[1]}")
            job.kill_node("n1")
            job.start_agent("n1")
        job.wait_phase(Phase.SUCCEEDED)
        assert {path.name for path in job.record.glob("died.*")} == {f"died.{death}" for death in deaths}
        entered = {line["generation"]: line["entered"] for line in job.lines() if "entered" in line}
        restored = [step > 0 for generation, step in entered.items() if generation > 1]
        assert any(restored) if disk else all(restored), "nothing was restored"
        assert finals(job.record) == undisturbed(of, steps)


@pytest.mark.parametrize("of", CORE)
def test_a_loop_is_bit_identical_after_deaths(of: str, tmp_path: Path) -> None:
    assert_alike(of, tmp_path, node=of.startswith("lora"), steps=10)


@pytest.mark.long
@pytest.mark.timeout(300)  # inductor compiles once in each process
@pytest.mark.parametrize("of", LONG)
def test_a_loop_is_bit_identical_after_deaths_of_ranks_and_a_node(of: str, tmp_path: Path) -> None:
    assert_alike(of, tmp_path, node=True)


@pytest.mark.long
def test_values_are_shared_out_again_where_no_part_fits_the_new_world() -> None:
    """The survivors have parts, of other boxes than are needed now, and nothing was saved."""
    of = "tp_alone+own_draws"
    with job_of(of, steps=200, nodes="1:2") as job:
        eventually(functools.partial(made_steps, job, 1, 3), 60.0, "steps")
        job.kill_node("n1")
        job.wait_phase(Phase.SUCCEEDED)
        last = {line["rank"]: line["world_size"] for line in job.lines() if line.get("step") == 200}
        assert last == {0: 2, 1: 2}
        assert finals(job.record) == undisturbed(of, 200, world=2)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_hundred_deaths_leave_nothing_behind_and_no_bit_other(tmp_path: Path) -> None:
    """Of all ranks but 0, whose process lives through all of them."""
    of, steps, draw = "fsdp+clip+schedule+measured", 700, random.Random(0)
    checkpoint = {"dir": str(tmp_path), "every_steps": 5}
    with job_of(of, steps=steps, checkpoint=checkpoint, restarts={"budget": 200}) as job:
        for death in range(1, 101):
            eventually(functools.partial(made_steps, job, death, 3), 60.0, f"steps of generation {death}")
            job.kill_rank(draw.randrange(1, 4))
        job.wait_phase(Phase.SUCCEEDED, 300.0)
        lines = [line for line in job.commits() if line["rank"] == 0]
        assert len({line["pid"] for line in lines}) == 1
        early = next(line["held"] for line in lines if line["generation"] == 10)
        late = lines[-1]["held"]
        assert late["groups"] == early["groups"]
        assert late["fds"] <= early["fds"] + 8, (early, late)
        assert late["threads"] <= early["threads"] + 4, (early, late)
        assert late["mb"] <= early["mb"] + 60, (early, late)
        assert finals(job.record) == undisturbed(of, steps)


def made_steps(job: Job, generation: int, count: int) -> bool:
    """Whether it, or a later one, has made as many: a death may end two generations, if it strikes in the forming."""
    made = [line["step"] for line in job.commits() if line["generation"] >= generation]
    return len(set(made)) >= count or job.state().phase.over
