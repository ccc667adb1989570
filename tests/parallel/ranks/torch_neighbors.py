"""Bluefog's averages among neighbours, of torch tensors."""

from __future__ import annotations

from functools import partial

import torch

import hvdlite.torch as hvd
from tests.parallel.common import require_error


def check_every_dtype_and_layout() -> None:
    p, r = hvd.size(), hvd.rank()
    hvd.set_topology(hvd.RingGraph(p), is_weighted=True)
    w = torch.tensor(hvd.load_topology().matrix)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for shape in ((), (0,), (5,), (2, 3, 4, 4)):
            x = torch.stack([torch.full(shape, float(rank)) for rank in range(p)])
            mine = x[r].to(dtype).requires_grad_()
            if len(shape) == 4:
                mine = mine.detach().to(memory_format=torch.channels_last)
            found = hvd.neighbor_allreduce(mine, name="x")
            assert found.dtype == dtype and found.shape == shape and not found.requires_grad
            assert found.stride() == mine.stride() and (mine == r).all()
            expected = torch.tensordot(w, x.double(), 1)[r]
            assert torch.allclose(found.double(), expected, atol=1e-2 if dtype.itemsize == 2 else 1e-6)
            mean = hvd.hierarchical_neighbor_allreduce(mine)
            assert mean.dtype == dtype and torch.allclose(mean.double(), x.double().mean(0), atol=1e-2)
    for dtype in (torch.int64, torch.bool):
        require_error(TypeError, partial(hvd.neighbor_allreduce, torch.ones(3, dtype=dtype)), "not possible")
    hvd.set_topology()


def check_dynamic_topologies() -> None:
    p, r = hvd.size(), hvd.rank()
    if p == 1:
        return
    turns = hvd.GetDynamicOnePeerSendRecvRanks(hvd.ExponentialTwoGraph(p), r)
    for _ in range(4):
        dests, sources = next(turns)
        found = hvd.neighbor_allreduce(
            torch.tensor([float(r)]), self_weight=0.5, src_weights=dict.fromkeys(sources, 0.5), dst_weights=dests
        )
        assert found[0] == 0.5 * r + 0.5 * sources[0]
