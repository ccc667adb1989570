"""Compressors: gradients travel in fewer bits. As in Horovod, a compressor has `compress` and `decompress`.

Lossy compressors work between hosts, on sums (`compression/`). `Lossy` gives one of these the shape of Horovod's.
Each framework's `compression` module makes its compressors with `caster` and its own cast. `wire` calls a compressor
around each round. The dtype on the wire does not change the arithmetic: sums are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar, cast

from hvdlite.compression import Compressor as Between
from hvdlite.compression import codec
from hvdlite.compression.auto import Auto
from hvdlite.compression.powersgd import PowerSGD
from hvdlite.compression.quantize import Int8, OneBit
from hvdlite.compression.randomk import RandomK
from hvdlite.compression.topk import TopK
from hvdlite.gradients.tensors import Tensor

TensorT = TypeVar("TensorT", bound=Tensor)


class Compressor:
    """The interface of a compressor. Users may write their own.

    Attributes:
        wire: The dtype to which the compressor casts floating-point gradients, by name; None if it does not just cast.
    """

    wire: str | None = None

    @staticmethod
    def compress(tensor: TensorT) -> tuple[TensorT, object]:
        """Compress a gradient.

        Args:
            tensor: The gradient, dense.

        Returns:
            The tensor to send, of the same shape, and a context for `decompress`.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: TensorT, ctx: object) -> TensorT:
        """Restore a reduced tensor.

        Args:
            tensor: The ranks' result, in the dtype on the wire.
            ctx: The context that `compress` returned.

        Returns:
            The tensor in the gradient's own dtype.
        """
        raise NotImplementedError


class NoneCompressor(Compressor):
    """No compression: gradients travel unchanged."""

    @staticmethod
    def compress(tensor: TensorT) -> tuple[TensorT, object]:
        return tensor, None

    @staticmethod
    def decompress(tensor: TensorT, ctx: object) -> TensorT:
        return tensor


@dataclass(frozen=True)
class Lossy(NoneCompressor):
    """A lossy compressor between hosts. Gradients reach their bucket unchanged, and are added exactly on each host.

    Attributes:
        how: The compressor, a `compression.Compressor`.
    """

    how: Between

    def __repr__(self) -> str:
        return f"hvd.Compression.{self.how}"


def lossy_of(compression: object) -> Between | None:
    """The lossy compressor between hosts; None if gradients travel whole."""
    return compression.how if isinstance(compression, Lossy) else None


