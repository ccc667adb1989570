"""Checks of a Keras model in parts on two ranks: ways through the ranks, parts, and errors. See `backends_chain`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvdlite
import hvdlite.keras as hvd
from tests.parallel.chain_common import (
    BATCH,
    BODY,
    CLOSE,
    HEAD,
    NECK,
    ROWS,
    WIDTH,
    data,
    dense,
    optimizer,
    part,
    require_equal,
    require_equal_logs,
    whole,
)
from tests.parallel.common import require_error

SIZES = ()  # test_keras_backends runs this module: KERAS_BACKEND must be set before Keras is imported


def chain() -> hvd.Chain:
    model = hvd.Chain([(0, BODY), (1, NECK), (1, HEAD)])
    model.compile(optimizer(), "mse")
    return model


def require_in_step() -> None:
    """All ranks can go on together."""
    np.testing.assert_allclose(hvdlite.allreduce(np.ones(2), op=hvdlite.Sum), [hvd.size()] * 2)


def require_trains() -> None:
    x, y, _ = data()
    chain().train_on_batch(x[:BATCH], y[:BATCH])


def require_refused(call: Callable[[], Any], *words: str) -> None:
    """Every rank gets the same error."""
    text = require_error(Exception, call, "hvd.Chain", *words)  # TensorFlow's own class in compiled steps
    told = [each[each.index("hvd.Chain") :].partition("\n")[0] for each in hvd.allgather_object(text)]
    assert len(set(told)) == 1, told
    require_in_step()


def check_there_and_back() -> None:
    """The rank with the first part also has the last one, or ranks are in the other order."""
    x, y, _ = data()
    for ranks in ((0, 1, 0), (1, 0, 0)):
        model, one = hvd.Chain(list(zip(ranks, (BODY, NECK, HEAD), strict=True))), whole(BODY, NECK, HEAD)
        for each in (model, one):
            each.compile(optimizer(), "mse")
            each.fit(x, y, BATCH, 2, 0, shuffle=False)
        require_equal(model, one)


def check_four_parts_on_two_ranks() -> None:
    parts = BODY, NECK, part(4, (5,), dense(5)), HEAD
    x, y, _ = data()
    model, one = hvd.Chain(list(zip((0, 1, 0, 1), parts, strict=True))), whole(*parts)
    for each in (model, one):
        each.compile(optimizer(), "mse", run_eagerly=True)
        for _ in range(2):
            each.train_on_batch(x, y)
    require_equal(model, one)


def check_words_and_classes() -> None:
    """Whole numbers go in, and each word gets a vector; parts without weights; a part that is not trained."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 9, (ROWS, 4)), rng.integers(0, 3, ROWS)
    embed = part(1, (4,), lambda: keras.layers.Embedding(9, 3))
    for head in (part(2, (4, 3), keras.layers.Flatten, dense(3)), part(2, (4, 3), keras.layers.GlobalMaxPooling1D)):
        for trained in (True, False):
            model, one = hvd.Chain([(0, embed), (1, head)]), whole(embed, head)
            for layer in (*([model.parts[0]] if 0 in model.parts else []), one.layers[0]):
                layer.trainable = trained
            if not any(each.trainable_weights for each in one.layers):
                continue
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            for each in (model, one):
                each.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
            logs = [
                each.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history for each in (model, one)
            ]
            require_equal_logs(*logs)
            require_equal(model, one)


def check_parts_are_saved_and_joined() -> None:
    x, y, _ = data()
    model = chain()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(hvd.broadcast_object(name, 0))
        for number, mine in model.parts.items():
            mine.save(folder / f"{number}.keras")
        hvd.barrier()
        joined = keras.Sequential([keras.models.load_model(folder / f"{number}.keras") for number in range(3)])
        hvd.barrier()
    np.testing.assert_allclose(joined.predict(x, verbose=0), model.predict(x, verbose=0), rtol=CLOSE, atol=CLOSE)


