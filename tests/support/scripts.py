"""Training scripts in pieces, for tests that write their own: the end of one is the beginning of the next."""

TINY = """
import os, sys, time
import torch
import elastic

def setup(job):
    model = torch.nn.Linear(2, 2)
    return elastic.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

def train(job, state):
    model = job.ddp(state.model)
"""
"""Up to a loop that the test adds."""

TINY_STEP = """
        model(torch.ones(1, 2)).sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        job.commit(state)
        time.sleep(0.02)

elastic.run(setup, train)
"""
"""The body of that loop, and the call of `elastic.run`."""

EPOCH = """
import elastic, torch

class Data(torch.utils.data.Dataset):
    def __len__(self): return 240
    def __getitem__(self, i): x = torch.tensor([float(i)]) / 240; return x, x

def setup(job):
    model = torch.nn.Linear(1, 1)
    return elastic.State(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))

def train(job, state):
    model = job.ddp(state.model)
    for batch in job.batches(Data(), state, batch_size=8, epochs=1):
        loss = (model(batch.x) - batch.y).pow(2).mean()
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        job.commit(state, loss=loss)
"""
"""30 steps of one epoch, up to the end of the loop's body: the test adds what follows `job.commit`."""
