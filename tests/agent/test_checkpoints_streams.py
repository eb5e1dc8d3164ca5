"""Where each stream of data stands is part of the checkpoint: also for a job that goes on with another world."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.agents import Job
from support.wait import eventually

from elastic.checkpoint.stored import find
from elastic.contract.records.job_records import Phase

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]

SCRIPT = '''
import argparse, json, os, torch, elastic

parser = argparse.ArgumentParser()
parser.add_argument("--record"), parser.add_argument("--steps", type=int)
args = parser.parse_args()


class Stream:
    """Stream n gives n*1000, n*1000 + 1, ..."""

    def __init__(self, number):
        self.number, self.at = number, 0

    def __iter__(self):
        while True:
            self.at += 1
            yield self.number * 1000 + self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def setup(job):
    model = torch.nn.Linear(1, 1)
    return elastic.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-9), streams=None)


def train(job, state):
    model = job.ddp(state.model)
    with open(f"{args.record}/{os.getpid()}", "a", buffering=1) as log:
        for batch in job.streams(
            lambda n, _: Stream(n), state, count=4, batch_size=8, steps=args.steps, keep_every=10
        ):
            model(batch.data.float().view(-1, 1)).mean().backward()
            state.optimizer.step()
            job.commit(state)
            log.write(json.dumps([state.step, job.world_size, batch.data.tolist()]) + "\\n")


if __name__ == "__main__":
    elastic.run(setup, train)
'''


def newest_step(folder: Path) -> int:
    return next((step for step, _, _ in find.peek(str(folder), "job")), -1)


@pytest.mark.long
def test_each_sample_once_and_in_order_over_two_worlds(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    script, record, folder = tmp_path / "train.py", tmp_path / "record", tmp_path / "checkpoints"
    script.write_text(SCRIPT)
    record.mkdir()
    spec = {"checkpoint": {"dir": str(folder)}}
    for workers, steps in ((2, 25), (1, 40)):  # 25 is between two exchanges of the streams' places
        args = {"record": str(record), "steps": steps}
        with Job(nodes="1:1", workers=workers, script=script, args=args, spec=spec) as job:
            job.wait_phase(Phase.SUCCEEDED)
            eventually(lambda steps=steps: newest_step(folder) == steps, 30.0, "the job's last state")
        kept = find.verify(find.peek(str(folder), "job")[0][2]).extra["state"]["parts"]["streams"]
        assert kept["step"] == (steps - 1) // 10 * 10
        assert sorted(kept["states"]) == ["0", "1", "2", "3"]
    lines = sorted(json.loads(line) for path in record.iterdir() for line in path.read_text().splitlines())
    assert {(step, world_size) for step, world_size, _ in lines} == {(s, 2 if s <= 25 else 1) for s in range(1, 41)}
    for number in range(4):
        taken = [sample for _, _, samples in lines for sample in samples if sample // 1000 == number]
        assert taken == [number * 1000 + at for at in range(80)]
