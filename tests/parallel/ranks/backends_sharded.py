"""`DistributedOptimizer(sharded=True)` for Keras: the same bits as without, and a part of the state on each rank."""

from __future__ import annotations

import contextlib
import gc
import io
import tempfile
import unittest.mock
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvdlite
import hvdlite.keras as hvd
from hvdlite.keras.backends import sharding
from hvdlite.keras.sharded.kinds import kind_of
from hvdlite.sharding.kinds import Kind
from tests.parallel.common import last, require_error, require_same_bits

SIZES = ()  # test_keras_backends runs this module: KERAS_BACKEND must be set before Keras is imported
SHAPES = ((30, 211), (), (97, 87), (5,))  # the ends of two ranks' ranges are in the third
Make = Callable[[], Any]
Adam, SGD = keras.optimizers.Adam, keras.optimizers.SGD

ELEMENTWISE: dict[str, Make] = {  # with Keras' options among them
    "SGD": lambda: SGD(0.1),
    "momentum": lambda: SGD(0.05, momentum=0.9, nesterov=True, clipnorm=0.5),
    "Adam": lambda: Adam(0.01, amsgrad=True, global_clipnorm=1.0),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, centered=True, momentum=0.5, clipvalue=0.2),
    "Lion": lambda: keras.optimizers.Lion(0.01, weight_decay=0.1),
}
OTHERS: dict[str, Make] = {
    "Nadam": lambda: keras.optimizers.Nadam(0.01, loss_scale_factor=8.0, clipnorm=0.1),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "accumulating": lambda: Adam(0.01, gradient_accumulation_steps=3),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(Adam(0.01, clipnorm=0.1), initial_scale=4.0),
    "scheduled": lambda: SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9), momentum=0.9),
}
OF_TENSORS: dict[str, Make] = {
    "Lamb": lambda: keras.optimizers.Lamb(0.01),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "Muon": lambda: keras.optimizers.Muon(0.01),
}


def on(backend: str) -> bool:
    return bool(keras.backend.backend() == backend)


def variables(constraint: Any = None) -> list[Any]:
    """Variables with the same values on every rank. The third one has a name of its own."""
    rng, found = np.random.default_rng(1), []
    for number, shape in enumerate(SHAPES):
        value = rng.standard_normal(shape).astype("float32")
        found.append(keras.Variable(value, name="bias" if number == 2 else "kernel"))
        found[-1].constraint = constraint
    return found


def gradients(step: int) -> list[Any]:
    """Gradients of other data on each rank."""
    rng = np.random.default_rng((step, hvd.rank()))
    return [keras.ops.convert_to_tensor(rng.standard_normal(shape).astype("float32")) for shape in SHAPES]


def train(make: Make, sharded: bool, steps: int = 20, given: Any = None, **options: Any) -> Any:
    """Return trained variables and their optimizer."""
    own = given or variables()
    optimizer = hvd.DistributedOptimizer(make(), sharded=sharded, **options)
    apply = in_a_graph(optimizer, own) if steps >= 10 else lambda given: optimizer.apply(given, own)
    for step in range(steps):
        apply(gradients(step))
    return own, optimizer


def in_a_graph(optimizer: Any, own: Any) -> Callable[[list[Any]], None]:
    """A function that steps; on TensorFlow in a graph, in which an order must be asked for."""
    if on("tensorflow"):
        import tensorflow as tf

        return tf.function(lambda given: optimizer.apply(given, own), autograph=False)
    return lambda given: optimizer.apply(given, own)


def values(found: Any) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(each)) for each in found]


def require_equal(one: Any, other: Any, what: object = "") -> None:
    """Check that two lists of variables have the same bits, on all ranks."""
    for number, (a, b) in enumerate(zip(values(one), values(other), strict=True)):
        assert a.shape == b.shape, (what, number)
        np.testing.assert_array_equal(a, b, f"{what}, variable {number}")
    require_same_bits(values(one))


def elements(optimizer: Any) -> int:
    """The number of elements of an optimizer's state."""
    return sum(int(np.prod(each.shape)) for each in optimizer.variables)


def folder() -> Path:
    """A new folder, the same on all ranks."""
    return Path(hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, 0))


def check_the_same_bits_and_a_part_of_the_state() -> None:
    for name, make in ELEMENTWISE.items():
        require_the_same_bits(make, name, 100)


