"""Horovod's names for Keras on TensorFlow: `import hvdlite.tensorflow.keras as hvd`. The same as `hvdlite.keras`."""

from hvdlite import keras
from hvdlite.keras import *  # noqa: F403
from hvdlite.tensorflow.keras import callbacks, elastic  # type: ignore[no-redef]

__all__ = [*(name for name in keras.__all__ if name not in ("callbacks", "elastic")), "callbacks", "elastic"]
