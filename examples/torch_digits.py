"""Train a small convolutional network on real handwritten digits, on any number of processes.

    hvdliterun -np 2 python examples/torch_digits.py

The data (1,797 images of 8 x 8 pixels) come with scikit-learn: nothing is downloaded. Only the lines marked (1) to (5)
differ from a script for one process.
"""

import argparse
import math
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvdlite.torch as hvd


def digits(device: str) -> tuple[TensorDataset, TensorDataset]:
    """Return 1,437 images to train on and 360 to test with."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(data.target, device=device)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def averaged(total: float, count: int) -> float:
    """The mean over all ranks' samples. Ranks may have different numbers of samples."""
    sums = hvd.allreduce(torch.tensor([total, count], dtype=torch.float64), op=hvd.Sum)
    return (sums[0] / sums[1]).item()


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """The accuracy on held-out images. Every rank tests its share."""
    images, labels = data[hvd.rank() :: hvd.size()]
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).sum().item()
    model.train()
    return averaged(right, len(labels))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--warmup-epochs", type=float, default=2.0)
    parser.add_argument("--device", default="cpu", help="cuda: each process on a GPU of its host (needs CuPy)")
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error("--epochs must be at least 1")

    hvd.init()  # (1)
    torch.manual_seed(hvd.rank())
    train, test = digits(options.device)
    sampler = DistributedSampler(train, hvd.size(), hvd.rank())  # (2)
    loader = DataLoader(train, options.batch_size, sampler=sampler)
    model = network().to(options.device)
    # Goyal et al. 2017: the learning rate grows with the number of processes, after a start at the rate of one.
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr * hvd.size(), momentum=0.9)  # (3)
    warmup = options.warmup_epochs * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (1 + step / max(warmup, 1) * (hvd.size() - 1)) / hvd.size())
            * (0.5 + 0.5 * math.cos(math.pi * step / (options.epochs * len(loader))))
        ),
    )
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # (4)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # (5)

    began, seen = time.perf_counter(), 0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        total, count = 0.0, 0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            total, count = total + loss.item() * len(labels), count + len(labels)
        seen += count * hvd.size()
        loss_of_all, right = averaged(total, count), accuracy(model, test)
        if hvd.rank() == 0:
            line = f"epoch {epoch + 1:2}/{options.epochs}  loss {loss_of_all:.4f}  held-out accuracy {right:.2%}"
            print(line, flush=True)
    seconds = time.perf_counter() - began
    if hvd.rank() == 0:
        print(f"{hvd.size()} processes: held-out accuracy {right:.2%}, {seconds:.1f} s, {seen / seconds:.0f} images/s")


if __name__ == "__main__":
    main()
