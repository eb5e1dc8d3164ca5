"""Samples of gradients of a real job: what is wrong with it is named, and training is not changed by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import Cluster, Job
from support.wait import eventually

from elasticd.base.command_answers import Gradients
from elasticd.ctl.client import Client
from elasticd.ctl.jobs.debug import sampled

pytestmark = [pytest.mark.chaos, pytest.mark.etcd]

SCRIPT = str(Path(__file__).parents[1] / "support" / "train_sampled.py")


def sample(cluster: Cluster, job: Job) -> Gradients:
    """What `elasticctl debug --gradients` has of a job that has just begun."""
    eventually(lambda: (job.row()["step"] or 0) >= 8, 60.0, "it steps")
    data = sampled(Client(str(cluster.nodes[0].socket)), job.name)
    assert data.ranks == [0, 1]
    return data


def submit(cluster: Cluster, bug: str, **more: Any) -> Job:
    env = {"BUG": bug, **more.pop("env", {})}
    return cluster.submit(f"job-{bug}", script=SCRIPT, nodes="2", steps=more.pop("steps", 100_000), env=env, **more)


NAMED = {
    "none": [],
    "same": ["ranks 0, 1 have the same gradients before they are averaged: they train on the same samples, or on none"],
    "unused": [
        "no gradient reaches spare.weight, spare.bias on all ranks: unused in the loss, or frozen without "
        "requires_grad = False"
    ],
    "drift": ["the replicas' weights differ, and no majority is equal: ranks 0, 1"],
}


@pytest.mark.long
@pytest.mark.parametrize("bugs", [("none", "drift"), ("same", "unused")])
def test_what_is_wrong_with_the_gradients_is_named_on_request_and_as_events(bugs: tuple[str, ...]) -> None:
    with Cluster(nodes=2, slots=1) as cluster:
        said = {}
        for bug in bugs:
            job = submit(cluster, bug)
            data = sample(cluster, job)
            said[bug] = data.findings
            layers = {row.layer: row for row in data.layers}
            assert set(layers) - {"spare"} == {"0", "2", "3"}
            for name in ("0", "2", "3"):
                assert set(layers[name].own) == set(layers[name].mean) == {"0", "1"}
                assert layers[name].weight["0"] > 0
            events = eventually(
                lambda j=job, b=bug: found
                if (found := [e for e in cluster.api("GET", f"/v1/events?job={j.name}")["events"]
                              if e["kind"] == "job.gradients"]) or not said[b] else None,
                30.0, "the events of it",
            ) if said[bug] else []  # fmt: skip
            assert [e["text"].partition(": ")[2] for e in events] == said[bug]
            job.stop()
        assert said == {bug: NAMED[bug] for bug in bugs}


def test_samples_at_an_interval_change_no_bit_of_the_training_and_are_in_files(tmp_path: Path) -> None:
    losses = {}
    with Cluster(nodes=2, slots=1) as cluster:
        for name, debug in (("off", {}), ("on", {"gradients_every_steps": 3, "layers": True})):
            job = submit(cluster, name, steps=30, debug=debug, tensorboard=str(tmp_path))
            job.wait_over()
            lines = (tmp_path / job.name / "metrics.jsonl").read_text().splitlines()
            losses[name] = [json.loads(line)["values"]["loss"] for line in lines]
            samples = cluster.api("GET", f"/v1/jobs/{job.name}/gradients")
            assert bool(samples["ranks"]) == bool(debug)
        assert samples["step"] == 30
        assert losses["on"] == losses["off"]
        assert len(losses["on"]) == 30
        written = (tmp_path / "job-on" / "gradients-node0" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in written] == list(range(3, 31, 3))
        assert any("/rank " in name for name in json.loads(written[0])["values"])


@pytest.mark.parametrize(
    ("layers", "saved_every"), [(True, 5), (False, 5), pytest.param(False, 1000, marks=pytest.mark.long)]
)
def test_incident_of_a_nan_names_layer_rank_and_sample(layers: bool, saved_every: int) -> None:
    """With `debug.layers` at once; without it when the steps are done again after a rollback, to a checkpoint or, where
    none was saved yet, to the beginning."""
    with Cluster(nodes=2, slots=1) as cluster:
        checkpoint = {"dir": str(cluster.folder / "ckpt"), "every_steps": saved_every}
        mode: dict[str, Any] = (
            {"debug": {"layers": True}, "env": {}}
            if layers
            else {"on_bad_numbers": "rollback", "checkpoint": checkpoint, "env": {"AGAIN": "1"}}
        )
        job = submit(cluster, "nan", steps=40, **mode)
        eventually(lambda: job.phase() == "failed", 60.0, "the job fails")
        second = json.loads((job.folder / "ids").read_text())[1]
        said = f"first in layer 2 (Spoiled), for sample {second}"

        def named() -> list[dict[str, Any]]:
            """The incidents once they name it: a consequence, on the other rank, may have been reported earlier."""
            found = cluster.api("GET", f"/v1/incidents?job={job.name}")["incidents"]
            bad = [i for i in found if i["kind"] == "bad loss"]
            return bad if said in (bad[0]["detail"] if bad and layers else str(bad)) else []

        incidents = eventually(named, 20.0, said)
        if layers:
            eventually(lambda: said in job.row()["reason"], 20.0, "the reason names it, too")
        # The other rank may have begun the next step with what that loss has made of the weights.
        assert incidents[0]["causes"][0]["ranks"] == [1]
        assert {cause["kind"] for each in incidents for cause in each["causes"]} == {"bad loss"}, "an agent has ended"
        assert incidents[0]["verdict"]["rule"] == "bad_loss"
