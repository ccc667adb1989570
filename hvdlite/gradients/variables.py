"""Variables of Keras and TensorFlow: how hvdlite finds them in a model, and what it calls them.

`lists` describes variables for a plan by name, dtype, shape and device, and ranks compare these descriptions. Keras
numbers the names that it invents (dense, dense_1, ...) through the life of a process. If rank 0 has built another model
before, its `dense_3/kernel` is `dense/kernel` on other ranks. So the comparison leaves such numbers out. No framework
is imported here: a variable is known by its methods.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import numpy as np

from hvdlite.gradients.tensors import Variable

NUMBERED = re.compile(r"_\d+(?=[/:_]|$)")
MEAN = re.compile(r"(.*/)?mean(:\d+)?")  # a Normalization layer's mean, and few other variables

PARTS = "_hvdlite_parts"
"""An attribute of models with other variables on other ranks."""


def is_variable(found: object) -> TypeGuard[Variable]:
    return hasattr(found, "assign") and hasattr(found, "shape")  # a Keras optimizer assigns, too


def variables_of(found: object) -> list[Variable]:
    """Find the variables of a model, layer, module or optimizer, or of a dict or sequence of these.

    A Keras model's metrics are a rank's own, and are left out.

    Raises:
        ValueError: A model or layer has no weights yet.
        TypeError: `found` is none of these.
        NotImplementedError: `found` is a model in parts.
    """
    refuse_parts(found)
    if is_variable(found):
        return [found]
    members: object = found
    if isinstance(found, Mapping):
        members = found.values()
    elif hasattr(found, "weights"):
        if not getattr(found, "built", True):
            name = getattr(found, "name", type(found).__name__)
            raise ValueError(f"{name} has no weights yet: build it (or call it once) before broadcasting them [HVD316]")
        members = found.weights
    elif hasattr(found, "variables"):
        members = found.variables() if callable(found.variables) else found.variables
    if not isinstance(members, Iterable) or isinstance(members, (str, bytes)) or hasattr(members, "shape"):
        raise TypeError(f"{type(members).__name__} is no model, optimizer or variable")
    return [variable for each in members for variable in variables_of(each)]


def refuse_parts(found: object) -> None:
    """Refuse a model that has other variables on other ranks: equal names and shapes would be taken for one variable.

    Raises:
        NotImplementedError: `found` is a `hvdlite.keras.Chain`.
    """
    if getattr(found, PARTS, False):
        raise NotImplementedError(
            "hvd.Chain has other weights on each rank, so no rank can give its weights to all. The chain itself gives "
            "the ranks of a part the same weights. To save or broadcast, take the rank's own parts: model.parts"
        )


def name_of(variable: Variable) -> str:
    """A Keras variable's path; another variable's name."""
    return str(getattr(variable, "path", None) or variable.name)


def fixed_shape(variable: Variable) -> tuple[int, ...]:
    """A variable's shape. Raises ValueError if a dimension is not fixed."""
    shape = tuple(variable.shape)
    if None in shape:
        raise ValueError(f"{name_of(variable)} has the shape {shape}: hvdlite reduces gradients of a fixed shape only")
    return tuple(map(int, shape))


def common_name(variable: Variable) -> str:
    """A variable's name without the numbers that Keras counts through the life of a process."""
    return unnumbered(name_of(variable))


def unnumbered(name: str) -> str:
    return NUMBERED.sub("", name)


def name_in_layer(name: str) -> str:
    """The last two parts of a variable's name: its layer and its own name, also in a model loaded from a file."""
    return "/".join(name.split("/")[-2:])


def is_one_of(variable: object, chosen: Iterable[object]) -> bool:
    """Whether a variable is among the chosen. A Keras variable counts as the framework's variable inside it."""
    own = inside(variable)
    return any(each is variable or inside(each) is own for each in chosen)


def inside(variable: object) -> Any:
    """The framework's variable inside a Keras variable; else the variable itself.

    Keras on JAX takes the values out of variables during fit. Then this is the Keras variable.
    """
    value = getattr(variable, "_value", None)
    return variable if value is None else value


def have_layers_follow(variables: Iterable[Variable]) -> bool | None:
    """Have Keras' Normalization layers use the new values of these variables.

    A Normalization layer makes tensors of its mean and variance once, and computes with these. A variable does not know
    its layer, so this looks through all layers of the process, if any variable may belong to one.

    Returns:
        Whether the values differ from the layers' tensors, which traced functions go on using. None, on all ranks, if
        no variable belongs to such a layer.
    """
    keras, means = sys.modules.get("keras"), [each for each in variables if MEAN.fullmatch(name_of(each))]
    if keras is None or not means:
        return None
    kind, changed = keras.layers.Normalization, False
    for layer in [found for found in gc.get_objects() if issubclass(type(found), kind)]:
        if hasattr(layer, "adapt_mean") and is_one_of(layer.adapt_mean, means):
            before = [np.array(keras.ops.convert_to_numpy(each)) for each in (layer.mean, layer.variance)]
            layer.finalize_state()
            after = [keras.ops.convert_to_numpy(each) for each in (layer.mean, layer.variance)]
            changed |= not all(map(np.array_equal, before, after))
    return changed


def add_to(chosen: list[Variable], found: object) -> None:
    """Add a variable, or those of a layer, list or dict, to a list in place. Raises ValueError if there are none."""
    try:
        chosen += variables_of(found)
    except TypeError as error:
        raise ValueError(f"a variable, or several, must be given: {error}") from None
