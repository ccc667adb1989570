"""Horovod's `horovod.tensorflow.keras.elastic`: the names of `hvdlite.keras.elastic`."""

from hvdlite.keras import elastic
from hvdlite.keras.elastic import *  # noqa: F403

__all__ = list(elastic.__all__)
