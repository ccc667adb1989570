"""Rank 1 skips a batch after a simulated memory error, so it ends one step early. Rank 0 catches the error that it gets.

With "shutdown", all call hvd.shutdown() at the end.
"""

import sys

import torch

import hvdlite.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for batch in range(5):
    try:
        if hvd.rank() == 1 and batch == 2:
            raise RuntimeError("out of memory")
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    except RuntimeError:
        continue
print("trained", flush=True)
if "shutdown" in sys.argv:
    hvd.shutdown()
