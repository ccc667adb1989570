"""Attaching to a Keras optimizer: its `apply` is replaced on the instance, nothing is wrapped.

    fit, train_on_batch, custom train_step, GradientTape loops
        -> optimizer.apply_gradients -> optimizer.apply          (stateless_apply, too, comes through here)
               gradients are reduced over all ranks, then the optimizer's own apply goes on: clipping, weight decay,
               EMA and gradient accumulation see reduced gradients

The optimizer stays the same object: compile, isinstance, saving and its class go on working, and a saved model holds
the plain optimizer. Keras 3 never calls the hooks that Horovod used, and trained unsynchronized without a word. So
that this cannot happen here, the optimizer's update step refuses gradients that have not come through `apply`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import keras
from keras.optimizers import Optimizer

from hvdlite.gradients.accumulator import Accumulator
from hvdlite.gradients.lists import Gradients, dense, keep_own
from hvdlite.gradients.settings import Settings
from hvdlite.gradients.tensors import Gradient, Variable
from hvdlite.keras import private_api
from hvdlite.keras.backends import framework

Apply = Callable[[list[Gradient], Sequence[Variable] | None], object]


class KerasAttachment:
    """What is attached to a Keras optimizer: its gradients are reduced before it applies them.

    Attributes:
        optimizer: The optimizer itself, inside a LossScaleOptimizer.
        settings: What the user asked for.
        sums: The gradients of earlier passes.
        framework: The backend.
        gradients: Reduces lists of gradients.
        local: Variables whose gradients stay this rank's own.
        reduced: Whether the update under way has reduced gradients.
    """

    def __init__(self, optimizer: Optimizer, settings: Settings, sums: Accumulator) -> None:
        self.optimizer = optimizer
        self.settings = settings
        self.sums = sums
        self.framework = framework()
        user = optimizer if keras.backend.backend() == "tensorflow" else None  # there Keras keeps its graphs
        title = f"DistributedOptimizer({type(optimizer).__name__})"
        self.gradients = Gradients(settings, self.framework, "optimizer", title, sums, user)
        self.local: list[Variable] = []
        self.reduced = False

    @property
    def at_work(self) -> bool:
        """Whether gradients are to be reduced or added up.

        Raises:
            RuntimeError: They are, and cannot be: hvd.shutdown() has been called since, say.
            RemovedError: The process set was removed.
        """
        self.gradients.require_alive()
        return self.gradients.alive and (self.gradients.group is not None or self.sums.passes > 1)

    # What the optimizer's methods become

    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Variable] | None = None) -> None:
        """Reduce the gradients over all ranks and apply them."""
        self.reduce_and(self.original("apply"), self.optimizer, grads, trainable_variables)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Gradient, Variable]], **kwargs: object) -> object:
        """The class's own, which is not Keras': it clips or chooses among reduced gradients, too."""
        results: list[object] = []

        def go_on(grads: Sequence[Gradient], variables: Sequence[Variable] | None) -> None:
            results.append(self.original("apply_gradients")(zip(grads, variables or (), strict=True), **kwargs))

        pairs = list(grads_and_vars)
        grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
        self.reduce_and(go_on, self.optimizer, grads, variables)
        return results[0] if results else self.optimizer.iterations

    def guarded(self, method: str) -> Callable[..., object]:
        """The class's own update, for gradients that have been reduced."""

        def update(*args: object, **kwargs: object) -> object:
            if not self.reduced and self.at_work:
                raise RuntimeError(
                    f"{type(self.optimizer).__name__} was about to apply gradients that were not reduced over all "
                    "ranks: this Keras, or another optimizer around this one (then make that one distributed), calls "
                    "it in a way that hvdlite does not know. Nothing was changed."
                )
            return self.original(method)(*args, **kwargs)

        return update

    def original(self, method: str) -> Callable[..., object]:
        """The class's method, looked up anew at each call."""
        return getattr(type(self.optimizer), method).__get__(self.optimizer)  # type: ignore[no-any-return]

    def reduce_and(
        self, apply: Apply, optimizer: Optimizer, grads: Sequence[Gradient],
        trainable_variables: Sequence[Variable] | None,
    ) -> None:
        """Call apply(gradients, trainable_variables) with reduced gradients, at the last of several passes."""
        grads = list(grads)
        if self.reduced or not grads or not self.at_work:
            apply(grads, trainable_variables)
            return
        given = None if trainable_variables is None else list(trainable_variables)
        variables = private_api.trainable_variables(optimizer) if given is None else given
        if len(grads) != len(variables):
            raise ValueError(f"{len(grads)} gradients for {len(variables)} variables: build the optimizer first")
        if any(getattr(variable, "overwrite_with_gradient", False) for variable in variables):
            raise NotImplementedError("layers in float8: what Keras gives as their gradients are no sums over a batch")

        def reduce_all(grads: list[Gradient]) -> None:
            refuse_distribution()
            self.framework.refuse_replicas()
            reduced = self.gradients.reduce(grads, variables, self.local, borrow=keeps_nothing(self.optimizer))
            with self.framework.using(), self.updating():
                apply(reduced, given)

        if self.sums.passes == 1:
            reduce_all(grads)
        else:
            self.at_last_pass(reduce_all, optimizer, grads, variables)

    def at_last_pass(
        self, then: Callable[[list[Gradient]], None], optimizer: Optimizer, grads: list[Gradient],
        variables: list[Variable],
    ) -> None:
        """Add the gradients to those of earlier passes; at the last, then(sums). Each pass counts as an iteration."""
        if not optimizer.built:  # variables cannot be made in one branch of a condition
            with keras.name_scope(optimizer.name):
                optimizer.build(variables)
            optimizer.built = True
        given = {i: dense(self.settings.sparse_as_dense, self.framework, grad, variables[i])
                 for i, grad in enumerate(grads) if grad is not None}  # fmt: skip
        last = self.framework.accumulate(self.sums, given)

        def step() -> None:
            totals = self.framework.accumulated(self.sums, given)
            then([totals.get(i) for i in range(len(grads))])

        def skip() -> None:
            innermost(optimizer).iterations.assign_add(1)

        if isinstance(last, bool):
            (step if last else skip)()
        else:
            keras.ops.cond(last, step, skip)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Inside, gradients are reduced ones."""
        before, self.reduced = self.reduced, True
        try:
            yield
        finally:
            self.reduced = before


def innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside a LossScaleOptimizer; else the optimizer itself."""
    return innermost(optimizer.inner_optimizer) if scales(optimizer) else optimizer


