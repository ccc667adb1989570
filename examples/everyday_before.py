"""A short training with what users of data-parallel training write by hand.

    hvdliterun -np 2 python examples/everyday_before.py

`everyday.py` does the same with hvdlite's helpers, and prints the same. The data (1,797 images of handwritten digits)
come with scikit-learn: nothing is downloaded.
"""

import logging
import random

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvdlite.torch as hvd

EPOCHS, BATCH, TESTED = 6, 32, 296


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def average(total: float, count: int) -> float:
    """The mean over all ranks' samples. Ranks may have different numbers of samples."""
    sums = hvd.allreduce(torch.tensor([total, count], dtype=torch.float64), op=hvd.Sum)
    return (sums[0] / sums[1]).item()


def main() -> None:
    hvd.init()
    log = logging.getLogger("train")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"[%(asctime)s] rank {hvd.rank()} %(levelname)s: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO if hvd.rank() == 0 else logging.WARNING)
    seed_all(0)
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    train, test = TensorDataset(images[TESTED:], labels[TESTED:]), TensorDataset(images[:TESTED], labels[:TESTED])
    sampler = DistributedSampler(train, hvd.size(), hvd.rank(), drop_last=True)
    loader = DataLoader(train, BATCH, sampler=sampler)
    # A DistributedSampler would count some held-out images twice, so that all ranks get equally many.
    held_out = DataLoader(test, 100, sampler=range(hvd.rank(), len(test), hvd.size()))

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    if hvd.rank() == 0:
        weights = sum(each.numel() for each in model.parameters())
        print(f"{weights} weights on each of {hvd.size()} processes", flush=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    log.info("%d steps in each epoch", len(loader))
    # Each rank drops out other units. With seed + rank, runs with neighbouring seeds would share most of them.
    seed_all(int(np.random.SeedSequence(0, spawn_key=(hvd.rank(),)).generate_state(1)[0]))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total, seen, right, tested = 0.0, 0, 0, 0
        for batch, target in loader:
            optimizer.zero_grad()
            error = nn.functional.cross_entropy(model(batch), target)
            error.backward()
            optimizer.step()
            total, seen = total + error.item() * len(target), seen + len(target)
        model.eval()
        for batch, target in held_out:
            right, tested = right + int((model(batch).argmax(1) == target).sum()), tested + len(target)
        model.train()
        loss, accuracy = average(total, seen), average(right, tested)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}, held-out accuracy {accuracy:.2%}", flush=True)


if __name__ == "__main__":
    main()
