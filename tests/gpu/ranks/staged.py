"""Checks with an MPI that is not CUDA-aware, like the wheels on PyPI. The trial does no harm, and all operations work."""

from __future__ import annotations

import cupy
import numpy as np
import torch

import hvdlite as hvd
import hvdlite.torch
from hvdlite.job import runtime
from hvdlite.lanes import gpu_side
from hvdlite.transports.device import StagedTransport
from tests.parallel.common import require_same_bits, restart

LENGTHS = (1, 1000, 300_000, 5_000_000)  # the last array travels in several pieces


def summed(length: int) -> None:
    p = hvd.size()
    mine = cupy.asarray((np.arange(length) % 7 + hvd.rank()).astype(np.float32))
    result = hvd.allreduce(mine, op=hvd.Sum).get()
    np.testing.assert_array_equal(result, np.arange(length) % 7 * p + p * (p - 1) // 2)
    require_same_bits(result)


def side() -> gpu_side.Side:
    found = runtime.current().everyone.eager.host.gpu
    assert isinstance(found, gpu_side.Side)
    return found


def check_messages_pass_through_host_memory() -> None:
    restart(ALGORITHM="ring")
    for length in LENGTHS:
        summed(length)
    assert isinstance(side().transport, StagedTransport), "the MPI takes device pointers"
    rows = hvd.allgather(cupy.asarray(np.full((hvd.rank() + 1, 100_000), hvd.rank())))
    np.testing.assert_array_equal(rows.get()[:, -1], np.repeat(np.arange(hvd.size()), np.arange(hvd.size()) + 1))
    np.testing.assert_array_equal(
        hvd.broadcast(cupy.asarray(np.full(10, hvd.rank())), hvd.size() - 1).get(), np.full(10, hvd.size() - 1)
    )


def check_gpus_share_memory_all_the_same() -> None:
    restart()
    for length in LENGTHS:
        summed(length)
    stage = side().workspace.stage
    assert stage is not None and stage.peers is not None, "CUDA IPC is refused here"


def check_training() -> None:
    """Gradients of a model on the GPU, with buckets in memory that the GPUs share, and by messages."""
    for way in ({}, {"ALGORITHM": "ring"}):
        restart(**way)
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(300, 1000), torch.nn.ReLU(), torch.nn.Linear(1000, 10)).cuda()
        optimizer = hvdlite.torch.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters())
        for step in range(5):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + hvd.rank())
            net(torch.randn(8, 300, generator=generator).cuda()).square().mean().backward()
            optimizer.step()
        require_same_bits(list(net.parameters()))
    restart()