def check_the_same_bits_of_more_optimizers() -> None:
    for name, make in OTHERS.items():
        require_the_same_bits(make, name, 12)


def require_the_same_bits(make: Make, name: str, steps: int) -> None:
    (whole, all_of_it), (own, optimizer) = train(make, False, steps), train(make, True, steps)
    require_equal(own, whole, name)
    assert len(optimizer.variables) == len(all_of_it.variables)
    assert elements(optimizer) <= 1.02 * elements(all_of_it) / hvd.size() + 4, name
    assert int(optimizer.iterations) == int(all_of_it.iterations)


def check_the_state_is_a_part_from_the_beginning() -> None:
    optimizer, own = hvd.DistributedOptimizer(Adam(), sharded=True), variables()
    optimizer.build(own)
    assert elements(optimizer) <= 1.02 * 2 * sum(each.size for each in values(own)) / hvd.size()
    require_same_bits(values(optimizer.variables[:2]))


def check_optimizers_that_look_at_whole_tensors() -> None:
    for name, make in OF_TENSORS.items():
        (whole, _), (own, optimizer) = train(make, False, 5), train(make, True, 5)
        require_equal(own, whole, name)
        assert kind_of(make()) is Kind.TENSORS
        assert min(hvd.allgather_object(elements(optimizer))) < elements(make_built(make)) / hvd.size()