def caster(
    name: str,
    dtype: str,
    is_floating: Callable[[TensorT], bool],
    to_dtype: Callable[..., TensorT],
    to: object = None,
) -> type[Compressor]:
    """Make a compressor that casts floating-point tensors, and leaves others unchanged.

    Args:
        name: The name of the new class.
        dtype: The dtype on the wire, by name.
        is_floating: Tells whether a tensor is to be cast.
        to_dtype: Casts a tensor: called as to_dtype(tensor, dtype).
        to: The dtype on the wire, as the framework spells it; by default its name.
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


def compressor(given: object, lossy: bool = False) -> type[Compressor]:
    """Check the user's `compression=`.

    Args:
        given: The user's argument.
        lossy: Whether it may be a lossy compressor, since there are rounds: an optimizer's or a tape's.

    Raises:
        ValueError: It is no compressor, or a lossy one for a single collective.
    """
    if (isinstance(given, (Lossy, codec.Codec)) or given == "auto") and not lossy:
        raise ValueError(
            f"compression={given!r} is for hvd.DistributedOptimizer and DistributedGradientTape, where later rounds "
            "send what one round leaves out. A single collective takes hvd.Compression.none, fp16 or bf16"
        )
    if isinstance(given, type) and issubclass(given, codec.Codec):
        raise ValueError(f"compression={given.__name__} is a class: pass an object, {given.__name__}()")
    if getattr(given, "__name__", "") in vars(LossyChoices):
        raise ValueError(f"compression: call hvd.Compression.{given.__name__}(), which returns a compressor")  # type: ignore[attr-defined]
    if isinstance(given, str) and given == "auto":
        return cast(type[Compressor], Lossy(Auto()))
    if isinstance(given, codec.Codec):
        return cast(type[Compressor], Lossy(given))
    if not hasattr(given, "compress") or not hasattr(given, "decompress"):
        raise ValueError(f"compression must be one of hvd.Compression (hvd.Compression.fp16, ...), not {given!r}")
    return cast(type[Compressor], given)


def unknown(given: object) -> type[Compressor] | None:
    """Return a compressor of the user's own, which may do anything; None for hvdlite's compressors.

    Raises:
        ValueError: `given` is no compressor.
    """
    found = compressor(given, lossy=True)
    known = lossy_of(found) is not None or wire_of(found) is not None or found.compress is NoneCompressor.compress
    return None if known else found


def wire_of(compression: type[Compressor]) -> str | None:
    """The dtype to which a compressor casts, by name; None if it does not just cast, or has no attribute `wire`."""
    return getattr(compression, "wire", None)


class LossyChoices:
    """The lossy compressors between hosts, the same for all frameworks: `hvd.Compression.topk(ratio=0.01)`.

    Ranks of one host add their gradients exactly. Then hosts exchange compressed sums; on one host nothing is
    compressed. With error feedback, what was not sent is added to the next step's gradients. Parameters with fewer than
    two dimensions or 1024 elements, and sparse gradients, travel exactly.

    Attributes:
        Codec: The base class of your own compressor.
    """

    Codec: TypeAlias = codec.Codec

    @staticmethod
    def auto() -> Lossy:
        """Send float32 or bfloat16 between hosts, whichever takes less time in the first steps. Never lossier.

        Returns:
            The compressor, the same as for `compression="auto"`.
        """
        return Lossy(Auto())

    @staticmethod
    def topk(
        ratio: float = 0.01,
        *,
        error_feedback: bool = True,
        momentum: float = 0.0,
        clip: float = 0.0,
        warmup_rounds: int = 0,
    ) -> Lossy:
        """Send the largest elements of each host's sum (Top-K; Lin et al. 2018, arXiv:1712.01887).

        Price: 8 k (h-1) bytes per host for k elements and h hosts; with many hosts at most 16 k, whatever h is
        (Ok-Topk; Li & Hoefler 2022, arXiv:2201.07598). For float32; each host's k elements are chosen from its own sum.

        Args:
            ratio: The part of the elements that is sent.
            error_feedback: Whether what was not sent is added to the next step's gradients.
            momentum: The factor of momentum correction. Then the optimizer must have no momentum of its own.
            clip: The largest norm of one host's sum for one parameter; 0: no limit.
            warmup_rounds: In so many first steps the ratio falls from 25 % to `ratio`.

        Returns:
            The compressor.

        Raises:
            ValueError: An argument cannot be right.
        """
        return Lossy(TopK(ratio, error_feedback, momentum, clip, warmup_rounds))

    @staticmethod
    def randomk(ratio: float = 0.01, seed: int = 0, *, error_feedback: bool = True) -> Lossy:
        """Send random elements, the same on all hosts, so that no indices travel (Stich et al. 2018, arXiv:1809.07599).

        Price: 8 k (h-1)/h bytes per host for k elements and h hosts. Needs a smaller learning rate than Top-K.

        Args:
            ratio: The part of the elements that is sent.
            seed: The seed of the choice.
            error_feedback: Whether what was not sent is added to the next step's gradients. If not, values are scaled
                up, so that sums are right on average.

        Returns:
            The compressor.

        Raises:
            ValueError: An argument cannot be right.
        """
        return Lossy(RandomK(ratio, seed, error_feedback))

    @staticmethod
    def int8(bits: int = 8, *, block: int = 256, seed: int = 0, error_feedback: bool = True) -> Lossy:
        """Send each element in 8 or 4 bits, rounded at random (QSGD; Alistarh et al. 2017, arXiv:1610.02132).

        Price: about 2 (bits/8 + 4/block) bytes per element and host, times (h-1)/h.

        Args:
            bits: 8 or 4.
            block: The number of elements with one scale.
            seed: The seed of the rounding.
            error_feedback: Whether errors of rounding are added to the next step's gradients.

        Returns:
            The compressor.

        Raises:
            ValueError: An argument cannot be right.
        """
        return Lossy(Int8(bits, block, seed, error_feedback))

    @staticmethod
    def onebit(*, block: int = 512) -> Lossy:
        """Send signs, and a mean magnitude per block (Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847).

        Price: about 2 (1/8 + 4/block) bytes per element and host, times (h-1)/h. Needs a smaller learning rate.

        Args:
            block: The number of elements with one magnitude.

        Returns:
            The compressor.

        Raises:
            ValueError: An argument cannot be right.
        """
        return Lossy(OneBit(block))

    @staticmethod
    def powersgd(rank: int = 2, *, start_step: int = 10, seed: int = 0, min_compression_rate: float = 2.0) -> Lossy:
        """Send a product of two thin matrices per parameter (PowerSGD; Vogels et al. 2019, arXiv:1905.13727).

        Price: 8 rank (n+m) (h-1)/h bytes per host for a parameter of n x m elements. Computes like torch's
        `powerSGD_hook`.

        Args:
            rank: The number of columns of these matrices.
            start_step: The first step that compresses.
            seed: The seed of the first matrices.
            min_compression_rate: Parameters that would not shrink by this factor travel exactly.

        Returns:
            The compressor.

        Raises:
            ValueError: An argument cannot be right.
        """
        return Lossy(PowerSGD(rank, start_step, seed, min_compression_rate))
