"""N ranks with batches of B train to the weights of one process with batches of N * B: fit, tape and TF1 sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite.tensorflow as hvd
from hvdlite import MismatchError
from hvdlite.job import runtime
from tests.parallel.common import at_sizes, last, require_error
from tests.parallel.keras_common import (
    BATCH,
    OPTIMIZERS,
    STEPS,
    WIDTH,
    alone,
    both,
    data,
    fit,
    model,
    require_close,
    share,
    weights,
)

v1 = tf.compat.v1


def check_fit() -> None:
    for make in OPTIMIZERS.values():
        both(make)


def check_custom_train_step_and_loops() -> None:
    class Custom(keras.Sequential):
        def train_step(self, batch: Any) -> dict[str, Any]:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((self(x, training=True) - y) ** 2)
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
            return {"loss": loss}

    def build() -> Any:
        keras.utils.set_random_seed(1)
        return Custom([keras.layers.Input((WIDTH,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(2)])

    both(OPTIMIZERS["Adam"], build)


def train_with_tape(optimizer: Any, rows: Any, compiled: bool, distribute: bool, **arguments: Any) -> Any:
    """Train in a custom loop; if `distribute`, with a DistributedGradientTape."""
    trained = model()
    x, y = data()
    optimizer.build(trained.trainable_variables)

    def step(xs: Any, ys: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((trained(xs, training=True) - ys) ** 2)
        if distribute:
            tape = hvd.DistributedGradientTape(tape, **arguments)
        grads = tape.gradient(loss, trained.trainable_variables)
        optimizer.apply_gradients(zip(grads, trained.trainable_variables, strict=True))

    run = tf.function(step) if compiled else step
    for xs, ys in zip(np.split(x[rows], STEPS), np.split(y[rows], STEPS), strict=True):
        run(tf.constant(xs), tf.constant(ys))
    return trained


def check_tape() -> None:
    for make in OPTIMIZERS.values():
        expected = alone(lambda: weights(train_with_tape(make(), slice(None), True, distribute=False)))
        for compiled in (True, False):
            together = train_with_tape(make(), share(), compiled, distribute=True)
            require_close(weights(together), expected, f"tape, compiled={compiled}")


def check_tape_details() -> None:
    """Nested sources, None, local sources, and several gradients of one persistent tape, in each mode."""
    a, b, unused = tf.Variable(2.0), tf.Variable([3.0, 4.0]), tf.Variable(1.0)
    rank, mean = hvd.rank(), (hvd.size() - 1) / 2

    def gradients() -> Any:
        with tf.GradientTape(persistent=True) as tape:
            loss = float(rank) * (a + tf.reduce_sum(b * b))
            other = a * a
        tape = hvd.DistributedGradientTape(tape)
        nested = tape.gradient(loss, {"a": a, "more": (b, unused)})
        single = tape.gradient(other, a)
        local = hvd.DistributedGradientTape(tape, scale_local_gradients=False)
        local.register_local_source(b)
        return nested, single, local.gradient(loss, [a, b])

    for mode in (gradients, tf.function(gradients), gradients):
        nested, single, local = mode()
        np.testing.assert_allclose(nested["a"], mean)
        np.testing.assert_allclose(nested["more"][0], [6 * mean, 8 * mean])
        assert nested["more"][1] is None
        np.testing.assert_allclose(single, 4.0)
        np.testing.assert_allclose(local[0], mean)
        np.testing.assert_allclose(local[1], [6.0 * rank, 8.0 * rank])


def check_a_tapes_sources_are_variables() -> None:
    x = tf.constant([1.0, 2.0])

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(x * x)
        return hvd.DistributedGradientTape(tape).gradient(loss, x)

    if hvd.size() > 1:
        for mode in (gradient, tf.function(gradient)):
            require_error(TypeError, mode, "must be a variable", "plain tf.GradientTape")


def check_second_derivatives() -> None:
    """With an inner plain tape they are right. Through results of a distributed tape they are an error, not None."""
    weight = tf.Variable([1.0, 2.0])

    def penalty(inside: Any) -> tf.Tensor:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(weight**3) * (hvd.rank() + 1)
            (grad,) = inside(inner).gradient(loss, [weight])
            total = loss + tf.reduce_sum(grad)
        return hvd.DistributedGradientTape(outer).gradient(total, [weight])[0]

    for call in (penalty, tf.function(penalty)):
        # d/dw of (r+1) (w^3 + 3 w^2), averaged
        np.testing.assert_allclose(call(lambda tape: tape), (3 * weight**2 + 6 * weight) * (hvd.size() + 1) / 2)
        if hvd.size() > 1:
            require_error(NotImplementedError, lambda: call(hvd.DistributedGradientTape), "plain tf.GradientTape")


def check_partial_tape() -> None:
    """Local layers keep this rank's gradients, divided by the number of ranks by default."""
    rank, size = hvd.rank(), hvd.size()
    trained = model()
    head, variables = trained.layers[-1], trained.trainable_variables
    for scale in (True, False):
        with tf.GradientTape() as tape:
            loss = (rank + 1.0) * tf.add_n([tf.reduce_sum(variable) for variable in variables])
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=[head], scale_local_gradients=scale)
        local, common = tape.get_local_and_global_gradients(loss, variables)
        assert [variable.path for variable, _ in local] == [variable.path for variable in head.trainable_weights]
        own = (rank + 1) / (size if scale else 1)
        for pairs, expected in ((local, own), (common, (size + 1) / 2)):
            for _, grad in pairs:
                np.testing.assert_allclose(grad, np.full(grad.shape, expected), rtol=1e-6)


