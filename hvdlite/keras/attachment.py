"""Attaching to a Keras optimizer: `attach` replaces `apply` on the instance, and wraps nothing.

    fit, train_on_batch, custom train_step, GradientTape loops
        -> optimizer.apply_gradients -> optimizer.apply          (stateless_apply calls apply, too)
               the attachment reduces gradients over all ranks, then calls the class's own apply: clipping, weight
               decay, EMA and gradient accumulation see reduced gradients

The optimizer stays the same object: compile, isinstance and saving work as before, and a saved model holds the plain
optimizer. Horovod replaced methods that Keras 3 never calls, so ranks trained alone, and no error said so. To exclude
this, the optimizer's update step refuses gradients that have not come through `apply`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import keras
from keras.optimizers import Optimizer

from hvdlite.gradients.accumulator import Accumulator
from hvdlite.gradients.lists import Gradients, dense, keep_own
from hvdlite.gradients.settings import Settings
from hvdlite.gradients.tensors import Gradient, Variable
from hvdlite.job import runtime
from hvdlite.keras import private_api
from hvdlite.keras.backends import framework, noted
from hvdlite.keras.sharded.kinds import kind_of
from hvdlite.keras.sharded.shard import Shard, require_served
from hvdlite.keras.strategy.steps import StrategySteps
from hvdlite.keras.strategy.terms import require_same
from hvdlite.sharding.kinds import Kind
from hvdlite.sharding.slots import refuse_slots
from hvdlite.strategies import Strategy

Apply: TypeAlias = Callable[[list[Gradient], Sequence[Variable] | None], object]
"""A function that applies gradients: (gradients, variables). Without variables, those of the optimizer."""


class KerasAttachment:
    """Reduces the gradients of one Keras optimizer over all ranks before the optimizer applies them.

    Attributes:
        optimizer: The optimizer; the inner one of a LossScaleOptimizer.
        settings: The user's settings.
        sums: The gradients of earlier passes.
        framework: The backend.
        gradients: Reduces lists of gradients.
        local: The variables with gradients that stay this rank's own.
        reduced: Whether the update under way has reduced gradients.
        shard: The pieces of a sharded optimizer; None if this rank steps all variables.
        strategy: Keeps the ranks' models together in another way than by reduced gradients; None: they are reduced.
    """

    def __init__(
        self, optimizer: Optimizer, settings: Settings, sums: Accumulator, kind: Kind | None, strategy: Strategy | None
    ) -> None:
        """Collective.

        Args:
            optimizer: The attribute of that name.
            settings: The attribute of that name.
            sums: The attribute of that name.
            kind: How the variables of a sharded optimizer can be divided.
            strategy: The user's strategy.
        """
        self.optimizer = optimizer
        self.settings = settings
        self.sums = sums
        self.framework = framework()
        title = f"DistributedOptimizer({type(optimizer).__name__})"
        common = replace(settings, replica_check="off", scale_local=False) if strategy else settings
        self.gradients = Gradients(common, self.framework, "optimizer", title, sums, optimizer)
        self.local: list[Variable] = []
        self.reduced = False
        group = self.gradients.group
        shared = group is not None and group.size > 1
        self.shard = Shard(optimizer, self.gradients, self.local, kind) if kind and shared else None
        self.strategy: StrategySteps | None = None
        if strategy and shared:
            self.strategy = StrategySteps(strategy, self.gradients, optimizer, self.local, settings.replica_check)

    @property
    def at_work(self) -> bool:
        """Whether the attachment must reduce or accumulate gradients.

        Raises:
            RuntimeError: It must, and cannot: the user has called hvd.shutdown() since, say.
            RemovedError: The process set was removed.
        """
        self.gradients.require_alive()
        return self.gradients.alive and (self.gradients.group is not None or self.sums.passes > 1)

    # The methods that replace the optimizer's

    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Variable] | None = None) -> None:
        """Reduce the gradients over all ranks and apply them. Waits for all ranks."""
        apply = self.shard.apply if self.shard else self.original("apply")
        self.reduce_and(apply, self.optimizer, grads, trainable_variables)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Gradient, Variable]], **kwargs: object) -> object:
        """Reduce the gradients and call the class's own apply_gradients, which may clip or select reduced gradients.

        Replaces the method only where the class has one that is not Keras'. Waits for all ranks.
        """
        results: list[object] = []

        def go_on(grads: Sequence[Gradient], variables: Sequence[Variable] | None) -> None:
            results.append(self.original("apply_gradients")(zip(grads, variables or (), strict=True), **kwargs))

        pairs = list(grads_and_vars)
        grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
        self.reduce_and(go_on, self.optimizer, grads, variables)
        return results[0] if results else self.optimizer.iterations

    def guarded(self, method: str) -> Callable[..., object]:
        """Return the class's update method of this name, which then refuses gradients that were not reduced."""

        def update(*args: object, **kwargs: object) -> object:
            if not self.reduced and self.at_work:
                raise RuntimeError(
                    f"rank {runtime.rank()}: {type(self.optimizer).__name__} was about to apply gradients that were "
                    "not reduced over all ranks. No weight has changed. If there is another optimizer around this one, "
                    "make the outer one distributed instead. If a training step calls the optimizer's private "
                    "methods, have it call apply() or apply_gradients() [HVD312]"
                )
            return self.original(method)(*args, **kwargs)

        return update

    def original(self, method: str) -> Callable[..., object]:
        """Return the class's present method of this name, bound to the optimizer."""
        return private_api.own_method(self.optimizer, method)

    def built_for(self, optimizer: Optimizer) -> list[Variable]:
        """Return the model's variables that the optimizer, or the LossScaleOptimizer around it, was built for."""
        if self.shard and optimizer is self.optimizer:
            return self.shard.variables
        return private_api.trainable_variables(optimizer)

    def reduce_and(
        self,
        apply: Apply,
        optimizer: Optimizer,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[Variable] | None,
    ) -> None:
        """Reduce gradients and apply them, at the last of several passes. Waits for all ranks.

        Args:
            apply: Called with the reduced gradients and `trainable_variables`.
            optimizer: The optimizer that applies: the attached one, or the LossScaleOptimizer around it.
            grads: This rank's gradients.
            trainable_variables: Their variables. None: those that the optimizer was built for.

        Raises:
            ValueError: The numbers of gradients and variables differ.
            NotImplementedError: Layers train in float8.
        """
        grads = list(grads)
        if self.reduced or not grads or not self.at_work:
            apply(grads, trainable_variables)
            return
        given = None if trainable_variables is None else list(trainable_variables)
        variables = self.built_for(optimizer) if given is None else given
        if len(grads) != len(variables):
            raise ValueError(
                f"{len(grads)} gradients for {len(variables)} variables of {type(optimizer).__name__}: give apply() "
                "the variables, or build the optimizer with them first (optimizer.build(model.trainable_variables))"
            )
        if any(getattr(variable, "overwrite_with_gradient", False) for variable in variables):
            raise NotImplementedError(
                "hvd.DistributedOptimizer does not support layers in float8: the values that Keras gives as their "
                "gradients are new scales, and an average over ranks would be wrong. Train these layers in bfloat16"
            )

        def reduce_all(grads: list[Gradient]) -> None:
            refuse_distribution()
            self.framework.refuse_replicas()
            if self.strategy:
                self.require_built(optimizer, variables)
                with self.updating():
                    self.strategy.around(lambda grads: apply(grads, given), grads, variables)
                return
            if self.shard:
                self.shard.refuse_sparse(grads, self.settings)
            grads = self.with_scale(optimizer, grads)
            reduced = self.gradients.reduce(grads, variables, self.local, borrow=keeps_nothing(self.optimizer))
            with self.framework.using(reduced), self.updating():
                apply(reduced, given)

        if self.sums.passes == 1:
            reduce_all(grads)
        else:
            self.at_last_pass(reduce_all, optimizer, grads, variables)

    def with_scale(self, optimizer: Optimizer, grads: list[Gradient]) -> list[Gradient]:
        """Note the gradients' loss scale for lossy compression, which keeps what was not sent without a scale.

        Args:
            optimizer: The optimizer that applies the gradients, and has scaled the loss.
            grads: The gradients.

        Returns:
            The gradients to reduce.
        """
        stores = self.gradients.stores
        if stores.how is None:
            return grads
        if not scales(optimizer):
            stores.hold_scale(optimizer.loss_scale_factor or 1.0)
            return grads
        scale = optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale
        return noted(stores.hold_scale, keras.ops.convert_to_tensor(scale), grads)

    def at_last_pass(
        self,
        then: Callable[[list[Gradient]], None],
        optimizer: Optimizer,
        grads: list[Gradient],
        variables: list[Variable],
    ) -> None:
        """Accumulate gradients, and call `then` with the sums at the last pass. Each pass counts as an iteration."""
        self.require_built(optimizer, variables)
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

    def require_built(self, optimizer: Optimizer, variables: list[Variable]) -> None:
        """Build the optimizer, if it is not built: a branch of a condition cannot make variables."""
        if not optimizer.built:
            with keras.name_scope(optimizer.name):
                optimizer.build(variables)
            optimizer.built = True

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Return a context in which the guarded methods accept gradients, because they are reduced."""
        before, self.reduced = self.reduced, True
        try:
            yield
        finally:
            self.reduced = before


def innermost(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside a LossScaleOptimizer; any other optimizer itself."""
    return innermost(optimizer.inner_optimizer) if scales(optimizer) else optimizer


