"""Keras' backends, and the modules that serve each: how gradients and values reach the core and come back."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, cast

import keras
import numpy as np

from hvdlite.gradients.framework import Framework

MODULES = {
    "tensorflow": "hvdlite.tensorflow_graph.framework",
    "torch": "hvdlite.keras.backend_torch",
    "jax": "hvdlite.keras.backend_jax",
}
COLLECTIVES = {"tensorflow": "hvdlite.tensorflow", "torch": "hvdlite.torch", "jax": "hvdlite.numpy"}


def name() -> str:
    """The backend that Keras runs on. Raises NotImplementedError for one that hvdlite does not serve."""
    found = str(keras.backend.backend())
    if found not in MODULES:
        raise NotImplementedError(
            f"hvdlite serves Keras on {' and '.join(MODULES)}, not on {found}: set KERAS_BACKEND before importing keras"
        )
    return found


def framework() -> Framework:
    """The backend as `gradients/` uses it."""
    return cast(Framework, importlib.import_module(MODULES[name()]))


def settle() -> None:
    """Wait until the steps that have been started are over. What they raise has been raised before, and is ignored."""
    with contextlib.suppress(Exception):
        framework().wait()


def collectives() -> Any:
    """The module with the backend's collectives."""
    return importlib.import_module(COLLECTIVES[name()])


def to_given(tensor: Any) -> Any:
    """A tensor of the backend as `collectives()` take it: an array where they are NumPy's. Raises NotImplementedError
    inside what JAX compiles."""
    if name() != "jax":
        return tensor
    if isinstance(tensor, importlib.import_module("jax").core.Tracer):
        raise NotImplementedError(
            "hvdlite's collectives on JAX take values, not those of a step that JAX compiles: call them outside of it "
            "(in a callback, say). The gradients that DistributedOptimizer reduces are no such call"
        )
    return np.asarray(tensor)
