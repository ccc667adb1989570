"""Train with torch's DistributedDataParallel: as on any cluster, but for the name of the backend.

    hvdliterun -np 2 python examples/torch_ddp.py

The script is that of torch's DDP tutorial: with "hvdlite" in place of "gloo" or "nccl" it needs no torchrun, no
MASTER_ADDR and no port. The data (1,797 images of 8 x 8 pixels) come with scikit-learn: nothing is downloaded.
"""

import argparse
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,437 images to train on and 360 to test with."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Conv2d(1, 32, 3, padding=1)
        self.net2 = nn.Conv2d(32, 64, 3, padding=1)
        self.net3 = nn.Linear(64 * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.net1(x))
        x = torch.max_pool2d(torch.relu(self.net2(x)), 2)
        logits: torch.Tensor = self.net3(x.flatten(1))
        return logits


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """The accuracy on held-out images. Every rank tests its share."""
    images, labels = data[dist.get_rank() :: dist.get_world_size()]
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).sum()
    counts = torch.tensor([right, len(labels)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()

    dist.init_process_group("hvdlite")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, test = digits()
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    model = DDP(ToyModel(), gradient_as_bucket_view=True)
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    began = time.perf_counter()
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss_fn(model(images), labels).backward()
            optimizer.step()
        right = accuracy(model.module, test)
        if rank == 0:
            print(f"epoch {epoch + 1:2}/{options.epochs}  held-out accuracy {right:.2%}", flush=True)
    if rank == 0:
        print(f"{size} processes: held-out accuracy {right:.2%}, {time.perf_counter() - began:.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
