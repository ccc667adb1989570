"""Has the TensorFlow checks of tests/parallel run through everything of ours that is for GPUs, where there is none."""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf
from keras.src.trainers.trainer import Trainer


def install(where: str) -> None:
    """where: 'gpu', where TensorFlow puts its tensors anyway, and Keras would compile steps with XLA, in which ranks
    cannot communicate, unless it is told not to; or 'pretend': what TensorFlow computes on the CPU is taken for memory
    of the GPU that CuPy's stand-in knows."""
    if where == "pretend":
        pretend()
    else:
        Trainer._resolve_auto_jit_compile = lambda self: False


def pretend() -> None:
    cupy = importlib.import_module("cupy")
    assert hasattr(cupy, "LOG"), "this is a real CuPy"
    from hvdlite.tensorflow_graph import gpu

    cpu = tf.config.list_logical_devices("CPU")[0].name

    def device_for(inputs: Any, dtypes: Any) -> str | None:
        return cpu if inputs and {tf.as_dtype(each) for each in (*(t.dtype for t in inputs), *dtypes)} <= gpu.DTYPES else None

    def on_gpu(tensor: tf.Tensor) -> bool:
        return tensor.dtype in gpu.DTYPES

    gpu.available, gpu.is_gpu = (lambda: True), (lambda device: True)
    gpu.on_gpu, gpu.device_for = on_gpu, device_for
