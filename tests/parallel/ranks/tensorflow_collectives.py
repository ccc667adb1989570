"""TensorFlow's collectives in eager mode, in tf.function and in a TF1 session: values, gradients, errors."""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

import hvdlite as neutral
import hvdlite.tensorflow as hvd
import hvdlite.tensorflow.keras as hvd_keras
from tests.parallel.common import at_sizes, last, require_error

SIZES = (1, 2, 3)
v1 = tf.compat.v1
Build = Callable[..., Sequence[Any]]


def eager(build: Build, *values: Any) -> list[Any]:
    return [np.asarray(result.numpy()) for result in build(*map(tf.constant, values))]


def traced(build: Build, *values: Any) -> list[Any]:
    return [np.asarray(result.numpy()) for result in tf.function(build)(*map(tf.constant, values))]


def session(build: Build, *values: Any) -> list[Any]:
    with tf.Graph().as_default():
        holders = [v1.placeholder(np.asarray(value).dtype, np.shape(value)) for value in values]
        results = list(build(*holders))
        with v1.Session() as live:
            return list(live.run(results, dict(zip(holders, values, strict=True))))


MODES = (eager, traced, session)


def require(build: Build, values: Sequence[Any], expected: Sequence[Any], modes: Sequence[Any] = MODES) -> None:
    """Require that build(*values) returns these values, with their dtypes and shapes, in each mode."""
    for mode in modes:
        results = mode(build, *values)
        assert len(results) == len(expected)
        for result, wanted in zip(results, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(result), np.asarray(wanted), err_msg=mode.__name__)
            assert np.shape(result) == np.shape(wanted) and np.asarray(result).dtype == np.asarray(wanted).dtype


def ranks() -> np.ndarray:
    return np.arange(hvd.size())


def check_averages_that_the_dtype_holds() -> None:
    """Every mode and collective averages correctly, even if the dtype cannot hold the sum."""
    for dtype, value in (
        ("float16", 40000), ("int8", 100), ("uint8", 200), ("int16", -(2**15)), ("int32", 2**31 - 1), ("int64", 2**62 + 1),
        ("uint64", 2**64 - 1),
    ):  # fmt: skip
        given = np.full((hvd.size(), 3), value, dtype)
        require(lambda t: [hvd.allreduce(t), *hvd.grouped_allreduce([t, t])], [given], [given] * 3)
        require(lambda t: [hvd.reducescatter(t)], [given], [given[:1]])


def mine(rows: int = 3) -> np.ndarray:
    """Rank r has r + 1, r + 2, ..."""
    return np.arange(rows, dtype=np.float32) + 1 + hvd.rank()


def everyones(rows: int = 3) -> np.ndarray:
    return np.arange(rows, dtype=np.float32) + 1 + ranks()[:, None].astype(np.float32)


def check_allreduce() -> None:
    folded: dict[Any, Callable[..., Any]] = {
        hvd.Sum: np.sum,
        hvd.Min: np.min,
        hvd.Max: np.max,
        hvd.Product: np.prod,
        hvd.Average: np.mean,
    }
    for op, fold in folded.items():
        expected = fold(everyones(), axis=0).astype(np.float32)
        require(lambda x, op=op: [hvd.allreduce(x, op=op)], [mine()], [expected])
    require(lambda x: [hvd.allreduce(x)], [np.float32(hvd.rank())], [np.float32((hvd.size() - 1) / 2)])


def check_factors() -> None:
    expected = (2 * everyones()).sum(0) * np.float32(0.5)
    require(lambda x: [hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)], [mine()], [expected])


def check_dtypes() -> None:
    for dtype in (tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float64):
        expected = np.full(3, ranks().sum(), dtype.as_numpy_dtype)
        values = np.full(3, hvd.rank(), dtype.as_numpy_dtype)
        require(lambda x: [hvd.allreduce(x, op=hvd.Sum)], [values], [expected])
        require(lambda x: [hvd.allreduce(x, op=hvd.Sum)], [values[0]], [expected[0]])
    for dtype in (tf.uint16, tf.int16, tf.bool):
        values = np.full(2, hvd.rank() == 1, dtype.as_numpy_dtype)
        require(lambda x: [hvd.allgather(x)], [values], [np.repeat(ranks() == 1, 2).astype(dtype.as_numpy_dtype)])