def check_a_gradient_that_one_rank_lacks() -> None:
    """The missing gradient counts as zeros."""
    w, v = tf.Variable([1.0, 2.0]), tf.Variable([1.0])

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w) + (tf.reduce_sum(v) if hvd.rank() == 0 else 0.0)
        return hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, [w, v])

    traced = tf.function(gradients)
    for mode in (gradients, gradients, traced, traced):  # the second run's results lie in memory that held zeros
        of_w, of_v = mode()
        np.testing.assert_array_equal(of_w, [hvd.size()] * 2)
        np.testing.assert_array_equal(of_v, [1.0])


def train_v1(make: Callable[[], Any], rows: Any, distribute: bool, **arguments: Any) -> list[np.ndarray]:
    """Train with the script of TF1 tutorials."""
    x, y = data()
    with tf.Graph().as_default():
        v1.set_random_seed(1 + hvd.rank() * distribute)
        xs, ys = v1.placeholder(tf.float32, [None, WIDTH]), v1.placeholder(tf.float32, [None, 2])
        # Ranks start with different values. The hook broadcasts rank 0's, with which one process trains alone.
        start = np.random.default_rng(hvd.rank() if distribute else 0)
        w = v1.get_variable("w", initializer=start.integers(-3, 3, (WIDTH, 2)).astype(np.float32) / 8)
        b = v1.get_variable("b", initializer=np.full(2, float(hvd.rank() * distribute), np.float32))
        loss = tf.reduce_mean((xs @ w + b - ys) ** 2)
        optimizer = make()
        if distribute:
            assert hvd.DistributedOptimizer(optimizer, **arguments) is optimizer
        hooks = [hvd.BroadcastGlobalVariablesHook(0)] if distribute else []
        train_op = optimizer.minimize(loss, global_step=v1.train.get_or_create_global_step())
        config = v1.ConfigProto()
        gpus = len(tf.config.list_physical_devices("GPU"))  # ranks may share a GPU
        config.gpu_options.visible_device_list = str(hvd.local_rank() % gpus if gpus else hvd.local_rank())
        with v1.train.MonitoredTrainingSession(hooks=hooks, config=config) as session:
            for one in zip(np.split(x[rows], STEPS), np.split(y[rows], STEPS), strict=True):
                session.run(train_op, dict(zip((xs, ys), one, strict=True)))
            return list(session.run([w, b]))


