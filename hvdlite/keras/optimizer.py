"""`DistributedOptimizer`: Horovod's name and arguments for attaching to a Keras optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import keras

from hvdlite.api.frameworks import refuse_legacy
from hvdlite.gradients.accumulator import Accumulator
from hvdlite.gradients.compression import NoneCompressor
from hvdlite.gradients.lists import check_name, settings_of
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.keras.attachment import attach, innermost
from hvdlite.lanes.calls import calling
from hvdlite.ops import Adasum, Average, Op, Sum, op_of

OptimizerT = TypeVar("OptimizerT")


def DistributedOptimizer(
    optimizer: OptimizerT,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op | int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    replica_check: str | None = None,
) -> OptimizerT:
    """Make every apply() use the gradients of all ranks. Returns the same optimizer object.

    Attach before or after compile(), but before the first fit(): a step that Keras has compiled stays as it is, until
    compile() is called again or a fit() has hvd.callbacks.BroadcastGlobalVariablesCallback.

    Whatever applies gradients (fit, train_on_batch, a custom train_step, a GradientTape loop) then applies the ranks'
    average; clipping, weight decay, EMA and loss scaling see averaged gradients. The optimizer gains
    `register_local_var(variable)`, whose gradient stays the rank's own, divided by the number of ranks where
    scale_local_gradients. Collective: every rank attaches the same optimizer to the same model; a difference raises
    MismatchError with a diff on every rank, before any gradient moves. In a job of one rank nothing changes.

    compression: `Compression.none`, `.fp16` or `.bf16`: the dtype in which gradients travel.
    sparse_as_dense: sparse gradients (embeddings) travel dense. gradient_predivide_factor: f divides before the sum
    and multiplies after; with Average only. op: Average or Sum. backward_passes_per_step: gradients are summed
    locally over that many apply() (averaged, with average_aggregated_gradients), reduced and applied at the last;
    the others only count iterations, which rules out use_ema and gradient_accumulation_steps. groups: a number, or
    lists of variables that are to travel together; num_groups: deprecated name for the number. name, device_dense,
    device_sparse: accepted for Horovod's sake.
    replica_check: what happens where the ranks train with different weights: "error" (by default), "warn", or "off",
    which never compares them. By default what HVDLITE_REPLICA_CHECK says.

    Raises ValueError or TypeError for arguments that cannot be right, RuntimeError where the optimizer is attached
    already.
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
    settings = settings_of(
        op=op, predivide=gradient_predivide_factor, compression=NoneCompressor if compression is None else compression,
        sparse_as_dense=sparse_as_dense, num_groups=num_groups, groups=groups, scale_local=scale_local_gradients,
        process_set=process_set,
        replica_check=replica_check,
    )  # fmt: skip
    with calling(f"hvd.DistributedOptimizer({type(optimizer).__name__})"):
        attach(optimizer, settings, sums)
    return optimizer


def require_no_other_count(optimizer: Any) -> None:
    """Raise ValueError for what Keras does at certain iterations: passes, which count as such, would be taken for
    steps."""
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
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op | int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    replica_check: str | None = None,
) -> OptimizerT:
    """As DistributedOptimizer; the weights of local_layers (a Keras layer or several) keep this rank's gradients."""
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


def weights_of(layers: Any) -> list[Any]:
    """The trainable weights of a layer or several. Raises ValueError for what is no layer, or has not been built."""
    chosen = list(layers) if isinstance(layers, Iterable) else [] if layers is None else [layers]
    if not all(isinstance(layer, keras.Layer) for layer in chosen):
        raise ValueError("local_layers takes Keras layers")
    if unbuilt := [layer.name for layer in chosen if not layer.built]:
        raise ValueError(f"local_layers: no weights yet in {', '.join(unbuilt)}: build the model (or call it) first")
    return [variable for layer in chosen for variable in layer.trainable_weights]