def check_ftrl() -> None:
    """PyTorch's pow rounds by an element's place in memory: two roundings of 6e-8 relative in a step."""
    one, other = (train(lambda: keras.optimizers.Ftrl(0.05), sharded, 10)[0] for sharded in (True, False))
    for a, b in zip(values(one), values(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)
    require_same_bits(values(one))


def make_built(make: Make) -> Any:
    optimizer = make()
    optimizer.build(variables())
    return optimizer


class Signs(keras.optimizers.Optimizer):
    """Steps by the sign of momentum; each element by itself."""

    def __init__(self, learning_rate: float = 0.01, **options: Any) -> None:
        super().__init__(learning_rate, **options)

    def build(self, variables: Any) -> None:
        if not self.built:
            super().build(variables)
            self.moments = self.add_optimizer_variables(variables, "moment")

    def direction(self, gradient: Any, variable: Any) -> Any:
        moment = self.moments[self._get_variable_index(variable)]
        self.assign(moment, moment * 0.9 + gradient)
        return keras.ops.sign(moment)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_sub(variable, learning_rate * self.direction(gradient, variable))


class Unit(Signs):
    """Steps of the length 1."""

    def direction(self, gradient: Any, variable: Any) -> Any:
        return gradient / keras.ops.sqrt(keras.ops.sum(gradient * gradient))


class Own(Signs):
    """Makes its state in a way from which the state's variable is not known."""

    def build(self, variables: Any) -> None:
        if not self.built:
            keras.optimizers.Optimizer.build(self, variables)
            self.moments = [self.add_variable(each.shape, name="moment") for each in variables]


class Together(Signs):
    """Steps that depend on all gradients."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        norm = sum(keras.ops.sum(keras.ops.abs(gradient)) for gradient in grads)
        super().apply([gradient / norm for gradient in grads], trainable_variables)

    def direction(self, gradient: Any, variable: Any) -> Any:
        return gradient


class Averaging(Signs):
    """Begins with the weights."""

    def build(self, variables: Any) -> None:
        if not self.built:
            super().build(variables)
            for moment, variable in zip(self.moments, variables, strict=True):
                moment.assign(variable)


def check_optimizers_of_users() -> None:
    for make, kind in ((Signs, Kind.ELEMENTS), (Unit, Kind.TENSORS), (Own, Kind.TENSORS)):
        assert kind_of(make()) is kind, make
        require_equal(train(make, True, 5)[0], train(make, False, 5)[0], make.__name__)


def several() -> Any:
    """A stand-in for MultiOptimizer, which older versions of Keras lack."""
    optimizer = SGD()
    optimizer.optimizers = []
    return optimizer


def check_what_is_refused() -> None:
    accumulating = partial(Adam, gradient_accumulation_steps=2, clipnorm=1.0)
    cases: list[tuple[type[Exception], Make, str]] = [
        (NotImplementedError, partial(Adam, use_ema=True), "use_ema"),
        (NotImplementedError, accumulating, "backward_passes_per_step"),
        (NotImplementedError, several, "it has several optimizers"),
        (ValueError, Together, "depends on other variables"),
        (ValueError, Averaging, "begins with the weights"),
        (ValueError, partial(make_built, Adam), "has state for whole variables already"),
    ]
    for kind, make, word in cases:
        require_error(kind, partial(hvd.DistributedOptimizer, make(), sharded=True), word)
    require_error(NotImplementedError, lambda: hvd.DistributedOptimizer(Adam(), sharded=True, op=hvd.Adasum), "Adasum")
    own, optimizer = train(Adam, True, 2)
    require_error(ValueError, lambda: optimizer.apply(gradients(0)[:1], variables()[:1]), "without the variable kernel")
    require_error(ValueError, lambda: hvd.broadcast_variables(optimizer.variables), "hvd.save")
    require_error(NotImplementedError, lambda: optimizer.stateless_apply([], [], []), "apply()")
    optimizer.register_local_var(own[0])
    require_error(RuntimeError, lambda: optimizer.apply(gradients(0), own), "before the optimizer is built")


def check_options() -> None:
    """Excluded variables do not decay, constraints, passes, groups, compression, variables without gradients."""

    def excluding(by_list: bool, own: Any) -> Any:
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(**({"var_list": [own[2]]} if by_list else {"var_names": ["bias"]}))
        return optimizer

    for by_list in (True, False):
        one, other = variables(), variables()
        train(lambda: excluding(by_list, one), True, 3, given=one)
        train(lambda: excluding(by_list, other), False, 3, given=other)
        require_equal(one, other, f"by list: {by_list}")
    constraint = lambda value: 0.9 * value  # noqa: E731  (twice would be wrong)
    for options in (
        {"constraint": constraint},
        {"backward_passes_per_step": 2},
        {"groups": 2, "compression": hvd.Compression.fp16},
    ):
        found = []
        for sharded in (True, False):
            given, rest = variables(options.get("constraint")), {k: v for k, v in options.items() if k != "constraint"}
            found.append(train(ELEMENTWISE["Adam"], sharded, 4, given, **rest)[0])
        require_equal(found[0], found[1], options)
    found = []
    for sharded in (True, False):
        own, optimizer = train(OTHERS["Nadam"], sharded, 2)
        for step, missing in ((2, (0, 1)), (3, (2, 3)), (4, ())):
            given = [None if number in missing else each for number, each in enumerate(gradients(step))]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.apply(given, own)
        optimizer.apply(gradients(5))  # for the variables that it was built for
        found.append((own, int(optimizer.iterations)))
    require_equal(found[0][0], found[1][0], "missing gradients")
    assert found[0][1] == found[1][1]


def check_local_variables() -> None:
    found = []
    for sharded in (True, False):
        own = variables()
        optimizer = hvd.DistributedOptimizer(Adam(0.01), sharded=sharded)
        optimizer.register_local_var(own[0])
        for step in range(3):
            optimizer.apply(gradients(step), own)
        found.append(values(own))
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
    require_same_bits(found[0][1:])
    assert not np.array_equal(found[0][0], hvd.allgather_object(found[0][0])[hvd.rank() - 1])


def check_different_first_weights() -> None:
    """They are an error before the first step: after it, all ranks would have a mixture of them."""
    own = variables()
    own[2].assign_add(np.full(SHAPES[2], float(last()), "float32"))
    before = values(own)
    optimizer = hvd.DistributedOptimizer(Adam(), sharded=True)
    require_error(Exception, lambda: optimizer.apply(gradients(0), own), "broadcast_variables", "variable 2")
    assert all(map(np.array_equal, values(own), before))


def check_a_rank_that_leaves_a_step_out() -> None:
    """All ranks raise an error: the other's next step is no answer to the pieces that are sent."""
    own, optimizer = train(Adam, True, 2)
    step = partial(optimizer.apply, gradients(2), own)
    if last():  # it has reduced gradients, and steps no pieces
        with unittest.mock.patch.object(sharding(), "give"):
            step()
    require_error(Exception, step, "kind differs", "step() of a sharded optimizer")
    assert (np.array(hvdlite.allreduce(np.ones(3), op=hvdlite.Sum)) == hvd.size()).all()


def model() -> Any:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(211, "tanh"), keras.layers.Dense(97, "tanh"), keras.layers.Dense(5)]
    return keras.Sequential([keras.layers.Input((30,)), *layers])


