"""Training steps whose timeline `timeline.py` draws: `hvdliterun -np 2 python steps.py TRACE`.

In every third step rank 1 is late.
"""

import sys
import time

import torch

import hvdlite.torch as hvd

WIDTH, LAYERS = 1024, 6


def train(steps: int) -> None:
    for step in range(steps):
        if step % 3 == 2 and hvd.rank() == 1:
            time.sleep(0.02)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


hvd.init()
hvd.seed(1)
torch.set_num_threads(1)
layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
batch = torch.randn(64, WIDTH)
train(20)
hvd.start_timeline(sys.argv[1])
train(120)
hvd.stop_timeline()
