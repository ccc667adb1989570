"""Sparse gradients (embeddings): every rank's indices and values, gathered. Cost: n nnz bytes per rank, all-gather."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite import ops, runtime
from hvdlite.ops import Average, Op, Sum
from hvdlite.torch._tensors import to_array, to_tensor


def reduce_sparse(p: torch.nn.Parameter, op: Op) -> None:
    """Replace p.grad by the sum (or average) of all ranks' sparse gradients; a rank without one adds nothing.

    Where no rank has any, p.grad stays as it is. Raises NotImplementedError for operations other than these two.
    """
    indices, values = coordinates(p)
    if op not in (Average, Sum):
        raise NotImplementedError(f"sparse gradients with op={op.name}: only Average and Sum are possible")
    all_indices = to_tensor(ops.allgather(to_array(indices.t().contiguous())))
    all_values = to_tensor(ops.allgather(to_array(values.contiguous())))
    if all_indices.shape[0] == 0 and p.grad is None:
        return
    if op is Average:
        all_values /= runtime.size()
    p.grad = torch.sparse_coo_tensor(all_indices.t(), all_values, p.shape, dtype=p.dtype, check_invariants=False)


def coordinates(p: torch.nn.Parameter) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient's indices (sparse dims x nnz) and values; empty ones of the right shape where there is none."""
    grad: Any = p.grad
    if grad is None:
        return torch.empty(1, 0, dtype=torch.int64, device=p.device), p.new_empty(0, *p.shape[1:]).detach()
    if grad.layout == torch.strided:
        grad = grad.to_sparse(1)
    grad = grad.coalesce()
    return grad.indices(), grad.values()
