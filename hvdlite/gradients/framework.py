"""What frameworks that compute all gradients and then apply them (TensorFlow, Keras) do differently."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hvdlite.gradients.accumulator import Accumulator
from hvdlite.gradients.exchange import Exchange
from hvdlite.gradients.use import Use
from hvdlite.lanes.gpu_side import Gpu


class Border(Protocol):
    """How a framework's gradients (its tensors, its sparse tensors, or None) cross into the core. A module, usually."""

    Compression: Any
    """The compressors to choose from, by Horovod's names."""

    def use_of(self, gradient: Any) -> Use: ...

    def dtype_of(self, gradient: Any) -> str:
        """The dtype's name in the core."""
        ...

    def zeros(self, shape: Sequence[int], dtype: str) -> Any:
        """A tensor; dtype: the name in the core."""
        ...

    def densified(self, gradient: Any) -> Any:
        """A sparse gradient as an ordinary tensor."""
        ...

    def divided(self, gradient: Any, divisor: int) -> Any:
        """The gradient, dense or sparse, divided."""
        ...

    def gpu_of(self, variables: Sequence[Any]) -> Gpu | None:
        """Where these variables' gradients are to be reduced; None for the host."""
        ...

    def values_of(self, variables: Sequence[Any]) -> list[int] | None:
        """A checksum of each variable's value now, in a round; None where they cannot be read then."""
        ...

    def in_session(self, variables: Sequence[Any]) -> bool:
        """Whether only a run of the graph can read them."""
        ...

    def traced(self, gradients: Sequence[Any]) -> bool:
        """Whether a graph is being made, to be run many times."""
        ...

    def in_order(self) -> bool:
        """Whether rounds run one after another, as the program has them. If not, each call gets its own exchange."""
        ...

    def wait(self) -> None:
        """Until steps that have been started have reduced their gradients."""
        ...

    def untouched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, not to be rewritten by the framework."""
        ...

    def reduce(self, exchange: Exchange, gradients: Sequence[Any], borrow: bool = False) -> list[Any]:
        """The gradients reduced over all ranks. borrow: they are gone when the next round begins. Raises where the step
        is being compiled for something that cannot call Python; so does `accumulate`."""
        ...

    def refuse_replicas(self) -> None:
        """Raises NotImplementedError where the framework has several devices compute, and adds up what they give."""
        ...

    def using(self) -> AbstractContextManager[None]:
        """Where borrowed results are used."""
        ...

    def accumulate(self, accumulator: Accumulator, gradients: Mapping[int, Any]) -> Any:
        """Add gradients to the sums, by index; a bool or boolean tensor: whether a step follows."""
        ...

    def accumulated(self, accumulator: Accumulator, gradients: Mapping[int, Any]) -> dict[int, Any]:
        """The sums of all passes, as tensors like gradients, which are the last one's."""
        ...
