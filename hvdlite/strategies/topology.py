"""Topologies: which ranks combine their arrays, and with which weights.

A topology is a matrix W. Rank i combines x_i <- sum over j of W[i, j] x_j. So rank j sends to rank i if W[i, j] is not
zero. The graphs have Bluefog's names and weights (Ying et al. 2021, "BlueFog"); Bluefog's matrices are the transposes
of these. If W is doubly stochastic, the mean of all ranks stays, and all ranks approach it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import TypeAlias

import numpy as np

Matrix: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
TOLERANCE = 1e-6
"""The largest difference from 1 of a sum of weights. Users may give weights in float32."""


@dataclass(frozen=True)
class Topology:
    """A weight matrix. It does not change. Two topologies are equal if their digests are.

    Attributes:
        size: The number of ranks.
        digest: A short text, equal for equal matrices.
        matrix: The weights, read-only: row i says how rank i combines.
    """

    size: int
    digest: str
    matrix: Matrix = field(repr=False, compare=False)

    @staticmethod
    def of(matrix: object) -> Topology:
        """Make a topology of a matrix.

        Args:
            matrix: For each rank a row of weights, one for each rank. A weight of 0 means that no message is sent.

        Returns:
            The topology.

        Raises:
            ValueError: It is not a square matrix of finite numbers.
        """
        found = np.array(matrix, np.float64)
        if found.ndim != 2 or found.shape[0] != found.shape[1] or not found.size:
            raise ValueError(f"a topology needs a square matrix, a row of weights for each rank, not {found.shape}")
        if not np.isfinite(found).all():
            raise ValueError(
                f"a topology needs finite weights: row {np.argwhere(~np.isfinite(found))[0][0]} has others"
            )
        found += 0.0  # -0.0 becomes 0.0
        found.flags.writeable = False
        return Topology(len(found), blake2b(found.tobytes(), digest_size=6).hexdigest(), found)

    def in_neighbors(self, rank: int) -> list[int]:
        """Return the ranks that send to a rank.

        Args:
            rank: The receiver.

        Returns:
            The senders, ascending, without the rank itself.
        """
        return [int(other) for other in np.flatnonzero(self.matrix[rank]) if other != rank]

    def out_neighbors(self, rank: int) -> list[int]:
        """Return the ranks that a rank sends to.

        Args:
            rank: The sender.

        Returns:
            The receivers, ascending, without the rank itself.
        """
        return [int(other) for other in np.flatnonzero(self.matrix[:, rank]) if other != rank]

    def self_weight(self, rank: int) -> float:
        """Return the weight of a rank's own array.

        Args:
            rank: The rank.

        Returns:
            The weight.
        """
        return float(self.matrix[rank, rank])

    def weights(self, rank: int) -> dict[int, float]:
        """Return the weight of each in-neighbour's array.

        Args:
            rank: The receiver.

        Returns:
            The weights by rank.
        """
        return {other: float(self.matrix[rank, other]) for other in self.in_neighbors(rank)}


def require_doubly_stochastic(rounds: Sequence[Topology]) -> None:
    """Check that repeated rounds of combining lead all ranks to their mean.

    Args:
        rounds: The topologies of one period, in their order: one, if it never changes.

    Raises:
        ValueError: A weight is negative, a row or column does not sum to 1, some ranks never hear of others, or the
            ranks exchange their arrays forever without coming closer.
    """
    for topology in rounds:
        if (topology.matrix < 0).any():
            row, column = np.argwhere(topology.matrix < 0)[0]
            raise ValueError(
                f"weight [{row}, {column}] of the topology is {topology.matrix[row, column]:g}: give weights from 0 on"
            )
        for what, axis in (("row", 1), ("column", 0)):
            sums = topology.matrix.sum(axis=axis)
            wrong = [f"{what} {place} sums to {sums[place]:.6g}" for place in np.flatnonzero(abs(sums - 1) > TOLERANCE)]
            if wrong:
                raise ValueError(
                    f"the topology is not doubly stochastic: {', '.join(wrong[:4])}. Each row and each column must sum "
                    "to 1, so that the mean of all ranks stays"
                )
    whole = np.eye(rounds[0].size)
    for topology in rounds:
        whole = topology.matrix @ whole
    reached = (whole > 0) | np.eye(len(whole), dtype=bool)
    for _ in range(len(whole).bit_length()):  # each squaring doubles the length of the ways that are known
        reached = reached.astype(np.float64) @ reached > 0
    if not reached.all():
        row, column = np.argwhere(~reached)[0]
        raise ValueError(
            f"the topology is not connected: rank {row} never hears of rank {column}. Give weights that join all ranks"
        )
    if contraction(whole) > 1 - 1e-9:
        raise ValueError(
            "the topology never brings ranks closer: they exchange their arrays in a circle. Give each rank a weight "
            "for its own array"
        )


def contraction(matrix: Matrix) -> float:
    """Return the factor by which one round shrinks the ranks' differences in the long run: the second eigenvalue."""
    return float(np.sort(np.abs(np.linalg.eigvals(matrix)))[-2]) if len(matrix) > 1 else 0.0


