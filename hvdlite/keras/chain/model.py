"""`Chain`, as Keras sees it: construction, compile(), fit() and the steps that Keras runs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import accumulate
from typing import TypeVar

import keras
from keras import ops as K
from keras.optimizers import Optimizer

from hvdlite.arrays import Array
from hvdlite.errors import HvdliteError
from hvdlite.gradients.tensors import Gradient, Tensor
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet
from hvdlite.keras.attachment import attachment_of
from hvdlite.keras.chain.backend import backend
from hvdlite.keras.chain.lockstep import Act, Lockstep
from hvdlite.keras.chain.parts import Place, Report, Spec, made, ranks_of, signature, signatures_of
from hvdlite.keras.chain.relay import Nested, Relay, Tensors, leaves, rows_of
from hvdlite.keras.functions import give
from hvdlite.keras.logs import Logs
from hvdlite.keras.optimizer import DistributedOptimizer
from hvdlite.lanes.calls import calling
from hvdlite.ops.objects import allgather_object

T = TypeVar("T")


def together(method: Callable[..., T], end: Act) -> Callable[..., T]:
    """Return a method of Keras' model whose error on one rank becomes an error on all. end: what the method ends."""
    signature = inspect.signature(method)

    @wraps(method)
    def call(self: Chain, *args: object, **kwargs: object) -> T:
        with self.relay.lockstep.together(end):
            bound = signature.bind(self, *args, **kwargs)
            if "epochs" in signature.parameters:
                given = keras.tree.flatten(bound.arguments.get("callbacks") or [])
                bound.arguments["callbacks"] = [Epochs(), *given]
            return method(*bound.args, **bound.kwargs)

    return call


