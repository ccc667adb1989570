"""Checks of TensorFlow that need a GPU: tensors stay there, and are neither read nor written too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import hvdlite.tensorflow as hvd
from hvdlite.algorithms import pipeline
from hvdlite.gradients import lists
from hvdlite.tensorflow_graph import gpu
from tests.parallel.common import require_same_bits, restart

pipeline.WHOLE = pipeline.GPU_CHUNK = 1 << 14  # rings in several chunks
WAYS = [{"ALGORITHM": "shared"}, {"ALGORITHM": "ring", "CUDA_AWARE": "1"}, {"ALGORITHM": "ring", "CUDA_AWARE": "0"}]
TIMES = 300


def lies_on_a_gpu(tensor: tf.Tensor) -> bool:
    return "GPU" in tensor.backing_device


def long_work(x: tf.Tensor) -> tf.Tensor:
    """x again, some time later on TensorFlow's stream."""
    square = tf.reshape(x[: 200 * 200], [200, 200]) * 0.0
    for _ in range(20):
        square = square @ square
    return x + square[0, 0]


def check_there_is_one() -> None:
    assert gpu.available() and lies_on_a_gpu(tf.random.normal([3]))


def check_results_lie_where_tensors_do() -> None:
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int64, tf.uint8, tf.bool):
        mine = tf.cast(tf.random.uniform([1000], 0, 2, tf.int32), dtype)
        for op in (hvd.Max,) if dtype == tf.bool else (hvd.Sum, hvd.Max):
            for run in (hvd.allreduce, tf.function(hvd.allreduce)):
                found = run(mine, op=op)
                assert lies_on_a_gpu(found) and found.dtype == dtype
                everyone = np.stack(hvd.allgather_object(mine.numpy()))
                expected = everyone.max(0) if op == hvd.Max else everyone.sum(0, dtype=everyone.dtype)
                np.testing.assert_array_equal(found.numpy(), expected)
    rows = hvd.allgather(tf.fill([hvd.rank() + 1, 2], float(hvd.rank())))
    assert lies_on_a_gpu(rows) and rows.shape[0] == hvd.size() * (hvd.size() + 1) // 2
    with tf.device("CPU:0"):
        assert not lies_on_a_gpu(hvd.allreduce(tf.identity(tf.ones([3]))))
    np.testing.assert_array_equal(
        hvd.allreduce(tf.constant([1, 2], tf.int32), op=hvd.Sum), np.array([1, 2]) * hvd.size()
    )


def mismatches(step: Callable[[tf.Tensor], tf.Tensor]) -> int:
    """All-reduce right after long work, read the result at once, and free all memory at once."""
    wrong, p = 0, hvd.size()
    for time in range(TIMES):
        found = step(tf.fill([50_000], float(time % 97 + hvd.rank())))
        exact = float(p * (time % 97) + p * (p - 1) // 2)
        wrong += int(tf.math.count_nonzero(long_work(found) - exact))
    return wrong


def check_no_race() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(long_work(x), op=hvd.Sum, name="race")

    for way in WAYS:
        restart(**way)
        for run in (step, tf.function(step)):
            assert mismatches(run) == 0, way
    restart()


def check_gradients_are_reduced_on_the_gpu() -> None:
    """Gradients of variables on the GPU are reduced there. If one variable of a list is on the host, all pass through it."""
    for way in WAYS:
        restart(**way)
        with tf.device("CPU:0"):
            on_host = tf.Variable(tf.ones([10]))
        there = [tf.Variable(tf.ones([length])) for length in (1, 1000, 50_000)]
        for variables in (there, [*there, on_host]):
            require_mean_gradients(variables)
        found = [exchange.contents.gpu is not None for shared in lists.shared.known.values() if shared.alive
                 for exchange in shared.exchanges.values()]  # fmt: skip
        assert found == [True, True, False, False]
    restart()


def require_mean_gradients(variables: list[Any]) -> None:
    def step(factor: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variable) * factor for variable in variables])
        return hvd.DistributedGradientTape(tape).gradient(loss, variables)

    for run in (step, tf.function(step)):
        for time in range(20):
            found = run(tf.constant(float(time + hvd.rank())))
            for variable, grad in zip(variables, found, strict=True):
                np.testing.assert_array_equal(grad.numpy(), np.full(variable.shape, time + (hvd.size() - 1) / 2))
        require_same_bits([grad.numpy() for grad in found])