def keeps_nothing(optimizer: Optimizer) -> bool:
    """Return whether the optimizer needs its gradients during the step only.

    Most of Keras' own optimizers do. Others may assign a gradient to a variable, and TensorFlow then gives the variable
    the gradient's memory. So it may if an optimizer assigns the sum of a variable and a gradient, which TensorFlow
    computes in the gradient's memory: gradient accumulation and Ftrl do that.
    """
    ours = type(optimizer).__module__.partition(".")[0] == "keras" and not hasattr(optimizer, "optimizers")
    return ours and type(optimizer).__name__ != "Ftrl" and not optimizer.gradient_accumulation_steps


def scales(optimizer: Optimizer) -> bool:
    """Return whether this is a LossScaleOptimizer: the only wrapper with known calls of the inner optimizer."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def attachment_of(optimizer: Optimizer) -> KerasAttachment | None:
    """Return the attachment of the optimizer, or of the one inside a LossScaleOptimizer; None if there is none."""
    found: KerasAttachment | None = vars(optimizer).get("_hvdlite")
    return found if found is not None or not scales(optimizer) else attachment_of(optimizer.inner_optimizer)


def refuse_distribution() -> None:
    """Refuse keras.distribution, which trains on several devices of one process.

    Raises:
        NotImplementedError: A distribution is set.
    """
    found = keras.distribution.distribution()
    if found is not None:
        raise NotImplementedError(
            f"hvd.DistributedOptimizer does not work under keras.distribution ({type(found).__name__}): hvdlite trains "
            "with one process per device. Remove keras.distribution.set_distribution(...) from the script, or undo it "
            "with keras.distribution.set_distribution(None); then start one process per device (hvdliterun -np) "
            "[HVD314]"
        )


def attach(optimizer: Optimizer, settings: Settings, sums: Accumulator, strategy: Strategy | None = None) -> None:
    """Attach to an optimizer. Collective.

    Args:
        optimizer: The optimizer, or a LossScaleOptimizer around it. Its methods are replaced on the instance.
        settings: The user's settings.
        sums: Accumulates the gradients of several passes.
        strategy: How the ranks' models are kept together; None: by reduced gradients.

    Raises:
        RuntimeError: The optimizer is attached already.
        MismatchError: The ranks' strategies differ; on every rank.
        HvdliteError: This version of Keras, or of its backend, lacks a private name that hvdlite uses.
        NotImplementedError: `keras.distribution` or a tf.distribute strategy of several replicas is in use, or
            sharded=True cannot serve the optimizer.
        ValueError: sharded=True cannot serve the optimizer, or each rank has a part of its state.
    """
    before = attachment_of(optimizer)
    if before is not None:
        before.gradients.require_replaceable()
    inner = innermost(optimizer)
    framework().refuse_replicas()
    private_api.require_all(inner)
    refuse_slots("hvd.DistributedOptimizer", inner.variables)
    kind = shardable(inner) if settings.sharded else None
    if settings.size > 1:
        refuse_distribution()
        require_same(strategy, settings)
    attachment = KerasAttachment(inner, settings, sums, kind, strategy)
    if before is not None:
        before.gradients.replace()
        if before.strategy:
            before.strategy.replace()
    untouched = attachment.framework.untouched
    methods: dict[str, Callable[..., object]] = {"apply": attachment.apply}
    methods |= {name: attachment.guarded(name) for name in private_api.guards(inner)}
    if type(inner).apply_gradients is not keras.optimizers.Optimizer.apply_gradients:
        methods["apply_gradients"] = attachment.apply_gradients
    if before is not None and before.shard:
        for name in before.shard.methods():
            del inner.__dict__[name]
    if attachment.shard:
        methods |= attachment.shard.methods()
    # Not by __setattr__, with which Keras tracks an object's parts.
    inner.__dict__.update(_hvdlite=attachment, **{name: untouched(method) for name, method in methods.items()})
    for each in (inner, optimizer):
        each.__dict__.update(register_local_var=partial(keep_own, attachment.local))


def shardable(optimizer: Optimizer) -> Kind:
    """Return how the variables of an optimizer can be divided among the ranks.

    Raises:
        NotImplementedError: They cannot: the backend is JAX, or an option needs whole variables.
        ValueError: They cannot: the optimizer has state already, or steps variables together.
        HvdliteError: This version of Keras lacks a private name that hvdlite uses.
    """
    require_served(optimizer)
    for name in (private_api.CLIP_GRADIENTS, private_api.USE_WEIGHT_DECAY):
        name.of(type(optimizer))
    return kind_of(optimizer)
