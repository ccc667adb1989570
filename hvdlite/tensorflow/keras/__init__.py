"""Horovod's names for Keras on TensorFlow: `import hvdlite.tensorflow.keras as hvd`. The same as `hvdlite.keras`, but
for the callbacks that Horovod has for TensorFlow alone."""

from importlib import import_module

from hvdlite import keras
from hvdlite.api.names import *  # noqa: F403  (hvdlite.keras has them; type checkers see them here)
from hvdlite.keras import *  # noqa: F403

callbacks = import_module("hvdlite.tensorflow.keras.callbacks")
elastic = import_module("hvdlite.tensorflow.keras.elastic")
__all__ = list(keras.__all__)
