"""Keras' own files have no state of a sharded optimizer, since one rank saves them.

model.save() raises an error before it opens the file: on one rank it cannot write the whole state, and if it waited for
other ranks, the usual `if hvd.rank() == 0: model.save(...)` would hang. save_weights() and ModelCheckpoint with
save_weights_only=True write weights alone. Keras calls methods of the model and of the optimizer, and compile() makes
optimizers around the user's. So hvdlite changes Keras' classes, once in a process. For other optimizers the methods
stay what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import keras
from keras.optimizers import Optimizer

from hvdlite.arrays import Array
from hvdlite.job import runtime
from hvdlite.sharding.slots import first_slot, slot_of


class Store(Protocol):
    """The values that a file has of one object, by the numbers of its variables."""

    def keys(self) -> Collection[str]: ...
    def __getitem__(self, key: str, /) -> Array: ...


class SavingMethods:
    """Replaces methods of Keras' models and optimizers.

    Attributes:
        own: The classes' own methods by name; empty before the first replacement.
    """

    def __init__(self) -> None:
        self.own: dict[str, Callable[..., object]] = {}

    def change(self) -> None:
        """Replace the classes' methods. Safe to call twice."""
        if self.own:
            return
        replaced: Mapping[type, tuple[Callable[..., object], ...]] = {
            keras.Model: (save,), keras.optimizers.Optimizer: (save_own_variables, load_own_variables),
        }  # fmt: skip
        for owner, functions in replaced.items():
            for function in functions:
                name = function.__name__
                self.own[name] = getattr(owner, name)
                setattr(owner, name, function)


methods = SavingMethods()
"""The replacement in this process."""


def save(
    self: keras.Model, filepath: object, *args: object, include_optimizer: bool = True, **kwargs: object
) -> object:
    """Save the model in place of keras.Model.save, unless its optimizer has a part of the state only.

    Raises:
        RuntimeError: The optimizer has a part of its state.
    """
    slot = None if self.optimizer is None else first_slot(self.optimizer.variables)
    if slot and include_optimizer:
        raise RuntimeError(
            f"rank {runtime.rank()}: model.save({str(filepath)!r}) cannot write the state of {slot.owner}, since each "
            "rank has another part of it. Nothing is written. Call hvd.save('file', model=model) on all ranks, which "
            "hvd.load reads on any number of ranks; or save weights alone: model.save(..., include_optimizer=False), "
            "model.save_weights(...), ModelCheckpoint(..., save_weights_only=True) [HVD411]"
        )
    return methods.own["save"](self, filepath, *args, include_optimizer=include_optimizer, **kwargs)


def save_own_variables(self: Optimizer, store: Store) -> None:
    """Write the optimizer's state, or nothing if it is a part only. Then Keras warns when it loads the file."""
    if first_slot(self.variables) is None:
        methods.own["save_own_variables"](self, store)


def load_own_variables(self: Optimizer, store: Store) -> None:
    """Take the state from a file; a sharded optimizer takes its parts of a file with the whole state."""
    variables = self.variables
    if first_slot(variables) is None or len(store.keys()) != len(variables):
        methods.own["load_own_variables"](self, store)
        return
    for number, variable in enumerate(variables):
        slot, value = slot_of(variable), store[str(number)][...]
        variable.assign(slot.part(value) if slot else value)
