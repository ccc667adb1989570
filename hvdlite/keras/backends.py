"""The backends of Keras, and the modules that serve each of them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import cast

import keras
import numpy as np

from hvdlite.gradients.framework import Framework
from hvdlite.gradients.tensors import Gradient, Tensor

MODULES = {
    "tensorflow": "hvdlite.tensorflow_graph.framework",
    "torch": "hvdlite.keras.backend_torch",
    "jax": "hvdlite.keras.backend_jax",
}
SHARDING = {"tensorflow": "hvdlite.keras.sharded.on_tensorflow", "torch": "hvdlite.keras.sharded.on_torch"}
STRATEGIES = {"tensorflow": "hvdlite.keras.strategy.on_tensorflow", "torch": "hvdlite.keras.strategy.on_torch"}
COLLECTIVES = {"tensorflow": "hvdlite.tensorflow", "torch": "hvdlite.torch", "jax": "hvdlite.numpy"}


def name() -> str:
    """Return the name of Keras' backend.

    Raises:
        NotImplementedError: hvdlite does not serve this backend.
    """
    found = str(keras.backend.backend())
    if found not in MODULES:
        raise NotImplementedError(
            f"hvdlite serves Keras on {' and '.join(MODULES)}, not on {found}: set KERAS_BACKEND before importing keras"
        )
    return found


def framework() -> Framework:
    """Return the backend as `gradients/` uses it."""
    return cast(Framework, importlib.import_module(MODULES[name()]))


def noted(note: Callable[[float], None], value: Tensor, gradients: Sequence[Gradient]) -> list[Gradient]:
    """Call `note` with a number before the round of these gradients; in a compiled step, each time that it runs.

    Args:
        note: The function. It must not wait for other ranks.
        value: The number, a tensor of the backend.
        gradients: The gradients.

    Returns:
        The gradients to reduce.
    """
    call = importlib.import_module(MODULES[name()]).noted
    return cast(list[Gradient], call(note, value, gradients))


def settle() -> None:
    """Wait until all steps that have been started are over. Ignores their errors, which Keras has raised before."""
    with contextlib.suppress(Exception):
        framework().wait()


def sharding() -> ModuleType:
    """Return the module with the backend's part of sharded optimizers."""
    return importlib.import_module(SHARDING[name()])


def strategies() -> ModuleType:
    """Return the module with the backend's part of strategies."""
    return importlib.import_module(STRATEGIES[name()])


def collectives() -> ModuleType:
    """Return the module with the backend's collectives."""
    return importlib.import_module(COLLECTIVES[name()])


def to_given(tensor: Tensor) -> Tensor:
    """Return a tensor of the backend as the functions of `collectives()` take it: on JAX a NumPy array.

    Raises:
        NotImplementedError: JAX is compiling the call.
    """
    if name() != "jax":
        return tensor
    if isinstance(tensor, importlib.import_module("jax").core.Tracer):
        raise NotImplementedError(
            "hvdlite's collectives on JAX take values, not the tracers of a function that JAX compiles: call the "
            "collective outside of it (in a callback, say). DistributedOptimizer needs no such call: it reduces "
            "gradients inside compiled steps"
        )
    return np.asarray(tensor)
