"""`examples/ddp_plain.py` with torchft, after its train_ddp.py.

torchft_lighthouse --min_replicas 1 --join_timeout_ms 10000
TORCHFT_LIGHTHOUSE=http://localhost:29510 REPLICA_GROUP_ID=0 torchrun --max-restarts 10 ddp_torchft.py    # and with 1
"""

import os
from datetime import timedelta

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing.pg_transport import PGTransport

EPOCHS = int(os.environ.get("EPOCHS", "50"))
GROUP, GROUPS = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ.get("NUM_REPLICA_GROUPS", "2"))
torch.manual_seed(0)
X = torch.rand(10_000, 16)
DATA = TensorDataset(X, X.sum(1, keepdim=True).sin())


def network():
    return torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))


def main():
    def state_dict():
        return {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(saved):
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    pg = ProcessGroupGloo(timeout=timedelta(seconds=5))
    manager = Manager(
        pg=pg,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"ddp_{GROUP}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=PGTransport(pg, timeout=timedelta(seconds=10), device=torch.device("cpu")),
    )
    model = DistributedDataParallel(manager, network())
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-3))
    if os.path.exists("model.pt"):
        saved = torch.load("model.pt")
        load_state_dict(saved)
        manager.load_state_dict(saved["manager"])
    sampler = DistributedSampler(DATA, replica_rank=GROUP, num_replica_groups=GROUPS, group_rank=0, num_replicas=1)
    loader = DataLoader(DATA, batch_size=32, sampler=sampler)
    while (epoch := manager.current_step() // len(loader)) < EPOCHS:
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            if manager.current_step() == (epoch + 1) * len(loader):
                break
        if manager.participating_rank() == 0:
            torch.save({**state_dict(), "manager": manager.state_dict()}, "model.tmp")
            os.replace("model.tmp", "model.pt")
            print(f"epoch {epoch}  loss {loss.item():.4f}", flush=True)
    manager.shutdown()


if __name__ == "__main__":
    main()
