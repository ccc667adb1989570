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
from typing import Any

import keras

from hvdlite.gradients.accumulator import Accumulator
from hvdlite.gradients.lists import Gradients, Settings, dense, keep_own
from hvdlite.job import runtime
from hvdlite.keras import private_api
from hvdlite.keras.backends import border

Optimizer = Any
Apply = Callable[[list[Any], Sequence[Any] | None], Any]


class Attachment:
    """One optimizer's gradients, reduced."""

    def __init__(self, optimizer: Optimizer, settings: Settings, sums: Accumulator) -> None:
        self.optimizer, self.settings, self.sums, self.border = optimizer, settings, sums, border()
        user = optimizer if keras.backend.backend() == "tensorflow" else None  # there Keras keeps its graphs
        title = f"DistributedOptimizer({type(optimizer).__name__})"
        self.gradients = Gradients(settings, self.border, "optimizer", title, sums, user)
        self.local: list[Any] = []
        self.reduced = False  # the update under way has reduced gradients

    @property
    def at_work(self) -> bool:
        """Whether there is something to do. Raises RuntimeError (of a removed process set RemovedError) where there is
        and it cannot be done."""
        self.gradients.require_alive()
        return self.gradients.alive and (self.gradients.group is not None or self.sums.passes > 1)

    # What the optimizer's methods become

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce the gradients over all ranks and apply them."""
        self.reduce_and(self.original("apply"), self.optimizer, grads, trainable_variables)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], **kwargs: Any) -> Any:
        """The class's own, which is not Keras': it clips or chooses among reduced gradients, too."""
        results: list[Any] = []

        def go_on(grads: Sequence[Any], variables: Sequence[Any] | None) -> None:
            results.append(self.original("apply_gradients")(zip(grads, variables or (), strict=True), **kwargs))

        grads, variables = map(list, zip(*grads_and_vars, strict=True))
        self.reduce_and(go_on, self.optimizer, grads, variables)
        return results[0] if results else self.optimizer.iterations

    def guarded(self, method: str) -> Callable[..., Any]:
        """The class's own update, for gradients that have been reduced."""

        def update(*args: Any, **kwargs: Any) -> Any:
            if not self.reduced and self.at_work:
                raise RuntimeError(
                    f"{type(self.optimizer).__name__} was about to apply gradients that were not reduced over all "
                    "ranks: this Keras, or another optimizer around this one (then make that one distributed), calls "
                    "it in a way that hvdlite does not know. Nothing was changed."
                )
            return self.original(method)(*args, **kwargs)

        return update

    def original(self, method: str) -> Callable[..., Any]:
        """The class's method, looked up anew at each call."""
        return getattr(type(self.optimizer), method).__get__(self.optimizer)  # type: ignore[no-any-return]

    def reduce_and(
        self, apply: Apply, optimizer: Optimizer, grads: Sequence[Any], trainable_variables: Sequence[Any] | None
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

        def reduce_all(grads: list[Any]) -> None:
            refuse_distribution()
            self.border.refuse_replicas()
            reduced = self.gradients.reduce(grads, variables, self.local, borrow=keeps_nothing(self.optimizer))
            with self.border.using(), self.updating():
                apply(reduced, given)

        if self.sums.passes == 1:
            reduce_all(grads)
        else:
            self.at_last_pass(reduce_all, optimizer, grads, variables)

    def at_last_pass(
        self, then: Callable[[list[Any]], None], optimizer: Optimizer, grads: list[Any], variables: list[Any]
    ) -> None:
        """Add the gradients to those of earlier passes; at the last, then(sums). Each pass counts as an iteration."""
        if not optimizer.built:  # variables cannot be made in one branch of a condition
            with keras.name_scope(optimizer.name):
                optimizer.build(variables)
            optimizer.built = True
        given = {i: dense(self.settings.sparse_as_dense, self.border, grad, variables[i])
                 for i, grad in enumerate(grads) if grad is not None}  # fmt: skip
        last = self.border.accumulate(self.sums, given)

        def step() -> None:
            totals = self.border.accumulated(self.sums, given)
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
    """The optimizer inside a LossScaleOptimizer, else the optimizer itself."""
    return innermost(optimizer.inner_optimizer) if scales(optimizer) else optimizer


def keeps_nothing(optimizer: Optimizer) -> bool:
    """Whether its gradients may be gone after the step: Keras' own keep none. Others may assign one to a variable, to
    which TensorFlow gives the gradient's memory."""
    return type(optimizer).__module__.partition(".")[0] == "keras" and not hasattr(optimizer, "optimizers")


def scales(optimizer: Optimizer) -> bool:
    """Whether it is a LossScaleOptimizer: others that have one inside may call that in any way."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def attachment_of(optimizer: Optimizer) -> Attachment | None:
    """What is attached to the optimizer, or to the one inside it."""
    found: Attachment | None = vars(optimizer).get("_hvdlite")
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
    attachment = Attachment(inner, settings, sums)
    if before is not None:
        before.gradients.replace()
    untouched = attachment.border.untouched
    methods: dict[str, Callable[..., Any]] = {"apply": attachment.apply}
    methods |= {name: attachment.guarded(name) for name in private_api.guards(inner)}
    if type(inner).apply_gradients is not keras.optimizers.Optimizer.apply_gradients:
        methods["apply_gradients"] = attachment.apply_gradients
    # Past __setattr__, with which Keras keeps account of an object's parts.
    inner.__dict__.update(_hvdlite=attachment, **{name: untouched(method) for name, method in methods.items()})
    for each in (inner, optimizer):
        each.__dict__.update(register_local_var=partial(keep_own, attachment.local))
    reduce_before_scaling()


def reduce_before_scaling() -> None:
    """From now on, while a job is live, Keras' LossScaleOptimizers know about attached inner optimizers.

    With mixed precision, compile() wraps the optimizer into one; it looks whether gradients are finite and skips the
    step where they are not. All ranks must skip alike, so the reduction comes before the look: an infinity on one
    rank is then one on all. compile() makes it after this, so its class is changed: shutdown() changes it back.
    """
    if restore_scaler not in runtime.when_stopped:
        runtime.when_stopped.append(restore_scaler)
        runtime.when_started.append(lambda local_rank: change_scaler())
    change_scaler()


def change_scaler() -> None:
    """Put our methods in the place of LossScaleOptimizer's."""
    scaler = keras.optimizers.LossScaleOptimizer
    for name, method in (("apply", scaled_apply), ("stateless_apply", scaled_stateless_apply)):
        scaler_methods.setdefault(name, vars(scaler)[name])
        setattr(scaler, name, border().untouched(method))


def restore_scaler() -> None:
    """Give LossScaleOptimizer its own methods back."""
    for name, method in scaler_methods.items():
        setattr(keras.optimizers.LossScaleOptimizer, name, method)


scaler_methods: dict[str, Callable[..., Any]] = {}
"""LossScaleOptimizer's own, by name, from the first time on that ours take their place."""


def scaled_apply(self: Optimizer, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
    """LossScaleOptimizer.apply, with reduced gradients when the inner optimizer is attached."""
    attachment, go_on = attachment_of(self), scaler_methods["apply"].__get__(self)
    if attachment is None:
        go_on(grads, trainable_variables)
    else:
        attachment.reduce_and(go_on, self, grads, trainable_variables)


def scaled_stateless_apply(
    self: Optimizer, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
) -> Any:
    """LossScaleOptimizer.stateless_apply, with reduced gradients when the inner optimizer is attached."""
    attachment, go_on = attachment_of(self), scaler_methods["stateless_apply"].__get__(self)
    results: list[Any] = []

    def step(reduced: Sequence[Any], _: Any) -> None:
        results.append(go_on(optimizer_variables, reduced, trainable_variables))

    if attachment is None:
        return go_on(optimizer_variables, grads, trainable_variables)
    with keras.StatelessScope(list(zip(self.variables, optimizer_variables, strict=True))) as scope:
        attachment.reduce_and(step, self, grads, None)
    # None at a pass before the last, which is an iteration and nothing else.
    return results[0] if results else (trainable_variables, [scope.get_current_value(v) for v in self.variables])
