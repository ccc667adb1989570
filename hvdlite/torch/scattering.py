"""Reduce-scatter, gather and scatter of torch tensors; the first differentiable, as Horovod's: gradients are those of
the sum of the ranks' losses, times the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite import ops
from hvdlite.gradients.compression import compressor
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.ops import Average, Op, op_of
from hvdlite.ops.handles import remember
from hvdlite.torch.compression import Compression
from hvdlite.torch.differentiable import differentiable
from hvdlite.torch.movement import allgather, grouped_allgather, tensor_of_splits
from hvdlite.torch.tensors import readable, to_tensor

Everyone = global_process_set


# reduce-scatter

def reducescatter_async(
    tensor: torch.Tensor, name: str | None = None, op: Op | int = Average, process_set: ProcessSet = Everyone,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:
    """This rank's rows of the reduction, asynchronously; returns a handle."""
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)
    return remember(ops.reducescatter.start(readable(tensor), *how), to_tensor)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, op: Op | int = Average,
    process_set: ProcessSet = Everyone, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:
    """This rank's rows of several reductions as one operation, asynchronously; returns a handle for a tuple."""
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)
    handle = ops.grouped_reducescatter.start([readable(tensor) for tensor in tensors], *how)
    return remember(handle, lambda arrays: tuple(map(to_tensor, arrays)))


def reducescatter(
    tensor: torch.Tensor, name: str | None = None, compression: Any = Compression.none, op: Op | int = Average,
    process_set: ProcessSet = Everyone, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows of the reduction of all ranks' tensors, as a new tensor; differentiable. Average or Sum.

    The rows are dealt out in rank order, as evenly as possible, the first ranks one more. Same shape on every rank.
    """
    small, context = compressor(compression).compress(tensor)
    factor = ops.amplification(op_of(op), prescale_factor, postscale_factor, process_set)
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)
    (result,) = differentiable(
        lambda given: (to_tensor(ops.reducescatter(readable(given), *how)),),
        lambda grad: [allgather(grad * factor, None, process_set)], [small],
    )  # fmt: skip
    return compression.decompress(result, context)  # type: ignore[no-any-return]


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor], name: str | None = None, compression: Any = Compression.none,
    op: Op | int = Average, process_set: ProcessSet = Everyone, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` of several tensors, as many on every rank, as one; differentiable. Waits for all ranks."""
    small = [compressor(compression).compress(tensor) for tensor in tensors]
    factor = ops.amplification(op_of(op), prescale_factor, postscale_factor, process_set)
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)

    def make(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(to_tensor, ops.grouped_reducescatter([readable(tensor) for tensor in given], *how)))

    def back(*grads: torch.Tensor) -> Sequence[torch.Tensor]:
        return grouped_allgather([grad * factor for grad in grads], None, process_set)

    results = differentiable(make, back, [tensor for tensor, _ in small])
    return [compression.decompress(t, context) for t, (_, context) in zip(results, small, strict=True)]


# to and from a root

def gather(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = Everyone
) -> torch.Tensor | None:
    """All ranks' tensors concatenated in rank order along dimension 0 (which may differ) at root_rank (a global rank);
    None elsewhere. Waits for all ranks. Raises MismatchError on every rank where dtypes or other dimensions differ."""
    array = ops.gather(readable(tensor), root_rank, name, process_set)
    return None if array is None else to_tensor(array)


def gather_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = Everyone
) -> int:
    """`gather` without waiting. Asynchronous: returns a number, and `synchronize` gives the result."""
    handle = ops.gather.start(readable(tensor), root_rank, name, process_set)
    return remember(handle, lambda array: None if array is None else to_tensor(array))


def scatter(
    tensor: torch.Tensor | None, root_rank: int, splits: Any = None, name: str | None = None,
    process_set: ProcessSet = Everyone,
) -> torch.Tensor:
    """This rank's rows of root_rank's tensor: splits[0] for rank 0, ...; without splits as evenly as possible.

    Elsewhere than at the root, tensor and splits are ignored and may be None.
    """
    array = None if tensor is None else readable(tensor)
    counts = None if splits is None else tensor_of_splits("scatter", splits).cpu().numpy()
    return to_tensor(ops.scatter(array, root_rank, counts, name, process_set))


def scatter_async(
    tensor: torch.Tensor | None, root_rank: int, splits: Any = None, name: str | None = None,
    process_set: ProcessSet = Everyone,
) -> int:
    """`scatter` without waiting. Asynchronous: returns a number, and `synchronize` gives the result."""
    array = None if tensor is None else readable(tensor)
    counts = None if splits is None else tensor_of_splits("scatter", splits).cpu().numpy()
    return remember(ops.scatter.start(array, root_rank, counts, name, process_set), to_tensor)


