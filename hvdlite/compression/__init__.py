"""Lossy compression: sums over hosts from far fewer bytes, with error feedback.

Within a host gradients are added exactly, in shared memory. Then each driver (`transports/two_levels`) has the host's
sum of one part of a bucket. A `Compressor` replaces the all-reduce of that part between hosts:

    gradients of the host's ranks -> exact sum -> + residual -> exchange between hosts -> the same sum on all hosts
                                                     ^                  |
                                                     +--- what was not sent

`part` adds and keeps the residuals (error feedback, Karimireddy et al. 2019, arXiv:1901.09847). A compressor only says
what this host's contribution was (`sent`). Nothing is lost: over all hosts, result + residuals = gradients + residuals
before. `store` has the memory of residuals, and `saved` what checkpoints have. The compressors are `topk` (with
`oktopk` for many hosts), `randomk`, `quantize` and `powersgd`; `codec` is the base of users' own.

Belongs here: arithmetic and messages of lossy sums. Not here: which gradients are compressed, and when residuals are
committed (`gradients/lossy`). The room is above `algorithms/`, because compressors use all-reduces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import ClassVar, Protocol

import numpy as np

from hvdlite.arrays import DType
from hvdlite.compression.column import Column

__all__ = ["Column", "Compressor", "Exchange", "MatrixCompressor", "Piece", "RoundMemory"]


@dataclass(frozen=True)
class Piece:
    """The elements of one parameter that lie in a driver's part of a bucket.

    Attributes:
        name: The parameter's name.
        shape: The parameter's shape.
        start: The first of these elements, counted in the part.
        first: The same element, counted in the flat parameter.
        length: The number of elements.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    first: int
    length: int

    @property
    def here(self) -> slice:
        """The elements, counted in the part."""
        return slice(self.start, self.start + self.length)


def gaps_between(pieces: Sequence[Piece], length: int) -> tuple[slice, ...]:
    """The elements of a part of this length that belong to no piece."""
    ordered = sorted(pieces, key=lambda piece: piece.start)
    begins = [0, *(piece.here.stop for piece in ordered)]
    ends = [*(piece.start for piece in ordered), length]
    return tuple(slice(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end)


@dataclass(frozen=True)
class RoundMemory:
    """What an exchange keeps from round to round, in the round under way.

    Attributes:
        number: Counts rounds from 0, equally on all hosts, also after a restart from a checkpoint.
        before: For each piece the `extra` elements as the last committed round left them; zeros at first.
        after: For each piece the memory for new `extra` elements. Contents are undefined. They count once the round has
            been committed.
    """

    number: int
    before: Sequence[np.ndarray]
    after: Sequence[np.ndarray]


class Exchange(Protocol):
    """Adds up one part of a bucket over the hosts, in every round. Made by `Compressor.prepare`."""

    def __call__(self, values: np.ndarray, sent: np.ndarray, now: RoundMemory) -> None:
        """Replace values by their sum over hosts. Collective over the column; waits for all hosts.

        Args:
            values: This host's values: flat, float32 or float64, finite on all hosts. Changed in place to the sum, with
                the same bits on all hosts. Elements outside all pieces are zero on all hosts, and stay zero.
            sent: As long as `values`, of the same dtype, with undefined contents. Filled with this host's contribution:
                added up over all hosts, these are the sum, up to rounding.
            now: The round.
        """
        ...


class Compressor(Protocol):
    """A way to add up with fewer bytes. Immutable and hashable; compared between ranks by its `repr`.

    Attributes:
        error_feedback: Whether what was not sent is added to the next round's gradients.
        whole: Whether the compressor needs whole parameters: then no parameter is divided between drivers.
        momentum: The factor of momentum correction (`part`); 0 for none.
        clip: The largest norm of one parameter's gradient (`part`); 0 for no limit. Needs `whole`.
    """

    @property
    def error_feedback(self) -> bool: ...
    @property
    def whole(self) -> bool: ...
    @property
    def momentum(self) -> float: ...
    @property
    def clip(self) -> float: ...

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether to compress a parameter of this shape. Others travel exactly: biases, norms, small parameters."""
        ...

    def extra(self, shape: tuple[int, ...]) -> int:
        """The number of elements that a parameter's exchange keeps from one round to the next. Needs `whole`."""
        ...

    def prepare(self, column: Column, pieces: Sequence[Piece], length: int, dtype: DType) -> Exchange:
        """An exchange for many rounds. Sends nothing yet.

        Args:
            column: One driver of each host.
            pieces: The parameters in this column's part, equal on all its ranks.
            length: The part's length in elements, padding included.
            dtype: float32 or float64.
        """
        ...


LEAST = 1024
"""Parameters with fewer elements travel exactly: their bytes do not count, and biases and norms need precision."""


def is_matrix(shape: tuple[int, ...]) -> bool:
    """Whether a parameter has at least two dimensions and LEAST elements."""
    return len(shape) >= 2 and int(np.prod(shape, dtype=np.int64)) >= LEAST


class MatrixCompressor:
    """The base of a compressor, a dataclass, that compresses matrices and keeps nothing but residuals."""

    whole: ClassVar[bool] = False
    momentum: ClassVar[float] = 0.0
    clip: ClassVar[float] = 0.0

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a parameter has at least two dimensions and LEAST elements."""
        return is_matrix(shape)

    def extra(self, shape: tuple[int, ...]) -> int:
        """Nothing is kept."""
        return 0

    def __repr__(self) -> str:
        return spelled(self)


def spelled(compressor: object) -> str:
    """A compressor's repr: its name in lower case, its first field, and the fields that differ from their defaults."""
    assert is_dataclass(compressor)
    values = [(each.name, getattr(compressor, each.name), each.default) for each in fields(compressor)]
    said = [f"{name}={value!r}" for place, (name, value, default) in enumerate(values) if not place or value != default]
    return f"{type(compressor).__name__.lower()}({', '.join(said)})"
