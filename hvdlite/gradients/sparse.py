"""Sparse gradients (embeddings): all ranks' row numbers and values are gathered, and added up where they are used.

Cost: each rank sends its nnz rows to all others (an all-gather). Frameworks convert tensors and divide averages in
their own arithmetic; which operations are possible, and what is gathered, is decided here for all of them.
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
        shape: The dense shape, which ranks then compare with the operation; None: ranks compare neither.
    """

    op: Op
    process_set: ProcessSet = global_process_set
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Raise NotImplementedError for another operation."""
        require_sum(self.op)

    @property
    def divisor(self) -> int:
        """What the gathered values are to be divided by."""
        return runtime.group_of(self.process_set).size if self.op is Average else 1

    def gather(
        self, rows: Array, values: Array, names: Sequence[str | None] = (None, None)
    ) -> tuple[Array, Array]:
        """All ranks' row numbers and values, not divided. Waits for all ranks.

        Args:
            rows: Row numbers, of shape (nnz,) or (nnz, sparse dimensions).
            values: The rows themselves, of shape (nnz, ...).
            names: Of the two all-gathers, equal on all ranks.
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
        """`gather`, but returns at once; the function that it returns waits for the results."""
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
    """The array in C order, on the host; on a GPU it is so already."""
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