def require_size(size: int) -> None:
    """Raise ValueError unless there is a rank."""
    if size < 1:
        raise ValueError(f"size={size}: a topology has at least one rank")


def circulant(size: int, sources: Callable[[int], bool]) -> Topology:
    """Each rank combines with the ranks that lie `distance` before it, with equal weights.

    Args:
        size: The number of ranks.
        sources: Whether ranks at a distance from 1 to size - 1 are in-neighbours.
    """
    require_size(size)
    distances = [0, *(distance for distance in range(1, size) if sources(distance))]
    matrix = np.zeros((size, size))
    for rank in range(size):
        matrix[rank, [(rank - distance) % size for distance in distances]] = 1 / len(distances)
    return Topology.of(matrix)


def metropolis(linked: Matrix) -> Topology:
    """Metropolis weights of an undirected graph: an edge weighs 1 / (1 + the larger number of neighbours of its ends).

    Each rank keeps the rest, so the matrix is doubly stochastic (Xiao & Boyd 2004).

    Args:
        linked: 1 where two ranks are neighbours, else 0; symmetric, with zeros on the diagonal.
    """
    degrees = linked.sum(axis=0)
    matrix = linked / (1 + np.maximum.outer(degrees, degrees))
    np.fill_diagonal(matrix, 1 - matrix.sum(axis=1))
    return Topology.of(matrix)


def RingGraph(size: int, connect_style: int = 0) -> Topology:
    """Make a ring.

    Args:
        size: The number of ranks.
        connect_style: 0: each rank combines with both ranks beside it, with weights of 1/3. 1: each rank sends to the
            rank before it alone. 2: each rank sends to the rank after it alone. In these two the weights are 1/2.

    Returns:
        The topology.

    Raises:
        ValueError: An argument has another value.
    """
    if connect_style not in (0, 1, 2):
        raise ValueError(f"connect_style={connect_style!r} must be 0 (both sides), 1 (to the left) or 2 (to the right)")
    after, before = connect_style != 2, connect_style != 1
    return circulant(size, lambda distance: (before and distance == 1) or (after and distance == size - 1))


def ExponentialTwoGraph(size: int) -> Topology:
    """Make a graph in which each rank sends to the ranks 1, 2, 4, 8, ... after it, with equal weights.

    Args:
        size: The number of ranks.

    Returns:
        The topology.
    """
    return circulant(size, lambda distance: distance & (distance - 1) == 0)


