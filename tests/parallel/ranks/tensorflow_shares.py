"""`hvd.shard`, `hvd.seed` and `hvd.Metric` with TensorFlow and Keras."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import hvdlite.keras
import hvdlite.tensorflow as hvd
from tests.parallel.common import require_error, require_same_bits


class Pair(NamedTuple):
    """A structure of tensors."""

    a: Any
    b: Any


def elements(dataset: Any) -> list[Any]:
    return list(dataset.as_numpy_iterator())


def lengths() -> list[int]:
    p = hvd.size()
    return [0, 1, p - 1, p, p + 1, 3 * p + 2]


def unknown(dataset: Any) -> Any:
    """The same dataset, of a cardinality that TensorFlow does not know."""
    found = dataset.filter(lambda *_: True)
    assert found.cardinality() == tf.data.UNKNOWN_CARDINALITY
    return found


def check_every_element_once() -> None:
    for n in lengths():
        for data in (tf.data.Dataset.range(n), unknown(tf.data.Dataset.range(n))):
            shares = hvd.allgather_object(elements(hvd.shard(data, even=False)))
            assert sorted(each for share in shares for each in share) == list(range(n))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def check_equally_many_elements() -> None:
    p, r = hvd.size(), hvd.rank()
    for n in lengths():
        for data in (tf.data.Dataset.range(n), unknown(tf.data.Dataset.range(n))):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # fewer samples than ranks
                share = hvd.shard(data, even=True)
            for _ in range(2):
                assert elements(share) == list(range(r, n // p * p, p))


def check_structures_and_ragged_elements() -> None:
    """Elements without a common shape are dealt out, too, also if their number is unknown."""
    p, r = hvd.size(), hvd.rank()
    more = 1 if p > 1 else 0  # than all ranks together get
    data = tf.data.Dataset.range(2 * p + more).map(lambda i: tf.range(i))
    assert [len(each) for each in elements(hvd.shard(unknown(data), even=True))] == [r, r + p]
    for structure in (lambda i: (i, -i), lambda i: (i,), lambda i: {"x": i, "y": (i, i)}, lambda i: (i, {"y": -i}),
                      lambda i: Pair(i, -i), lambda i: (Pair(i, -i), i), lambda i: (Pair(i, -i),)):  # fmt: skip
        whole = tf.data.Dataset.range(2 * p + more).map(structure)
        share = hvd.shard(unknown(whole), even=True)
        assert share.element_spec == whole.element_spec
        assert elements(share) == elements(whole)[r : 2 * p : p]


def check_endless_data() -> None:
    p, r = hvd.size(), hvd.rank()
    data = tf.data.Dataset.range(p).repeat()
    for even in (None, True, False):
        assert elements(hvd.shard(data, even=even).take(3)) == [r] * 3


def check_warnings() -> None:
    p, r = hvd.size(), hvd.rank()
    data = tf.data.Dataset.range(2 * p)
    for given, even, warns in ((data, None, False), (unknown(data), None, p > 1), (unknown(data), False, False),
                               (data.take(p + 1), None, p > 1)):  # fmt: skip
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hvd.shard(given, even=even)
        assert len(caught) == int(warns and r == 0), [str(each.message) for each in caught]


def check_tensors_and_other_objects() -> None:
    p, r = hvd.size(), hvd.rank()
    x, y = hvdlite.keras.shard((tf.range(p + 1), np.arange(p + 1)), even=False)
    assert x.numpy().tolist() == y.tolist() == list(range(r, p + 1, p))
    require_error(TypeError, lambda: hvd.shard(tf.Module()), "Module is no data")
    require_error(TypeError, lambda: hvd.shard(tf.constant(1)), "no rows")
    require_error(TypeError, lambda: hvd.shard(keras.utils.PyDataset()), "PyDataset", "data[hvd.rank() :: hvd.size()]")


def check_keras_fits_a_share() -> None:
    """All ranks take as many steps, and end with the same weights."""
    p = hvd.size()
    x, y = np.arange(8.0 * p + p - 1).reshape(-1, 1) / 10, np.ones((9 * p - 1, 1))
    hvd.seed(1)
    for data in (hvd.shard((x, y), even=True), None):
        share = hvd.shard(tf.data.Dataset.from_tensor_slices((x, y)), even=True) if data is None else None
        net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        net.compile(hvdlite.keras.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
        callbacks = [hvdlite.keras.callbacks.BroadcastGlobalVariablesCallback(0)]
        given = {"x": share.batch(4)} if data is None else {"x": data[0], "y": data[1], "batch_size": 4}
        net.fit(**given, epochs=2, verbose=0, callbacks=callbacks)
        assert int(net.optimizer.iterations) == 2 * 2
        require_same_bits([np.asarray(each) for each in net.get_weights()])


def check_metrics_of_tensors() -> None:
    p, r = hvd.size(), hvd.rank()
    metric = hvd.Metric()
    metric.update(tf.constant(float(r)), tf.constant(2))
    metric.update(tf.Variable(r + 2.0), 2)
    values = {"m": metric, "t": (tf.constant(r, tf.float16), 1), "k": keras.Variable(float(r)), "o": tf.constant([1.0])}
    assert hvd.average_metrics(values) == {"m": (p + 1) / 2, "t": (p - 1) / 2, "k": (p - 1) / 2, "o": 1.0}
    require_error(ValueError, lambda: metric.update(tf.ones(2)), "2 elements")


def check_seed() -> None:
    """TensorFlow and Keras are seeded: alike on all ranks, or each rank otherwise."""
    hvd.seed(11)
    drawn = [
        tf.random.uniform([3]).numpy(),
        keras.random.normal([2]).numpy(),
        keras.layers.Dense(2)(np.ones((1, 2))).numpy(),
    ]
    require_same_bits(drawn)
    hvd.seed(11)
    again = [tf.random.uniform([3]).numpy(), keras.random.normal([2]).numpy()]
    assert all(np.array_equal(a, b) for a, b in zip(again, drawn, strict=False))
    hvd.seed(11, per_rank=True)
    mine = (tf.random.uniform([3]).numpy().tolist(), keras.random.normal([2]).numpy().tolist())
    assert len(set(map(str, hvd.allgather_object(mine)))) == hvd.size()
