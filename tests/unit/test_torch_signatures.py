"""Horovod's names for PyTorch: all exist, with Horovod's arguments, their order and their defaults."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import hvdlite
import hvdlite.numpy
import hvdlite.torch as hvd
import hvdlite.torch.functions as functions
import hvdlite.torch.mpi_ops as mpi_ops

REDUCE = "average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=G"
COMPRESSED = (
    "average=None, name=None, compression=none, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=G"
)
SCATTER = "name=None, op=Average, process_set=G, prescale_factor=1.0, postscale_factor=1.0"
SCATTER_COMPRESSED = "name=None, compression=none, op=Average, process_set=G, prescale_factor=1.0, postscale_factor=1.0"
SIGNATURES = {
    "allreduce": f"tensor, {COMPRESSED}",
    "allreduce_async": f"tensor, {REDUCE}",
    "allreduce_": f"tensor, {REDUCE}",
    "allreduce_async_": f"tensor, {REDUCE}",
    "grouped_allreduce": f"tensors, {COMPRESSED}",
    "grouped_allreduce_async": f"tensors, {REDUCE}",
    "grouped_allreduce_": f"tensors, {REDUCE}",
    "grouped_allreduce_async_": f"tensors, {REDUCE}",
    "sparse_allreduce_async": "tensor, name, op, process_set=G",
    "allgather": "tensor, name=None, process_set=G",
    "allgather_async": "tensor, name=None, process_set=G",
    "grouped_allgather": "tensors, name=None, process_set=G",
    "grouped_allgather_async": "tensors, name=None, process_set=G",
    "broadcast": "tensor, root_rank, name=None, process_set=G",
    "broadcast_async": "tensor, root_rank, name=None, process_set=G",
    "broadcast_": "tensor, root_rank, name=None, process_set=G",
    "broadcast_async_": "tensor, root_rank, name=None, process_set=G",
    "alltoall": "tensor, splits=None, name=None, process_set=G",
    "alltoall_async": "tensor, splits=None, name=None, process_set=G",
    "reducescatter": f"tensor, {SCATTER_COMPRESSED}",
    "reducescatter_async": f"tensor, {SCATTER}",
    "grouped_reducescatter": f"tensors, {SCATTER_COMPRESSED}",
    "grouped_reducescatter_async": f"tensors, {SCATTER}",
    "poll": "handle",
    "synchronize": "handle",
    "join": "device=-1",
    "barrier": "process_set=G",
    "broadcast_parameters": "params, root_rank, process_set=G",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None, process_set=G",
    "init": "comm=None, process_sets=None",
    "shutdown": "",
    "DistributedOptimizer": "optimizer, named_parameters=None, compression=none, backward_passes_per_step=1, op=Average, "
    "gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set=G, "
    "replica_check=None, sharded=False, grad_scaler=None, strategy=None",
}
OTHERS = """Adasum Average Compression HorovodInternalError Max Min ProcessSet Product Sum SyncBatchNorm add_process_set
allgather_object broadcast_object ccl_built cross_rank cross_size cuda_built ddl_built elastic global_process_set gloo_built
gloo_enabled is_initialized local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built rank
remove_process_set rocm_built size start_timeline stop_timeline"""
SYMBOLS = {id(hvd.global_process_set): "G", id(hvd.Compression.none): "none", id(hvd.Average): "Average"}


def written(function: Callable[..., object]) -> str:
    """'tensor, name=None, ...'"""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.default
        value = "" if default is parameter.empty else f"={SYMBOLS.get(id(default), repr(default))}"
        found.append(parameter.name + value)
    return ", ".join(found)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    assert written(getattr(hvd, name)) == SIGNATURES[name]
    assert name in hvd.__all__


@pytest.mark.parametrize("module", [hvd, hvdlite.numpy])
def test_functions_know_what_they_are_called(module: Any) -> None:
    """For `help`, and for who sends them to other processes."""
    for function in filter(inspect.isfunction, (getattr(module, name, None) for name in mpi_ops.__all__)):
        assert getattr(module, function.__name__) is function and function.__doc__
        assert pickle.loads(pickle.dumps(function)) is function
    for function in (module.reduce_async, module.scatter_async):  # help() shows sections at the left margin
        lines = str(inspect.getdoc(function)).splitlines()
        assert not [line for line in lines if line.startswith(" ") and line.strip() in ("Args:", "Returns:", "Raises:")]
    assert " = ProcessSet(process_set_id=" in str(inspect.signature(hvd.allreduce))
    assert "Asynchronous" in module.allreduce_async_.__doc__ and "Asynchronous" not in module.allreduce_.__doc__
    assert inspect.signature(module.allreduce_async_).return_annotation == "int"


def test_every_other_name() -> None:
    assert [name for name in OTHERS.split() if not hasattr(hvd, name) or name not in hvd.__all__] == []
    assert len(set(hvd.__all__)) == len(hvd.__all__) and all(hasattr(hvd, name) for name in hvd.__all__)
    assert hvd.HorovodInternalError is hvdlite.HvdliteError and issubclass(hvd.HorovodInternalError, RuntimeError)
    assert all(hasattr(mpi_ops, name) for name in mpi_ops.__all__)


def test_operations_have_horovods_numbers() -> None:
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == list(range(6))


def test_beyond_horovod_in_every_form() -> None:
    names = {"reduce", "gather", "scatter", "send", "recv"}
    assert names | {f"{name}_async" for name in names} | {"uneven_inputs"} <= set(hvd.__all__)


def test_the_neutral_front_has_all_that_torch_has() -> None:
    """The collectives, that is: in `hvdlite` as in `hvdlite.torch`."""
    collectives = {name for name in mpi_ops.__all__ if name not in ("sparse_allreduce_async",)}
    assert collectives <= set(hvdlite.__all__), collectives - set(hvdlite.__all__)
    assert {"init", "rank", "local_size", "ProcessSet", "mpi_built", "start_timeline"} <= collectives
    assert all(hasattr(hvdlite, name) for name in hvdlite.__all__)


def test_functions_has_those_of_objects_too() -> None:
    """As `horovod.torch.functions`, from which scripts import them."""
    assert functions.broadcast_object is hvd.broadcast_object and functions.allgather_object is hvd.allgather_object


def test_a_process_set_has_horovods_names_alone() -> None:
    """What else it can do is the job's affair: a script could end a set by mistake."""
    names = {name for name in dir(hvd.ProcessSet([0])) if not name.startswith("_")}
    assert names == {"process_set_id", "ranks", "mpi_comm", "size", "rank", "included"}
