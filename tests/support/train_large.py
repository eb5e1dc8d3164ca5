"""A state of many bytes and steps of little work: a copy of the state takes longer than ten steps.

    train_large.py RECORD MEGABYTES STEP_MS STEPS

Each commit is a line in RECORD/PID.jsonl.
"""

import json
import os
import sys
import time

import torch

import elastic

RECORD, MEGABYTES, PACE_S, STEPS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) / 1000, int(sys.argv[4])
log = open(os.path.join(RECORD, f"{os.getpid()}.jsonl"), "a", buffering=1)  # noqa: SIM115 - for the life of the process
LARGE = 1 << 20


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 16

    def __getitem__(self, i):
        return torch.tensor([i / len(self)]), torch.tensor([(i % 7) / 7])


def setup(job):
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    # All but a few bytes stand still: what is measured is the state's way, not the optimizer's.
    ballast = torch.nn.ParameterList(
        [torch.nn.Parameter(torch.full((LARGE,), float(i)), requires_grad=False) for i in range(MEGABYTES // 4)]
    )
    return elastic.State(model=model, ballast=ballast, optimizer=torch.optim.Adam(model.parameters(), 1e-3))


def train(job, state):
    model = job.ddp(state.model)
    for batch in job.batches(Data(), state, batch_size=16, steps=STEPS, epochs=1000):
        loss = torch.nn.functional.mse_loss(model(batch.x), batch.y)
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        time.sleep(PACE_S)
        job.commit(state, loss=loss)
        line = {"step": state.step, "at_s": time.monotonic(), "generation": job.generation, "rank": job.rank}
        log.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    elastic.run(setup, train)
