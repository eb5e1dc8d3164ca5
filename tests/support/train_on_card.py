"""A job for a GPU, or for a CPU on gloo: BatchNorm with a real momentum, and the same bits in every run.

Its ranks may share one card: each process is a host of its own to NCCL. A line in FOLDER for each commit, and at the
end a digest of all that the job has: weights, buffers, the optimizer's state.

    train_on_card.py --record FOLDER --steps N --step-ms MS --read-loss 1

With --read-loss 1 the host waits for the card, and so for the other ranks, between the backward and the optimizer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time

os.environ["NCCL_HOSTID"] = str(os.getpid())  # NCCL refuses two ranks of one host on one card

import torch

import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--record", required=True)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--step-ms", type=float, default=20.0)
parser.add_argument("--read-loss", type=int, default=0)
ARGS = parser.parse_args()


class Numbers(torch.utils.data.Dataset):
    """Fixed samples, each a function of its index."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(32, generator=torch.Generator().manual_seed(index))
        return x, x.sum().sign().clamp(min=0).long()


def setup(job: elastic.Job) -> elastic.State:
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
    ).to(job.device)
    return elastic.State(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


def train(job: elastic.Job, state: elastic.State) -> None:
    model = job.ddp(state.model)
    with open(f"{ARGS.record}/{os.getpid()}.jsonl", "a", buffering=1) as log:
        for batch in job.batches(Numbers(), state, batch_size=16, steps=ARGS.steps):
            loss = torch.nn.functional.cross_entropy(model(batch.x), batch.y)
            loss.backward()
            if ARGS.read_loss:
                loss.item()
            state.optimizer.step()
            state.optimizer.zero_grad()
            time.sleep(ARGS.step_ms / 1000)
            line = {"step": state.step + 1, "generation": job.generation, "rank": job.rank, "pid": os.getpid()}
            try:
                job.commit(state, loss=loss)
            finally:
                if state.step == line["step"]:
                    device = str(job.device)
                    log.write(json.dumps({**line, "device": device, "at_s": time.monotonic()}) + "\n")
    found = hashlib.sha256()
    for info, tensor in state.tensors():
        found.update(info.name.encode() + tensor.cpu().numpy().tobytes())
    with open(f"{ARGS.record}/final-{job.rank}.txt", "w") as final:
        final.write(found.hexdigest())


if __name__ == "__main__":
    elastic.run(setup, train)
