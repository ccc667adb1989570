"""Which Keras optimizers can be cut: those that look at each element of a variable by itself.

Keras' own are known by their exact class. Any other is tried: three steps on random data, whole and in pieces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import keras
import numpy as np
from keras.optimizers import Optimizer

from hvdlite.arrays import Array
from hvdlite.gradients.tensors import Variable
from hvdlite.keras import private_api
from hvdlite.keras.sharded.slots import noting
from hvdlite.sharding.kinds import ELEMENTS_CUT, SHAPE, Kind

ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lion")
"""The names of Keras' own classes that can be cut."""
PLAIN: dict[str, object] = {
    "clipnorm": None, "global_clipnorm": None, "clipvalue": None, "loss_scale_factor": None,
    "gradient_accumulation_steps": None, "learning_rate": 0.1,
}  # fmt: skip
"""The options of the trial's optimizers. hvdlite clips whole gradients itself; a warm-up begins with the rate 0."""


def kind_of(optimizer: Optimizer) -> Kind:
    """Return how the optimizer's variables can be divided.

    Raises:
        ValueError: They cannot be divided.
    """
    name, module = type(optimizer).__name__, type(optimizer).__module__
    if module.partition(".")[0] == "keras" and name in ELEMENTWISE:
        return Kind.ELEMENTS
    try:
        with private_api.outside_of_graphs():
            return tried(optimizer)
    except Exception as error:
        raise ValueError(
            f"sharded=True cannot serve {name}: three steps on random data, to find out whether it may be cut, "
            f"failed: {type(error).__name__}: {error} [HVD412]"
        ) from error


def tried(optimizer: Optimizer) -> Kind:
    """Find out how an optimizer can be divided, by steps on random data. The optimizer itself does not change.

    Raises:
        ValueError: A variable's step depends on other variables, or its state on the variable's first value.
    """
    values = list(np.random.default_rng(0).standard_normal((2, 4, *SHAPE)).astype("float32"))  # itself, its gradients
    zeros = [0 * its for its in values]
    if not all(map(np.array_equal, first_state(optimizer, values), first_state(optimizer, zeros))):
        raise ValueError("its state begins with the weights' values, which ranks may broadcast later")
    whole = stepped(optimizer, values)
    if all((after != before[0]).all() for after, before in zip(whole, values, strict=True)):
        cut = slice(ELEMENTS_CUT), slice(ELEMENTS_CUT, None)
        with contextlib.suppress(Exception):  # of optimizers that take matrices only
            # Each alone: a norm over all variables is nearly the same in pieces.
            pieces = [stepped(optimizer, [each.reshape(4, -1)[:, part]])[0] for each in values for part in cut]
            together = [np.concatenate(pieces[first : first + 2]).reshape(SHAPE) for first in (0, 2)]
            if all(map(np.array_equal, whole, together)) and slots_follow(optimizer):
                return Kind.ELEMENTS
    if not all(map(np.array_equal, whole, [stepped(optimizer, [its])[0] for its in values])):
        raise ValueError("the step of a variable depends on other variables")
    return Kind.TENSORS


def twin_of(optimizer: Optimizer) -> Optimizer:
    """Return a new optimizer with the same options, but `PLAIN`."""
    config = optimizer.get_config()
    return type(optimizer).from_config({**config, **{name: PLAIN[name] for name in PLAIN.keys() & config.keys()}})


def stepped(optimizer: Optimizer, values: Sequence[Array]) -> list[Array]:
    """Return variables after steps of a twin of the optimizer. values: each one's value and its gradients."""
    twin, variables = twin_of(optimizer), variables_with(values)
    twin.build(variables)
    for number in range(1, len(values[0])):
        twin.apply([keras.ops.convert_to_tensor(its[number]) for its in values], variables)
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def first_state(optimizer: Optimizer, values: Sequence[Array]) -> list[Array]:
    """Return the state of a twin that has not stepped."""
    twin = twin_of(optimizer)
    twin.build(variables_with(values))
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in twin.variables]


def slots_follow(optimizer: Optimizer) -> bool:
    """Whether `build` makes all arrays of the state by `add_variable_from_reference`, which names their variable."""
    twin = twin_of(optimizer)
    before = len(twin.variables)
    with noting(twin) as noted:
        twin.build(variables_with([np.zeros((1, 64), "float32")]))
    return all(id(slot) in noted or not slot.shape for slot in twin.variables[before:])


def variables_with(values: Sequence[Array]) -> list[Variable]:
    """Return variables with these first values."""
    return [keras.Variable(its[0], name="kernel") for its in values]
