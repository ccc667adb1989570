"""Variables of Keras and TensorFlow, told from what they can do; and arrays of one rank, given to all.

Ranks' variables are compared by name, dtype, shape, and whether they lie on a GPU. Keras numbers the names that it
invents (dense, dense_1, ...) through the life of a process, so one model may be `dense/kernel` here and
`dense_3/kernel` there, where rank 0 has built another model before. Such numbers are left out of the comparison. (For
the names of a model that one rank has loaded from a file see `matching`.)
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

NUMBERED = re.compile(r"_\d+(?=[/:_]|$)")
MEAN = re.compile(r"(.*/)?mean(:\d+)?")  # as a Normalization layer calls its own, and few others


def is_variable(found: Any) -> bool:
    return hasattr(found, "assign") and hasattr(found, "shape")  # a Keras optimizer assigns, too


def variables_of(found: Any) -> list[Any]:
    """The variables of a model, layer, module or optimizer, or those in a dict or sequence of such.

    A Keras model's weights without its metrics, which are a rank's own. Raises ValueError for a model or layer that
    has not been built, and so has no weights yet; TypeError for what has no variables.
    """
    if is_variable(found):
        return [found]
    if isinstance(found, Mapping):
        found = found.values()
    elif hasattr(found, "weights"):
        if not getattr(found, "built", True):
            raise ValueError(f"{found.name} has no weights yet: build it (or call it once) before broadcasting them")
        found = found.weights
    elif hasattr(found, "variables"):
        found = found.variables() if callable(found.variables) else found.variables
    if not isinstance(found, Iterable) or isinstance(found, (str, bytes)) or hasattr(found, "shape"):
        raise TypeError(f"{type(found).__name__} is no model, optimizer or variable")
    return [variable for each in found for variable in variables_of(each)]


def name_of(variable: Any) -> str:
    """A Keras variable's path, a framework variable's name."""
    return str(getattr(variable, "path", None) or variable.name)


def fixed_shape(variable: Any) -> tuple[int, ...]:
    """Raises ValueError where a dimension may change."""
    shape = tuple(variable.shape)
    if None in shape:
        raise ValueError(f"{name_of(variable)} has the shape {shape}: hvdlite reduces gradients of a fixed shape only")
    return tuple(map(int, shape))


def common_name(variable: Any) -> str:
    """A variable's name without the numbers that Keras counts on through the life of a process."""
    return unnumbered(name_of(variable))


def unnumbered(name: str) -> str:
    return NUMBERED.sub("", name)


def name_in_layer(name: str) -> str:
    """A variable's name with that of its own layer, which it has in a model that was loaded from a file, too."""
    return "/".join(name.split("/")[-2:])


def is_one_of(variable: Any, chosen: Iterable[Any]) -> bool:
    """Whether a variable is among the chosen. A Keras variable and the framework's variable inside it are one."""
    own = inside(variable)
    return any(each is variable or inside(each) is own for each in chosen)


def inside(variable: Any) -> Any:
    """The framework's variable in one of Keras', else the variable itself: Keras on JAX takes values out during fit."""
    value = getattr(variable, "_value", None)
    return variable if value is None else value


def have_layers_follow(variables: Iterable[Any]) -> bool | None:
    """Have Keras' Normalization layers compute with what these variables have been assigned: they do so with tensors
    made of their mean and variance once. Whether these were others, with which functions go on that have been traced;
    None, on all ranks, where the variables are of no such layer.

    A variable does not tell its layer, so all of this process are looked through, where there may be one.
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


def add_to(chosen: list[Any], found: Any) -> None:
    """Put a variable, or those of a layer, a list or a dict, among the chosen. Raises ValueError for what has none."""
    try:
        chosen += variables_of(found)
    except TypeError as error:
        raise ValueError(f"a variable or several are needed: {error}") from None