def check_grouped() -> None:
    def build(x: Any, y: Any) -> Any:
        return hvd.grouped_allreduce([x, y], op=hvd.Sum)

    require(build, [mine(), np.int64(hvd.rank())], [everyones().sum(0), np.int64(ranks().sum())])
    gathered = [everyones().reshape(-1), everyones(1).reshape(-1)]
    require(lambda x, y: hvd.grouped_allgather([x, y]), [mine(), mine(1)], gathered)
    assert hvd.grouped_allreduce([]) == [] == hvd.grouped_allgather([])


def check_allgather_of_different_lengths() -> None:
    expected = np.repeat(ranks(), ranks()).astype(np.float32)[:, None] * np.ones((1, 2), np.float32)
    values = np.full((hvd.rank(), 2), hvd.rank(), np.float32)
    require(lambda x: [hvd.allgather(x)], [values], [expected])


def check_broadcast() -> None:
    root = hvd.size() - 1
    require(lambda x: [hvd.broadcast(x, root)], [mine()], [everyones()[root]])


def check_alltoall() -> None:
    size, rank = hvd.size(), hvd.rank()
    splits = np.arange(size, dtype=np.int32)  # rank r gets r rows of each rank
    rows = np.repeat(ranks(), ranks()) + 10.0 * rank
    expected = np.repeat(10.0 * ranks() + rank, rank)
    require(lambda x, s: hvd.alltoall(x, s), [rows, splits], [expected, np.full(size, rank, np.int32)])
    require(lambda x: [hvd.alltoall(x)], [10 * rank + ranks()], [10 * ranks() + rank])


def check_reducescatter() -> None:
    rows = hvd.size() + 1  # the first rank gets two rows
    chosen = slice(0, 2) if hvd.rank() == 0 else slice(hvd.rank() + 1, hvd.rank() + 2)
    total = everyones(rows).sum(0)[chosen]
    require(lambda x: [hvd.reducescatter(x, op=hvd.Sum)], [mine(rows)], [total])
    require(lambda x: hvd.grouped_reducescatter([x, 2 * x], op=hvd.Sum), [mine(rows)], [total, 2 * total])


