"""`TopK`: only the elements with the largest magnitudes are sent (Aji & Heafield 2017, arXiv:1704.05021).

Momentum correction, clipping and the warm-up of the ratio make it Deep Gradient Compression (Lin et al. 2018,
arXiv:1712.01887).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdlite.arrays import Array, DType
from hvdlite.compression import Column, Exchange, Piece, RoundMemory, is_matrix, spelled
from hvdlite.compression.oktopk import OkTopK
from hvdlite.compression.selection import Selection, check_ratio

ALGORITHMS = ("auto", "gather", "oktopk")
STEP_BYTES = 16 * 1024
"""The bytes that a network of 10 Gbit/s sends in the 12 us that a message costs (`algorithms/choice`)."""


@dataclass(frozen=True, repr=False)
class TopK:
    """Sends the k = ratio n elements of largest magnitude of each part with n elements, as values and indices.

    For h hosts and float32 each driver sends 8k(h-1) bytes with the algorithm "gather": all hosts get all that was
    selected. With "oktopk" it sends about 16k(h-1)/h, however many hosts there are, but the result has only k elements
    (`oktopk`).

    Args:
        ratio: The share of the elements to send.
        error_feedback: Whether what was not sent is added to the next round's gradients.
        momentum: The factor of momentum correction; 0 for none. Then the optimizer should have no momentum of its own.
        clip: The largest norm of one parameter's gradient on a host, before it is compressed; 0 for no limit.
        warmup_rounds: In so many rounds the ratio falls from 25 % to `ratio`.
        algorithm: "gather", "oktopk", or "auto" for the faster one.

    Raises:
        ValueError: An argument is out of its range.
    """

    ratio: float = 0.01
    error_feedback: bool = True
    momentum: float = 0.0
    clip: float = 0.0
    warmup_rounds: int = 0
    algorithm: str = "auto"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is at least 0 and below 1, not {self.momentum}")
        if not 0 <= self.clip < np.inf:
            raise ValueError(f"clip is the largest norm of a gradient, or 0 for no limit, not {self.clip}")
        if self.warmup_rounds != int(self.warmup_rounds) or self.warmup_rounds < 0:
            raise ValueError(f"warmup_rounds is a number of rounds, at least 0, not {self.warmup_rounds}")
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm is one of {', '.join(map(repr, ALGORITHMS))}, not {self.algorithm!r}")

    @property
    def whole(self) -> bool:
        """Whether no parameter may be divided between drivers: for a norm."""
        return self.clip > 0

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Matrices are compressed."""
        return is_matrix(shape)

    def extra(self, shape: tuple[int, ...]) -> int:
        """Top-K keeps nothing but the residual."""
        return 0

    def prepare(self, column: Column, pieces: Sequence[Piece], length: int, dtype: DType) -> Exchange:
        """The exchange by one of both algorithms. See `Compressor`."""
        selection = Selection.of(pieces, length, self.ratio, self.warmup_rounds)
        name = self.algorithm
        if name == "auto":
            name = faster(column.size, selection.count(self.warmup_rounds) * (dtype.itemsize + 4))
        return OkTopK(column, selection, length) if name == "oktopk" else Gather(column, selection)

    def __repr__(self) -> str:
        return spelled(self)


def faster(hosts: int, nbytes: int) -> str:
    """The algorithm that takes less time, for so many bytes of values and indices that each host selects.

    "gather" sends them h-1 times in 2(h-1) messages. "oktopk" sends them 2(h-1)/h times in 4(h-1) messages.
    """
    gather = (hosts - 1) * (nbytes + 2 * STEP_BYTES)
    oktopk = (hosts - 1) * (2 * nbytes / hosts + 4 * STEP_BYTES)
    return "oktopk" if oktopk < gather else "gather"


@dataclass(frozen=True)
class Gather:
    """The exchange that gathers all hosts' largest elements. Price: 8k(h-1) bytes for float32, 12k(h-1) for float64.

    Attributes:
        column: One driver of each host.
        selection: Which elements are selected.
    """

    column: Column
    selection: Selection

    def __call__(self, values: Array, sent: Array, now: RoundMemory) -> None:
        """See `Exchange`. All hosts add up in host order, so that they have the same bits."""
        places = self.selection(values, sent, now.number)
        mine = values[places]
        sent[...] = 0
        sent[places] = mine
        all_places, all_values = self.column.gather(places), self.column.gather(mine)
        values[...] = 0
        for host in range(self.column.size):
            values[all_places[host]] += all_values[host]  # a host's places are all different
