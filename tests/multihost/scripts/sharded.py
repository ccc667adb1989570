"""Trains with and without a sharded optimizer, compares the weights, and saves and loads a checkpoint."""

import os
import socket
from functools import partial

import torch
from torch import nn, optim

import hvdlite.torch as hvd

torch.set_num_threads(1)
hvd.init()


def network() -> nn.Sequential:
    """0.6 MB: pieces that travel alone, and pieces that travel together."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 301), nn.Tanh(), nn.Linear(301, 401), nn.Tanh(), nn.Linear(401, 3))


def train(net: nn.Module, optimizer: optim.Optimizer, first: int, steps: int = 10) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))
        net(x).square().mean().backward()
        hvd.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()


for make in (partial(optim.SGD, lr=0.1, momentum=0.9), partial(optim.Adam, fused=True), optim.Adafactor):
    trained = []
    for sharded in (False, True, "gradients"):
        model = network()
        optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), sharded=sharded)
        train(model, optimizer, 0)
        path = os.path.join(os.environ["CHECKPOINTS"], f"{sharded}.pt")
        hvd.save(path, model=model, optimizer=optimizer)
        again = network()
        another = hvd.DistributedOptimizer(make(again.parameters()), again.named_parameters(), sharded=sharded)
        hvd.load(path, model=again, optimizer=another)
        train(again, another, 10)
        trained += [model, again]
    for whole, part, less in zip(trained[:2], trained[2:4], trained[4:], strict=True):
        assert all(map(torch.equal, whole.parameters(), part.parameters())), make
        for p, q in zip(whole.parameters(), less.parameters(), strict=True):  # sums are in another order
            assert torch.allclose(p, q, rtol=1e-3, atol=1e-4), (make, (p - q).abs().max())
hosts = hvd.allgather_object((socket.gethostname(), [p.sum().item() for p in again.parameters()]))
assert all(weights == hosts[0][1] for _, weights in hosts)
if hvd.rank() == 0:
    print("trained on", *(host for host, _ in hosts), flush=True)
