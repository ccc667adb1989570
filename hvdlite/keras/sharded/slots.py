"""The slots of a sharded Keras optimizer: whole values of its state for checkpoints, and this rank's parts of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import keras
import numpy as np
from keras.optimizers import Optimizer

from hvdlite import ops
from hvdlite.arrays import Array
from hvdlite.gradients.settings import Settings
from hvdlite.gradients.tensors import Variable
from hvdlite.gradients.variables import fixed_shape, inside, name_of
from hvdlite.job import runtime
from hvdlite.keras import private_api
from hvdlite.keras.sharded.stand_ins import Share
from hvdlite.ops.objects import allgather_object
from hvdlite.sharding.slots import ATTRIBUTE

ROOT = 0
"""The rank that writes checkpoints."""


@contextmanager
def noting(optimizer: Optimizer) -> Iterator[dict[int, Variable]]:
    """Note for which variable build() makes each slot by `add_variable_from_reference`, by the slot's id()."""
    noted: dict[int, Variable] = {}
    add = private_api.own_method(optimizer, "add_variable_from_reference")

    def adding(reference_variable: Variable, *args: object, **kwargs: object) -> object:
        slot = add(reference_variable, *args, **kwargs)
        noted[id(slot)] = reference_variable
        return slot

    optimizer.__dict__["add_variable_from_reference"] = adding
    try:
        yield noted
    finally:
        del optimizer.__dict__["add_variable_from_reference"]


@dataclass(frozen=True)
class StateSlot:
    """One variable of a sharded optimizer's state.

    Attributes:
        variable: The variable: this rank's part.
        share: The model's variable that the state belongs to; None if that is not known.
        settings: The user's settings.
        owner: The optimizer in messages.
        number: The slot's place in the optimizer's state, the same on all ranks.
    """

    variable: Variable
    share: Share | None
    settings: Settings
    owner: str
    number: int

    @property
    def value(self) -> Array:
        """A copy of the variable's value on the host."""
        return np.array(keras.ops.convert_to_numpy(self.variable))

    def whole(self) -> Array | None:
        """Return the whole value on rank 0, and None on others. Waits for all ranks of the process set.

        Raises:
            ValueError: Ranks have different values, and the state's variable is not known; on every rank.
        """
        process_set, name = self.settings.process_set, f"hvd.save: slot {self.number}"
        if ROOT not in runtime.group_of(process_set).ranks:
            return self.value  # rank 0 writes its own, and this is not used
        if self.share is None:
            return self.owners_value(name)
        pieces = ops.gather(self.value.reshape(-1), ROOT, name, process_set)
        return None if pieces is None else pieces.reshape(fixed_shape(self.share.whole))

    def owners_value(self, name: str) -> Array:
        """Return the value of the rank that has one, of a shape that other ranks' stand-ins do not have."""
        everyone: list[Array] = allgather_object(self.value, process_set=self.settings.process_set, name=name)
        found = [value for value in everyone if value.size] or everyone
        if not all(np.array_equal(value, found[0], equal_nan=value.dtype.kind == "f") for value in found):
            raise ValueError(
                f"hvd.save: {name_of(self.variable)} of {self.owner} differs between ranks, and hvdlite cannot know "
                "which rank has the right value: have build() make it by add_variable_from_reference"
            )
        return found[0]

    def part(self, whole: Array) -> Array:
        """Return this rank's part of a whole value.

        Raises:
            ValueError: The value does not have the shape of the model's variable.
        """
        own = fixed_shape(self.variable)
        if self.share is None:
            return whole if own == whole.shape or 0 not in own else np.zeros(own, whole.dtype)
        if whole.shape != fixed_shape(self.share.whole):
            shapes = f"{list(whole.shape)}, but the variable has {list(self.share.whole.shape)}"
            raise ValueError(f"{name_of(self.variable)} of {self.owner} is given a value of the shape {shapes}")
        part: Array = whole.reshape(-1)[self.share.start : self.share.stop].reshape(own)
        return part


def mark(
    optimizer: Optimizer, first: int, noted: Mapping[int, Variable], divided: Mapping[int, Share],
    settings: Settings, owner: str,
) -> None:  # fmt: skip
    """Mark the variables of an optimizer's state with their slots.

    Args:
        optimizer: The optimizer, which has just been built.
        first: The number of variables that it had before.
        noted: What `noting` has noted.
        divided: By the id() of a stand-in its share. The state of other variables, the local ones, stays a rank's own.
        settings: The user's settings.
        owner: The optimizer in messages.
    """
    for number, variable in enumerate(optimizer.variables):
        reference = noted.get(id(variable))
        share = None if reference is None else divided.get(id(inside(reference)))
        if number >= first and (share is not None or reference is None):
            vars(variable)[ATTRIBUTE] = StateSlot(variable, share, settings, owner, number)
