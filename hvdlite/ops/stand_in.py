"""Stand-ins: how a rank that has joined takes part in other ranks' operations, with zeros or with no rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from hvdlite.algorithms.grouped import allreduce_all
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array, DType, is_host
from hvdlite.lanes.gpu_side import gpu_in_use, side_of
from hvdlite.lanes.workplace import Workplace


@dataclass(frozen=True)
class StandIn:
    """What a rank that has joined does instead of an operation's work. Picklable.

    Attributes:
        on_gpu: Whether the operation is one of arrays on a GPU.
    """

    on_gpu: bool

    def __call__(self, at: Workplace) -> None:
        if self.on_gpu:
            with side_of(at.host, gpu_in_use(at.host)).working() as side:
                side.end(self.take_part(side, side.gpu.xp))
        else:
            self.take_part(at, np)

    def take_part(self, at: Workplace, xp: ModuleType) -> object:
        """Do this rank's part with arrays of the module `xp`. Returns the arrays, which a GPU may still be writing."""
        raise NotImplementedError


@dataclass(frozen=True)
class Zeros(StandIn):
    """An all-reduce of zeros. Its results are dropped.

    Attributes:
        lengths: Each array's length and dtype.
        how: The arithmetic.
    """

    lengths: tuple[tuple[int, DType], ...]
    how: Reduction

    @classmethod
    def like(cls, arrays: Iterable[Array], how: Reduction) -> Zeros:
        """Return the stand-in for an all-reduce of these arrays."""
        arrays = list(arrays)
        on_gpu = any(not is_host(array) for array in arrays)
        return cls(on_gpu, tuple((array.size, array.dtype) for array in arrays), how)

    def take_part(self, at: Workplace, xp: ModuleType) -> list[Array]:
        """All-reduce zeros."""
        arrays = [xp.zeros(length, dtype) for length, dtype in self.lengths]
        allreduce_all(at.transport, at.workspace, at.place, arrays, self.how)
        return arrays