def fit(trained: Any, first: int = 0, until: int = 2, callbacks: Any = ()) -> Any:
    rng = np.random.default_rng(hvd.rank())
    x, y = rng.standard_normal((12, 30)).astype("float32"), rng.standard_normal((12, 5)).astype("float32")
    trained.fit(
        x, y, batch_size=4, initial_epoch=first, epochs=until, shuffle=False, verbose=0, callbacks=list(callbacks)
    )
    return trained


def compiled(sharded: bool, make: Make = Adam, seed: int = 0) -> Any:
    trained = model()
    for variable in trained.trainable_variables:
        variable.assign_add(seed * np.ones(variable.shape, "float32"))
    trained.compile(hvd.DistributedOptimizer(make(), sharded=sharded), "mse")
    return trained


def check_fit_and_checkpoints() -> None:
    """fit() with the usual callback; saved by all ranks, loaded by all, and by optimizers that are not sharded."""
    path, broadcast, make = (
        folder() / "run.npz",
        [hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
        ELEMENTWISE["Adam"],
    )
    trained, whole = fit(compiled(True, make, hvd.rank()), 0, 2, broadcast), fit(compiled(False, make), 0, 2, broadcast)
    require_equal(trained.weights, whole.weights)
    hvd.save(path, model=trained, epoch=2)
    saved = hvd.load(path)  # the arrays, in the order of a plain optimizer
    for array, variable in zip(saved["model.optimizer"], whole.optimizer.variables, strict=True):
        np.testing.assert_array_equal(array, keras.ops.convert_to_numpy(variable))
    fit(whole, 2, 3)
    for sharded in (True, False):
        again = compiled(sharded, make)
        assert hvd.load(path, model=again, epoch=0) == {"epoch": 2}
        require_equal(again.weights, trained.weights)
        require_equal(fit(again, 2, 3).weights, whole.weights, f"{sharded}")


def check_checkpoints_of_optimizers_of_tensors() -> None:
    path = folder() / "run.npz"
    for make in (*OF_TENSORS.values(), Own, OTHERS["Nadam"], OTHERS["scaled"]):
        (own, optimizer), (whole, all_of_it) = train(make, True, 3), train(make, False, 3)
        hvd.save(path, weights=own, state=optimizer)
        for array, variable in zip(hvd.load(path)["state"], all_of_it.variables, strict=True):
            np.testing.assert_array_equal(array, keras.ops.convert_to_numpy(variable))
        again = hvd.DistributedOptimizer(make(), sharded=True)
        given = variables()
        again.build(given)
        hvd.load(path, weights=given, state=again)
        for step in (3, 4):
            again.apply(gradients(step), given)
            all_of_it.apply(gradients(step), whole)
        require_equal(given, whole)


def check_kerass_own_files() -> None:
    trained, where = fit(compiled(True)), folder()
    if hvd.rank() == 0:  # as in most scripts
        good = where / "model.keras"
        good.write_text("an older file")
        require_error(RuntimeError, lambda: trained.save(good), "rank 0", "hvd.save", "Adam")
        assert good.read_text() == "an older file"
        require_error(RuntimeError, lambda: trained.save(where / "model.h5"), "hvd.save")
        assert not (where / "model.h5").exists()
        trained.save_weights(where / "own.weights.h5")
        trained.save(where / "weights.keras", include_optimizer=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras says that there is no state
            again = keras.models.load_model(where / "weights.keras")
            assert len(again.optimizer.variables) == len(trained.optimizer.variables)
            other = model()
            other.load_weights(where / "own.weights.h5")
        for each in (again, other):
            assert all(map(np.array_equal, values(each.weights), values(trained.weights)))
        checkpoint = keras.callbacks.ModelCheckpoint(where / "each.keras")
        checkpoint.set_model(trained)
        require_error(RuntimeError, lambda: checkpoint.on_epoch_end(0, {}) if checkpoint.on_epoch_begin(0) is None else 0,
                      "save_weights_only=True")  # fmt: skip
        plain = fit(compiled_alone())  # optimizers that are not sharded are saved as ever
        plain.save_weights(where / "whole.weights.h5")
        plain.save(where / "plain.keras")
        for a, b in zip(values(keras.models.load_model(where / "plain.keras").optimizer.variables),
                        values(plain.optimizer.variables), strict=True):  # fmt: skip
            np.testing.assert_array_equal(a, b)
    hvd.barrier()
    sharded, whole = compiled(True), compiled_alone()
    sharded.optimizer.build(sharded.trainable_variables)
    for each in (sharded, whole):
        each.optimizer.build(each.trainable_variables) if not each.optimizer.built else None
        each.load_weights(where / "whole.weights.h5")
    hvd.save(where / "run.npz", model=sharded)
    for array, variable in zip(hvd.load(where / "run.npz")["model.optimizer"], whole.optimizer.variables, strict=True):
        np.testing.assert_array_equal(array, keras.ops.convert_to_numpy(variable))


def compiled_alone() -> Any:
    trained = model()
    trained.compile(Adam(), "mse")
    return trained


def check_elastic_states_refuse_pieces() -> None:
    require_error(ValueError, lambda: hvd.elastic.KerasState(compiled(True)), "hvd.save")


def check_the_report_of_memory() -> None:
    gc.collect()
    before = hvd.memory_report()  # TensorFlow's graphs may keep earlier optimizers
    own, optimizer = train(Adam, True, 1)
    million = sum(each.nbytes for each in values(own)) / 1e6
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        rows = hvd.memory_report()
    assert len(rows) == hvd.size()
    for row, old in zip(rows, before, strict=True):
        assert abs(row["parameters"] - old["parameters"] - million) < 1e-9
        assert abs(row["optimizer state"] - old["optimizer state"] - 2 * million / hvd.size()) < 0.02 * million
        assert row["parameters"] < row["process"] and 0 < row["arenas"] < row["process"]
    assert ("optimizer state" in out.getvalue()) == (hvd.rank() == 0)
    assert optimizer.built


def check_sparse_gradients() -> None:
    if not on("tensorflow"):
        return
    import tensorflow as tf

    for as_dense in (False, True):
        found = []
        for sharded in (True, False):
            table = keras.Variable(np.ones((50, 400), "float32"))
            optimizer = hvd.DistributedOptimizer(Adam(0.1), sharded=sharded, sparse_as_dense=as_dense)
            gradient = tf.IndexedSlices(tf.ones((2, 400)), tf.constant([hvd.rank(), 7]), tf.constant([50, 400]))
            step = partial(optimizer.apply, [gradient], [table])
            if sharded and not as_dense:
                require_error(NotImplementedError, step, "sparse_as_dense=True")
            else:
                step()
                found.append([table])
        if as_dense:
            require_equal(found[0], found[1])


def check_variables_of_tensorflow() -> None:
    """A loop with variables that are not Keras'. Ranks of a float64 model have pieces of other lengths."""
    if not on("tensorflow"):
        return
    import tensorflow as tf

    found = []
    for sharded in (True, False):
        own = [tf.Variable(np.ones((90, 91)), name=f"layer/{name}") for name in ("kernel", "bias")]
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        hvd.DistributedOptimizer(optimizer, sharded=sharded)
        for step in range(3):
            given = np.random.default_rng((step, hvd.rank())).standard_normal((2, 90, 91))
            optimizer.apply(list(map(tf.constant, given)), own)
        found.append(own)
    require_equal(*found)


def check_process_sets() -> None:
    """A rank alone in its set is not sharded. Two of the ranks load what all have saved, and go on together."""
    hvdlite.shutdown()
    hvdlite.init(process_sets="dynamic")
    path, (own, optimizer) = folder() / "run.npz", train(Adam, True, 3)
    hvd.save(path, weights=own, state=optimizer)
    alone = hvd.add_process_set([0])
    pair = hvd.add_process_set([0, hvd.size() - 1]) if hvd.size() > 2 else hvd.global_process_set
    assert elements(train(Adam, True, 2, process_set=alone)[1]) == elements(make_built(Adam))
    found = []
    for sharded in (True, False):
        given, again = variables(), hvd.DistributedOptimizer(Adam(), sharded=sharded, process_set=pair)
        again.build(given)
        hvd.load(path, weights=given, state=again)
        if pair.included():
            for step in (3, 4):
                again.apply(gradients(step), given)
            assert not sharded or elements(again) < 0.52 * elements(make_built(Adam))
        hvd.save(path.with_name(f"{sharded}"), weights=given, state=again)
        found.append(hvd.load(path.with_name(f"{sharded}")))
    for one, other in zip(*([*each["weights"], *each["state"]] for each in found), strict=True):
        np.testing.assert_array_equal(one, other)
    hvdlite.shutdown()
    hvdlite.init()
