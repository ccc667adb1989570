"""Sparse gradients (embeddings): the row numbers and values of all ranks are gathered, not reduced.

In the walk of a gradient, a sparse gradient skips plan, bucket and reducer. Each rank sends its rows to all others
(all-gathers of nnz row numbers and nnz rows), and the framework adds up equal rows. This module decides for all
frameworks which operations are possible and what is gathered. Each framework converts its tensors. Whoever calls
`gather` divides averages: `exchange`, or the framework's own collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hvdlite import ops
from hvdlite.arrays import Array
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.ops import Average, Op, Sum

ADDENDS = "sparse tensors"


@dataclass(frozen=True)
class SparseReduction:
    """A sum or average of sparse tensors over the ranks of a process set.

    Attributes:
        op: Average or Sum.
        process_set: The ranks that reduce together.
        shape: The dense shape. If given, the ranks compare shape and operation.
    """

    op: Op
    process_set: ProcessSet = global_process_set
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Raise NotImplementedError unless the operation is Average or Sum."""
        require_sum(self.op)

    @property
    def divisor(self) -> int:
        """The number by which the caller divides the gathered values."""
        return runtime.group_of(self.process_set).size if self.op is Average else 1

    def gather(self, rows: Array, values: Array, names: Sequence[str | None] = (None, None)) -> tuple[Array, Array]:
        """Gather row numbers and values. Waits for all ranks.

        Args:
            rows: This rank's row numbers, of shape (nnz,) or (nnz, sparse dimensions).
            values: This rank's rows, of shape (nnz, ...).
            names: The names of the two all-gathers, equal on all ranks.

        Returns:
            The row numbers and values of all ranks, not divided.
        """
        facts = () if self.shape is None else ops.sparse_facts(self.op, self.shape)
        all_rows, all_values = (
            ops.allgather(contiguous(part), name, self.process_set, addends=True, facts=facts)
            for part, name in zip((rows, values), names, strict=True)
        )
        return all_rows, all_values

    def start_gather(
        self, rows: Array, values: Array, names: Sequence[str | None]
    ) -> Callable[[], tuple[Array, Array]]:
        """Start to gather, with the arguments of `gather`, and return at once.

        Returns:
            A function that waits for all ranks and returns the results of `gather`.
        """
        facts = () if self.shape is None else ops.sparse_facts(self.op, self.shape)
        handles = [
            ops.allgather.start(contiguous(part), name, self.process_set, addends=True, facts=facts)
            for part, name in zip((rows, values), names, strict=True)
        ]

        def finish() -> tuple[Array, Array]:
            all_rows, all_values = (handle.wait() for handle in handles)
            return all_rows, all_values

        return finish


def contiguous(array: Array) -> Array:
    """The array in C order. An array on a GPU is in C order already."""
    return np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array


def require_sum(op: Op, what: str = ADDENDS, cure: str = "") -> None:
    """Raise NotImplementedError unless sparse tensors can be reduced by this operation.

    Args:
        op: The operation that the user chose.
        what: The tensors, in the user's words.
        cure: What the user can do instead.
    """
    if op not in (Average, Sum):
        raise NotImplementedError(f"{what} with op={op.name}: only Average and Sum are possible{cure and f'. {cure}'}")
