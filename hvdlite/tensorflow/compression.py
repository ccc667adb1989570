"""Horovod's `horovod.tensorflow.compression`."""

from hvdlite.tensorflow_graph.compression import Compression as Compression