def check_v1() -> None:
    train = v1.train
    for make in (
        lambda: train.GradientDescentOptimizer(0.05),
        lambda: train.MomentumOptimizer(0.05, 0.9),
        lambda: train.AdamOptimizer(0.01, epsilon=1e-3),
    ):
        expected = alone(lambda: train_v1(make, slice(None), distribute=False))
        require_close(train_v1(make, share(), distribute=True), expected, "v1")


def check_v1_reference_variables() -> None:
    """With the variables of `disable_v2_behavior()`; one of them has no gradient."""
    with tf.Graph().as_default():
        used, unused = (
            v1.get_variable(name, initializer=[1.0, 2.0], use_resource=False) for name in ("used", "unused")
        )
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
        step = optimizer.minimize(tf.reduce_sum(used * float(hvd.rank())), var_list=[used, unused])
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(step)
            mean = (hvd.size() - 1) / 2
            np.testing.assert_array_equal(session.run(used), np.array([1.0, 2.0]) - mean)
            np.testing.assert_array_equal(session.run(unused), [1.0, 2.0])


def check_v1_counts_every_pass() -> None:
    """global_step, used by hooks and decaying rates, counts every pass; every second pass is a step."""
    for given in ("by name", "second"):
        with tf.Graph().as_default(), v1.Session() as session:
            w, global_step = v1.get_variable("w", initializer=1.0), v1.train.get_or_create_global_step()
            sgd = v1.train.GradientDescentOptimizer(0.5)
            optimizer = hvd.DistributedOptimizer(sgd, backward_passes_per_step=2)
            loss = w * float(hvd.rank() + 1)
            if given == "by name":
                step = optimizer.minimize(loss, global_step=global_step)
            else:
                step = optimizer.apply_gradients(optimizer.compute_gradients(loss), global_step)
            session.run(v1.global_variables_initializer())
            found = [session.run(step) or session.run([global_step, w]) for _ in range(5)]
            mean = (hvd.size() + 1) / 2
            assert found == [[1, 1], [2, 1 - mean], [3, 1 - mean], [4, 1 - 2 * mean], [5, 1 - 2 * mean]], found


def check_v1_with_its_shapes() -> None:
    """After `disable_v2_behavior()`, as in old scripts, shapes consist of `Dimension`s instead of ints."""

    def train(rows: Any, distribute: bool) -> list[np.ndarray]:
        v1.disable_v2_tensorshape()
        try:
            return train_v1(lambda: v1.train.MomentumOptimizer(0.05, 0.9), rows, distribute)
        finally:
            v1.enable_v2_tensorshape()

    require_close(train(share(), True), alone(lambda: train(slice(None), False)), "v1")


def check_aggregation_helper() -> None:
    require_aggregation(lambda function: function)
    require_aggregation(tf.function)


def require_aggregation(mode: Callable[[Any], Any]) -> None:
    """Rank r has the gradients r, r + 1, r + 2, r + 3, averaged in pairs; a local variable keeps this rank's."""
    p, r = hvd.size(), hvd.rank()
    pair = everyones, own = [keras.Variable(np.zeros(1, np.float32)) for _ in range(2)]
    helper = hvd.LocalGradientAggregationHelper(2, lambda grads, _: hvd.grouped_allreduce(grads), False, True)
    helper.register_local_var(own)
    sgd = keras.optimizers.SGD(1.0)
    sgd.build(pair)

    @mode
    def one_pass(grad: Any) -> None:
        grads = helper.compute_gradients([grad, grad], pair)
        helper.apply_gradients(lambda: sgd.apply(grads, pair), sgd)

    for turn in range(4):
        one_pass(tf.constant([float(r + turn)]))
        steps = [0.5 + (p - 1) / 2, 2.5 + (p - 1) / 2][: (turn + 1) // 2]
        np.testing.assert_allclose(everyones, [-sum(steps)], rtol=1e-6)
    np.testing.assert_allclose(own, [-(2 * r + 3) / p], rtol=1e-6)
    assert int(sgd.iterations) == 4


def check_v1_passes_and_guard() -> None:
    """Two passes with the same batch are averaged, so every other pass changes the weights."""
    with tf.Graph().as_default():
        w = v1.get_variable("w", initializer=np.zeros(2, np.float32))
        optimizer = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2, average_aggregated_gradients=True
        )
        train_op = optimizer.minimize(tf.reduce_sum(w * float(hvd.rank() + 1)))
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            seen = []
            for _ in range(4):
                session.run(train_op)
                seen.append(float(session.run(w)[0]))
        mean = (hvd.size() + 1) / 2
        np.testing.assert_allclose(seen, [0, -mean, -mean, -2 * mean])
        by_hand = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
        require_error(RuntimeError, lambda: by_hand.apply_gradients([(tf.ones(2), w)]), "compute_gradients")


