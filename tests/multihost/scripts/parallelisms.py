"""Trains in four ways over torch.distributed, and compares the weights with one process: no line knows hvdlite or MPI."""

import functools
import os
import socket

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.parallel.distributed_models import (
    Block,
    full,
    network,
    require_close,
    require_pipeline,
    sgd,
    sharded,
    train,
    trained_alone,
    whole,
)  # fmt: skip

torch.set_num_threads(1)
assert "MASTER_ADDR" not in os.environ
dist.init_process_group("hvdlite")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))

for width in (16, 301):  # weights of 2 KiB and of 0.4 MB, which take other ways between hosts
    expected = trained_alone(make=functools.partial(network, width=width))
    parallel = DistributedDataParallel(network(width=width))
    train(parallel, sgd(parallel.parameters()))
    require_close(parallel.state_dict(), expected, prefix="module.")
    model = sharded(network(width=width), mesh=mesh)
    train(model, sgd(model.parameters()))
    require_close(full(model), expected)

block = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
train(block, sgd(block.parameters()), share=whole)
require_close(full(block), trained_alone(make=Block))

require_pipeline(ScheduleGPipe)

hosts: list[str | None] = [None] * dist.get_world_size()
dist.all_gather_object(hosts, socket.gethostname())
if dist.get_rank() == 0:
    print("trained on", *hosts, flush=True)
dist.destroy_process_group()
