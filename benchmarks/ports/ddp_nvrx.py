"""`examples/ddp_plain.py` with the heartbeats of NVRx, after its basic_ft_example.py.

ft_launcher --nproc-per-node=2 --max-restarts=10 --ft-rank-heartbeat-timeout=30 ddp_nvrx.py
"""

import os

import nvidia_resiliency_ext.fault_tolerance as ft
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


def main():
    dist.init_process_group()
    client = ft.RankMonitorClient()
    client.init_workload_monitoring()
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
            client.send_heartbeat()
        if dist.get_rank() == 0:
            saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(saved, "model.tmp")
            os.replace("model.tmp", "model.pt")
            print(f"epoch {epoch}  loss {loss.item():.4f}", flush=True)
    client.shutdown_workload_monitoring()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
