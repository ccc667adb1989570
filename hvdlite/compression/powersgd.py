"""`PowerSGD`: matrices travel as two thin factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from hvdlite.arrays import Array, DType
from hvdlite.compression import Column, MatrixCompressor, Piece, RoundMemory

Floats: TypeAlias = NDArray[np.float32]
"""float32 or float64."""
TILE = 64 * 1024
"""Elements of a product that are computed at once, in the cache."""


@dataclass(frozen=True, repr=False)
class PowerSGD(MatrixCompressor):
    """Low-rank sums by one step of subspace iteration: Vogels et al. 2019, arXiv:1905.13727.

    A parameter is a matrix M of n rows, its first dimension, and m columns. Each round starts from the last one's Q:

        Q orthogonalized;   P = sum of M Q over hosts;   P orthogonalized;   Q = sum of M^T P;   result = P Q^T

    These are the steps of PyTorch's `powerSGD_hook`, and give the same sums. All matrices of a part share two
    all-reduces. PyTorch takes result / h as each host's contribution. Then a host's residual grows without bound if its
    gradients differ from the others' in the mean. Here a contribution is P Q^T with the Q before the sum. The sum of
    all residuals is the same, and each stays small.

    Price: 2 r (n+m) (h-1)/h elements per driver and matrix, with r = min(rank, n, m), instead of 2 n m (h-1)/h.

    Args:
        rank: The number of columns of P and Q.
        start_step: The number of rounds with exact sums at first. Early gradients change fast and need precision.
        seed: The seed of the first Q, at least 0.
        min_compression_rate: A parameter is compressed if that saves more than this factor.

    Raises:
        ValueError: An argument is out of range.
    """

    rank: int = 2
    start_step: int = 10
    seed: int = 0
    min_compression_rate: float = 2.0
    error_feedback: ClassVar[bool] = True
    whole: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("start_step", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"powersgd compression needs {name} >= {least}, not {name}={getattr(self, name)!r}")
        if not self.min_compression_rate > 0:
            raise ValueError(
                "powersgd compression needs min_compression_rate > 0, "
                f"not min_compression_rate={self.min_compression_rate!r}"
            )

    def fits(self, shape: tuple[int, ...]) -> bool:
        """At least two dimensions, and factors that have less than 1 / min_compression_rate of the elements."""
        if len(shape) < 2:
            return False
        rows, columns, rank = self.sizes(shape)
        return (rows + columns) * rank * self.min_compression_rate < rows * columns

    def extra(self, shape: tuple[int, ...]) -> int:
        """The elements of Q."""
        _, columns, rank = self.sizes(shape)
        return columns * rank

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """A parameter's rows and columns, and the rank of its sums."""
        rows, columns = shape[0], math.prod(shape[1:])
        return rows, columns, min(rows, columns, self.rank)

    def prepare(self, column: Column, pieces: Sequence[Piece], length: int, dtype: DType) -> LowRank:
        """See `Compressor.prepare`."""
        return LowRank(self, column, pieces, dtype)


