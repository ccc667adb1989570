"""Lossy compression on TensorFlow: tapes, sparse gradients and sessions, where each rank counts as a host.

`backends_compression` has the checks of Keras' fit.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import hvdlite
import hvdlite.tensorflow as hvd
from hvdlite.compression.codec import Codec
from hvdlite.gradients.compression import compressor
from hvdlite.gradients.lists import Gradients, shared
from hvdlite.gradients.lossy import Stores
from tests.parallel.common import require_error, require_same_bits, restart

SIZES = (2,)
SHAPE = (64, 32)
CLOSE = 1e-5  # of the largest element: float32 sums of a few steps
v1 = tf.compat.v1
topk = hvd.Compression.topk(ratio=0.05)


class Coarse(Codec):
    """A user's own compressor."""

    def encode(self, values: np.ndarray) -> Sequence[np.ndarray]:
        scale = np.abs(values).max(keepdims=True) / 7 + 1e-30
        return np.rint(values / scale).astype(np.int8), scale

    def decode(self, code: Sequence[np.ndarray], length: int) -> np.ndarray:
        return np.asarray(code[0] * code[1])


def between_ranks(check: Callable[[], None]) -> Callable[[], None]:
    """Run a check in a job that compresses between the ranks of a host."""

    @functools.wraps(check)
    def run() -> None:
        restart(COMPRESS_WITHIN_HOST="1")
        check()
        restart()

    return run


def gradients_of_tapes(compression: object = topk) -> Gradients:
    wanted = compressor(compression, lossy=True)
    (found,) = (each for each in shared.known.values() if each.alive and each.settings.compression == wanted)
    return found


def left(stores: Stores, variable: Any) -> np.ndarray:
    """The sum over all ranks of what was not sent of a variable."""
    name = stores.names([variable])[0]
    (store,) = (each for each in stores.known.values() if name in each.entries)
    return total(store.before(name).residual.reshape(variable.shape))


def total(mine: np.ndarray) -> np.ndarray:
    return np.asarray(hvdlite.allreduce(np.asarray(mine, np.float64), op=hvdlite.Sum))


def require_sum(found: np.ndarray, expected: np.ndarray, what: object) -> None:
    assert np.isfinite(found).all() and np.abs(expected).max() > 0, what
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < CLOSE, f"{what}: {error}"


class Factors:
    """This rank's gradients, step by step, and the sums of what was given and received, by place.

    Attributes:
        random: The source of gradients.
        given: The sums of this rank's gradients.
        received: The sums of the results.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng((seed, hvd.rank()))
        self.given: dict[int, np.ndarray] = {}
        self.received: dict[int, np.ndarray] = {}

    def next(self, places: Sequence[int]) -> list[np.ndarray]:
        """This rank's next gradients."""
        values = [self.random.standard_normal(SHAPE).astype(np.float32) for _ in places]
        for place, value in zip(places, values, strict=True):
            self.given[place] = self.given.get(place, 0) + value.astype(np.float64)
        return values

    def note(self, places: Sequence[int], results: Sequence[Any]) -> None:
        """Add results, which must be the same bits on all ranks."""
        require_same_bits([np.asarray(result) for result in results])
        for place, result in zip(places, results, strict=True):
            self.received[place] = self.received.get(place, 0) + np.asarray(result, np.float64)

    def require_all(self, stores: Stores, variables: Sequence[Any]) -> None:
        """Check that nothing was lost."""
        for place in self.given:
            rest = left(stores, variables[place])
            assert rest.any(), "no gradient was compressed"
            require_sum(self.received[place] + rest, total(self.given[place]), f"variable {place}")


def variables(count: int) -> list[Any]:
    return [tf.Variable(tf.zeros(SHAPE), name="w") for _ in range(count)]


def reduced(factors: Sequence[Any], used: Sequence[Any], among: Sequence[Any], compression: Any = topk) -> list[Any]:
    """The reduced gradients of `among` for a loss with these factors of the used variables."""
    with tf.GradientTape() as plain:
        loss = tf.add_n([tf.reduce_sum(variable * factor) for factor, variable in zip(factors, used, strict=True)])
    tape = hvd.DistributedGradientTape(plain, compression=compression, op=hvd.Sum)
    return list(tape.gradient(loss, list(among)))


@between_ranks
def check_tapes() -> None:
    """A tape per step, eagerly and in a tf.function, of variables with one name."""
    for compression in (topk, hvd.Compression.int8(), Coarse()):
        for wrap in (lambda function: function, tf.function):
            chosen, sums = variables(2), Factors()
            step = wrap(lambda factors, chosen=chosen: reduced(factors, chosen, chosen, compression))
            for _ in range(4):
                sums.note((0, 1), step(sums.next((0, 1))))
            sums.require_all(gradients_of_tapes(compression).stores, chosen)


@between_ranks
def check_a_tape_whose_model_is_replaced() -> None:
    """A new model of the same shapes starts with nothing unsent, and what was kept for old models is freed."""
    for _ in range(8):
        chosen, sums = variables(1), Factors()
        for _ in range(2):
            sums.note((0,), reduced(sums.next((0,)), chosen, chosen))
        sums.require_all(gradients_of_tapes().stores, chosen)
        del chosen
        gc.collect()
    assert len(gradients_of_tapes().stores.known) <= 5


