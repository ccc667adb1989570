"""Trains with lossy compression, checks that nothing is lost, and prints what each host's interface sends in a step."""

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
STEPS, SIDE = 4, 1024
CHOICES: dict[str, Any] = {
    "none": hvd.Compression.none,
    "topk": hvd.Compression.topk(0.01),
    "powersgd": hvd.Compression.powersgd(16, start_step=0),
    "randomk": hvd.Compression.randomk(0.05),
    "int8": hvd.Compression.int8(),
}


def sent() -> np.ndarray:
    """The bytes and packets that this host's interface has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return np.array(counters.split(), int)[[8, 9]]
    raise OSError("no eth0")


def train(name: str, side: int, bias: bool) -> list[int]:
    """Train, and check sums, bits, and that a host's ranks have one set of residuals. Returns the least traffic of a step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(side, side, bias=bias), nn.Linear(side, side, bias=bias))
    plain = optim.SGD(net.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(plain, net.named_parameters(), compression=CHOICES[name])
    computed = [torch.zeros(p.shape, dtype=torch.float64) for p in net.parameters()]
    given = [torch.zeros(p.shape, dtype=torch.float64) for p in net.parameters()]
    traffic: list[list[int]] = []
    for step in range(STEPS if bias else 5):
        if bias and step == 2:  # rank 0 has another batch, whose gradients travel exactly
            if hvd.rank() == 0:
                optimizer.zero_grad()
                net(torch.ones(4, side)).square().mean().backward()
                optimizer.step()
            hvd.join()
            hvd.broadcast_parameters(net.state_dict(), 0)
        x = torch.randn(4, side, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))
        loss = net(x).square().mean()
        grads = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
        optimizer.zero_grad()
        hvd.barrier()
        before = sent()
        loss.backward()
        hvd.barrier()
        traffic.append((sent() - before).tolist())
        optimizer.step()
        for total, result, mine, p in zip(computed, given, grads, net.parameters(), strict=True):
            total += hvd.allreduce(mine.double(), op=hvd.Sum)
            assert p.grad is not None
            result += p.grad.double() * hvd.size()
    store = optimizer._hvdlite.gradients.store  # type: ignore[attr-defined]
    for (key, p), total, result in zip(net.named_parameters(), computed, given, strict=True):
        kept = torch.zeros(p.shape, dtype=torch.float64)
        if store and key in store.entries:
            residual = torch.tensor(store.before(key).residual).view(p.shape).double()
            every = hvd.allgather_object((socket.gethostname(), residual))
            hosts = dict(every)
            assert all(torch.equal(each, hosts[host]) for host, each in every)  # a host's ranks share the memory
            kept = torch.stack([*hosts.values()]).sum(0)
        elif store:
            assert p.dim() == 1
        off = (result + kept - total).norm() / total.norm()
        assert off < 2e-6, (name, key, off)
    weights: list[list[torch.Tensor]] = hvd.allgather_object([p.detach() for p in net.parameters()])
    assert all(all(map(torch.equal, weights[0], each)) for each in weights), name
    return min(traffic[1:])  # TCP sends again under load, and MPI's daemons send now and then


for name in CHOICES:
    train(name, 96, bias=True)
    hosts = hvd.allgather_object((socket.gethostname(), train(name, SIDE, bias=False)))
    if hvd.rank() == 0:
        print(json.dumps({"name": name, "sent": dict(hosts)}), flush=True)
hvd.shutdown()
