"""What Keras' three backends do differently: how gradients and values cross into the core and back."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, cast

import keras
import numpy as np

from hvdlite.border import Border

MODULES = {"tensorflow": "hvdlite.tensorflow._gradients", "torch": "hvdlite.keras._torch", "jax": "hvdlite.keras._jax"}
COLLECTIVES = {"tensorflow": "hvdlite.tensorflow", "torch": "hvdlite.torch", "jax": "hvdlite.numpy"}


def name() -> str:
    """The backend that Keras runs on. Raises NotImplementedError for one that hvdlite does not serve."""
    found = str(keras.backend.backend())
    if found not in MODULES:
        raise NotImplementedError(
            f"hvdlite serves Keras on {' and '.join(MODULES)}, not on {found}: set KERAS_BACKEND before importing keras"
        )
    return found


def border() -> Border:
    """How the backend's gradients cross."""
    return cast(Border, importlib.import_module(MODULES[name()]))


def settle() -> None:
    """Wait until steps that have been started are over, where what they raise has been told."""
    with contextlib.suppress(Exception):
        border().wait()


def collectives() -> Any:
    """The module with the backend's collectives."""
    return importlib.import_module(COLLECTIVES[name()])


def to_given(tensor: Any) -> Any:
    """A tensor of the backend as `collectives()` take it: an array where they are NumPy's."""
    return np.asarray(tensor) if name() == "jax" else tensor
