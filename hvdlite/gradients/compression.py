"""Gradients on the wire in fewer bits. Horovod's shape: classes with `compress` and `decompress`.

What casting means is the framework's; the rest is here once. Sums are computed in float32, whatever travels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Compressor:
    """Interface, also for compressors of one's own. `wire`: set by those that do no more than cast: the dtype in which
    floating-point gradients travel, by name."""

    wire: str | None = None

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor to send, and what decompress needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The received tensor in the original dtype."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """As it is."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


def caster(
    name: str, dtype: str, is_floating: Callable[[Any], bool], cast: Callable[[Any, Any], Any], to: Any = None
) -> type[Compressor]:
    """A compressor that casts floating-point tensors to dtype (`to`, as the framework spells it) and leaves others
    alone. cast: (tensor, dtype) -> tensor."""
    target = dtype if to is None else to

    class Cast(Compressor):
        wire = dtype

        @staticmethod
        def compress(tensor: Any) -> tuple[Any, Any]:
            return (cast(tensor, target) if is_floating(tensor) else tensor), tensor.dtype

        @staticmethod
        def decompress(tensor: Any, ctx: Any) -> Any:
            return cast(tensor, ctx)

    Cast.__name__ = Cast.__qualname__ = name
    Cast.__doc__ = f"Floating-point tensors travel as {dtype}; sums are computed in float32."
    return Cast


def compressor(given: Any) -> Any:
    """What has Horovod's two functions. Raises ValueError for what has not."""
    if not hasattr(given, "compress") or not hasattr(given, "decompress"):
        raise ValueError(f"compression must be one of hvd.Compression (hvd.Compression.fp16, ...), not {given!r}")
    return given


def unknown(given: Any) -> Any:
    """The compressor, where it is a user's own, which may do anything; None for one that casts or does nothing. Raises
    ValueError for what is none."""
    known = getattr(compressor(given), "wire", None) is not None or given.compress is NoneCompressor.compress
    return None if known else given
