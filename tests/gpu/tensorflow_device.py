"""Runs the TensorFlow checks of tests/parallel on a GPU, or through hvdlite's GPU code on a machine without one."""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf
from keras.src.trainers.trainer import Trainer


def install(where: str) -> None:
    """Choose the device. where: 'gpu' or 'pretend'.

    On a 'gpu', Keras must not compile steps with XLA, because ranks cannot communicate there. With 'pretend', TensorFlow
    computes on the CPU, and hvdlite handles its tensors as memory of the pretend GPU.
    """
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
        return (
            cpu
            if inputs and {tf.as_dtype(each) for each in (*(t.dtype for t in inputs), *dtypes)} <= gpu.DTYPES
            else None
        )

    def on_gpu(tensor: tf.Tensor) -> bool:
        return tensor.dtype in gpu.DTYPES

    gpu.available, gpu.is_gpu = (lambda: True), (lambda device: True)  # type: ignore[assignment]
    gpu.on_gpu, gpu.device_for = on_gpu, device_for
