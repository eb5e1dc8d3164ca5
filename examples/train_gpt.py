"""A small GPT that learns to write Python, byte by byte, from the standard library's own source.

The same file runs in three ways:

    python examples/train_gpt.py                             # standalone
    torchrun --nproc-per-node 2 examples/train_gpt.py        # under stock torchrun
    elasticctl run --workers 2 -- examples/train_gpt.py      # under elasticd: failures cost under a second, no step
"""

import argparse
import pathlib
import sysconfig

import torch
import torch.nn.functional as F
from torch import nn

import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=500, help="optimizer steps in all")
parser.add_argument("--batch", type=int, default=32, help="global batch: sequences per step over all workers")
parser.add_argument("--context", type=int, default=64, help="bytes per sequence")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--micro-batch", type=int, help="sequences of one backward: gradients of a step accumulate")
parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile the model")
ARGS = parser.parse_args()


class Source(torch.utils.data.Dataset):
    """Sequences of `context` bytes of the standard library, each with the same shifted by one byte as the target."""

    def __init__(self) -> None:
        folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
        text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // ARGS.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * ARGS.context
        piece = self.text[start : start + ARGS.context + 1].long()
        return piece[:-1], piece[1:]


SOURCE = Source()  # once per process, not on each entry of `train`


class Block(nn.Module):
    """Causal attention, then a small MLP for each byte."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(ARGS.width), nn.LayerNorm(ARGS.width)
        self.qkv = nn.Linear(ARGS.width, 3 * ARGS.width)
        self.out = nn.Linear(ARGS.width, ARGS.width)
        self.mlp = nn.Sequential(
            nn.Linear(ARGS.width, 4 * ARGS.width), nn.GELU(), nn.Linear(4 * ARGS.width, ARGS.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (ARGS.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, ARGS.width)
        self.place = nn.Embedding(ARGS.context, ARGS.width)
        self.blocks = nn.Sequential(*(Block() for _ in range(ARGS.layers)))
        self.norm = nn.LayerNorm(ARGS.width)
        self.head = nn.Linear(ARGS.width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.byte(x) + self.place(places))))


def setup(job: elastic.Job) -> elastic.State:
    torch.manual_seed(ARGS.seed)
    model = GPT().to(job.device)
    if ARGS.compile:
        model.compile(backend=ARGS.compile)  # in place: parameters and checkpoints keep their names
    return elastic.State(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=ARGS.lr))


def train(job: elastic.Job, state: elastic.State) -> None:
    model = job.ddp(state.model)
    sizes = {"batch_size": ARGS.batch, "micro_batch": ARGS.micro_batch}
    for batch in job.batches(SOURCE, state, **sizes, steps=ARGS.steps, seed=ARGS.seed):
        for part in batch.parts():  # one, without --micro-batch; the gradients are exchanged in the last one's backward
            loss = F.cross_entropy(model(part.x).flatten(0, 1), part.y.flatten())  # not divided by their number
            loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        job.commit(state, loss=loss)
        if job.rank == 0 and state.step % 25 == 0:
            print(f"step {state.step}  loss {loss.item():.3f}  world {job.world_size}", flush=True)


if __name__ == "__main__":
    elastic.run(setup, train)