@between_ranks
def check_two_models_in_turns() -> None:
    chosen, sums = variables(2), Factors()
    for step in range(6):
        place = step % 2
        sums.note((place,), reduced(sums.next((place,)), chosen[place : place + 1], chosen[place : place + 1]))
    sums.require_all(gradients_of_tapes().stores, chosen)


@between_ranks
def check_frozen_variables() -> None:
    """A variable that is left out for a while, and the others meanwhile, keep what was not sent."""
    chosen, sums = variables(3), Factors()
    for places in ((0, 1, 2), (0, 2), (0, 2), (0, 1, 2)):
        now = [chosen[place] for place in places]
        sums.note(places, reduced(sums.next(places), now, now))
    stores = gradients_of_tapes().stores
    assert len(stores.known) == 1
    sums.require_all(stores, chosen)


@between_ranks
def check_variables_without_gradients() -> None:
    """What was not sent of a variable stays when a step does not use the variable: eagerly, and in a graph, which has no
    result for it."""
    for wrap in (lambda function: function, tf.function):
        chosen, sums = variables(2), Factors()
        step = wrap(lambda factors, chosen=chosen: reduced(factors, chosen[: len(factors)], chosen))
        for places in ((0, 1), (0,), (0,), (0, 1)):
            results = step(sums.next(places))
            assert (results[1] is None) == (len(places) == 1)
            sums.note(places, [result for result in results if result is not None])
        sums.require_all(gradients_of_tapes().stores, chosen)


@between_ranks
def check_local_variables_of_tapes() -> None:
    chosen, sums = variables(2), Factors()
    for _ in range(3):
        factors = sums.next((0, 1))
        with tf.GradientTape() as plain:
            loss = tf.add_n([tf.reduce_sum(variable * f) for f, variable in zip(factors, chosen, strict=True)])
        tape = hvd.DistributedGradientTape(plain, compression=topk, op=hvd.Sum, scale_local_gradients=False)
        tape.register_local_source(chosen[1])
        common, own = tape.gradient(loss, chosen)
        np.testing.assert_array_equal(own, factors[1])
        sums.note((0,), [common])
    del sums.given[1]
    sums.require_all(gradients_of_tapes().stores, chosen)


@between_ranks
def check_embeddings() -> None:
    """Sparse gradients travel exactly, also beside compressed ones; sparse_as_dense=True compresses them."""
    rows = tf.constant([1, 3, 3])
    for dense in (False, True):
        table, weight = variables(2)
        sums = Factors()
        for _ in range(3):
            (factor,) = sums.next((0,))
            with tf.GradientTape() as plain:
                picked = tf.reduce_sum(tf.gather(table, rows + hvd.rank()))
                loss = picked + tf.reduce_sum(weight * factor)
            tape = hvd.DistributedGradientTape(plain, compression=topk, op=hvd.Sum, sparse_as_dense=dense)
            sparse, found = tape.gradient(loss, [table, weight])
            sums.note((0,), [found])
            mine = np.zeros(SHAPE, np.float32)
            np.add.at(mine, rows.numpy() + hvd.rank(), 1)
            if not dense:
                np.testing.assert_array_equal(tf.convert_to_tensor(sparse), total(mine))
        stores = next(each.stores for each in shared.known.values() if each.settings.sparse_as_dense is dense)
        sums.require_all(stores, [weight])
        (store,) = stores.known.values()
        assert len(store.entries) == 1 + dense


@between_ranks
def check_refusals() -> None:
    tape = tf.GradientTape()
    require_error(ValueError, lambda: hvd.DistributedGradientTape(tape, compression=topk, op=hvd.Min), "Average or")
    require_error(ValueError, lambda: hvd.DistributedGradientTape(tape, compression=Coarse), "Coarse()")
    require_error(ValueError, lambda: hvd.allreduce(tf.ones(3), compression=topk), "single collective")
    require_error(ValueError, lambda: hvd.grouped_allreduce([tf.ones(3)], compression=topk), "single collective")


@contextlib.contextmanager
def session() -> Iterator[Any]:
    config = v1.ConfigProto(intra_op_parallelism_threads=2, inter_op_parallelism_threads=4)
    with v1.Session(config=config) as found:
        found.run(v1.global_variables_initializer())
        yield found


@between_ranks
def check_sessions() -> None:
    """Two independent rounds in one run of a session, which orders them freely."""
    compression = hvd.Compression.randomk(ratio=0.2)
    with tf.Graph().as_default():
        chosen = [v1.get_variable(name, SHAPE, initializer=v1.zeros_initializer()) for name in ("a", "b")]
        places = [v1.placeholder(tf.float32, SHAPE) for _ in chosen]
        optimizer = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(1.0), compression=compression, op=hvd.Sum
        )
        pairs = [optimizer.compute_gradients(tf.reduce_sum(variable * factor), [variable])[0]
                 for factor, variable in zip(places, chosen, strict=True)]  # fmt: skip
        train, sums = optimizer.apply_gradients(pairs), Factors()
        with session() as running:
            for _ in range(12):
                given = dict(zip(places, sums.next((0, 1)), strict=True))
                results, _ = running.run([[grad for grad, _ in pairs], train], given)
                sums.note((0, 1), results)
            stores = vars(optimizer)["_hvdlite"].gradients.stores
            assert {store.rounds for store in stores.known.values()} == {12}
            sums.require_all(stores, chosen)