def gradients_of(function: Callable[[Any], Any]) -> Build:
    """Build the gradient of function(x) for each rank's weighted sum: element i of rank r weighs (r + 1)(i + 1)."""

    def build(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = function(x)
            count = tf.size(result, out_type=tf.int64)
            weights = tf.cast(tf.reshape(tf.range(count) + 1, tf.shape(result)), x.dtype) * float(hvd.rank() + 1)
            loss = tf.reduce_sum(result * weights)
        return [tape.gradient(loss, x)]

    return build


def check_gradients() -> None:
    """Gradients are those of the average over ranks of the local losses."""
    size, rank, places = hvd.size(), hvd.rank(), np.arange(3, dtype=np.float32) + 1
    of_all = (ranks() + 1.0).sum()
    require(gradients_of(lambda x: hvd.allreduce(x, op=hvd.Sum)), [mine()], [np.float32(of_all) * places])
    average = np.float32(of_all) / np.float32(size)
    require(gradients_of(lambda x: hvd.grouped_allreduce([x])[0]), [mine()], [average * places])
    require(gradients_of(lambda x: hvd.broadcast(x, 0)), [mine()], [average * places * np.float32(rank == 0)])
    own = np.arange(3 * rank, 3 * rank + 3, dtype=np.float32) + 1
    require(gradients_of(hvd.allgather), [mine()], [average * own])
    values = np.arange(size + 1, dtype=np.float32)
    weights = np.concatenate([[1, 2], *([[r + 1.0] for r in range(1, size)])]).astype(np.float32)
    require(gradients_of(lambda x: hvd.reducescatter(x)), [values], [weights])
    sent = np.arange(size, dtype=np.float32)
    require(gradients_of(lambda x: hvd.alltoall(x)), [sent], [((ranks() + 1) * (rank + 1)).astype(np.float32)])


def check_gradients_in_tf1() -> None:
    """tf.gradients has no gradient for results of integers."""
    with tf.Graph().as_default(), v1.Session() as session:
        x, n = tf.ones([hvd.size(), 2]), tf.ones([2], tf.int32)
        sent: Any = hvd.alltoall(x)
        received = sent * float(hvd.rank() + 1)
        summed, _ = hvd.grouped_allreduce([x, n], op=hvd.Sum)
        to_senders, of_sum = session.run(v1.gradients(received, x) + v1.gradients(summed, x))
    np.testing.assert_array_equal(to_senders, np.repeat(ranks()[:, None] + 1, 2, 1))
    np.testing.assert_array_equal(of_sum, np.full((hvd.size(), 2), hvd.size()))


def check_results_are_the_users() -> None:
    """The next operation changes neither an earlier result nor the argument."""
    x = tf.constant(mine(1000))
    first = hvd.allreduce(x, op=hvd.Sum, name="again")
    before = np.array(first)
    hvd.allreduce(x + 1, op=hvd.Sum, name="again")
    np.testing.assert_array_equal(first, before)
    np.testing.assert_array_equal(x, mine(1000))


def check_indexed_slices() -> None:
    """Rank r adds r + 1 to rows 0 and r + 1."""

    def build(values: Any, rows: Any) -> Any:
        slices = tf.IndexedSlices(values, rows, tf.constant([hvd.size() + 1, 2], tf.int64))
        total = hvd.allreduce(slices, op=hvd.Sum)
        mean, dense = hvd.grouped_allreduce([slices, values])
        assert isinstance(total, tf.IndexedSlices) and isinstance(mean, tf.IndexedSlices)
        return [tf.convert_to_tensor(total), tf.convert_to_tensor(mean), dense]

    values = np.full((2, 2), hvd.rank() + 1, np.float32)
    expected = np.repeat(np.array([[ranks().sum() + hvd.size()], *[[r + 1] for r in ranks()]], np.float32), 2, 1)
    mean = np.float32((hvd.size() + 1) / 2)
    sums = [expected, expected / np.float32(hvd.size()), np.full((2, 2), mean)]
    require(build, [values, np.array([0, hvd.rank() + 1])], sums)
    with unittest.mock.patch.object(tf.config, "list_physical_devices", lambda kind: [f"a {kind}"]):
        require(build, [values, np.array([0, hvd.rank() + 1])], sums)
        slices = hvd.allreduce(tf.IndexedSlices(tf.constant(values), tf.constant([0, hvd.rank() + 1])), op=hvd.Sum)
        np.testing.assert_array_equal(np.sort(slices.indices), np.arange(hvd.size() + 1))  # each row once
    slices = tf.IndexedSlices(tf.constant(values), tf.constant([0, 1]), tf.constant([5, 2]))
    for wrong in ({"op": hvd.Min}, {"prescale_factor": 2.0}):
        try:
            hvd.allreduce(slices, **wrong)
        except NotImplementedError:
            continue
        raise AssertionError(wrong)


def check_indexed_slices_that_differ() -> None:
    """Ranks with other dense shapes or operations fail, also if a shape is known only when the graph runs. One rank may
    have an unknown shape."""

    def total(rows: Any, op: hvd.Op = hvd.Sum) -> Any:
        shape = None if rows is None else tf.stack([rows, 2])
        return hvd.allreduce(tf.IndexedSlices(tf.ones((1, 2)), [2], shape), op=op, name="slices")

    compiled = tf.function(total)
    for call in (total, compiled):
        found = call(None if last() else tf.constant(3))
        assert set(np.asarray(found.indices).tolist()) == {2}  # with a GPU each row occurs once
        np.testing.assert_array_equal(tf.reduce_sum(found.values, axis=0), [hvd.size()] * 2)
        for different in (
            lambda c=call: c(tf.constant(4 if last() else 3)),
            lambda c=call: c(3, hvd.Average if last() else hvd.Sum),
        ):
            try:
                different()
                assert hvd.size() == 1
            except tf.errors.FailedPreconditionError as error:
                text = str(error)
                assert "slices" in text and (("(4, 2)" in text and "(3, 2)" in text) or "Average" in text), text


def check_compression() -> None:
    """float16 carries these integers exactly, but not 1/3."""
    third = np.full(3, 1 / 3, np.float32)
    for compression, dtype in ((hvd.Compression.fp16, np.float16), (hvd.Compression.bf16, tf.bfloat16.as_numpy_dtype)):
        require(lambda x, c=compression: [hvd.allreduce(x, compression=c, op=hvd.Sum)], [mine()], [everyones().sum(0)])
        require(
            lambda x, c=compression: [hvd.allreduce(x, compression=c, op=hvd.Max)],
            [third],
            [third.astype(dtype).astype(np.float32)],
        )


def check_facts_at_run_time() -> None:
    require(
        lambda: [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()],
        [],
        [np.int32(hvd.rank()), np.int32(hvd.size()), np.int32(hvd.local_rank()), np.int32(hvd.local_size())],
    )


def check_session_order_does_not_matter() -> None:
    """A session runs independent operations in any order in few threads; ranks match them by name."""

    def build(x: Any) -> Any:
        order = range(8) if hvd.rank() % 2 else reversed(range(8))  # ranks build different graphs
        results = {i: hvd.allreduce(x * i, op=hvd.Sum, name=f"number.{i}") for i in order}
        return [results[i] for i in range(8)]

    for _ in range(3):
        require(build, [mine()], [everyones().sum(0) * i for i in range(8)], [session])


def check_variables() -> None:
    variables = [tf.Variable(mine()), tf.Variable([hvd.rank()]), tf.Variable(bool(hvd.rank()))]
    hvd.broadcast_variables(variables, root_rank=hvd.size() - 1)
    require(
        lambda: [variables[0].value(), variables[1].value()],
        [],
        [everyones()[-1], np.array([hvd.size() - 1], np.int32)],
        [eager],
    )
    assert bool(variables[2]) == (hvd.size() > 1)
    variables[0].assign(mine())

    @tf.function
    def start() -> None:
        hvd.broadcast_variables(variables, 0)

    start()
    np.testing.assert_array_equal(variables[0], everyones()[0])
    variables[0].assign(mine())
    (value,) = hvd.broadcast_(variables[:1], 0)
    np.testing.assert_array_equal(value, everyones()[0])
    np.testing.assert_array_equal(variables[0], everyones()[0])
    variables[0].assign(mine())
    neutral.broadcast_variables({"x": variables[0]}, root_rank=0)
    np.testing.assert_array_equal(variables[0], everyones()[0])


def check_objects() -> None:
    assert hvd.broadcast_object({"rank": hvd.rank()}, 0) == {"rank": 0}
    assert hvd.broadcast_object_fn(0)(hvd.rank()) == 0
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


def check_tensors_from_outside_of_a_function() -> None:
    """The name of such a tensor is a number that differs between ranks, and is no part of the operation's name."""
    for _ in range(hvd.rank()):
        tf.constant(0.0)
    x = tf.constant(mine())
    np.testing.assert_array_equal(tf.function(lambda: hvd.allreduce(x, op=hvd.Sum))(), everyones().sum(0))


def check_neutral_front() -> None:
    """hvd.allreduce of a tf.Tensor returns a tf.Tensor; of a Keras variable, a Keras variable."""
    import keras

    total = neutral.allreduce(tf.constant(mine()), op=hvd.Sum)
    assert isinstance(total, tf.Tensor)
    np.testing.assert_array_equal(total, everyones().sum(0))
    total = neutral.allreduce(keras.Variable(mine()), op=hvd.Sum)
    assert isinstance(total, keras.Variable)
    np.testing.assert_array_equal(total, everyones().sum(0))
    assert neutral.allgather(keras.Variable(mine())).shape == (3 * hvd.size(),)
    assert isinstance(neutral.broadcast(keras.Variable(mine()), 0), keras.Variable)
    swapped = neutral.alltoall(keras.Variable(np.full(hvd.size(), hvd.rank(), "float32")))
    assert isinstance(swapped, keras.Variable)
    np.testing.assert_array_equal(swapped, np.arange(hvd.size()))
    (total,) = neutral.grouped_allreduce([keras.Variable(mine())], op=hvd.Sum)
    assert isinstance(total, keras.Variable)
    np.testing.assert_array_equal(total, everyones().sum(0))


def check_torch_beside_tensorflow() -> None:
    import torch

    total = neutral.allreduce(torch.from_numpy(mine()), op=hvd.Sum)
    assert isinstance(total, torch.Tensor)
    np.testing.assert_array_equal(total, hvd.allreduce(tf.constant(mine()), op=hvd.Sum))


def require_failure(kind: type[Exception], mode: Any, build: Build, values: Sequence[Any], *words: str) -> None:
    """Require that the call raises this class with these words in this mode, and that a later all-reduce works."""
    try:
        mode(build, *values)
    except kind as error:
        text = str(error)
    else:
        raise AssertionError(f"no {kind.__name__} in {mode.__name__}")
    for word in words:
        assert word in text, f"{mode.__name__}: {word!r} is not in {text}"
    np.testing.assert_array_equal(hvd.allreduce(tf.ones(2), op=hvd.Sum), np.full(2, hvd.size()))


@at_sizes(2, 3, 4)
def check_mismatch_is_failed_precondition() -> None:
    for mode in MODES:
        values = np.ones(10 if last() else 1, np.float32)
        require_failure(
            tf.errors.FailedPreconditionError,
            mode,
            lambda x: [hvd.allreduce(x, name="loss")],
            [values],
            "allreduce 'loss'",
            "shape differs",
            f"rank {hvd.size() - 1} has (10,)",
            "(1,)",
            "pad",
        )
        values = np.ones(3, np.float64 if last() else np.float32)
        require_failure(
            tf.errors.FailedPreconditionError,
            mode,
            lambda x: [hvd.allgather(x, name="loss")],
            [values],
            "dtype differs",
            "float64",
            "float32",
        )
        root = int(last())
        require_failure(
            tf.errors.FailedPreconditionError,
            mode,
            lambda x, root=root: [hvd.broadcast(x, root, name="b")],
            [np.ones(3)],
            "root rank differs",
        )


def check_gathered_scalars_are_failed_precondition() -> None:
    for mode in MODES:
        for gather in (lambda x: [hvd.allgather(x)], lambda x: hvd.grouped_allgather([x, x])):
            require_failure(tf.errors.FailedPreconditionError, mode, gather, [np.float32(1)], "at least one dimension")


def check_bad_arguments() -> None:
    splits = np.full(hvd.size(), 7, np.int32)
    for mode in MODES:
        require_failure(
            tf.errors.InvalidArgumentError,
            mode,
            lambda x, s: hvd.alltoall(x, s),
            [np.ones(3), splits],
            "splits add up to",
        )
    require_failure(tf.errors.InvalidArgumentError, eager, lambda x: [hvd.reducescatter(x)], [np.float32(1)])
    require_failure(tf.errors.InvalidArgumentError, eager, lambda x: [hvd.broadcast(x, 99)], [np.ones(3)], "99")
    require_failure(ValueError, eager, lambda x: [hvd.allreduce(x, average=True, op=hvd.Sum)], [np.ones(3)])
    require_failure(RuntimeError, eager, lambda: [hvd.broadcast_global_variables(0)], [], "broadcast_variables")
    require_error(
        TypeError, lambda: hvd.broadcast_variables([tf.ones(1)]), "EagerTensor is no model, optimizer or variable"
    )
    for parts in (tf.ragged.constant([[1.0], [2.0, 3.0]]), tf.sparse.from_dense(tf.ones((1, 2)))):
        for call in (
            hvd.allreduce,
            hvd.allgather,
            hvd.alltoall,
            hvd.reducescatter,
            partial(hvd.broadcast, root_rank=0),
        ):
            require_error(TypeError, lambda: call(parts), "cannot be sent: send its parts")
        require_error(TypeError, lambda: hvd.grouped_allgather([parts]), "cannot be sent: send its parts")


def check_strings_are_refused() -> None:
    """All collectives refuse strings with one sentence, before anything moves."""
    text, several = tf.constant(["a"] * hvd.size()), [tf.constant(["a"])]
    calls = [
        hvd.allreduce,
        hvd_keras.allreduce,
        hvd.allgather,
        hvd.alltoall,
        hvd.reducescatter,
        partial(hvd.broadcast, root_rank=0),
    ]
    grouped = [hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter]
    given: list[tuple[list[Any], Any]] = [
        (calls, text),
        (grouped, several),
        ([hvd.broadcast_variables], [tf.Variable(["a"])]),
    ]
    for call, what in ((call, what) for calls, what in given for call in calls):
        require_error(TypeError, lambda: call(what), "an array of Python objects cannot be sent")
        if call is not hvd.broadcast_variables:
            graph = tf.function(lambda: call(what), autograph=False)
            require_error(tf.errors.InvalidArgumentError, graph, "an array of Python objects cannot be sent")
    assert hvd.allreduce(tf.ones(1), op=hvd.Sum).numpy() == hvd.size()


def check_xla_is_refused() -> None:
    compiled = tf.function(lambda x: hvd.allreduce(x), jit_compile=True)
    require_failure(RuntimeError, eager, lambda x: [compiled(x)], [np.ones(3)], "XLA", "jit_compile=False")
