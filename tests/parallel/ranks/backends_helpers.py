"""The helpers with Keras on other backends than TensorFlow. `test_keras_backends` runs them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdlite.keras as hvd
from tests.parallel.common import require_same_bits

SIZES = ()  # test_keras_backends runs this module: KERAS_BACKEND must be set before Keras is imported


def check_seed() -> None:
    """Alike on all ranks, or each rank otherwise."""
    hvd.seed(11)
    drawn = np.asarray(keras.ops.convert_to_numpy(keras.random.normal([3])))
    require_same_bits(drawn)
    hvd.seed(11)
    assert np.array_equal(keras.ops.convert_to_numpy(keras.random.normal([3])), drawn)
    hvd.seed(11, per_rank=True)
    mine = keras.ops.convert_to_numpy(keras.random.normal([3])).tolist()
    assert len(set(map(str, hvd.allgather_object(mine)))) == hvd.size()


def check_metrics_of_tensors() -> None:
    p, r = hvd.size(), hvd.rank()
    metric = hvd.Metric()
    metric.update(keras.ops.convert_to_tensor(float(r)), 2)
    metric.update(keras.Variable(r + 2.0), keras.ops.convert_to_tensor(2))
    assert hvd.average_metrics({"m": metric, "k": keras.Variable(float(r))}) == {"m": (p + 1) / 2, "k": (p - 1) / 2}


def check_fit_takes_a_share() -> None:
    """Of a DataLoader, whose epochs differ, and of arrays. All ranks take as many steps."""
    p = hvd.size()
    x, y = np.arange(9.0 * p - 1, dtype=np.float32).reshape(-1, 1) / 10, np.ones((9 * p - 1, 1), np.float32)
    loader = DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), 4, shuffle=True)
    seen: list[list[float]] = []

    class Noting(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(x)

        def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
            seen[-1].append(float(x[index, 0]))
            return x[index], y[index]

    class Epochs(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            seen.append([])

    for data in (hvd.shard(loader), hvd.shard((x, y), even=True), hvd.shard(DataLoader(Noting(), 4, shuffle=True))):
        net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        net.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
        given = {"x": data[0], "y": data[1], "batch_size": 4} if isinstance(data, tuple) else {"x": data}
        seen = [[]]
        net.fit(**given, epochs=2, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), Epochs()])
        assert int(keras.ops.convert_to_numpy(net.optimizer.iterations)) == 2 * 2
        require_same_bits([np.asarray(each) for each in net.get_weights()])
    first, second = seen[-2:]
    assert len(first) == len(second) == 8 and first != second
