"""`Framework`: the functions that `gradients/` calls in TensorFlow and in each backend of Keras.

These frameworks compute all gradients and then apply them. Each has a module with these functions. `lists`, `wire` and
the attachments call them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ParamSpec, Protocol, TypeVar

from hvdlite.compression.codec import Codec
from hvdlite.gradients.accumulator import Accumulator
from hvdlite.gradients.compression import Compressor, Lossy
from hvdlite.gradients.exchange import Exchange
from hvdlite.gradients.tensors import Gradient, Tensor, Variable
from hvdlite.gradients.use import Use
from hvdlite.lanes.gpu_side import Gpu

P = ParamSpec("P")
R = TypeVar("R")


class Compressors(Protocol):
    """A framework's `hvd.Compression`."""

    none: type[Compressor]
    fp16: type[Compressor]
    bf16: type[Compressor]
    Codec: type[Codec]

    @property
    def topk(self) -> Callable[..., Lossy]: ...
    @property
    def randomk(self) -> Callable[..., Lossy]: ...
    @property
    def int8(self) -> Callable[..., Lossy]: ...
    @property
    def onebit(self) -> Callable[..., Lossy]: ...
    @property
    def powersgd(self) -> Callable[..., Lossy]: ...


class Framework(Protocol):
    """A framework, as `gradients/` uses it. Usually a module.

    A new framework of this kind is one module with these functions. A gradient is a dense or sparse tensor, or None.
    """

    Compression: Compressors
    """The framework's compressors, by Horovod's names."""

    def use_of(self, gradient: Gradient) -> Use:
        """The gradient's kind: none, dense or sparse."""
        ...

    def dtype_of(self, gradient: Tensor) -> str:
        """The NumPy name of the gradient's dtype."""
        ...

    def zeros(self, shape: Sequence[int], dtype: str) -> Tensor:
        """A tensor of zeros. dtype: its NumPy name."""
        ...

    def densified(self, gradient: Gradient) -> Gradient:
        """A sparse gradient as a dense tensor; other gradients unchanged."""
        ...

    def divided(self, gradient: Tensor, divisor: int) -> Tensor:
        """A dense or sparse gradient, divided by a number."""
        ...

    def gpu_of(self, variables: Sequence[Variable]) -> Gpu | None:
        """The GPU on which the gradients of these variables are reduced; None: they are reduced in host memory."""
        ...

    def values_of(self, variables: Sequence[Variable]) -> list[int] | None:
        """A checksum of each variable's value, read at the end of a round; None if they cannot be read."""
        ...

    def in_session(self, variables: Sequence[Variable]) -> bool:
        """Whether only a run of the graph can read the variables, like in a TF1 session."""
        ...

    def traced(self, gradients: Sequence[Gradient]) -> bool:
        """Whether the framework is building a graph, which will run many times."""
        ...

    def in_order(self) -> bool:
        """Whether rounds run in the program's order. If not, each call gets an exchange of its own."""
        ...

    def wait(self) -> None:
        """Wait until all started steps have reduced their gradients."""
        ...

    def untouched(self, function: Callable[P, R]) -> Callable[P, R]:
        """Mark a function, so that the framework does not rewrite or compile it. Returns the function."""
        ...

    def reduce(self, exchange: Exchange, gradients: Sequence[Gradient], borrow: bool = False) -> list[Gradient]:
        """Reduce gradients over all ranks. Waits for all ranks, now or when the graph runs.

        Args:
            exchange: The exchange of these gradients' variables.
            gradients: This rank's gradients, in the exchange's order.
            borrow: Whether the results may become invalid when the next round begins.

        Returns:
            The reduced gradients, in the same order.

        Raises:
            RuntimeError: The step is being compiled for a device or runtime that cannot call Python.
        """
        ...

    def refuse_replicas(self) -> None:
        """Raise NotImplementedError if the framework itself spreads each step over several devices."""
        ...

    def using(self, results: Sequence[Gradient], /) -> AbstractContextManager[object]:
        """A context for the code that uses borrowed results."""
        ...

    def accumulate(self, accumulator: Accumulator, gradients: Mapping[int, Tensor]) -> bool | Tensor:
        """Add gradients to the sums of earlier passes, by index.

        Returns:
            Whether a step follows. In a graph this is a tensor.

        Raises:
            RuntimeError: As for `reduce`.
        """
        ...

    def accumulated(self, accumulator: Accumulator, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The sums of all passes, as tensors in the form of the last pass's gradients."""
        ...
