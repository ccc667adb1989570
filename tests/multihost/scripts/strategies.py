"""Trains with strategies on several hosts, against simulations of all ranks, and prints what each host's interface sends."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn, optim

import hvdlite.torch as hvd

torch.set_num_threads(1)
hvd.init()
HOSTS: list[str] = hvd.allgather_object(socket.gethostname())
SIDE, EVERY = 1024, 4


def sent() -> np.ndarray:
    """The bytes and packets that this host's interface has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return np.array(counters.split(), int)[[8, 9]]
    raise OSError("no eth0")


def model(side: int, dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(side, side, bias=False, dtype=dtype)


def gradient(net: nn.Linear, rank: int, step: int) -> None:
    """Set the gradients of one rank's batch."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, net.in_features, generator=generator, dtype=net.weight.dtype)
    net.zero_grad()
    loss: torch.Tensor = net(x) - (1 + rank) * x.sin()
    loss.square().mean().backward()


def check_hierarchical() -> None:
    """Every step averages gradients within each host; every third one averages weights over all ranks."""
    net = model(8)
    plain = optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(plain, strategy=hvd.LocalSGD(3, hierarchical=True, warmup_steps=1))
    nets = [model(8) for _ in HOSTS]
    optimizers = [optim.SGD(each.parameters(), lr=0.1, momentum=0.5) for each in nets]
    for step in range(8):
        gradient(net, hvd.rank(), step)
        optimizer.step()
        for rank, each in enumerate(nets):
            gradient(each, rank, step)
        gradients: list[Any] = [each.weight.grad for each in nets]
        for rank, each in enumerate(nets):
            together = [g for g, host in zip(gradients, HOSTS, strict=True) if step == 0 or host == HOSTS[rank]]
            each.weight.grad = sum(together) / len(together)
        for simulated in optimizers:
            simulated.step()
        if step in (3, 6):
            mean: Any = sum(each.weight.data for each in nets) / len(nets)
            for each in nets:
                each.weight.data.copy_(mean)
        assert (net.weight - nets[hvd.rank()].weight).abs().max() < 1e-12, step


def check_compressed_outer_gradients() -> None:
    """What int8 leaves out is sent later: the common weights stay close to those of exact outer gradients."""
    exact, rounded = model(512), model(512)
    for net, how in ((exact, None), (rounded, hvd.Compression.int8())):
        strategy = hvd.DiLoCo(2, hvd.OuterSGD(1.0, 0.0), compression=how)
        optimizer = hvd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), strategy=strategy)
        for step in range(40):
            gradient(net, hvd.rank(), step)
            optimizer.step()
    off = (exact.weight - rounded.weight).norm() / (exact.weight - model(512).weight).norm()
    assert 0 < off < 0.02, off
    weights = hvd.allgather_object(rounded.weight.detach())
    assert all(torch.equal(weights[0], each) for each in weights)


def traffic(strategy: Any) -> tuple[list[int], float]:
    """What this host's interface sends in EVERY steps, and hvdlite's own count per step."""
    net = model(SIDE, torch.float32)
    optimizer = hvd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), strategy=strategy)
    found = []
    for step in range(4 * EVERY):
        if step % EVERY == 0:
            hvd.barrier()
            before = sent()
        gradient(net, hvd.rank(), step)
        optimizer.step()
        if step % EVERY == EVERY - 1:
            hvd.barrier()
            found.append((sent() - before).tolist())
    counted = [value for key, value in hvd.communication_stats().as_dict().items() if key.endswith("/bytes_per_step")]
    del optimizer
    return min(found[1:]), counted[-1]  # TCP sends again under load


check_hierarchical()
check_compressed_outer_gradients()
for name, strategy in (
    ("synchronous", None), ("local", hvd.LocalSGD(EVERY)), ("diloco", hvd.DiLoCo(EVERY)),
    ("streaming", hvd.DiLoCo(EVERY, fragments=1, overlap=2)), ("bf16", hvd.DiLoCo(EVERY, compression=hvd.Compression.bf16)),
):  # fmt: skip
    measured, counted = traffic(strategy)
    everyone = hvd.allgather_object((socket.gethostname(), measured, counted))
    if hvd.rank() == 0:
        hosts = {host: seen for host, seen, _ in everyone}
        print(json.dumps({"name": name, "sent": hosts, "counted": [each for *_, each in everyone]}), flush=True)
hvd.shutdown()
