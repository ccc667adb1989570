"""The script with which the PyTorch tutorial begins: it trains on one process, and goes on from its checkpoint.

    python examples/tutorial_torch_before.py --checkpoint /tmp/one.pt

`tutorial_torch.py` is the same script for any number of processes. The data (1,797 images of handwritten digits) come
with scikit-learn: nothing is downloaded.
"""

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


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
    return right / seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoint", default="tutorial.pt")
    options = parser.parse_args()

    train, test = digits()
    train_loader = DataLoader(train, batch_size=32, shuffle=True)
    test_loader = DataLoader(test, batch_size=100)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    start = 0
    if os.path.exists(options.checkpoint):
        found = torch.load(options.checkpoint)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        start = found["epoch"]

    print(f"epochs {start + 1} to {options.epochs}, {len(train_loader)} steps in each")
    for epoch in range(start, options.epochs):
        for images, labels in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        print(f"epoch {epoch + 1:2}: held-out accuracy {accuracy(model, test_loader):.2%}")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        torch.save(state, options.checkpoint)


if __name__ == "__main__":
    main()
