"""Loading models so that they go on training on all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvdlite.keras.optimizer import DistributedOptimizer
from hvdlite.lanes.calls import calling


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
) -> Any:
    """`keras.models.load_model`, and the model's optimizer comes back distributed, its state restored.

    A model saved while its optimizer was distributed holds the plain optimizer: it loads with or without hvdlite.
    custom_optimizers: optimizer classes of your own. compression: as for DistributedOptimizer. Collective. Raises
    ValueError for legacy_opts, since Keras 3 has no legacy optimizers.
    """
    if legacy_opts:
        raise ValueError("Keras 3 has no legacy optimizers: legacy_opts must be False")
    known = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()} | dict(custom_objects or {})
    try:
        model = keras.models.load_model(filepath, custom_objects=known)
    except ValueError as error:
        if "optimizer" in str(error) and any(map(inspect.isfunction, known.values())):
            error.add_note("hvdlite: an optimizer's custom object is its class itself, which load_model then attaches")
        raise
    if getattr(model, "optimizer", None) is not None:
        with calling(f"hvd.load_model({str(filepath)!r})"):
            DistributedOptimizer(model.optimizer, compression=compression)
    return model
