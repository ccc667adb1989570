"""Gradients in fewer bits while they travel. Horovod's shape: classes with `compress` and `decompress`.

How a tensor is cast is the framework's; the rest is here once. Sums are computed in float32, in whatever dtype
gradients travel. What happens to a gradient between the framework and the wire is in `wire`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from hvdlite.gradients.tensors import Tensor

TensorT = TypeVar("TensorT", bound=Tensor)


class Compressor:
    """The interface of a compressor, for users' own as well.

    Attributes:
        wire: The name of the dtype in which floating-point gradients travel, of compressors that only cast; else None.
    """

    wire: str | None = None

    @staticmethod
    def compress(tensor: TensorT) -> tuple[TensorT, object]:
        """The tensor to send, of the same shape, and a context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: TensorT, ctx: object) -> TensorT:
        """The reduced tensor in the original dtype. ctx: what `compress` returned for it."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Gradients travel as they are."""

    @staticmethod
    def compress(tensor: TensorT) -> tuple[TensorT, object]:
        return tensor, None

    @staticmethod
    def decompress(tensor: TensorT, ctx: object) -> TensorT:
        return tensor


def caster(
    name: str, dtype: str, is_floating: Callable[[TensorT], bool], to_dtype: Callable[..., TensorT],
    to: object = None,
) -> type[Compressor]:
    """A compressor that casts floating-point tensors, and leaves others alone.

    Args:
        name: The name of the new class.
        dtype: The name of the dtype in which gradients travel.
        is_floating: Whether a tensor is to be cast.
        to_dtype: Casts: (tensor, dtype) -> tensor.
        to: The dtype as the framework spells it; by default its name.
    """
    target = dtype if to is None else to

    def compress(tensor: TensorT) -> tuple[TensorT, object]:
        return (to_dtype(tensor, target) if is_floating(tensor) else tensor), tensor.dtype

    def decompress(tensor: TensorT, ctx: object) -> TensorT:
        return to_dtype(tensor, ctx)

    members = {
        "__doc__": f"Floating-point tensors travel as {dtype}; sums are computed in float32.",
        "__module__": __name__,
        "wire": dtype,
        "compress": staticmethod(compress),
        "decompress": staticmethod(decompress),
    }
    return type(name, (Compressor,), members)


def compressor(given: object) -> type[Compressor]:
    """The user's compressor.

    Raises:
        ValueError: It lacks one of Horovod's two functions.
    """
    if not hasattr(given, "compress") or not hasattr(given, "decompress"):
        raise ValueError(f"compression must be one of hvd.Compression (hvd.Compression.fp16, ...), not {given!r}")
    return cast(type[Compressor], given)


def unknown(given: object) -> type[Compressor] | None:
    """A user's own compressor, which may do anything; None for a compressor that casts or does nothing.

    Raises:
        ValueError: It is no compressor.
    """
    found = compressor(given)
    known = wire_of(found) is not None or found.compress is NoneCompressor.compress
    return None if known else found


def wire_of(compression: type[Compressor]) -> str | None:
    """The dtype that a compressor casts to; None for one that does something else. Users' own need not say."""
    return getattr(compression, "wire", None)
