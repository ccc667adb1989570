"""The PyTorch backend of Keras, as `gradients/` uses it.

Each gradient byte is copied once into the arena. Results are copied again unless the optimizer needs its gradients
during the step only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, Protocol, TypeVar

import torch

from hvdlite.arrays import Array
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

P = ParamSpec("P")
R = TypeVar("R")


class TorchVariable(Protocol):
    """A Keras variable on PyTorch."""

    @property
    def value(self) -> torch.Tensor:
        """The variable's tensor."""
        ...


def untouched(function: Callable[P, R]) -> Callable[P, R]:
    """Mark the function so that torch.compile neither traces it nor anything that it calls."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call,no-any-return]


def zeros(shape: Sequence[int], dtype: str) -> torch.Tensor:
    return torch.zeros(tuple(shape), dtype=getattr(torch, dtype))


def densified(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def gpu_of(variables: Sequence[TorchVariable]) -> Gpu | None:
    """Return the GPU if all variables lie on one, else None.

    Raises:
        HvdliteError: CuPy is missing, or the variables lie on several GPUs.
    """
    tensors = [variable.value for variable in variables]
    return cuda.gpu_of(tensors) if {_tensors.device_name(tensor) for tensor in tensors} == {"cuda"} else None


def values_of(variables: Sequence[TorchVariable]) -> list[int]:
    return [checksum(variable.value) or 0 for variable in variables]


def traced(gradients: Sequence[torch.Tensor | None]) -> bool:
    return False


def wait() -> None:
    """Do nothing: steps are done when they return."""


def reduce(
    exchange: Exchange, gradients: Sequence[torch.Tensor | None], borrow: bool = False
) -> list[torch.Tensor | None]:
    """Reduce gradients over all ranks, on their GPU or in host memory. Waits for all ranks.

    Args:
        exchange: The exchange of these gradients' variables.
        gradients: This rank's, in the exchange's order.
        borrow: Whether the results may be gone when the next round begins.

    Returns:
        The reduced gradients, in the same order; None where no rank has any.
    """
    device = next((g.device for g in gradients if g is not None), torch.device("cpu"))
    dense = [g if g is None else g.detach().contiguous() for g in map(densified, gradients)]
    if exchange.contents.gpu is not None:
        with cuda.on_torchs_stream(exchange.contents.gpu):
            results = reduce_now(exchange, dense, to_array, to_tensors)
    else:
        results = reduce_now(exchange, [g if g is None else g.cpu() for g in dense], to_array, to_tensors)
    return [g if g is None else g.to(device, copy=not borrow) for g in results]


def to_tensors(views: Sequence[Array]) -> list[torch.Tensor]:
    return [to_tensor(view) for view in views]


def noted(
    note: Callable[[float], None], value: torch.Tensor, gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Call `note` with a number. Returns the gradients."""
    note(float(value))
    return list(gradients)


def accumulate(accumulator: Accumulator, gradients: Mapping[int, torch.Tensor]) -> bool:
    """Add gradients to the sums of earlier passes, by index. Returns whether this was the last pass before a step."""
    return accumulator.add({i: to_array(gradient.detach().cpu().contiguous()) for i, gradient in gradients.items()})


def accumulated(accumulator: Accumulator, gradients: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the sums of all passes, by index."""
    device = next((gradient.device for gradient in gradients.values()), torch.device("cpu"))
    return {i: to_tensor(total).to(device) for i, total in accumulator.take().items()}
