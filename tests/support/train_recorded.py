"""A small training job that writes down every commit: step, generation, rank, samples, instant."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time

import torch
import torch.nn.functional as F

import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--record", required=True)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--samples", type=int, default=1000)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--step-ms", type=float, default=5.0)
parser.add_argument("--setup-s", type=float, default=0.0)
parser.add_argument("--leave-s", type=float, default=0.0)  # how long it takes to leave `train` after a failure
parser.add_argument("--hashes", type=int, default=0)  # of the weights, with each commit
parser.add_argument("--fail", default="")  # rank:step:kind, struck in the first life of the process only
ARGS = parser.parse_args()


class Numbers(torch.utils.data.Dataset):
    """Fixed samples, each a function of its index."""

    def __len__(self) -> int:
        return ARGS.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(ARGS.width, generator=generator)
        return x, x.sum().sign().clamp(min=0).long()


def setup(job: elastic.Job) -> elastic.State:
    if ARGS.setup_s:
        time.sleep(ARGS.setup_s)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(ARGS.width, 64), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 2)
    )
    return elastic.State(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


def train(job: elastic.Job, state: elastic.State) -> None:
    try:
        steps(job, state)
    finally:
        if sys.exc_info()[0] is not None:
            time.sleep(ARGS.leave_s)


def steps(job: elastic.Job, state: elastic.State) -> None:
    model = job.ddp(state.model)
    with open(f"{ARGS.record}/{os.getpid()}.jsonl", "a", buffering=1) as log:
        log.write(json.dumps({"entered": state.step, "generation": job.generation, "rank": job.rank}) + "\n")
        for batch in job.batches(Numbers(), state, batch_size=ARGS.batch, steps=ARGS.steps):
            # Before the exchange: if anybody commits this step, then all of these samples went into it.
            part = {"part": state.step + 1, "generation": job.generation, "samples": list(batch.indices)}
            log.write(json.dumps(part) + "\n")
            fail(job, state)
            loss = F.cross_entropy(model(batch.x), batch.y)
            loss.backward()
            state.optimizer.step()
            state.optimizer.zero_grad(set_to_none=True)
            time.sleep(ARGS.step_ms / 1000)
            line = {
                "step": state.step + 1,
                "generation": job.generation,
                "rank": job.rank,
                "world_size": job.world_size,
                "slot": job.local_rank,
                "pid": os.getpid(),
                **({"hash": digest(state)[:12], "loss": float(loss)} if ARGS.hashes else {}),
            }
            try:
                job.commit(state, loss=loss)
            finally:
                if state.step == line["step"]:
                    log.write(json.dumps({**line, "at_s": time.monotonic()}) + "\n")
    with open(f"{ARGS.record}/final-{job.rank}.txt", "w") as final:
        final.write(digest(state))


def digest(state: elastic.State) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in state.model.parameters())).hexdigest()


def fail(job: elastic.Job, state: elastic.State) -> None:
    if not ARGS.fail:
        return
    rank, step, kind = ARGS.fail.split(":")
    marker = f"{ARGS.record}/failed"
    if (
        job.rank != int(rank)
        or state.step != int(step)
        or (os.path.exists(marker) and kind not in ("always", "refused"))
    ):
        return
    with open(marker, "a") as told:
        told.write(f"{os.getpid()}\n")
    if kind in ("exception", "always"):
        raise ValueError(f"planted at step {state.step}")
    if kind == "refused":  # as a client of the script's own may say it
        raise RuntimeError("feature store: Connection refused")
    if kind == "exit0":
        raise SystemExit(0)
    if kind == "exit3":
        raise SystemExit(3)
    if kind == "abort":
        os.abort()
    if kind == "memory":
        raise MemoryError("planted")
    if kind == "spin":
        while True:
            pass
    if kind == "nan":
        for p in state.model.parameters():
            p.data.fill_(float("nan"))


if __name__ == "__main__":
    elastic.run(setup, train)
