"""In the shape of minGPT under DDP: a small GPT on text, mixed precision's calls, clipping, a snapshot by fsspec."""

import dataclasses
import inspect
import io

import fsspec
import probe
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

BLOCK, STEPS, SAVE_EVERY = 32, 80, 20


class Text(Dataset):
    def __init__(self) -> None:
        self.data = torch.tensor(list(inspect.getsource(dataclasses).encode()[:8000]))

    def __len__(self) -> int:
        return len(self.data) - BLOCK - 1

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.data[at : at + BLOCK], self.data[at + 1 : at + BLOCK + 1]


class GPT(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(BLOCK, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.blocks(self.tokens(x) + self.places(torch.arange(x.shape[1])), mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    path, dataset, model = str(probe.FOLDER / "gpt_snapshot.pt"), Text(), GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    done = 0
    try:
        with fsspec.open(path) as file:
            snapshot = torch.load(io.BytesIO(file.read()), weights_only=True)
        model.load_state_dict(snapshot["model_state"])
        optimizer.load_state_dict(snapshot["optimizer_state"])
        done = snapshot["steps"]
    except FileNotFoundError:
        pass
    wrapped = DDP(model)
    sampler = DistributedSampler(dataset, shuffle=True, seed=3)
    loader = DataLoader(dataset, 8, sampler=sampler)
    for step, (x, y) in enumerate(loader, 1):
        if step <= done:
            continue
        if step > STEPS:
            break
        with torch.autocast("cpu", torch.bfloat16):
            loss = wrapped(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        probe.step(step)
        if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
            content = io.BytesIO()
            state = {"model_state": model.state_dict(), "optimizer_state": optimizer.state_dict(), "steps": step}
            torch.save(state, content)
            filesystem, where = fsspec.url_to_fs(path)
            with filesystem.transaction, filesystem.open(where, "wb") as file:
                file.write(content.getvalue())
    probe.final(model.parameters())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
