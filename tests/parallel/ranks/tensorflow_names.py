"""Horovod's names for TensorFlow and Keras: each exists, with Horovod's order of arguments and defaults. Also the
classes of errors."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite.keras
import hvdlite.tensorflow as hvd
import hvdlite.tensorflow.keras as hvd_keras
from hvdlite.job import runtime
from hvdlite.tensorflow import mpi_ops
from tests.parallel.common import require_error

SIZES = (2,)
DEVICES = "device_dense='', device_sparse=''"
FACTORS = "prescale_factor=1.0, postscale_factor=1.0"
TAPE = f"gradtape, {DEVICES}, compression=none, sparse_as_dense=False, op=Average, gradient_predivide_factor=1.0, " \
    "num_groups=0, groups=None, process_set=G"  # fmt: skip
TENSORFLOW = {
    "allreduce": f"tensor, average=None, {DEVICES}, compression=none, op=None, {FACTORS}, name=None, process_set=G, "
    "ignore_name_scope=False",
    "grouped_allreduce": f"tensors, average=None, {DEVICES}, compression=none, op=None, {FACTORS}, process_set=G, "
    "ignore_name_scope=False, name=None",
    "allgather": "tensor, name=None, ignore_name_scope=False, process_set=G",
    "grouped_allgather": "tensors, name=None, ignore_name_scope=False, process_set=G",
    "broadcast": "tensor, root_rank, name=None, ignore_name_scope=False, process_set=G",
    "broadcast_": "variables, root_rank, name=None, process_set=G",
    "alltoall": "tensor, splits=None, name=None, ignore_name_scope=False, process_set=G",
    "reducescatter": "tensor, device_dense='', compression=none, op=Average, name=None, process_set=G, "
    f"ignore_name_scope=False, {FACTORS}",
    "grouped_reducescatter": f"tensors, device_dense='', compression=none, op=Average, process_set=G, {FACTORS}",
    "join": "",
    "size_op": "process_set_id=0, name=None",
    "process_set_included_op": "process_set_id=0, name=None",
    "local_size_op": "name=None",
    "rank_op": "name=None",
    "local_rank_op": "name=None",
    "broadcast_variables": "variables, root_rank=0, process_set=G, inplace=False",
    "broadcast_global_variables": "root_rank",
    "BroadcastGlobalVariablesHook": "root_rank, device=''",
    "broadcast_object": "obj=None, root_rank=0, session=None, name=None, process_set=G",
    "broadcast_object_fn": "root_rank=0, session=None, name=None, process_set=G",
    "allgather_object": "obj, session=None, name=None, process_set=G",
    "SyncBatchNormalization": "fused=False, kwargs",
    "DistributedOptimizer": f"optimizer, name=None, use_locking=False, {DEVICES}, compression=none, sparse_as_dense=False, "
    "backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, average_aggregated_gradients=False, "
    "num_groups=0, groups=None, process_set=G, scale_local_gradients=True, replica_check=None",
    "DistributedGradientTape": f"{TAPE}, scale_local_gradients=True, replica_check=None",
    "PartialDistributedGradientTape": f"{TAPE}, local_layers=None, scale_local_gradients=True, replica_check=None",
    "LocalGradientAggregationHelper": "backward_passes_per_step, allreduce_func, sparse_as_dense, "
    "average_aggregated_gradients",
    "init": "comm=None, process_sets=None",
    "start_timeline": "file_path, mark_cycles=False",
}
OPTIMIZER = f"optimizer, name=None, {DEVICES}, compression=None, sparse_as_dense=False, gradient_predivide_factor=1.0, " \
    "op=Average, backward_passes_per_step=1, average_aggregated_gradients=False"  # fmt: skip
KERAS = {
    "DistributedOptimizer": f"{OPTIMIZER}, num_groups=0, groups=None, process_set=G, scale_local_gradients=True, replica_check=None",
    "PartialDistributedOptimizer": f"{OPTIMIZER}, groups=None, process_set=G, local_layers=None, "
    "scale_local_gradients=True, replica_check=None",
    "allreduce": f"value, name=None, average=None, {FACTORS}, op=None, compression=None",
    "allgather": "value, name=None",
    "broadcast": "value, root_rank, name=None",
    "reducescatter": "value, name=None, op=Average",
    "broadcast_global_variables": "root_rank",
    "load_model": "filepath, custom_optimizers=None, custom_objects=None, compression=None, legacy_opts=False",
}
CALLBACKS = {
    "BroadcastGlobalVariablesCallback": "root_rank, device='', local_variables=None",
    "MetricAverageCallback": "device=''",
    "LearningRateScheduleCallback": "initial_lr, multiplier, start_epoch=0, end_epoch=None, staircase=True, "
    "momentum_correction=True, steps_per_epoch=None",
    "LearningRateWarmupCallback": "initial_lr, warmup_epochs=5, momentum_correction=True, steps_per_epoch=None, verbose=0",
}
CHECKPOINT = "monitor='val_loss', verbose=0, mode='auto', save_freq='epoch'"
CHECKPOINT_OF_TENSORFLOW = "monitor='val_loss', verbose=0, save_weights_only=False, mode='auto', save_freq='epoch'"
OTHERS = """Adasum Average Compression Max Min ProcessSet Product Sum add_process_set ccl_built check_num_rank_power_of_2
cross_rank cross_size cuda_built ddl_built elastic global_process_set gloo_built gloo_enabled gpu_available is_homogeneous
is_initialized local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built rank remove_process_set
rocm_built shutdown size split_list stop_timeline"""


def require_signatures(module: Any, wanted: dict[str, str]) -> None:
    """Arguments of hvdlite alone may follow Horovod's."""
    symbols = {id(hvd.global_process_set): "G", id(hvd.Compression.none): "none", id(hvd.Average): "Average"}
    for name, expected in wanted.items():
        found = []
        for parameter in inspect.signature(getattr(module, name)).parameters.values():
            default = parameter.default
            value = "" if default is parameter.empty else f"={symbols.get(id(default), repr(default))}"
            found.append(parameter.name + value)
        mine = ", ".join(found)
        assert mine == expected or mine.startswith(f"{expected}, "), f"{module.__name__}.{name}({mine})"