class Chain(keras.Model):  # type: ignore[misc]
    """A model in parts on different ranks, which `fit`, `evaluate` and `predict` run together.

    Call compile(), fit(), evaluate() and predict() on every rank, with the same arguments. Each step waits for all
    ranks. The rank with the first part gives the batch: its labels and sample weights travel to the rank with the last
    part. On other ranks, x and y only tell the number of rows, shapes and dtypes. All ranks log the same loss and
    metrics, and predict() returns the predictions on every rank. An error on one rank, in its part or its data, raises
    on every rank.

    With a process set for each part, parts also train data-parallel: the i-th ranks of all parts form a column that
    trains on its own share of the data, and the ranks of a part average their gradients.

    Attributes:
        parts: This rank's parts, by number: Keras models, to save (`model.parts[0].save(path)`) or to look at. Give
            parts names if you will join them: keras.Sequential refuses two parts of one name.
        relay: Runs the parts, and exchanges tensors with other ranks.
        process_set: The ranks that have the same parts; None if this rank alone has them.
    """

    _hvdlite_parts = True  # gradients.variables.PARTS

    def __init__(self, parts: Sequence[tuple[Place, Callable[[], keras.Model]]], name: str | None = None) -> None:
        """Make this rank's parts. Collective.

        Args:
            parts: The same list on every rank: where each part is (a global rank, or a registered process set), and a
                function that makes it. Only the part's ranks call the function. It returns a model with one output
                that begins with keras.Input. A rank may have several parts.
            name: As for keras.Model.

        Raises:
            HvdliteError: A rank could not make its parts, the lists differ, or a part takes another shape than the
                previous one returns. On every rank.
            NotImplementedError: Keras runs on JAX.
        """
        super().__init__(name=name)
        served, cause = backend(), None
        try:
            ranks = ranks_of([place for place, _ in parts])
            own = [number for number, those in enumerate(ranks) if runtime.rank() in those]
            self.parts = {number: made(parts[number][1]) for number in own}
            mine = Report(ranks, {number: signature(part) for number, part in self.parts.items()})
        except Exception as error:  # the other ranks wait for this one
            mine, cause = Report(error=f"{type(error).__name__}: {error}"), error
        with calling("hvd.Chain"):
            reports = allgather_object(mine)
        try:
            signatures = signatures_of(reports)
        except HvdliteError as error:
            raise error from cause
        self.relay = Relay(self.parts, signatures, Lockstep(ranks), served)
        place = parts[own[0]][0]
        self.process_set = place if isinstance(place, ProcessSet) and len(ranks[0]) > 1 else None
        if self.process_set is not None and self.weights:
            with calling("hvd.Chain"):
                give(self.weights, ranks[own[0]][0], self.process_set)
        self.built = True

    def compile(self, optimizer: Optimizer | str = "rmsprop", loss: object = None, **kwargs: object) -> None:
        """As keras.Model.compile. If other ranks have the same parts, the optimizer averages gradients over them.

        Args:
            optimizer: The same on every rank.
            loss: The same on every rank.
            **kwargs: As for keras.Model.compile; jit_compile=False by default.

        Raises:
            NotImplementedError: An option that a model in parts does not support.
            ValueError: The optimizer averages over other ranks than those with the same parts.
        """
        optimizer = keras.optimizers.get(optimizer)
        kwargs.setdefault("jit_compile", False)
        for option, used in {
            "global_clipnorm, since no rank has all gradients (use clipnorm or clipvalue)": optimizer.global_clipnorm,
            "loss scaling, since one rank would skip a step and others not (use bfloat16)": scales(optimizer),
            "jit_compile, since compiled code cannot communicate": kwargs["jit_compile"],
            "steps_per_execution": kwargs.get("steps_per_execution", 1) != 1,
        }.items():
            if used:
                raise NotImplementedError(f"hvd.Chain does not support {option}")
        attachment = attachment_of(optimizer)
        if attachment is None and self.process_set is not None:
            DistributedOptimizer(optimizer, process_set=self.process_set)
        elif attachment is not None and attachment.settings.process_set is not self.process_set:
            raise ValueError(
                "hvd.Chain: this optimizer averages gradients over ranks that have other parts. Give compile() a plain "
                "optimizer: the chain makes it distributed where several ranks have the same parts"
            )
        super().compile(optimizer, loss, **kwargs)

    fit = together(keras.Model.fit, Act.TRAINED)
    evaluate = together(keras.Model.evaluate, Act.TESTED)
    predict = together(keras.Model.predict, Act.PREDICTED)
    train_on_batch = together(keras.Model.train_on_batch, Act.TRAINED)
    test_on_batch = together(keras.Model.test_on_batch, Act.TESTED)
    predict_on_batch = together(keras.Model.predict_on_batch, Act.PREDICTED)

    def save(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError("hvd.Chain has no file: each rank saves its own parts (model.parts[0].save(path))")

    def call(self, inputs: Nested, training: bool | None = None) -> Tensor:
        """Give Keras the shape of the last part's output, for metrics. Refuses values: each rank has its own."""
        found = leaves(inputs)[0]
        if str(getattr(found, "device", "")) != "meta":  # torch's device of tensors without values
            raise NotImplementedError("hvd.Chain cannot be called: use fit(), evaluate() and predict() on every rank")
        return self.relay.blank(found.shape[0])

    # The steps that Keras calls

    def train_step(self, data: Nested) -> Logs:
        relay, (x, y, weights) = self.relay, unpacked(data)
        relay.begin(Act.TRAIN, x, (y, weights))
        with relay.backend.record() as tape:
            inputs, outputs = relay.forth(x, True, tape)
            y, weights = relay.labels(y, weights)
            loss = self.loss_of(x, y, weights, outputs, True)
        variables = self.trainable_variables
        gradients = relay.back(tape, inputs, outputs, loss, variables)
        logs = self.logs_of(x, y, weights, outputs)  # after it, no rank can fail but in its optimizer
        if variables:
            with relay.backend.unrecorded():
                self.optimizer.apply(gradients, variables)
        return logs

    def test_step(self, data: Nested) -> Logs:
        x, y, weights = unpacked(data)
        self.relay.begin(Act.TEST, x, (y, weights))
        _, outputs = self.relay.forth(x, False)
        y, weights = self.relay.labels(y, weights)
        self.loss_of(x, y, weights, outputs, False)
        return self.logs_of(x, y, weights, outputs)

    def predict_step(self, data: Nested) -> Tensor:
        x, _, _ = unpacked(data)
        self.relay.begin(Act.PREDICT, x, None)
        return self.relay.predictions(self.relay.forth(x, False)[1])

    def loss_of(self, x: Nested, y: Nested, weights: Nested, outputs: Tensors, training: bool) -> Gradient:
        """Compute the loss of this rank's parts, and track it.

        Without the last part it is the regularization of this rank's parts; None without any.
        """
        loss: Gradient = None
        if self.relay.has_last:
            output = outputs[self.relay.last]
            loss = self.compute_loss(x=x, y=y, y_pred=output, sample_weight=weights, training=training)
        elif self.losses:
            loss = sum(self.losses[1:], self.losses[0])
        if loss is not None:
            tracker = next(metric for metric in self.metrics if metric.name == "loss")
            tracker.update_state(loss, sample_weight=rows_of(x))
        return loss

    def logs_of(self, x: Nested, y: Nested, weights: Nested, outputs: Tensors) -> Logs:
        """Update the metrics, and give all ranks the same values: those of the last part's ranks, the mean of columns.

        The loss has the regularization of all parts. Waits for all ranks.
        """
        relay = self.relay
        if not relay.has_last:  # no rows: metrics are built, and stay empty
            y, weights = keras.tree.map_structure(lambda each: None if each is None else each[:0], (y, weights))
        self.compute_metrics(x, y, outputs.get(relay.last, relay.blank(0)), sample_weight=weights)
        mine = {name: K.convert_to_tensor(value, "float32") for name, value in super().get_metrics_result().items()}
        ends = list(accumulate(math.prod(value.shape) for value in mine.values()))

        def work(row: Array) -> list[Array]:
            rows, columns = relay.lockstep.gather("metrics", row), relay.lockstep.columns
            mean = rows[[column[-1] for column in columns]].mean(0)
            mean[0] = rows[:, 0].sum() / len(columns)  # Keras' first metric is the loss
            return [mean]

        row = K.concatenate([K.reshape(value, (-1,)) for value in mine.values()])
        (mean,) = relay.backend.call(work, [row], [Spec((ends[-1],), "float32")])
        pieces = K.split(mean, ends[:-1]) if len(ends) > 1 else [mean]
        return {name: K.reshape(piece, like.shape) for (name, like), piece in zip(mine.items(), pieces, strict=True)}

    def get_metrics_result(self) -> Logs:
        """Return nothing: fit() and evaluate() then use the logs of the last step, which all ranks share."""
        return {}


class Epochs(keras.callbacks.Callback):  # type: ignore[misc]
    """Makes all ranks of a chain begin fit() and its epochs together."""

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.model.relay.lockstep.agree(Act.FIT, self.params["epochs"])

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self.model.relay.lockstep.agree(Act.EPOCH, epoch + 1)


def unpacked(data: Nested) -> tuple[Nested, Nested, Nested]:
    """Return inputs, labels and sample weights as tensors: train_on_batch() gives arrays to the step."""
    found = keras.utils.unpack_x_y_sample_weight(data)
    return keras.tree.map_structure(lambda each: None if each is None else K.convert_to_tensor(each), found)  # type: ignore[no-any-return]


def scales(optimizer: Optimizer) -> bool:
    """Return whether the loss will be scaled."""
    policy = keras.config.dtype_policy().name
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or policy == "mixed_float16"