class LowRank:
    """The exchange of `PowerSGD`.

    Results have the same bits on hosts with different CPUs, whose BLAS may round differently: BLAS only computes each
    host's own terms of P and Q. From their sums on, all is elementwise arithmetic in a fixed order.

    Attributes:
        settings: The compressor.
        column: One driver of each host.
        pieces: The matrices in the part.
        sizes: For each matrix its rows, columns and rank.
        left, right: Memory for P and Q of all matrices.
        ps, qs: The same memory, as one matrix for each.
    """

    def __init__(self, settings: PowerSGD, column: Column, pieces: Sequence[Piece], dtype: DType) -> None:
        self.settings, self.column, self.pieces = settings, column, pieces
        self.sizes = [settings.sizes(piece.shape) for piece in pieces]
        self.left, self.ps = matrices([(rows, rank) for rows, _, rank in self.sizes], dtype)
        self.right, self.qs = matrices([(columns, rank) for _, columns, rank in self.sizes], dtype)

    def __call__(self, values: Array, sent: Array, now: RoundMemory) -> None:
        """See `Exchange`. This host has contributed P (M^T P)^T with its own M."""
        if self.column.size == 1 or now.number < self.settings.start_step:
            sent[...] = values
            self.column.sum(values)
            for before, after in zip(now.before, now.after, strict=True):
                after[...] = before
            return
        own = self.as_matrices(values)
        for piece, before, matrix, p, q in zip(self.pieces, now.before, own, self.ps, self.qs, strict=True):
            q[...] = before.reshape(q.shape)
            orthogonalize(q, [self.settings.seed, now.number, crc32(piece.name.encode())])
            np.matmul(matrix, q, out=p)
        self.column.sum(self.left)
        sent[...] = 0
        shares = self.as_matrices(sent)
        for matrix, share, p, q in zip(own, shares, self.ps, self.qs, strict=True):
            orthogonalize(p)
            np.matmul(matrix.T, p, out=q)
            np.matmul(p, q.T, out=share)
        self.column.sum(self.right)
        for after, matrix, p, q in zip(now.after, own, self.ps, self.qs, strict=True):
            after[...] = q.reshape(-1)
            multiply(p, q, matrix)

    def as_matrices(self, part: Array) -> list[Floats]:
        """Views of the pieces of a part."""
        shapes = [(rows, columns) for rows, columns, _ in self.sizes]
        return [np.asarray(part[piece.here]).reshape(shape) for piece, shape in zip(self.pieces, shapes, strict=True)]


def matrices(shapes: Sequence[tuple[int, int]], dtype: DType) -> tuple[Floats, list[Floats]]:
    """Memory for matrices of these shapes: flat, and a view of each."""
    bounds = [*accumulate((rows * columns for rows, columns in shapes), initial=0)]
    flat: Floats = np.empty(bounds[-1], dtype)
    return flat, [flat[slice(*ends)].reshape(shape) for ends, shape in zip(pairwise(bounds), shapes, strict=True)]


def multiply(p: Floats, q: Floats, product: Floats) -> None:
    """Compute P Q^T with the same bits on all CPUs: for each column an outer product, added in order."""
    columns = np.ascontiguousarray(q.T)
    step = max(TILE // product.shape[1], 1)
    for start in range(0, len(product), step):
        rows, left = product[start : start + step], p[start : start + step]
        np.multiply(left[:, :1], columns[0], out=rows)
        for number in range(1, len(columns)):
            rows += left[:, number, None] * columns[number]


def orthogonalize(matrix: Floats, seed: Sequence[int] | None = None) -> None:
    """Make a matrix's columns orthonormal in place, by Gram-Schmidt, twice for each column.

    A column that depends on those before it, up to rounding, is replaced: by zeros, or by random numbers if there is a
    seed. Otherwise Q would lose such a column forever. The same bits on all CPUs, random numbers excepted.
    """
    least = 64 * float(np.finfo(matrix.dtype).eps)
    for number in range(matrix.shape[1]):
        column = matrix[:, number].copy()
        if not reduce_to_unit(column, matrix[:, :number], least):
            column[...] = 0
            if seed is not None:
                column[...] = np.random.default_rng([*seed, number]).standard_normal(len(column))
                reduce_to_unit(column, matrix[:, :number], least)
        matrix[:, number] = column


def reduce_to_unit(column: Floats, others: Floats, least: float) -> bool:
    """Remove from a column its projections on orthonormal others, and scale it to norm 1.

    Returns:
        Whether more than `least` of its norm remained. If not, its contents are undefined.
    """
    for _ in range(2):
        largest = np.abs(column).max()
        if largest == 0:
            return False
        column /= largest  # so that no square underflows
        column /= np.sqrt(total(column * column))
        for number in range(others.shape[1]):
            column -= total(column * others[:, number]) * others[:, number]
        if total(column * column) <= least * least:
            return False
    column /= np.sqrt(total(column * column))
    return True


def total(terms: Floats) -> np.float32:
    """The sum of an array, which is overwritten. Half is added to half, so that the order is the same on all CPUs."""
    while (length := len(terms)) > 1:
        half = length // 2
        terms[:half] += terms[length - half :]
        terms = terms[: length - half]
    first: np.float32 = terms[0]
    return first
