"""Stand-ins: the variables that a sharded optimizer is built for, in place of the model's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

import keras
import numpy as np

from hvdlite.gradients.tensors import Tensor, Variable
from hvdlite.gradients.variables import fixed_shape, name_of


class StandIn(keras.Variable):  # type: ignore[misc]
    """A variable in place of one that this rank owns in part, or not at all. It has the same name, path and dtype.

    Attributes:
        whole: The model's variable.
    """

    def __init__(self, whole: Variable, shape: tuple[int, ...]) -> None:
        """
        Args:
            whole: The model's variable.
            shape: The shape of the stand-in, which begins with zeros.
        """
        self.whole = whole
        super().__init__(
            "zeros", shape=shape, dtype=keras.backend.standardize_dtype(whole.dtype), trainable=False,
            name=re.sub("[/:]", "_", whole.name),
        )  # fmt: skip

    @property
    def path(self) -> str:
        """The path of the model's variable."""
        return name_of(self.whole)

    @path.setter
    def path(self, path: str) -> None:
        """Do nothing: Keras 3.6 gives each variable a path of its own here."""


@dataclass(frozen=True, eq=False)
class Share:
    """One variable of the model, and what this rank steps in its place.

    Attributes:
        whole: The model's variable.
        stand_in: `whole` itself, or a `StandIn`.
        start: The first element that this rank owns.
        stop: The element after the last one.
    """

    whole: Variable
    stand_in: Variable
    start: int
    stop: int

    @classmethod
    def of(cls, variable: Variable, start: int, stop: int) -> Share:
        """Make the stand-in for the elements of a variable that this rank owns."""
        shape = fixed_shape(variable)
        if (start, stop) == (0, prod(shape)):
            return cls(variable, variable, start, stop)
        # Optimizers may look at the number of dimensions of a variable that is not cut.
        own = (stop - start,) if start < stop else (0,) * max(len(shape), 1)
        return cls(variable, StandIn(variable, own), start, stop)

    @property
    def is_whole(self) -> bool:
        """Whether this rank owns the whole variable."""
        return self.stand_in is self.whole

    @property
    def is_empty(self) -> bool:
        """Whether this rank owns nothing of it."""
        return not self.is_whole and self.start == self.stop

    def piece_of(self, tensor: Tensor) -> Tensor:
        """Return this rank's elements of a tensor of the variable's shape, in the stand-in's shape."""
        if self.is_whole:
            return tensor
        row = keras.ops.reshape(tensor, (-1,))[self.start : self.stop]
        return keras.ops.reshape(row, self.stand_in.shape)  # type: ignore[no-any-return]

    def take(self) -> None:
        """Give the stand-in the present values of this rank's piece."""
        if not self.is_whole and not self.is_empty:
            self.stand_in.assign(self.piece_of(keras.ops.convert_to_tensor(self.whole)))


def itemsize(variable: Variable) -> int:
    """Return the bytes of one element of a variable."""
    return int(np.dtype(keras.backend.standardize_dtype(variable.dtype)).itemsize)
