"""`Codec`: the base of a user's own compressor. Each host's code is gathered by all hosts, which add up decoded ones.

    class Signs(hvd.Compression.Codec):
        "Signs and the mean magnitude: 1 bit per element."

        def encode(self, values):
            return np.packbits(values >= 0), np.abs(values).mean(keepdims=True)

        def decode(self, code, length):
            bits, scale = code
            return np.where(np.unpackbits(bits, count=length), scale, -scale)

Price: the code's bytes c, times h-1 for h hosts: c(h-1) sent per driver. That pays for few hosts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdlite.arrays import DType
from hvdlite.compression import Column, Piece, RoundMemory, is_matrix


class Codec:
    """A compressor that encodes each part by itself. Derive your own from it.

    A subclass defines `encode` and `decode`, and may override the attributes and `fits`. Every part of a bucket has a
    copy of the object, so attributes that `encode` changes are state of one part. They start anew when the set of
    trained parameters changes, and are not in checkpoints. Without `__repr__`, give your class one that names its
    parameters: ranks compare it.

    Attributes:
        error_feedback: Whether what was not sent is added to the next round's gradients.
        whole: Whether no parameter may be divided between hosts' drivers.
    """

    error_feedback: bool = True
    whole: bool = False
    momentum: float = 0.0
    clip: float = 0.0

    def encode(self, values: np.ndarray) -> Sequence[np.ndarray]:
        """Encode a host's sum.

        Args:
            values: Flat, float32 or float64, finite. Must not be changed.

        Returns:
            Flat arrays. Their dtypes and lengths depend on the length of `values` alone.
        """
        raise NotImplementedError

    def decode(self, code: Sequence[np.ndarray], length: int) -> np.ndarray:
        """Decode what `encode` has returned, here or on another host. The same bits on all hosts.

        Args:
            code: The arrays.
            length: The number of elements.

        Returns:
            The decoded values, flat.
        """
        raise NotImplementedError

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether to compress a parameter of this shape. By default: at least two dimensions and 1024 elements."""
        return is_matrix(shape)

    def extra(self, shape: tuple[int, ...]) -> int:
        """Codecs keep nothing in the parameters' memory."""
        return 0

    def prepare(self, column: Column, pieces: Sequence[Piece], length: int, dtype: DType) -> Gathered:
        """The exchange: an all-gather of codes."""
        return Gathered(copy.deepcopy(self), column)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


@dataclass(frozen=True)
class Gathered:
    """The exchange of a codec.

    Attributes:
        codec: The codec, for one part.
        column: One driver of each host.
    """

    codec: Codec
    column: Column

    def __call__(self, values: np.ndarray, sent: np.ndarray, now: RoundMemory) -> None:
        """See `Exchange`. All hosts add up in host order, so that they have the same bits."""
        length, kind = len(values), values.dtype
        mine = [np.ascontiguousarray(each) for each in self.codec.encode(values)]
        sent[...] = self.codec.decode(mine, length)
        rows = [self.column.gather(each) for each in mine]
        values[...] = 0
        for host in range(self.column.size):
            values += self.codec.decode([each[host] for each in rows], length).astype(kind)
