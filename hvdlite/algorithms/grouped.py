"""Grouped all-reduce: several arrays in one operation. Short arrays of one dtype are copied into one buffer.

    [a] [bb] [c]  ->  [abbc]  ->  one all-reduce  ->  [a] [bb] [c]

Price: a copy in and out for each array. Without grouping, each array costs an all-reduce, which takes at least 15 us on
one host and 100 us over a network (MEASURED.md, "Details").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdlite.algorithms import Place, allreduce
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array, module, split_rows
from hvdlite.memory.workspace import Workspace, staging_bytes
from hvdlite.transports import Transport

SHORT_BYTES = 128 * 1024


def allreduce_all(
    transport: Transport, workspace: Workspace, place: Place, arrays: Sequence[Array], reduction: Reduction
) -> None:
    """Reduce several arrays in place over the transport's ranks. Adasum is not element-wise, so it takes one at a time.

    arrays: contiguous and all different. Their dtypes and sizes are equal on all ranks.
    """
    flat = [array.reshape(-1) for array in arrays]
    apart = reduction.operation == "adasum" or transport.size == 1
    limit = 0 if apart else staging_bytes(place.hosts)
    for indices in batches(flat, limit):
        batch = [flat[index] for index in indices]
        if len(batch) == 1:
            allreduce(transport, workspace, place, batch[0], reduction)
            continue
        buffer = module(batch[0]).empty(sum(array.size for array in batch), batch[0].dtype)
        parts = split_rows(buffer, [array.size for array in batch])
        for part, array in zip(parts, batch, strict=True):
            part[...] = array
        allreduce(transport, workspace, place, buffer, reduction)
        for part, array in zip(parts, batch, strict=True):
            array[...] = part


def batches(arrays: Sequence[Array], limit: int) -> list[list[int]]:
    """The indices of the arrays in each batch of at most `limit` bytes. They depend on dtypes and sizes alone."""
    found: list[list[int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}  # by dtype: the batch with room, and its bytes
    for index, array in enumerate(arrays):
        short = array.nbytes <= min(SHORT_BYTES, limit)
        batch, nbytes = filling.get(array.dtype, ([], limit + 1))
        if not short or nbytes + array.nbytes > limit:
            batch, nbytes = [], 0
            found.append(batch)
        batch.append(index)
        if short:
            filling[array.dtype] = batch, nbytes + array.nbytes
    return found
