"""Reduce-scatter, gather and scatter of torch tensors.

`reducescatter` and `grouped_reducescatter` are differentiable, as in Horovod: the gradients are those of the sum of the
ranks' losses, times the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite import ops
from hvdlite.gradients.compression import Compressor, compressor
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.ops import Average, Op, op_of
from hvdlite.ops.handles import remember
from hvdlite.torch.compression import Compression
from hvdlite.torch.differentiable import differentiable
from hvdlite.torch.movement import Splits, allgather, grouped_allgather, tensor_of_splits
from hvdlite.torch.tensors import readable, to_tensor

Everyone = global_process_set


# reduce-scatter


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op | int = Average,
    process_set: ProcessSet = Everyone,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start `reducescatter`. Asynchronous: waits for no rank. Not differentiable.

    Args:
        tensor: The tensor, as for `reducescatter`. It must not change before `synchronize(handle)`.
        name: Ranks match calls by name, as for `allreduce`.
        op: hvd.Average or Sum.
        process_set: The ranks that take part.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        A handle: `synchronize(handle)` waits, and returns this rank's rows. It raises the errors of `reducescatter`.
    """
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)
    return remember(ops.reducescatter.start(readable(tensor), *how), to_tensor)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Op | int = Average,
    process_set: ProcessSet = Everyone,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start `grouped_reducescatter`. Asynchronous: waits for no rank. Not differentiable.

    Args:
        tensors: The tensors, as for `grouped_reducescatter`. They must not change before `synchronize(handle)`.
        name: Ranks match calls by name, as for `allreduce`.
        op: hvd.Average or Sum.
        process_set: The ranks that take part.
        prescale_factor: Multiplies the tensors before the reduction.
        postscale_factor: Multiplies the results.

    Returns:
        A handle: `synchronize(handle)` waits, and returns a tuple of this rank's rows of each tensor. It raises the
        errors of `grouped_reducescatter`.
    """
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)
    handle = ops.grouped_reducescatter.start([readable(tensor) for tensor in tensors], *how)
    return remember(handle, lambda arrays: tuple(map(to_tensor, arrays)))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | int = Average,
    process_set: ProcessSet = Everyone,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce all ranks' tensors, and give each rank a part of the rows. Differentiable.

    Waits for all ranks of the process set. The rows are dealt out in rank order, as evenly as possible; the first ranks
    may get one row more.

    Args:
        tensor: The tensor, of one dimension at least, of the same shape and dtype on every rank.
        name: Ranks match calls by name, as for `allreduce`.
        compression: The dtype in which the tensor travels, as for `allreduce`.
        op: hvd.Average or Sum.
        process_set: The ranks that take part.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        This rank's rows of the reduction, as a new tensor.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        ValueError: The tensor has no rows, or another argument cannot be right.
        HvdliteError: `op` is neither Average nor Sum.
    """
    small, context = compressor(compression).compress(tensor)
    factor = ops.amplification(op_of(op), prescale_factor, postscale_factor, process_set)
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)
    (result,) = differentiable(
        lambda given: (to_tensor(ops.reducescatter(readable(given), *how)),),
        lambda grad: [allgather(grad * factor, None, process_set)], [small],
    )  # fmt: skip
    return compression.decompress(result, context)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | int = Average,
    process_set: ProcessSet = Everyone,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Do `reducescatter` for several tensors as one operation. Differentiable. Waits for all ranks of the process set.

    Args:
        tensors: The tensors, as many on every rank, each as for `reducescatter`.
        name: Ranks match calls by name, as for `allreduce`.
        compression: The dtype in which the tensors travel, as for `allreduce`.
        op: hvd.Average or Sum.
        process_set: The ranks that take part.
        prescale_factor: Multiplies the tensors before the reduction.
        postscale_factor: Multiplies the results.

    Returns:
        This rank's rows of each reduction, as new tensors.

    Raises:
        MismatchError: The ranks' arguments differ, or their numbers of tensors; on every rank.
        ValueError: A tensor has no rows, or another argument cannot be right.
        HvdliteError: `op` is neither Average nor Sum.
    """
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
    """Concatenate all ranks' tensors on one rank, in rank order along dimension 0. Not differentiable.

    Waits for all ranks of the process set.

    Args:
        tensor: The tensor, of the same dtype on every rank. Only dimension 0 may differ; it may be 0.
        root_rank: The global rank that gets the result.
        name: Ranks match calls by name, as for `allreduce`.
        process_set: The ranks that take part.

    Returns:
        The concatenation, as a new tensor, on root_rank; None on other ranks.

    Raises:
        MismatchError: Dtypes, other dimensions or roots differ between ranks; on every rank.
        ValueError: root_rank is not a member of the process set, or the tensor cannot be communicated.
    """
    array = ops.gather(readable(tensor), root_rank, name, process_set)
    return None if array is None else to_tensor(array)


def gather_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = Everyone
) -> int:
    """Start `gather`. Asynchronous: waits for no rank.

    Args:
        tensor: The tensor, as for `gather`. It must not change before `synchronize(handle)`.
        root_rank: The global rank that gets the result.
        name: Ranks match calls by name, as for `allreduce`.
        process_set: The ranks that take part.

    Returns:
        A handle: `synchronize(handle)` waits, and returns the result of `gather`. It raises the errors of `gather`.
    """
    handle = ops.gather.start(readable(tensor), root_rank, name, process_set)
    return remember(handle, lambda array: None if array is None else to_tensor(array))


def scatter(
    tensor: torch.Tensor | None,
    root_rank: int,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = Everyone,
) -> torch.Tensor:
    """Give each rank its rows of root_rank's tensor. Not differentiable. Waits for all ranks of the process set.

    Args:
        tensor: On root_rank, the tensor, of one dimension at least. Ignored on other ranks.
        root_rank: The global rank whose tensor is taken.
        splits: On root_rank, how many rows each rank gets, in rank order; None: as evenly as possible. Ignored on
            other ranks.
        name: Ranks match calls by name, as for `allreduce`.
        process_set: The ranks that take part.

    Returns:
        This rank's rows, as a new tensor.

    Raises:
        MismatchError: The ranks' roots differ; on every rank.
        ValueError: The splits do not fit the tensor, or root_rank is not a member of the process set.
        TypeError: `splits` is neither a tensor nor a list of whole numbers.
    """
    array = None if tensor is None else readable(tensor)
    counts = None if splits is None else tensor_of_splits("scatter", splits).cpu().numpy()
    return to_tensor(ops.scatter(array, root_rank, counts, name, process_set))


def scatter_async(
    tensor: torch.Tensor | None,
    root_rank: int,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = Everyone,
) -> int:
    """Start `scatter`. Asynchronous: waits for no rank.

    Args:
        tensor: The tensor, as for `scatter`. It must not change before `synchronize(handle)`.
        root_rank: The global rank whose tensor is taken.
        splits: How many rows each rank gets, as for `scatter`.
        name: Ranks match calls by name, as for `allreduce`.
        process_set: The ranks that take part.

    Returns:
        A handle: `synchronize(handle)` waits, and returns this rank's rows. It raises the errors of `scatter`.
    """
    array = None if tensor is None else readable(tensor)
    counts = None if splits is None else tensor_of_splits("scatter", splits).cpu().numpy()
    return remember(ops.scatter.start(array, root_rank, counts, name, process_set), to_tensor)
