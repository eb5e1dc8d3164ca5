"""Calls of the public names, as users' scripts, tests and plug-ins write them: right ones, which a type checker lets
pass, and wrong ones, each with mypy's error for it. `make lint` reads it; a wrong call that is no error any more is one,
as an ignore that nothing needs. tests/deploy/test_typed.py reads it with elastic installed, as a user's own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import elastic
from elastic import testing
from elasticd import plugins

model: Any = ...
optimizer: Any = ...
dataset: Any = ...
state: elastic.State
job: elastic.Job


# ── right: training scripts ─────────────────────────────────────────────────────────────────────────────────


def setup(job: elastic.Job) -> elastic.State:
    return elastic.State(model=model, optimizer=optimizer, best=0.0, convert={Path: (str, Path)})


def train(job: elastic.Job, state: elastic.State) -> None:
    net = job.ddp(state.model, compress="bf16")
    for epoch in job.epochs(state, 3, seed=1):
        assert_type(epoch, int)
        for batch in job.batches(dataset, state, batch_size=64, shuffle=False, num_workers=2):
            assert_type(batch, elastic.Batch)
            assert_type(batch.indices, tuple[int, ...])
            assert_type(batch.weight, float)
            for part in batch.parts():
                net(part.x).backward()
            job.log(accuracy=0.5)
            job.commit(state, loss=0.5)
        state.best = job.evaluate(state, dataset, measure, batch_size=256)["loss"]
    for _ in job.steps(range(10), state, steps=10, seed=1, allow_changed=True):
        job.commit(state)
    for x, y in job.streams(stream, state, count=4, batch_size=8, steps=10, keep_every=5, collate=list):
        net(x, y)
    with job.quiet("download", limit_s=60):
        assert_type(job.gather(job.rank), list[Any])
    assert_type(job.lr_scale(optimizer, mode="sqrt", base_world_size=8), float)
    assert_type((job.name, job.rank, job.local_rank, job.world_size, job.generation), tuple[str, int, int, int, int])
    assert_type((state.step, state.established), tuple[int, bool])


def measure(batch: elastic.Batch) -> dict[str, float]:
    return {"loss": float(batch.size)}


def stream(number: int, count: int) -> range:
    return range(number, 100, count)


assert_type(elastic.run(setup, train, checkpoint_dir="/ck", checkpoint_every_steps=100), elastic.State)


# ── wrong: training scripts ─────────────────────────────────────────────────────────────────────────────────

elastic.Sate(model=model)  # type: ignore[attr-defined]
elastic.State(model)  # type: ignore[call-arg]
elastic.State(convert=[str])  # type: ignore[arg-type]
elastic.run(setup)  # type: ignore[call-arg]
elastic.run(train, setup)  # type: ignore[arg-type]
elastic.run(setup, train, "/ck")  # type: ignore[call-arg]
elastic.run(setup, train, checkpoints="/ck")  # type: ignore[call-arg]
elastic.run(setup, train, checkpoint_every_steps="100")  # type: ignore[arg-type]
elastic.run(lambda: elastic.State(), train)  # type: ignore[arg-type, misc]
job.comit(state)  # type: ignore[attr-defined]
job.commit()  # type: ignore[call-arg]
job.commit(3)  # type: ignore[arg-type]
job.commit(state, "0.5")  # type: ignore[arg-type]
job.batches(dataset, 64)  # type: ignore[arg-type]
job.batches(dataset, state, 64)  # type: ignore[call-arg]
job.batches(dataset, state, batch_size="64")  # type: ignore[arg-type]
job.batches(dataset, state, batch_size=64, epochs=2.5)  # type: ignore[arg-type]
job.batches(dataset, state, batch_size=64, num_worker=2)  # type: ignore[call-arg]
job.batches(dataset, state, batch_size=64, num_workers="2")  # type: ignore[arg-type]
job.batches(dataset, state, batch_size=64, rank=0)  # type: ignore[call-arg]
job.batches(dataset, state, batch_size=64, mesh="data")  # type: ignore[arg-type]
job.steps(range(10), state, shuffle=True)  # type: ignore[call-arg]
job.steps(range(10), state, commits="2")  # type: ignore[arg-type]
job.streams(stream, state, count=4, batch_size=8, steps=10, epochs=2)  # type: ignore[call-arg]
job.evaluate(state, dataset, measure, batch_size=8, shuffle=True)  # type: ignore[call-arg]
job.steps(10, state)  # type: ignore[arg-type]
job.epochs(3)  # type: ignore[call-arg, arg-type]
job.epochs(state, "3")  # type: ignore[arg-type]
job.streams(stream, state, batch_size=8, steps=10)  # type: ignore[call-arg]
job.streams(range(10), state, count=4, batch_size=8, steps=10)  # type: ignore[arg-type]
job.evaluate(state, dataset, measure)  # type: ignore[call-arg]
job.evaluate(state, dataset, len, batch_size=8)  # type: ignore[arg-type]
job.ddp(model, compress="fp8")  # type: ignore[arg-type]
job.lr_scale(optimizer, mode="cubic", base_world_size=8)  # type: ignore[arg-type]
job.quiet()  # type: ignore[call-arg]
job.quiet("download", limit_s="1 h")  # type: ignore[arg-type]
job.gather()  # type: ignore[call-arg]
state.step = 3  # type: ignore[misc]


def part_of(batch: elastic.Batch) -> None:
    batch.z  # type: ignore[attr-defined]
    batch.step = 3  # type: ignore[misc]


# ── right: faults ───────────────────────────────────────────────────────────────────────────────────────────

kill = testing.Kill(rank=1, step=13, place="backward")
plan = testing.Plan(faults=(kill, testing.Hang(rank=0, inside="c"), testing.WipeEtcd(step=9)))
plan.write("plan.json")
assert_type(testing.Plan.read(Path("plan.json")), testing.Plan)
record = testing.Record(plan.record, plan.faults)
assert_type(testing.recoveries(record), list[testing.Recovery])
with testing.Cluster(nodes=2, slots=2, timeouts={"beat_s": 0.2}) as cluster:
    run = cluster.run("train.py", "--lr", 0.1, nodes="1:2", faults=[kill, testing.StopEtcd(step=60, for_s=0.5)])
    assert_type(run.wait(timeout_s=60), str)
    assert_type(testing.judge(run), list[testing.Difference])
    assert_type(run.struck()[0].fault, testing.AnyFault)


# ── wrong: faults ───────────────────────────────────────────────────────────────────────────────────────────

testing.Kil(rank=1)  # type: ignore[attr-defined]
testing.Kill(step=13)  # type: ignore[call-arg]
testing.Kill(1, 13)  # type: ignore[call-arg]
testing.Kill(rank=1, place="backwards")  # type: ignore[arg-type]
testing.Kill(rank="1")  # type: ignore[arg-type]
testing.Kill(rank=1, for_s=2.0)  # type: ignore[call-arg]
testing.Hang(rank=1, inside="rust")  # type: ignore[arg-type]
testing.StopEtcd(step=60)  # type: ignore[call-arg]
testing.LoseNode(step=60, for_s=1.0)  # type: ignore[call-arg]
testing.Plan(faults=[kill])  # type: ignore[arg-type]
testing.Plan(faults=("kill",))  # type: ignore[arg-type]
kill.rank = 2  # type: ignore[misc]
testing.Cluster(2, 2, {})  # type: ignore[call-arg]
cluster.run()  # type: ignore[call-arg]
cluster.run("train.py", faults=kill)  # type: ignore[arg-type]
testing.judge("train.record")  # type: ignore[arg-type]
testing.judge(record, within=60)  # type: ignore[call-arg]


# ── right: plug-ins ─────────────────────────────────────────────────────────────────────────────────────────


class Mount(plugins.HealthCheck):
    every_s = 2.0
    leave = True

    def look(self) -> str:
        return ""


def check(node: plugins.NodeFacts, log: plugins.Log) -> plugins.HealthCheck:
    log.info("mount.watched", node=node.node, gpus=len(node.gpus))
    return Mount()


class Ends:
    def look(self, now_wall_s: float) -> plugins.Notice | None:
        if now_wall_s < 0:
            raise plugins.NoticeUnknown("the clock")
        return plugins.Notice("its allocation ends", deadline_s=60.0)


def source(url: str) -> Ends:
    return Ends()


checks: list[plugins.HealthCheckFactory] = [check]
notices: list[plugins.NoticeFactory] = [source]


# ── wrong: plug-ins ─────────────────────────────────────────────────────────────────────────────────────────


class Blind(plugins.HealthCheck):
    pass


class Sees(plugins.HealthCheck):
    def look(self) -> bool:  # type: ignore[override]
        return True


def without_log(node: plugins.NodeFacts) -> plugins.HealthCheck:
    return Mount()


def of_any(url: str) -> Mount:
    return Mount()


Blind()  # type: ignore[abstract]
checks = [without_log]  # type: ignore[list-item]
notices = [of_any]  # type: ignore[list-item]
plugins.Notice("its allocation ends")  # type: ignore[call-arg]
plugins.Notice("its allocation ends", deadline_s="60")  # type: ignore[arg-type]
plugins.Notice("its allocation ends", 60.0).reason = ""  # type: ignore[misc]
