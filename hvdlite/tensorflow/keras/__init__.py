"""Horovod's names for Keras on TensorFlow: `import hvdlite.tensorflow.keras as hvd`. The same as `hvdlite.keras`, but
for the callbacks that Horovod has for TensorFlow alone."""

import hvdlite.tensorflow.keras.callbacks
import hvdlite.tensorflow.keras.elastic
from hvdlite import keras
from hvdlite.keras import *  # noqa: F403

callbacks, elastic = hvdlite.tensorflow.keras.callbacks, hvdlite.tensorflow.keras.elastic
__all__ = list(keras.__all__)
