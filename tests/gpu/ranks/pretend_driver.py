"""Checks that only the pretend driver allows: the path of the bytes, and that all handles are closed."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import cupy
import numpy as np

import hvdlite as hvd
from hvdlite.job import runtime
from hvdlite.lanes import gpu_side
from hvdlite.transports import device
from tests.parallel.common import require_same_bits, restart


def count(what: str) -> int:
    return ctypes.c_int.in_dll(cupy.DRIVER, f"pretend_{what}").value


def summed(length: int = 300_000) -> None:
    mine = cupy.asarray((np.arange(length) % 7 + hvd.rank()).astype(np.float32))
    p = hvd.size()
    result = hvd.allreduce(mine, op=hvd.Sum).get()
    np.testing.assert_array_equal(result, np.arange(length) % 7 * p + p * (p - 1) // 2)
    require_same_bits(result)


def check_opened_handles_are_closed() -> None:
    """Five jobs, one after another, share memory. Every rank closes each handle that it opens."""
    opened, closed = count("opened"), count("closed")
    for _ in range(5):
        restart(ALGORITHM="shared", CUDA_AWARE="0")
        summed()
    restart()
    assert count("opened") - opened == count("closed") - closed == 5 * (hvd.size() - 1)


def check_the_verdict() -> None:
    """The trial finds out whether the MPI is CUDA-aware. If WITHOUT_CUDA_SUPPORT is set, it crashes, and this job lives."""
    restart()
    aware = "WITHOUT_CUDA_SUPPORT" not in os.environ
    summed()
    side = runtime.current().everyone.eager.host.gpu
    assert isinstance(side, gpu_side.Side)
    if hvd.size() > 1:
        assert isinstance(side.transport, device.StagedTransport) != aware
        answers = list(Path(os.environ["XDG_CACHE_HOME"]).glob("hvdlite/cuda-aware-*.json"))
        assert len(answers) == 1, answers


def check_refused_handles() -> None:
    """If handles cannot be opened, messages give the same sums."""
    restart(ALGORITHM="shared", CUDA_AWARE="1")
    summed()
    side = runtime.current().everyone.eager.host.gpu
    assert isinstance(side, gpu_side.Side)
    if hvd.size() > 1:
        assert side.workspace.stage is not None and side.workspace.stage.peers is None


def check_torch_gradients_lie_on_the_device() -> None:
    """The torch checks before this one have used device memory (TORCH_TENSORS_ON)."""
    import torch

    import hvdlite.torch as hvd

    weight: Any = torch.nn.Parameter(torch.zeros(1000))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    (weight.sum() * (hvd.rank() + 1)).backward()
    assert (weight.grad == (hvd.size() + 1) / 2).all()
    attachment = optimizer._hvdlite
    assert list(attachment.reducer.arenas) == ["cuda"] and attachment.streams is not None
    assert isinstance(attachment.lane.host.gpu, gpu_side.Side) and attachment.reducer.overlap
    then = attachment.planned  # as if it had been elsewhere when the plan was made
    then.addresses, then.facts = [0], [(spec, torch.device("meta")) for spec in then.specs]
    before = attachment.reducer
    weight.grad = None
    (weight.sum() * (hvd.rank() + 1)).backward()
    assert attachment.reducer is not before and (weight.grad == (hvd.size() + 1) / 2).all()


def check_tensorflow_gradients_lie_on_the_device() -> None:
    """The TensorFlow checks before this one have used device memory (TENSORFLOW_TENSORS_ON).

    Two lists of variables are reduced in turn, and each keeps its shared memory.
    """
    import tensorflow as tf

    import hvdlite.tensorflow as hvd
    from hvdlite.gradients import lists as gradients

    restart(ALGORITHM="shared", CUDA_AWARE="0")
    before, imports = count("opened"), [entry[0] for entry in cupy.LOG].count("import")
    lists = [[tf.Variable(tf.ones([length]))] for length in (300, 4000)]

    def step(variables: list[tf.Variable], factor: float) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = factor * tf.reduce_sum(variables[0])
        return hvd.DistributedGradientTape(tape).gradient(loss, variables)

    for run in (step, tf.function(step)):
        for times in range(3):
            for variables in lists:
                (found,) = run(variables, tf.constant(float(times + hvd.rank())))
                np.testing.assert_array_equal(found, np.full(variables[0].shape, times + (hvd.size() - 1) / 2))
    (shared,) = [each for each in gradients.shared.known.values() if each.alive]
    assert len(shared.exchanges) == 4 and isinstance(shared.working_lane().host.gpu, gpu_side.Side)
    for exchange in shared.exchanges.values():
        assert exchange.contents.gpu is not None and list(exchange.reducer.arenas) == ["cuda"]
        assert exchange.reducer.arenas["cuda"].peers is not None
    assert count("opened") - before == 4 * (hvd.size() - 1)
    assert [entry[0] for entry in cupy.LOG].count("import") - imports >= 2 * 2 * 3 * 2  # a gradient in, a result out
    restart()


def check_keras_gradients_lie_on_the_device() -> None:
    """The checks of Keras on torch before this one have used device memory (TORCH_TENSORS_ON)."""
    import keras

    import hvdlite.keras as hvd

    restart(ALGORITHM="shared", CUDA_AWARE="0")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    lists = [[keras.Variable(np.ones(length, np.float32))] for length in (300, 4000)]
    optimizer.build([*lists[0], *lists[1]])
    for times in range(3):
        for variables in lists:
            before = np.array(keras.ops.convert_to_numpy(variables[0]))
            optimizer.apply([keras.ops.full(variables[0].shape, float(times + hvd.rank()))], variables)
            after = np.array(keras.ops.convert_to_numpy(variables[0]))
            np.testing.assert_array_equal(before - after, np.full(before.shape, times + (hvd.size() - 1) / 2))
    exchanges = optimizer._hvdlite.gradients.exchanges.values()
    assert len(exchanges) == 2 and all(list(exchange.reducer.arenas) == ["cuda"] for exchange in exchanges)
    assert all(exchange.reducer.arenas["cuda"].peers is not None for exchange in exchanges)
    restart()
