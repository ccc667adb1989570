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


def right_ones(model: nn.Module, data: TensorDataset) -> tuple[float, int]:
    """How many images of this rank's share of the held-out ones are classified correctly, and the share's size."""
    images, labels = hvd.shard(data.tensors, even=False)
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).sum().item()
    model.train()
    return right, len(labels)


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
    hvd.seed(0, per_rank=True)  # each process has its own dropout; (5) makes the weights equal
    train, test = digits(options.device)
    loader = hvd.shard(DataLoader(train, options.batch_size, shuffle=True))  # (2)
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
        loss_of_all = hvd.Metric()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            loss_of_all.update(loss, len(labels))
            seen += len(labels) * hvd.size()
        found = hvd.average_metrics({"loss": loss_of_all, "accuracy": right_ones(model, test)})
        right = found["accuracy"]
        hvd.print(f"epoch {epoch + 1:2}/{options.epochs}  loss {found['loss']:.4f}  held-out accuracy {right:.2%}")
    seconds = time.perf_counter() - began
    hvd.print(f"{hvd.size()} processes: held-out accuracy {right:.2%}, {seconds:.1f} s, {seen / seconds:.0f} images/s")


if __name__ == "__main__":
    main()
