"""Loading of saved models, with a distributed optimizer."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence

import keras

from hvdlite.keras.optimizer import DistributedOptimizer
from hvdlite.lanes.calls import calling


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, object] | None = None,
    compression: object = None,
    legacy_opts: bool = False,
) -> keras.Model:
    """Load a model by `keras.models.load_model`, and make its optimizer distributed. Collective.

    A saved model holds the plain optimizer and its state, also if the optimizer was distributed. So plain Keras can
    load the file, too. Every rank reads the file.

    Args:
        filepath: A file that `model.save` has written.
        custom_optimizers: The user's own optimizer classes that the file names.
        custom_objects: Other classes and functions that the file names, by name.
        compression: As for `DistributedOptimizer`, lossy compressors too.
        legacy_opts: Must be False: Keras 3 has no legacy optimizers.

    Returns:
        The model. A model that was saved without an optimizer has none.

    Raises:
        ValueError: `legacy_opts` is true, or Keras cannot load the file.
        MismatchError: The ranks' optimizers differ; on every rank.
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
