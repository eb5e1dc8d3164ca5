"""The training script of the chaos tests: small, deterministic, and it writes down what it did.

Everything is told by the environment:

    RECORD_DIR      folder for the records, shared by all nodes
    STEPS, BATCH    steps in all, samples per step over all ranks (default 60, 8)
    PACE_S          least duration of a step (default 0.02), until there is a file RECORD_DIR/hurry
    SETUP_S         what `setup` takes (default 0)
    WIDTH           width of the model (default 32)
    NORM            set: the model has a BatchNorm, so its buffers are exchanged before each forward
    PRELUDE_S       what `train` does before its first step takes (default 0)
    LOG             set: each step logs its number and the rank
    ASK             set: the script has an all_reduce of its own before each forward

Each process appends to RECORD_DIR/commits.<node>.<pid>.jsonl one line per committed step (see `history.Commit`), and
writes final.<rank>.json at the end. Faults come from `elastic.testing`; some of them call a
function of this script.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import pathlib
import threading
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

import elastic

FOLDER = pathlib.Path(os.environ["RECORD_DIR"])
STEPS = int(os.environ.get("STEPS", "60"))
BATCH = int(os.environ.get("BATCH", "8"))
PACE_S = float(os.environ.get("PACE_S", "0.02"))
WIDTH = int(os.environ.get("WIDTH", "32"))
NODE = os.environ.get("ELASTIC_TESTING_NODE") or os.uname().nodename
SAMPLES = 1000


class Squares(torch.utils.data.Dataset):
    """Sample i is always the same pair."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        x = torch.arange(8, dtype=torch.float32) * 0.1 + i / SAMPLES
        return x, (x * x).sum().reshape(1)


def leave():
    """`train` returns before the next step."""
    global leaves
    leaves = True


def spin():
    while True:
        pass


def spin_when_all_is_handed_over():
    """Called in a backward: once all gradients are on their way to the others."""
    torch.autograd.Variable._execution_engine.queue_callback(spin)


def keep_the_lock():
    """Half a second from now a thread calls a C function that keeps the interpreter's lock."""

    def call():
        time.sleep(0.5)
        ctypes.PyDLL(None).sleep(300)  # unlike CDLL it does not release the lock

    threading.Thread(target=call, daemon=True).start()


def note(name, content):
    """Whole or not at all."""
    half = FOLDER / f"{name}.half.{os.getpid()}"
    half.write_text(json.dumps(content))
    half.rename(FOLDER / name)


leaves = False
rank = -1
log = os.open(FOLDER / f"commits.{NODE}.{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def setup(job):
    time.sleep(float(os.environ.get("SETUP_S", "0")))
    torch.manual_seed(1)
    norm = [torch.nn.BatchNorm1d(WIDTH)] if os.environ.get("NORM") else []
    model = torch.nn.Sequential(
        torch.nn.Linear(8, WIDTH), *norm, torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, 1)
    ).to(job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return elastic.State(model=model, optimizer=optimizer)


def train(job, state):
    global rank
    model, rank = job.ddp(state.model), job.rank
    if float(os.environ.get("PRELUDE_S", "0")):
        note(f"entered.{job.generation}.{os.getpid()}.json", {})
        time.sleep(float(os.environ["PRELUDE_S"]))
    for batch in job.batches(Squares(), state, batch_size=BATCH, steps=STEPS, epochs=1000):
        if leaves:
            return
        began_s = time.monotonic()
        if os.environ.get("ASK"):
            dist.all_reduce(torch.ones(1))
        loss = F.mse_loss(model(batch.x), batch.y)
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        if PACE_S and not (FOLDER / "hurry").exists():
            time.sleep(max(0.0, PACE_S - (time.monotonic() - began_s)))
        if os.environ.get("LOG"):
            job.log(number=state.step + 1, rank=job.rank)
        before = state.step
        try:
            job.commit(state, loss=loss)
        finally:  # at the end of a generation `commit` raises, but the step is committed all the same
            if state.step == before + 1:
                line = {
                    "step": before, "generation": job.generation, "rank": job.rank, "world_size": job.world_size,
                    "ids": batch.indices, "at_s": time.monotonic(), "loss": float(loss),
                }  # fmt: skip
                os.write(log, (json.dumps(line) + "\n").encode())
    note(f"final.{job.rank}.json", {"step": state.step, "world_size": job.world_size, "sha256": fingerprint(state)})


def fingerprint(state):
    """Of all weights and of the optimizer's state, to the last bit."""
    digest = hashlib.sha256()

    def add(value):
        if isinstance(value, torch.Tensor):
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                digest.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for one in value:
                add(one)
        else:
            digest.update(repr(value).encode())

    add(state.model.state_dict())
    add(state.optimizer.state_dict())
    return digest.hexdigest()


if __name__ == "__main__":
    elastic.run(setup, train)
