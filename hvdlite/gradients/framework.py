"""What differs between the frameworks that compute all gradients and then apply them (TensorFlow, Keras)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ParamSpec, Protocol, TypeVar

from hvdlite.gradients.accumulator import Accumulator
from hvdlite.gradients.exchange import Exchange
from hvdlite.gradients.tensors import Gradient, Tensor, Variable
from hvdlite.gradients.use import Use
from hvdlite.lanes.gpu_side import Gpu

P = ParamSpec("P")
R = TypeVar("R")


class Framework(Protocol):
    """A framework as `gradients/` uses it: what its gradients are, and how they are reduced. Usually a module.

    A new framework of this kind is one module with these functions. A gradient is a dense or sparse tensor, or None.
    """

    Compression: type
    """The compressors to choose from, by Horovod's names."""

    def use_of(self, gradient: Gradient) -> Use:
        """What the gradient is: none, dense or sparse."""
        ...

    def dtype_of(self, gradient: Tensor) -> str:
        """The name of the gradient's dtype in the core."""
        ...

    def zeros(self, shape: Sequence[int], dtype: str) -> Tensor:
        """A tensor of zeros. dtype: the name in the core."""
        ...

    def densified(self, gradient: Gradient) -> Gradient:
        """A sparse gradient as a dense tensor; others as they are."""
        ...

    def divided(self, gradient: Tensor, divisor: int) -> Tensor:
        """A dense or sparse gradient, divided by a number."""
        ...

    def gpu_of(self, variables: Sequence[Variable]) -> Gpu | None:
        """The GPU on which the gradients of these variables are to be reduced; None: in host memory."""
        ...

    def values_of(self, variables: Sequence[Variable]) -> list[int] | None:
        """A checksum of each variable's present value, read at the end of a round; None where none can be read."""
        ...

    def in_session(self, variables: Sequence[Variable]) -> bool:
        """Whether only a run of the graph can read the variables, as in a TF1 session."""
        ...

    def traced(self, gradients: Sequence[Gradient]) -> bool:
        """Whether the framework is making a graph, which will run many times."""
        ...

    def in_order(self) -> bool:
        """Whether rounds run one after another, as the program has them. If not, each call gets its own exchange."""
        ...

    def wait(self) -> None:
        """Wait until the steps that have been started have reduced their gradients."""
        ...

    def untouched(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function, marked so that the framework does not rewrite or compile it."""
        ...

    def reduce(self, exchange: Exchange, gradients: Sequence[Gradient], borrow: bool = False) -> list[Gradient]:
        """The gradients reduced over all ranks. Waits for all ranks, now or when the graph runs.

        Args:
            exchange: The exchange of these gradients' variables.
            gradients: This rank's, in the exchange's order.
            borrow: Whether the results may be gone when the next round begins.

        Raises:
            RuntimeError: The step is being compiled for something that cannot call Python.
        """
        ...

    def refuse_replicas(self) -> None:
        """Raise NotImplementedError when the framework itself has several devices compute, and adds up the results."""
        ...

    def using(self) -> AbstractContextManager[None]:
        """A context in which borrowed results are used."""
        ...

    def accumulate(self, accumulator: Accumulator, gradients: Mapping[int, Tensor]) -> bool | Tensor:
        """Add gradients to the sums of earlier passes, by index. Returns whether a step follows; in a graph, a tensor.

        Raises:
            RuntimeError: As `reduce`.
        """
        ...

    def accumulated(self, accumulator: Accumulator, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The sums of all passes, as tensors like the gradients of the last pass."""
        ...
