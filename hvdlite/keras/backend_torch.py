"""Gradients across the border between Keras on PyTorch and the core: copied once per gradient byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvdlite.gradients.accumulator import Accumulator
from hvdlite.gradients.exchange import Exchange, reduce_now
from hvdlite.keras.backend_common import divided, in_order, in_session, refuse_replicas, use_of, using
from hvdlite.lanes.gpu_side import Gpu
from hvdlite.torch import cuda
from hvdlite.torch import tensors as _tensors
from hvdlite.torch.attach.replica_check import checksum
from hvdlite.torch.compression import Compression
from hvdlite.torch.tensors import dtype_name as dtype_of
from hvdlite.torch.tensors import to_array, to_tensor

__all__ = [
    "Compression", "divided", "dtype_of", "in_order", "in_session", "refuse_replicas", "untouched", "use_of", "using",
]  # fmt: skip


def untouched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, not to be compiled by torch.compile, which would trace it and all that it calls."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call,no-any-return]


def zeros(shape: Sequence[int], dtype: str) -> torch.Tensor:
    return torch.zeros(tuple(shape), dtype=getattr(torch, dtype))


def densified(gradient: Any) -> Any:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def gpu_of(variables: Sequence[Any]) -> Gpu | None:
    """The GPU that all of them lie on; None where some lie elsewhere. Raises HvdliteError without CuPy."""
    tensors = [variable.value for variable in variables]
    return cuda.gpu_of(tensors) if {_tensors.device_name(tensor) for tensor in tensors} == {"cuda"} else None


def values_of(variables: Sequence[Any]) -> list[int]:
    return [checksum(variable.value) or 0 for variable in variables]


def traced(gradients: Sequence[Any]) -> bool:
    return False


def wait() -> None:
    """Nothing to wait for: steps are done when they return."""


def reduce(exchange: Exchange, gradients: Sequence[Any], borrow: bool = False) -> list[Any]:
    """The gradients reduced over all ranks, on their GPU or in host memory; None where no rank has any."""
    device = next((g.device for g in gradients if g is not None), "cpu")
    dense = [g if g is None else g.detach().contiguous() for g in map(densified, gradients)]
    if exchange.contents.gpu is not None:
        with cuda.on_torchs_stream(exchange.contents.gpu):
            results = reduce_now(exchange, dense, to_array, to_tensors)
    else:
        results = reduce_now(exchange, [g if g is None else g.cpu() for g in dense], to_array, to_tensors)
    return [g if g is None else g.to(device, copy=not borrow) for g in results]


def to_tensors(views: Sequence[Any]) -> list[Any]:
    return [to_tensor(view) for view in views]


def accumulate(accumulator: Accumulator, gradients: Mapping[int, Any]) -> bool:
    """Add to the sums of earlier passes; whether this was the last pass."""
    return accumulator.add({i: to_array(gradient.detach().cpu().contiguous()) for i, gradient in gradients.items()})


def accumulated(accumulator: Accumulator, gradients: Mapping[int, Any]) -> dict[int, Any]:
    """The sums."""
    device = next((gradient.device for gradient in gradients.values()), "cpu")
    return {i: to_tensor(total).to(device) for i, total in accumulator.take().items()}
