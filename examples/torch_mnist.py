"""Train on MNIST from local files, on any number of processes.

    hvdliterun -np 2 python examples/torch_mnist.py --data ~/mnist

--data is a folder with MNIST's four idx files (train-images-idx3-ubyte, train-labels-idx1-ubyte and the two t10k
files), also as .gz. Nothing is downloaded. torch_digits.py needs no files at all.
"""

import argparse
import gzip
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvdlite.torch as hvd


def read_idx(folder: Path, name: str) -> torch.Tensor:
    """Read an idx file: two zero bytes, a type, the number of dimensions, each as a big-endian int, then the bytes."""
    for path, opener in ((folder / name, open), (folder / f"{name}.gz", gzip.open)):
        if path.exists():
            with opener(path, "rb") as file:
                data = file.read()
            if data[:3] != b"\0\0\x08":
                sys.exit(f"{path} is no idx file of bytes")
            shape = np.frombuffer(data, ">i4", data[3], 4)
            return torch.from_numpy(np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape).copy())
    sys.exit(
        f"no {name}[.gz] in {folder}: put MNIST's four idx files there, or run examples/torch_digits.py, "
        "which brings its data along"
    )


def mnist(folder: Path, part: str) -> TensorDataset:
    images = read_idx(folder, f"{part}-images-idx3-ubyte").float().unsqueeze(1) / 255
    return TensorDataset(images, read_idx(folder, f"{part}-labels-idx1-ubyte").long())


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 49, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    images, labels = hvd.shard(data.tensors, even=False)
    with torch.no_grad():
        right = sum((model(i).argmax(1) == t).sum() for i, t in zip(images.split(500), labels.split(500), strict=True))
    return hvd.average_metrics({"accuracy": (right, len(labels))})["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="images per process and step")
    parser.add_argument("--checkpoint", help="a file to go on from if it is there; written after each epoch")
    options = parser.parse_args()
    train, test = mnist(options.data, "train"), mnist(options.data, "t10k")

    hvd.init()
    hvd.seed(0)
    loader = hvd.shard(DataLoader(train, options.batch_size, shuffle=True))
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 * hvd.size() ** 0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    start = 0
    if options.checkpoint:
        start = hvd.load(options.checkpoint, missing_ok=True, model=model, optimizer=optimizer, epoch=0)["epoch"]

    began = time.perf_counter()
    loader.set_epoch(start)  # after a restart, go on with the permutations of these epochs
    for epoch in range(start, options.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        right = accuracy(model, test)
        if options.checkpoint:
            hvd.save(options.checkpoint, model=model, optimizer=optimizer, epoch=epoch + 1)
        images_per_second = len(train) * (epoch + 1 - start) / (time.perf_counter() - began)
        hvd.print(f"epoch {epoch + 1}: held-out accuracy {right:.2%}, {images_per_second:.0f} images/s")


if __name__ == "__main__":
    main()