def ExponentialGraph(size: int, base: int = 2) -> Topology:
    """Make a graph in which each rank sends to the ranks 1, base, base^2, ... after it, with equal weights.

    Args:
        size: The number of ranks.
        base: At least 2.

    Returns:
        The topology.

    Raises:
        ValueError: `base` is smaller.
    """
    if base < 2:
        raise ValueError(f"base={base} must be at least 2")
    return circulant(size, lambda distance: distance in {base**power for power in range(size.bit_length())})


def FullyConnectedGraph(size: int) -> Topology:
    """Make a graph in which every rank combines with all others, with equal weights. One round gives the mean.

    Args:
        size: The number of ranks.

    Returns:
        The topology.
    """
    return circulant(size, lambda distance: True)


def StarGraph(size: int, center_rank: int = 0) -> Topology:
    """Make a star: all ranks combine with one, by Metropolis weights.

    Args:
        size: The number of ranks.
        center_rank: The rank in the middle.

    Returns:
        The topology.

    Raises:
        ValueError: There is no such rank.
    """
    require_size(size)
    if not 0 <= center_rank < size:
        raise ValueError(f"center_rank={center_rank} must be one of the ranks 0-{size - 1}")
    linked = np.zeros((size, size))
    linked[center_rank] = linked[:, center_rank] = 1
    linked[center_rank, center_rank] = 0
    return metropolis(linked)


def MeshGrid2DGraph(size: int, shape: tuple[int, int] | None = None) -> Topology:
    """Make a grid: each rank combines with the ranks beside, above and below it, by Metropolis weights.

    Args:
        size: The number of ranks.
        shape: The numbers of rows and columns. Default: as square as possible, with no more rows than columns.

    Returns:
        The topology.

    Raises:
        ValueError: The grid has another number of places than `size`.
    """
    require_size(size)
    rows = next(rows for rows in range(int(size**0.5), 0, -1) if size % rows == 0)
    rows, columns = (rows, size // rows) if shape is None else shape
    if rows * columns != size or rows < 1:
        raise ValueError(f"shape={shape} has {rows * columns} places, and there are {size} ranks")
    linked = np.zeros((size, size))
    for rank in range(size):
        row, column = divmod(rank, columns)
        for other in ([rank + 1] if column + 1 < columns else []) + ([rank + columns] if row + 1 < rows else []):
            linked[rank, other] = linked[other, rank] = 1
    return metropolis(linked)


def GetDynamicOnePeerSendRecvRanks(topology: Topology, self_rank: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield for each round the rank to send to, and the ranks to receive from, forever.

    In each round every rank sends to one of its out-neighbours in turn, the nearest after it first. If ranks have
    different numbers of out-neighbours, a rank may receive from several, or from none.

    Args:
        topology: The edges to use in turn.
        self_rank: This rank.

    Yields:
        Two lists: the ranks to send to (one, or none if there is no neighbour), and the ranks to receive from.
    """
    turns = [
        sorted(topology.out_neighbors(rank), key=lambda other, rank=rank: (other - rank) % topology.size)  # type: ignore[misc]
        for rank in range(topology.size)
    ]
    for step in count():
        dests = [turn[step % len(turn)] if turn else None for turn in turns]
        mine = dests[self_rank]
        yield [] if mine is None else [mine], [rank for rank, dest in enumerate(dests) if dest == self_rank]


@dataclass(frozen=True)
class OnePeerExponential:
    """A topology that changes each round: rank i sends to rank i + 2^k alone, for k = 0, 1, 2, ... in turn.

    Each rank takes the mean of its array and the one it receives. If the number of ranks is a power of two, all ranks
    have the exact mean after log2(size) rounds (Assran et al. 2019; Ying et al. 2021). A round costs one message.
    """

    def rounds(self, size: int) -> list[Topology]:
        """Return the topologies of one period.

        Args:
            size: The number of ranks.

        Returns:
            One topology for each power of two below `size`.
        """
        powers = range((size - 1).bit_length()) or range(1)
        return [circulant(size, lambda distance, hop=2**power: distance == hop) for power in powers]  # type: ignore[misc]
