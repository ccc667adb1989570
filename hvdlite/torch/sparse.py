"""Sparse gradients (embeddings): every rank's indices and values, gathered. Cost: n nnz bytes per rank, all-gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvdlite.gradients.sparse import SparseReduction
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.lanes.calls import calling
from hvdlite.ops import Average, Op, op_of
from hvdlite.torch.tensors import to_array, to_tensor


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: Op | int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start to add up (or average) all ranks' sparse tensors; returns a function that waits and returns the result,
    sparse and not coalesced, of the same shape. Raises NotImplementedError for operations other than these two.

    Raises ValueError for tensors that are not sparse; the function, MismatchError on every rank where shapes, dtypes or
    operations differ.
    """
    op = op_of(op)
    how = SparseReduction(op, process_set, tuple(tensor.shape))
    if tensor.layout is not torch.sparse_coo:
        cure = "call hvd.allreduce" if tensor.layout is torch.strided else "give its .to_sparse_coo()"
        raise ValueError(f"sparse_allreduce_async takes sparse COO tensors, not {tensor.layout} ones: {cure}")
    coalesced: Any = tensor.coalesce()
    indices, values = coalesced.indices().t().contiguous(), coalesced.values().contiguous()
    call = "sparse_allreduce" if name is None else f"sparse_allreduce {name!r}"
    names = [None if name is None else f"{name}.{part}" for part in ("indices", "values")]
    with calling(call):
        gathered = how.start_gather(to_array(indices), to_array(values), names)

    def finish() -> torch.Tensor:
        all_indices, all_values = map(to_tensor, gathered())
        if op is Average:
            all_values = all_values / how.divisor
        return sparse(all_indices, all_values, tensor)

    return finish


def sparse(indices: torch.Tensor, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """All ranks' values at all ranks' indices. Those at one index, which a GPU would add in any order, so that ranks'
    weights drift apart in their last bits, are added up here."""
    found = torch.sparse_coo_tensor(indices.t(), values, like.shape, dtype=like.dtype, check_invariants=False)
    return found.coalesce() if found.is_cuda else found


def reduce_sparse(p: torch.nn.Parameter, op: Op, process_set: ProcessSet, dense: torch.Tensor | None) -> None:
    """Replace p.grad by the sum (or average) of all ranks' sparse gradients; a rank without one adds nothing. dense:
    what other ranks had dense, reduced, as a sparse tensor, to which they are added.

    Where no rank has any, p.grad stays as it is. Raises NotImplementedError for operations other than these two.
    """
    indices, values = coordinates(p)
    how = SparseReduction(op, process_set, tuple(p.shape))
    all_indices, all_values = map(
        to_tensor, how.gather(to_array(indices.t().contiguous()), to_array(values.contiguous()))
    )
    if all_indices.shape[0] == 0 and p.grad is None and dense is None:
        return
    if all_indices.shape[0] == 0:  # torch adds to a gradient without rows by resizing it: in memory of its own only
        all_indices, all_values = all_indices.clone(), all_values.clone()
    if op is Average:
        all_values /= how.divisor
    found = sparse(all_indices, all_values, p)
    p.grad = found if dense is None else (found + dense).coalesce()  # each row once: see `sparse`


def coordinates(p: torch.nn.Parameter) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient's indices (sparse dims x nnz) and values; empty ones of the right shape where there is none."""
    grad: Any = p.grad
    if grad is None:
        return torch.empty(1, 0, dtype=torch.int64, device=p.device), p.new_empty(0, *p.shape[1:]).detach()
    if grad.layout == torch.strided or grad.sparse_dim() != 1:  # of gather(sparse_grad=True), or others' to be alike
        grad = grad.to_dense().to_sparse(1)
    grad = grad.coalesce()
    return grad.indices(), grad.values()
