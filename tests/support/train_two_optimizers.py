"""Two optimizer steps per commit, as a GAN makes them; a rank is killed between the two, when the others' state is half
changed.

    train_two_optimizers.py RECORD STEPS STEP_MS STRIKE_AT [node]

Rank 1 ends at step STRIKE_AT of generation 1 by SIGKILL; with `node` its agent with it. Each commit is a line in
RECORD/PID.jsonl.
"""

import json
import os
import signal
import sys
import time

import torch
import torch.nn.functional as F

import elastic

RECORD, STEPS, PACE_S, STRIKE_AT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) / 1000, int(sys.argv[4])
WHOLE_NODE = sys.argv[5:] == ["node"]
log = open(os.path.join(RECORD, f"{os.getpid()}.jsonl"), "a", buffering=1)  # noqa: SIM115 - for the life of the process


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, i):
        return torch.tensor([i / 4096]), torch.tensor([(i % 7) / 7])


def setup(job):
    torch.manual_seed(0)
    one, two = (torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)) for _ in range(2))
    adam = torch.optim.Adam
    return elastic.State(
        one=one, two=two, first=adam(one.parameters(), 1e-3), second=adam(two.parameters(), 1e-3), mixed=torch.arange(3)
    )


def train(job, state):
    one, two = job.ddp(state.one), job.ddp(state.two)
    for batch in job.batches(Data(), state, batch_size=32, steps=STEPS):
        F.mse_loss(one(batch.x), batch.y).backward()
        state.first.step()
        state.first.zero_grad()
        if (state.step, job.rank, job.generation) == (STRIKE_AT, 1, 1):
            if WHOLE_NODE:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        loss = F.mse_loss(two(batch.x), batch.y)
        loss.backward()
        state.second.step()
        state.second.zero_grad()
        time.sleep(PACE_S)
        job.commit(state, loss=loss)
        weights = torch.cat([p.detach().flatten() for p in [*state.one.parameters(), *state.two.parameters()]])
        line = {"step": state.step, "at_s": time.monotonic(), "generation": job.generation, "sum": weights.sum().item()}
        log.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    elastic.run(setup, train)
