"""A model with something wrong in it, for the tests of samples of gradients: BUG is same, unused, drift, nan or ''.

`same`: all ranks train on the same samples; `unused`: a layer takes no part in the loss; `drift`: from step 5 on rank 1
has other weights; `nan`: at step 12 the layer "2" of rank 1 gives NaN for one sample, once, or each time with AGAIN.
"""

from __future__ import annotations

import os
import pathlib
import time

import torch
import torch.nn.functional as F

import elastic

BUG, STEPS = os.environ.get("BUG", ""), int(os.environ.get("STEPS", "60"))
FOLDER = pathlib.Path(os.environ["RECORD_DIR"])
AT = 12


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, i):
        at = 0 if BUG == "same" else i
        return torch.full((4,), 1.0 + at / 1000), torch.ones(1)


class Spoiled(torch.nn.Linear):
    """Gives NaN for the second sample of its batch when told to."""

    now = False

    def forward(self, x):
        y = super().forward(x)
        if Spoiled.now:
            y = y.clone()
            y[1] = float("nan")
        return y


def setup(job):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), Spoiled(4, 4), torch.nn.Linear(4, 1))
    if BUG == "unused":
        model.spare = torch.nn.Linear(2, 2)
        model.forward = lambda x: model[3](model[2](model[1](model[0](x))))
    return elastic.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.001))


def spoils(job, state):
    if BUG != "nan" or job.rank != 1 or state.step != AT:
        return False
    first = not (FOLDER / "spoiled").exists()
    (FOLDER / "spoiled").write_text("")
    return first or bool(os.environ.get("AGAIN"))


def train(job, state):
    model = job.ddp(state.model, find_unused_parameters=BUG == "unused")
    for batch in job.batches(Data(), state, batch_size=8, steps=STEPS, epochs=1000, shuffle=False):
        Spoiled.now = spoils(job, state)
        loss = F.mse_loss(model(batch.x), batch.y)
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        time.sleep(float(os.environ.get("PACE_S", "0.02")))
        if BUG == "drift" and job.rank == 1 and state.step == 4:
            with torch.no_grad():
                state.model[0].weight[0, 0] += 1e-3
        if Spoiled.now:
            (FOLDER / "ids").write_text(str(list(batch.indices)))
        job.log(loss=loss)
        job.commit(state, loss=loss)


if __name__ == "__main__":
    elastic.run(setup, train)
