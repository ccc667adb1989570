"""Elastic states and callbacks under Horovod's other name for them."""

from hvdlite.keras import elastic
from hvdlite.keras.elastic import *  # noqa: F403

__all__ = list(elastic.__all__)
