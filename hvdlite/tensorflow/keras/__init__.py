"""Horovod's names for Keras on TensorFlow: `import hvdlite.tensorflow.keras as hvd`.

The names are those of `hvdlite.keras`; only the module `callbacks` differs.
"""

from importlib import import_module

from hvdlite import keras
from hvdlite.api.names import *  # noqa: F403  (hvdlite.keras has them; type checkers see them here)
from hvdlite.api.output import print as print  # not in __all__
from hvdlite.keras import *  # noqa: F403

callbacks = import_module("hvdlite.tensorflow.keras.callbacks")
elastic = import_module("hvdlite.tensorflow.keras.elastic")
__all__ = list(keras.__all__)
