"""Sparse gradients (embeddings): the indices and values of every rank are gathered.

Cost: with n ranks and nnz values on each, every rank receives n nnz values (an all-gather).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hvdlite.gradients.sparse import SparseReduction
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.lanes.calls import calling
from hvdlite.ops import Average, Op, op_of
from hvdlite.torch.tensors import to_array, to_tensor


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: Op | int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start to add up or average all ranks' sparse tensors. Waits for no rank.

    Args:
        tensor: A sparse COO tensor, of the same shape and dtype on every rank. The number of its values may differ.
        name: Ranks match calls by name, as for `allreduce`.
        op: hvd.Average or Sum.
        process_set: The ranks that take part.

    Returns:
        A function that waits for all ranks and returns the result: a sparse tensor of the same shape, not coalesced on
        the CPU. It raises MismatchError on every rank if shapes, dtypes or operations differ.

    Raises:
        ValueError: The tensor is not a sparse COO tensor.
        NotImplementedError: `op` is neither Average nor Sum.
    """
    op = op_of(op)
    how = SparseReduction(op, process_set, tuple(tensor.shape))
    if tensor.layout is not torch.sparse_coo:
        cure = "call hvd.allreduce" if tensor.layout is torch.strided else "give its .to_sparse_coo()"
        raise ValueError(f"sparse_allreduce_async takes sparse COO tensors, not {tensor.layout} ones: {cure}")
    coalesced = tensor.coalesce()
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
    """Return all ranks' values at all ranks' indices, as a sparse tensor of the shape and dtype of `like`.

    On a GPU, values at the same index are added up here. Otherwise the GPU would add them later, in any order, and the
    ranks' weights would differ in their last bits.
    """
    found = torch.sparse_coo_tensor(indices.t(), values, like.shape, dtype=like.dtype, check_invariants=False)
    return found.coalesce() if found.is_cuda else found


def reduce_sparse(p: torch.nn.Parameter, op: Op, process_set: ProcessSet, dense: torch.Tensor | None) -> None:
    """Replace p.grad by the sum or average of all ranks' sparse gradients. Waits for all ranks.

    A rank without a gradient adds nothing. If no rank has a gradient, p.grad stays as it is.

    Args:
        p: The parameter.
        op: Average or Sum.
        process_set: The ranks that take part.
        dense: The reduction, as a sparse tensor, of gradients that other ranks had dense; None if there were none.

    Raises:
        NotImplementedError: `op` is neither Average nor Sum.
    """
    indices, values = coordinates(p)
    how = SparseReduction(op, process_set, tuple(p.shape))
    all_indices, all_values = map(
        to_tensor, how.gather(to_array(indices.t().contiguous()), to_array(values.contiguous()))
    )
    if all_indices.shape[0] == 0 and p.grad is None and dense is None:
        return
    if all_indices.shape[0] == 0:  # torch adds to a gradient without rows by resizing it, if it owns its memory
        all_indices, all_values = all_indices.clone(), all_values.clone()
    if op is Average:
        all_values /= how.divisor
    found = sparse(all_indices, all_values, p)
    p.grad = found if dense is None else (found + dense).coalesce()  # each row once: see `sparse`


def coordinates(p: torch.nn.Parameter) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient's indices (1 x nnz) and its values (nnz x ...); nnz is 0 if there is no gradient."""
    grad = p.grad
    if grad is None:
        return torch.empty(1, 0, dtype=torch.int64, device=p.device), p.new_empty(0, *p.shape[1:]).detach()
    if grad.layout == torch.strided or grad.sparse_dim() != 1:  # gather(sparse_grad=True), or dense here only
        grad = grad.to_dense().to_sparse(1)  # type: ignore[call-overload,no-untyped-call,unused-ignore]
    grad = grad.coalesce()
    return grad.indices(), grad.values()