def check_two_optimizers_in_one_session() -> None:
    """Each rank runs the two optimizers' nodes in another order."""
    with tf.Graph().as_default():
        ws = [v1.get_variable(f"w{i}", initializer=np.zeros(2, np.float32)) for i in range(2)]
        ops = [
            hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0)).minimize(
                tf.reduce_sum(w * (hvd.rank() + i))
            )
            for i, w in enumerate(ws)
        ]
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for _ in range(5):
                session.run(ops)
            mean = (hvd.size() - 1) / 2
            np.testing.assert_allclose(session.run(ws), [[-5 * mean] * 2, [-5 * (mean + 1)] * 2])


@at_sizes(2, 3, 4)
def check_another_model_on_one_rank() -> None:
    """Every rank gets the difference before any gradient moves, and the job can go on."""
    width = 5 if last() else 4

    def build() -> Any:
        return keras.Sequential([keras.layers.Input((WIDTH,)), keras.layers.Dense(width), keras.layers.Dense(2)])

    def tape() -> None:
        w = tf.Variable(tf.zeros([width, 3]))
        with tf.GradientTape() as recorded:
            loss = tf.reduce_sum(w)
        hvd.DistributedGradientTape(recorded).gradient(loss, [w])

    calls = [
        lambda: fit(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), share(), 2, build),
        tape,
        tf.function(tape, autograph=False),
        lambda: hvd.broadcast_variables(build(), 0),
    ]
    for number, call in enumerate(calls):
        kind = tf.errors.FailedPreconditionError if number == 3 else MismatchError  # like the errors of collectives
        text = require_error(kind, call, "parameters differ", f"+++ rank {hvd.size() - 1}", "[4, ", "[5, ")
        assert len(set(hvd.allgather_object(text))) == 1
        np.testing.assert_array_equal(hvd.allreduce(tf.ones(2), op=hvd.Sum), np.full(2, hvd.size()))


def check_after_a_restart() -> None:
    """An optimizer attached under an earlier init() refuses to train alone; attached again it trains."""
    optimizer = keras.optimizers.SGD(0.05)
    hvd.DistributedOptimizer(optimizer)
    hvd.shutdown()
    hvd.init()
    if hvd.size() > 1:
        require_error(RuntimeError, lambda: fit(optimizer, share(), BATCH // hvd.size()), "again")
    optimizer = keras.optimizers.SGD(0.05)
    hvd.DistributedOptimizer(optimizer)
    hvd.shutdown()
    hvd.init()
    hvd.DistributedOptimizer(optimizer)
    together = fit(optimizer, share(), BATCH // hvd.size())
    require_close(weights(together), alone(lambda: weights(fit(keras.optimizers.SGD(0.05)))), "restarted")


def check_steps_of_two_models_and_of_two_graphs_are_counted() -> None:
    """Two models that train in turn, as in a GAN, make one step. A function traced for two shapes counts each call."""
    hvd.shutdown()
    hvd.init()
    first, second = (tf.Variable(tf.ones((length, 3))) for length in (2, 4))

    def train(variable: tf.Variable, x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable) * tf.reduce_sum(x)
        hvd.DistributedGradientTape(tape).gradient(loss, [variable])

    function = tf.function(train)
    for _ in range(6):
        train(first, tf.ones(3))
        train(second, tf.ones(3))
    expected = 6 if hvd.size() > 1 else 0
    assert runtime.current().observers.steps.number == expected
    hvd.shutdown()
    hvd.init()
    for step in range(6):
        function(first, tf.ones(3 + step % 2))
    assert runtime.current().observers.steps.number == expected
