"""A job that hangs: rank 2 reads a file that never ends. `stall.py` makes a picture of what the job prints."""

from pathlib import Path

import torch

import hvdlite.torch as hvd


def read(path: Path) -> object:
    return torch.load(path)


def train(steps: int) -> None:
    for step in range(steps):
        batch = read(Path("part-2.pt")) if (step, hvd.rank()) == (250, 2) else torch.randn(32, 8)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            hvd.print(f"step {step}: loss {loss.item():.4f}")


hvd.init()
hvd.seed(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
train(1000)
