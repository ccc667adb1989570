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
from hvdlite.lanes.calls import calling
from hvdlite.ops import Adasum, Average, Op, Sum, op_of

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
) -> OptimizerT:
    """Make every apply() use the gradients of all ranks. Collective.

    Attach before or after compile(), but before the first fit(): a step that Keras has compiled stays as it is, until
    compile() is called again or a fit() has hvd.callbacks.BroadcastGlobalVariablesCallback.

    Whatever applies gradients (fit, train_on_batch, a custom train_step, a GradientTape loop) then applies the ranks'
    average. Clipping, weight decay, EMA and loss scaling see averaged gradients. The optimizer gains
    `register_local_var(variable)`: that variable's gradient stays the rank's own. Each apply() waits for all ranks. In
    a job of one rank nothing changes.

    Args:
        optimizer: A Keras optimizer, the same on every rank. Its methods are replaced on this object.
        name: Accepted for Horovod's sake, as `device_dense` and `device_sparse` are.
        compression: `hvd.Compression.none`, `.fp16` or `.bf16`: the dtype in which gradients travel.
        sparse_as_dense: Whether sparse gradients (embeddings) travel dense.
        gradient_predivide_factor: Gradients are divided by it before the sum, and multiplied by it after. With
            Average only.
        op: Average or Sum.
        backward_passes_per_step: Gradients are summed on each rank over that many apply(), and reduced and applied at
            the last. The others only count iterations, which rules out use_ema and gradient_accumulation_steps.
        average_aggregated_gradients: Whether gradients are averaged over these passes instead of summed.
        num_groups: Deprecated: a number for `groups`.
        groups: A number of groups, or lists of variables that are to travel together.
        process_set: The ranks that reduce together.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.
        replica_check: What happens when ranks train with different weights: "error", "warn", or "off", which never
            compares them. By default what HVDLITE_REPLICA_CHECK says, else "error".

    Returns:
        The same optimizer object.

    Raises:
        ValueError: An argument cannot be right; TypeError for one of a wrong type.
        RuntimeError: The optimizer is attached already.
        MismatchError: On every rank, with a diff, when optimizers or models differ, before any gradient moves.
        NotImplementedError: `op` is Adasum, or `keras.distribution` is in use.
    """
    op = op_of(op)
    check_name(name)
    refuse_legacy(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"DistributedOptimizer takes a Keras optimizer first, not a {type(optimizer).__name__}: "
            "DistributedOptimizer(optimizer)"
        )
    if op not in (Average, Sum, Adasum):  # Adasum is refused as everywhere
        raise ValueError("op must be hvd.Average or hvd.Sum")
    sums = Accumulator(backward_passes_per_step, average_aggregated_gradients)
    if sums.passes > 1:
        require_no_other_count(innermost(optimizer))
    settings = settings_of(Arguments(
        compression=NoneCompressor if compression is None else compression, sparse_as_dense=sparse_as_dense, op=op,
        gradient_predivide_factor=gradient_predivide_factor, num_groups=num_groups, groups=groups,
        process_set=process_set, scale_local_gradients=scale_local_gradients, replica_check=replica_check,
    ))  # fmt: skip
    with calling(f"hvd.DistributedOptimizer({type(optimizer).__name__})"):
        attach(optimizer, settings, sums)
        reduce_before_scaling()
    return optimizer


def require_no_other_count(optimizer: Optimizer) -> None:
    """Raise ValueError when Keras would take passes for steps: each pass counts as an iteration."""
    if optimizer.use_ema or (optimizer.gradient_accumulation_steps or 1) > 1:
        raise ValueError(
            "backward_passes_per_step counts each pass as an iteration, so that Keras' use_ema would begin with zeros "
            "and its gradient_accumulation_steps at the wrong ones: use gradient_accumulation_steps alone, which "
            "accumulates as well"
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
    """`DistributedOptimizer` for a model of which some layers stay each rank's own.

    Args:
        local_layers: A Keras layer or several; their weights keep this rank's gradients.

    The other arguments, the result and the errors are those of `DistributedOptimizer`.
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
    """The trainable weights of a layer or several. Raises ValueError for what is no layer, or has not been built."""
    chosen: list[keras.Layer] = list(layers) if isinstance(layers, Iterable) else [] if layers is None else [layers]
    if not all(isinstance(layer, keras.Layer) for layer in chosen):
        raise ValueError("local_layers takes Keras layers")
    if unbuilt := [layer.name for layer in chosen if not layer.built]:
        raise ValueError(f"local_layers: no weights yet in {', '.join(unbuilt)}: build the model (or call it) first")
    return [variable for layer in chosen for variable in layer.trainable_weights]