def check_names() -> None:
    require_signatures(hvd, TENSORFLOW)
    assert [name for name in (*TENSORFLOW, *OTHERS.split()) if name not in hvd.__all__] == []
    assert len(set(hvd.__all__)) == len(hvd.__all__) and all(hasattr(hvd, name) for name in hvd.__all__)
    assert {"rank", "init", "allreduce", "broadcast_", "size_op"} <= set(mpi_ops.__all__) <= set(hvd.__all__)
    for module in (hvdlite.keras, hvd_keras):
        require_signatures(module, KERAS)
        require_signatures(module.callbacks, CALLBACKS)
    require_signatures(hvdlite.keras.callbacks, {"BestModelCheckpoint": CHECKPOINT})
    require_signatures(hvd_keras.callbacks, {"BestModelCheckpoint": CHECKPOINT_OF_TENSORFLOW})


def check_objects_as_positional_arguments() -> None:
    """The third argument is a session, which hvdlite ignores."""
    for mode in (lambda f: f(), with_session):
        assert mode(lambda *s: hvd.broadcast_object({"rank": hvd.rank()}, 1, *s, name="a")) == {"rank": 1}  # type: ignore[misc]
        assert mode(lambda *s: hvd.allgather_object(hvd.rank(), *s, name="b")) == list(range(hvd.size()))  # type: ignore[misc]


def with_session(function: Any) -> Any:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        return function(session)


def check_partial_arguments_as_positional_ones() -> None:
    """local_layers comes before scale_local_gradients."""
    layer = keras.layers.Dense(1)
    layer.build((None, 2))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.ones((1, 2)))) * (hvd.rank() + 1)
    everyone = hvd.global_process_set
    tape = hvd.PartialDistributedGradientTape(tape, "", "", hvd.Compression.none, False, hvd.Average, 1.0, 0, None, everyone,
                                              layer, False)  # fmt: skip
    (gradient,) = tape.gradient(loss, [layer.kernel])
    np.testing.assert_array_equal(gradient, [[hvd.rank() + 1.0]] * 2)
    optimizer = hvd_keras.PartialDistributedOptimizer(
        keras.optimizers.SGD(1.0), None, "", "", None, False, 1.0, hvd.Average, 1, False, None, everyone, layer, False
    )
    layer.kernel.assign([[0.0]] * 2)
    optimizer.apply([gradient], [layer.kernel])
    np.testing.assert_array_equal(layer.kernel, [[-hvd.rank() - 1.0]] * 2)


def check_reducescatter_of_other_operations_is_aborted() -> None:
    for call in (lambda: hvd.reducescatter(tf.ones(2), op=hvd.Min), lambda: hvd.grouped_reducescatter([tf.ones(2)], op=hvd.Max),
                 lambda: tf.function(lambda x: hvd.reducescatter(x, op=hvd.Adasum))(tf.ones(2))):  # fmt: skip
        require_error(tf.errors.AbortedError, call, "only Average and Sum")


def check_autograph_reads_what_functions_ask_ranks_for() -> None:
    """AutoGraph rewrites the functions that a `tf.function` calls, and warns if it cannot rewrite one."""
    for function in (runtime.known, hvd.rank, hvd.size, hvd.local_rank, hvd.local_size):
        tf.autograph.to_graph(function)


def check_before_init() -> None:
    hvd.shutdown()
    for call in (lambda: hvd.allreduce(tf.ones(1)), hvd.rank, hvd.size_op, lambda: hvd.start_timeline("x")):
        kind = tf.errors.FailedPreconditionError if call is hvd.size_op else ValueError
        require_error(kind, call, "hvd.init()")
    for send in (hvd.allgather, lambda x: hvd.broadcast(x, 0), hvd.alltoall, hvd.reducescatter,
                 lambda x: hvd.grouped_allreduce([x])):  # fmt: skip
        require_error(tf.errors.FailedPreconditionError, lambda: send(tf.ones(2)), "hvd.init()")
    hvd.init()
