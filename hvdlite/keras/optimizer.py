"""`DistributedOptimizer`: Horovod's name and arguments for attaching to a Keras optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import keras
from keras.optimizers import Optimizer

from hvdlite.api.frameworks import refuse_legacy
from hvdlite.gradients.accumulator import Accumulator
from hvdlite.gradients.compression import NoneCompressor
from hvdlite.gradients.settings import Arguments, check_name, settings_of
from hvdlite.gradients.tensors import Variable
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.keras.attachment import attach, innermost
from hvdlite.keras.loss_scaling import reduce_before_scaling
from hvdlite.keras.sharded.saving import methods
from hvdlite.keras.strategy.terms import require_served
from hvdlite.lanes.calls import calling
from hvdlite.ops import Adasum, Average, Op, Sum, op_of
from hvdlite.strategies import Strategy

OptimizerT = TypeVar("OptimizerT")


def DistributedOptimizer(
    optimizer: OptimizerT,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: object = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op | int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: object = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    replica_check: str | None = None,
    sharded: bool = False,
    strategy: Strategy | None = None,
) -> OptimizerT:
    """Make every apply() of an optimizer use the gradients of all ranks. Collective.

    Call this before or after compile(), but before the first fit(). A training step that Keras has compiled before
    stays as it is until the next compile(), or until a fit() with hvd.callbacks.BroadcastGlobalVariablesCallback.

    fit, train_on_batch, a custom train_step and a GradientTape loop then apply the ranks' average. Clipping, weight
    decay, EMA and loss scaling see averaged gradients. Each apply() waits for all ranks. In a job of one rank nothing
    changes.

    The optimizer gains the method `register_local_var(variable)`: the gradient of that variable stays the rank's own.

    Args:
        optimizer: A Keras optimizer, the same on every rank. Its methods are replaced on this object.
        name: Accepted for Horovod's sake.
        device_dense: Accepted for Horovod's sake.
        device_sparse: Accepted for Horovod's sake.
        compression: `hvd.Compression.none`, `.fp16` or `.bf16`: the dtype in which gradients travel. None: their own.
            Or a lossy compressor between hosts: `hvd.Compression.topk(ratio=0.01)`, `randomk`, `int8`, `onebit`,
            `powersgd`, or your own `Codec`.
        sparse_as_dense: Whether sparse gradients (embeddings) travel dense.
        gradient_predivide_factor: Divides gradients before the sum, and multiplies the sum. With Average only.
        op: Average or Sum.
        backward_passes_per_step: Each rank sums gradients over this many apply(); the last one reduces and applies
            them. Each pass counts as an iteration, so use_ema and gradient_accumulation_steps are refused.
        average_aggregated_gradients: Whether gradients are averaged over these passes instead of summed.
        num_groups: Deprecated: a number for `groups`.
        groups: A number of groups, or lists of variables that travel together.
        process_set: The ranks that reduce together.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.
        replica_check: The reaction to ranks that train with different weights: "error", "warn", or "off", which never
            compares them. None: the setting HVDLITE_REPLICA_CHECK, else "error".
        sharded: Whether each rank keeps a part of the optimizer's state only, and steps that part. Weights stay the
            same bits, except for Ftrl's. All ranks must have the same weights before the first step. hvd.save,
            called on all ranks, writes the whole state; model.save() raises an error.
        strategy: How the ranks' models are kept together, if not by averaging every gradient, such as
            `hvd.LocalSGD(sync_every=8)`. Each rank then applies its own gradients, and the strategy changes weights
            around updates, which may wait for other ranks. A step that a LossScaleOptimizer leaves out on some ranks
            counts as an update on all. A pass of gradient_accumulation_steps without an update does not count.

    Returns:
        The same optimizer object.

    Raises:
        ValueError: An argument cannot be right.
        TypeError: An argument has a wrong type.
        RuntimeError: The optimizer is attached already.
        HvdliteError: This version of Keras, or of its backend, lacks a private name that hvdlite uses.
        MismatchError: Optimizers or models differ, with a diff; on every rank, before any gradient travels.
        NotImplementedError: `op` is Adasum, or `keras.distribution` is in use; or, with `sharded`, the backend is JAX
            or the optimizer has use_ema, or gradient_accumulation_steps with clipping; or, with `strategy`, the backend
            is JAX or another argument tells how gradients are reduced.
    """
    op = op_of(op)
    check_name(name)
    refuse_legacy(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"DistributedOptimizer takes a Keras optimizer first, not a {type(optimizer).__name__}: "
            "DistributedOptimizer(optimizer)"
        )
    if op not in (Average, Sum, Adasum):  # settings_of refuses Adasum
        raise ValueError(f"DistributedOptimizer: op={op.name} must be hvd.Average or hvd.Sum")
    if sharded not in (False, True):
        raise NotImplementedError(
            f"sharded={sharded!r}: with Keras it can be True or False; torch has 'gradients', too"
        )
    sums = Accumulator(backward_passes_per_step, average_aggregated_gradients)
    if sums.passes > 1:
        require_no_other_count(innermost(optimizer))
    settings = settings_of(Arguments(
        compression=NoneCompressor if compression is None else compression, sparse_as_dense=sparse_as_dense, op=op,
        gradient_predivide_factor=gradient_predivide_factor, num_groups=num_groups, groups=groups,
        process_set=process_set, scale_local_gradients=scale_local_gradients, replica_check=replica_check,
        sharded=sharded,
    ))  # fmt: skip
    if strategy is not None:
        require_served(strategy, settings)
    with calling(f"hvd.DistributedOptimizer({type(optimizer).__name__})"):
        attach(optimizer, settings, sums, strategy)
        reduce_before_scaling()
        if sharded:
            methods.change()
    return optimizer


def require_no_other_count(optimizer: Optimizer) -> None:
    """Refuse options that count iterations: with several passes per step, each pass is an iteration.

    Raises:
        ValueError: The optimizer has use_ema or gradient_accumulation_steps.
    """
    if optimizer.use_ema or (optimizer.gradient_accumulation_steps or 1) > 1:
        raise ValueError(
            "backward_passes_per_step counts each pass as an iteration, so Keras' use_ema would begin with zeros, and "
            "its gradient_accumulation_steps would apply gradients at wrong passes: use gradient_accumulation_steps "
            "alone, which accumulates gradients, too"
        )


def PartialDistributedOptimizer(
    optimizer: OptimizerT,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: object = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op | int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: object = None,
    process_set: ProcessSet = global_process_set,
    local_layers: object = None,
    scale_local_gradients: bool = True,
    replica_check: str | None = None,
) -> OptimizerT:
    """Make an optimizer distributed, except for the weights of some layers. Collective.

    Args:
        optimizer: A Keras optimizer, the same on every rank. Its methods are replaced on this object.
        name: Accepted for Horovod's sake.
        device_dense: Accepted for Horovod's sake.
        device_sparse: Accepted for Horovod's sake.
        compression: `hvd.Compression.none`, `.fp16` or `.bf16`: the dtype in which gradients travel. None: their own.
            Or a lossy compressor between hosts: `hvd.Compression.topk(ratio=0.01)`, `randomk`, `int8`, `onebit`,
            `powersgd`, or your own `Codec`.
        sparse_as_dense: Whether sparse gradients (embeddings) travel dense.
        gradient_predivide_factor: Divides gradients before the sum, and multiplies the sum. With Average only.
        op: Average or Sum.
        backward_passes_per_step: The number of apply() per reduction, as for `DistributedOptimizer`.
        average_aggregated_gradients: Whether gradients are averaged over these passes instead of summed.
        groups: A number of groups, or lists of variables that travel together.
        process_set: The ranks that reduce together.
        local_layers: A Keras layer or several, built: the gradients of their weights stay this rank's own.
        scale_local_gradients: Whether gradients of local layers are divided by the number of ranks.
        replica_check: "error", "warn" or "off", as for `DistributedOptimizer`.

    Returns:
        The same optimizer object.

    Raises:
        ValueError: `local_layers` are no layers, or have no weights yet; or another argument cannot be right.
        TypeError: As `DistributedOptimizer`, like the following errors.
        RuntimeError: The optimizer is attached already.
        HvdliteError: This version of Keras, or of its backend, lacks a private name that hvdlite uses.
        MismatchError: Optimizers or models differ, with a diff; on every rank, before any gradient travels.
        NotImplementedError: `op` is Adasum, or `keras.distribution` is in use.
    """
    local = weights_of(local_layers)
    optimizer = DistributedOptimizer(
        optimizer, name=name, device_dense=device_dense, device_sparse=device_sparse, compression=compression,
        sparse_as_dense=sparse_as_dense, gradient_predivide_factor=gradient_predivide_factor, op=op,
        backward_passes_per_step=backward_passes_per_step, average_aggregated_gradients=average_aggregated_gradients,
        groups=groups, process_set=process_set, scale_local_gradients=scale_local_gradients,
        replica_check=replica_check,
    )  # fmt: skip
    optimizer.register_local_var(local)  # type: ignore[attr-defined]
    return optimizer


def weights_of(layers: object) -> list[Variable]:
    """Return the trainable weights of a layer, or of several.

    Raises:
        ValueError: `layers` contains another object, or a layer that has not been built.
    """
    chosen: list[keras.Layer] = list(layers) if isinstance(layers, Iterable) else [] if layers is None else [layers]
    if not all(isinstance(layer, keras.Layer) for layer in chosen):
        raise ValueError(f"local_layers={layers!r} must be a Keras layer or a list of Keras layers")
    if unbuilt := [layer.name for layer in chosen if not layer.built]:
        raise ValueError(f"local_layers: no weights yet in {', '.join(unbuilt)}: build the model (or call it) first")
    return [variable for layer in chosen for variable in layer.trainable_weights]
