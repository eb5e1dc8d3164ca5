"""`examples/ddp_plain.py` called again in its process after a failure, by NVRx, after its basic_example.py.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500 python ddp_nvrx_inprocess.py    # and with RANK=1
"""

import os

import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = int(os.environ.get("EPOCHS", "50"))
torch.manual_seed(0)
X = torch.rand(10_000, 16)
DATA = TensorDataset(X, X.sum(1, keepdim=True).sin())


def network():
    return torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))


@inprocess.Wrapper(store_kwargs={"port": int(os.environ["MASTER_PORT"]) + 2})
def main(call: inprocess.CallWrapper = None):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"]) + 1
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, world_size, rank == 0, multi_tenant=True)
    store = dist.PrefixStore(str(call.iteration), store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if os.path.exists("model.pt"):
        saved = torch.load("model.pt")
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]
    sampler = DistributedSampler(DATA)
    loader = DataLoader(DATA, batch_size=32, sampler=sampler)
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            with call.atomic():
                torch.save(saved, "model.tmp")
                os.replace("model.tmp", "model.pt")
            print(f"epoch {epoch}  loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
