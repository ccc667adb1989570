"""The TensorFlow adapter's decisions about GPUs, with stand-ins for TensorFlow's answers.

The transfer of tensors is tested on ranks: tests/gpu/tensorflow_device.py.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from hvdlite.system.user_warnings import say_once  # noqa: E402
from hvdlite.tensorflow_graph import gpu  # noqa: E402
from tests.pretend import cupy  # noqa: E402

GPU, OTHER, CPU = (f"/job:localhost/replica:0/task:0/device:{name}" for name in ("GPU:0", "GPU:1", "CPU:0"))


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = {"GPU": [GPU, OTHER], "CPU": [CPU]}
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [SimpleNamespace(name=n) for n in names[kind]])
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    forget()
    yield
    forget()


REMEMBERED = (gpu.available, gpu.number_of, say_once)


def forget() -> None:
    for remembered in REMEMBERED:
        remembered.cache_clear()
    gpu.NAMES.clear()


def test_without_cupy_tensors_pass_through_the_host(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """One warning names the cure."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    on_a_gpu = SimpleNamespace(backing_device=GPU)
    with caplog.at_level(logging.WARNING, "hvdlite"):
        assert not any(gpu.on_gpu(on_a_gpu) for _ in range(3)) and gpu.gpu_of([GPU]) is None
        assert gpu.device_for([SimpleNamespace(dtype=tf.float32, device=GPU)], [tf.float32]) is None
    (record,) = caplog.records
    assert "pip install cupy-cuda12x" in record.getMessage() and "host memory" in record.getMessage()


def test_without_a_gpu_nobody_asks_for_cupy(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [])
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert not gpu.available() and not caplog.records


def test_a_gpus_number_is_the_one_that_its_memory_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow's first GPU is CUDA's sixth if TensorFlow may not use the others."""
    monkeypatch.setattr(cupy.runtime, "pointerGetAttributes", lambda address: SimpleNamespace(device=5))
    monkeypatch.setattr(gpu, "unwritten", lambda shape, dtype, device: tf.zeros(shape, dtype))
    found = gpu.gpu_of([GPU, GPU])
    assert found is not None and found.number == 5 and gpu.NAMES == {5: GPU}


def test_gradients_are_reduced_on_a_gpu_only_where_all_variables_lie_on_it() -> None:
    for devices in ([], [CPU], [GPU, CPU], [GPU, OTHER], [""]):
        assert gpu.gpu_of(devices) is None
    with tf.Graph().as_default(), tf.compat.v1.Session():
        assert gpu.gpu_of([CPU]) is None


@pytest.mark.parametrize(
    ("dtypes", "devices", "expected"),
    [
        ([tf.float32], [""], GPU), ([tf.float32, tf.int64], ["", OTHER], OTHER), ([tf.float32], [CPU], None),
        ([tf.float32] * 2, [GPU, CPU], None), ([tf.float32, tf.int32], [GPU, GPU], None), ([], [], None),
        ([tf.string], [GPU], None),
    ],
)  # fmt: skip
def test_where_a_node_belongs(dtypes: Any, devices: Any, expected: str | None) -> None:
    inputs = [SimpleNamespace(dtype=dtype, device=device) for dtype, device in zip(dtypes, devices, strict=True)]
    assert gpu.device_for(inputs, dtypes[:1]) == expected


@pytest.mark.parametrize("dtype", sorted(gpu.DTYPES, key=str), ids=str)
def test_a_tensor_and_its_array_are_one_memory(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor and array have the same bits and dtype; TensorFlow receives a copy of an array."""
    monkeypatch.setattr(gpu, "number_of", lambda device: 0)
    gpu.NAMES[0] = tf.zeros([]).backing_device
    given = tf.cast(tf.constant([[0, 1, 5], [0, 7, 2]]), dtype)
    array: Any = gpu.array_of(given)
    assert array.shape == (2, 3) and array.dtype == given.dtype.as_numpy_dtype
    assert array.get().tobytes() == given.numpy().tobytes()
    (copy,) = gpu.tensors_of([array])
    assert copy.dtype == dtype and copy.numpy().tobytes() == given.numpy().tobytes()
    array[...] = np.ones((2, 3))
    array.get()
    assert given.numpy().tobytes() == np.ones((2, 3), array.dtype).tobytes() and copy[1, 1] == tf.cast(7, dtype)
    assert gpu.array_of(tf.zeros([0, 3], dtype)).shape == (0, 3)