def check_parts_that_do_not_fit() -> None:
    def fails() -> keras.Model:
        raise RuntimeError("no memory")

    wide, words = part(1, (9,), dense(2)), part(1, (4,), lambda: keras.layers.Embedding(9, 8, mask_zero=True))

    def whole_numbers() -> keras.Model:
        given = keras.Input((WIDTH,))
        return keras.Model(given, keras.ops.cast(given, "int32"))

    for parts, said in (
        ([(0, BODY), (1, wide)], ["part 0 (rank 0) returns a tensor of shape (None, 8)", "takes (None, 9)"]),
        ([(0, BODY), (1, fails)], ["rank 1 could not make its parts: RuntimeError: no memory"]),
        ([(0, words), (1, part(1, (4, 8), dense(2)))], ["mask"]),
        ([(0, whole_numbers), (1, part(1, (WIDTH,), dense(2)))], ["returns int32"]),
        ([(0, BODY), (hvd.rank(), NECK), (1, HEAD)], ["rank 1 has parts on the ranks"]),
        ([(0, BODY), (0, NECK)], ["each of the 2 ranks needs a part"]),
        ([(0, BODY), (1, lambda: keras.Sequential([keras.layers.Dense(2)]))], ["must begin with keras.Input"]),
        ([(0, BODY), (1, keras.layers.Dense(2))], ["function that makes it"]),
    ):
        require_refused(lambda: hvd.Chain(parts), *said)
    require_trains()


def check_batches_that_do_not_fit() -> None:
    """Rank 1 has fewer rows or batches than rank 0, or more epochs or labels; the data of rank 0 have another shape."""
    x, y, weights = data()
    model, rows = chain(), ROWS - hvd.rank()

    def batches() -> Iterator[Any]:
        for _ in range(3 - hvd.rank()):
            yield x[:BATCH], y[:BATCH]

    for call, said in (
        (lambda: model.fit(x[:rows], y[:rows], batch_size=BATCH, verbose=0), ["4 rows", "3 rows"]),
        (
            lambda: model.evaluate(x[:rows], y[:rows], verbose=0, batch_size=BATCH),
            ["evaluates a batch of 3 rows"],
        ),
        (
            lambda: model.predict(x[:rows], verbose=0, batch_size=43),
            ["predicts a batch of 1 rows", "ends predict"],
        ),
        (lambda: model.train_on_batch(x, y, weights if hvd.rank() else None), ["labels: 1", "labels: 2"]),
        (lambda: model.fit(batches(), epochs=2, verbose=0), ["rank 0 trains", "rank 1 begins epoch 2"]),
        (lambda: model.predict(x, verbose=0) if hvd.rank() else model.evaluate(x, y, verbose=0), ["predicts"]),
    ):
        require_refused(call, *said)
    require_refused(lambda: model.fit(x, y, epochs=2 + hvd.rank(), verbose=0), "fit() for 2 epochs", "for 3 epochs")
    require_trains()


def require_told(failing: int, call: Callable[[], Any], *words: str) -> None:
    """The failing rank gets its own error, others one that names the rank."""
    told = () if hvd.rank() == failing else (f"hvd.Chain: rank {failing} has raised",)
    require_error(Exception, call, *told, *words)
    require_in_step()


