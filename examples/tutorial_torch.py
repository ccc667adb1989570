"""The PyTorch tutorial's script: it trains on any number of processes, and goes on from its checkpoint.

    hvdliterun -np 2 python examples/tutorial_torch.py --checkpoint /tmp/two.pt

`tutorial_torch_before.py` is the same script for one process. The lines marked (1) to (8) differ. The data (1,797
images of handwritten digits) come with scikit-learn: nothing is downloaded.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvdlite.torch as hvd


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,437 images to train on and 360 to test with."""
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    return TensorDataset(images[360:], labels[360:]), TensorDataset(images[:360], labels[:360])


def accuracy(model: nn.Module, loader: DataLoader) -> float:
    right = seen = 0
    for images, labels in loader:
        right += int((model(images).argmax(1) == labels).sum())
        seen += len(labels)
    return hvd.average_metrics({"accuracy": (right, seen)})["accuracy"]  # (6) over all ranks' images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoint", default="tutorial.pt")
    options = parser.parse_args()

    hvd.init()  # (1)
    train, test = digits()
    train_loader = hvd.shard(DataLoader(train, batch_size=32, shuffle=True))  # (2) this rank's share of the images
    test_loader = hvd.shard(DataLoader(test, batch_size=100))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)  # (3)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # (4)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # (5)

    found = hvd.load(options.checkpoint, missing_ok=True, model=model, optimizer=optimizer, epoch=0)  # (8)
    start = found["epoch"]
    train_loader.set_epoch(start)  # go on with the next order of the images

    hvd.print(f"epochs {start + 1} to {options.epochs}, {len(train_loader)} steps in each")  # (7) on rank 0 only
    for epoch in range(start, options.epochs):
        for images, labels in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        hvd.print(f"epoch {epoch + 1:2}: held-out accuracy {accuracy(model, test_loader):.2%}")
        hvd.save(options.checkpoint, model=model, optimizer=optimizer, epoch=epoch + 1)

    weights = sum(each.detach().double().sum().item() for each in model.parameters())
    hvd.print(f"the sum of all weights is {weights:.12f}", all=True)  # a line of each rank


if __name__ == "__main__":
    main()