def keeps_nothing(optimizer: Optimizer) -> bool:
    """Whether the optimizer's gradients may be gone after the step. Keras' own optimizers keep none; others may assign
    one to a variable, and TensorFlow then gives the variable the gradient's memory."""
    return type(optimizer).__module__.partition(".")[0] == "keras" and not hasattr(optimizer, "optimizers")


def scales(optimizer: Optimizer) -> bool:
    """Whether it is a LossScaleOptimizer. Other wrappers of optimizers may call the inner one in any way."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def attachment_of(optimizer: Optimizer) -> KerasAttachment | None:
    """What is attached to the optimizer, or to the one inside it."""
    found: KerasAttachment | None = vars(optimizer).get("_hvdlite")
    return found if found is not None or not scales(optimizer) else attachment_of(optimizer.inner_optimizer)


def refuse_distribution() -> None:
    """Raise NotImplementedError when Keras itself spreads training over several devices of this process."""
    found = keras.distribution.distribution()
    if found is not None:
        raise NotImplementedError(
            f"hvd.DistributedOptimizer under keras.distribution ({type(found).__name__}): hvdlite trains with one "
            "process per device. Remove keras.distribution.set_distribution(...) from the script, or undo it with "
            "keras.distribution.set_distribution(None); then start one process per device (hvdliterun -np)"
        )


def attach(optimizer: Optimizer, settings: Settings, sums: Accumulator) -> None:
    """Attach to the optimizer (to the one inside a LossScaleOptimizer). Collective.

    Raises:
        RuntimeError: The optimizer is attached already.
        HvdliteError: This version of Keras, or of its backend, lacks a private name that hvdlite uses.
        NotImplementedError: `keras.distribution` is in use.
    """
    before = attachment_of(optimizer)
    if before is not None:
        before.gradients.require_replaceable()
    inner = innermost(optimizer)
    private_api.require_all(inner)
    if settings.size > 1:
        refuse_distribution()
    attachment = KerasAttachment(inner, settings, sums)
    if before is not None:
        before.gradients.replace()
    untouched = attachment.framework.untouched
    methods: dict[str, Callable[..., object]] = {"apply": attachment.apply}
    methods |= {name: attachment.guarded(name) for name in private_api.guards(inner)}
    if type(inner).apply_gradients is not keras.optimizers.Optimizer.apply_gradients:
        methods["apply_gradients"] = attachment.apply_gradients
    # Past __setattr__, with which Keras keeps account of an object's parts.
    inner.__dict__.update(_hvdlite=attachment, **{name: untouched(method) for name, method in methods.items()})
    for each in (inner, optimizer):
        each.__dict__.update(register_local_var=partial(keep_own, attachment.local))