def check_errors_on_one_rank() -> None:
    """In a part, the loss, the data, a callback or the optimizer, in the first batch or a later one."""
    x, y, _ = data()
    words = np.zeros((ROWS, 4), "int32")
    words[-1] = 99  # in the last batch

    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if hvd.rank() == 1:
                raise ArithmeticError("no luck")

    class FailsAtTheEnd(keras.callbacks.Callback):
        def on_train_end(self, logs: Any = None) -> None:
            if hvd.rank() == 0:
                raise ArithmeticError("no luck")

    class FailingSGD(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            if hvd.rank() == 0:
                raise ArithmeticError("no luck")
            super().apply(grads, trainable_variables)

    def batches() -> Iterator[Any]:
        yield x[:BATCH], y[:BATCH]
        if hvd.rank() == 1:
            raise ArithmeticError("no luck")
        yield x[:BATCH], y[:BATCH]

    def embeds() -> hvd.Chain:
        embed = part(1, (4,), lambda: keras.layers.Embedding(9, 2), keras.layers.Flatten)
        model = hvd.Chain([(0, embed), (1, part(2, (8,), dense(2)))])
        model.compile("sgd", "mse")
        return model

    def failing_loss(y: Any, output: Any) -> Any:
        if hvd.rank() == 1:
            raise ArithmeticError("no luck")
        return keras.ops.mean(keras.ops.square(y - output), -1)

    def compiled(optimizer: Any = "sgd", loss: Any = "mse") -> hvd.Chain:
        model = hvd.Chain([(0, BODY), (1, part(2, (8,), dense(2)))])
        model.compile(optimizer, loss)
        return model

    require_told(0, lambda: embeds().fit(words, y, BATCH, shuffle=False, verbose=0))
    require_told(0, lambda: embeds().predict(words, verbose=0))
    require_told(1, lambda: compiled(loss=failing_loss).fit(x, y, verbose=0), "no luck")
    require_told(1, lambda: chain().fit(batches(), verbose=0), "no luck")
    require_told(1, lambda: chain().fit(x, y, epochs=2, verbose=0, callbacks=[Fails()]), "no luck")
    require_told(0, lambda: chain().fit(x, y, verbose=0, callbacks=FailsAtTheEnd()), "no luck")
    require_told(0, lambda: compiled(FailingSGD()).fit(x, y, epochs=2, verbose=0), "no luck")
    require_told(0, lambda: chain().fit(x[:, :5], y, verbose=0))
    require_told(1, lambda: chain().fit(x, y[: ROWS - hvd.rank()], verbose=0))
    require_told(1, lambda: chain().fit(x, y[:, : 2 - hvd.rank()], verbose=0), "the labels on rank 0 are")
    require_trains()


def check_a_part_that_returns_something_else() -> None:
    """Keras takes the dtype of a Lambda layer with output_shape= for that of its inputs."""
    x, y, _ = data()
    whole_numbers = part(9, (8,), lambda: keras.layers.Lambda(lambda t: keras.ops.cast(t, "int32"), output_shape=(8,)))
    for place in (0, 1):
        model = hvd.Chain([(0, BODY), (place, whole_numbers), (1, part(2, (8,), dense(2)))])
        model.compile("sgd", "mse")
        said = "hvd.Chain: part 1 returns int32 of shape", "but has said to return float32"
        require_told(place, lambda: model.fit(x, y, verbose=0), *said)
    require_trains()


def check_one_rank_stops_alone() -> None:
    x, y, _ = data()
    model = chain()

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = epoch == hvd.rank()

    require_refused(lambda: model.fit(x, y, epochs=9, verbose=0, callbacks=[Stop()]), "rank 0 ends fit()", "epoch 2")
    require_trains()


def check_what_a_chain_does_not_support() -> None:
    x, y, _ = data()
    model = chain()
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    for call, said in (
        (lambda: model.fit(x, y, verbose=0, callbacks=[callback]), "model.parts"),
        (lambda: hvd.broadcast_variables(model), "model.parts"),
        (lambda: model.save("x.keras"), "model.parts"),
        (lambda: model(x), "fit()"),
        (lambda: model.compile(keras.optimizers.SGD(0.1, global_clipnorm=1.0), "mse"), "global_clipnorm"),
        (lambda: model.compile(keras.optimizers.LossScaleOptimizer(optimizer()), "mse"), "loss scaling"),
        (lambda: model.compile("sgd", "mse", jit_compile=True), "jit_compile"),
        (lambda: model.compile("sgd", "mse", steps_per_execution=2), "steps_per_execution"),
    ):
        require_error(NotImplementedError, call, said)
    everyones = hvd.DistributedOptimizer(optimizer())
    require_error(ValueError, lambda: model.compile(everyones, "mse"), "plain optimizer")
    require_trains()
