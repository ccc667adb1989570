"""Cuts: which rank owns which elements of each parameter.

    parameters    | w1            | b1 | w2                | b2 |      in the optimizer's order
    owners        | 0                      | 1                  |      ranges of equally many bytes

A range per rank, and not a part of each parameter: so each rank owns whole parameters, except for the two at the ends
of its range, and only these have to be cut. Parameters that come later (unfrozen, added) get ranges of their own, so
state never moves between ranks while a job trains.

If gradients are sharded as well, each parameter is cut (`cut_each`): then every bucket of gradients has as many bytes
for each rank.

A cut lies at a whole number of cache lines from the parameter's first element: vectorized optimizers compute the same
bits for an element wherever such a cut is, but not if the cut is elsewhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hvdlite.arrays import LINE

SHORT = 16 * 1024
"""Parameters of fewer bytes are not cut."""


@dataclass(frozen=True)
class Parameter:
    """A parameter that is to be divided. cuttable: whether the optimizer looks at each element by itself."""

    length: int
    itemsize: int
    cuttable: bool = True

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.length * self.itemsize


@dataclass(frozen=True)
class Cuts:
    """The pieces of all parameters.

    Attributes:
        borders: For each parameter size+1 elements. The piece of rank r is from border r to border r+1.
    """

    borders: tuple[tuple[int, ...], ...] = ()

    def piece(self, index: int, rank: int) -> tuple[int, int]:
        """The elements, from and to, of a parameter that a rank owns. Often none, or all."""
        borders = self.borders[index]
        return borders[rank], borders[rank + 1]

    def __add__(self, later: Cuts) -> Cuts:
        """These, and the pieces of parameters that came later."""
        return Cuts(self.borders + later.borders)


def cut(parameters: Sequence[Parameter], size: int) -> Cuts:
    """Divide parameters among ranks, in ranges of equally many bytes. Pure: the same on all ranks.

    Args:
        parameters: The parameters, in the optimizer's order.
        size: The number of ranks.
    """
    ends = [0, *accumulate(parameter.nbytes for parameter in parameters)]
    ranges = [0, *(_border(parameters, ends, ends[-1] * rank // size) for rank in range(1, size)), ends[-1]]
    found = []
    for parameter, (start, _) in zip(parameters, pairwise(ends), strict=True):
        inside = [min(max(place - start, 0), parameter.nbytes) for place in ranges]
        found.append(tuple(place // max(parameter.itemsize, 1) for place in inside))
    return Cuts(tuple(found))


def cut_each(parameters: Sequence[Parameter], size: int) -> Cuts:
    """Divide each parameter among all ranks. Short ones, and those not cuttable, go to the rank with the least. Pure.

    Args:
        parameters: The parameters, in the optimizer's order.
        size: The number of ranks.
    """
    found, load = [], [0] * size
    for parameter in parameters:
        if parameter.cuttable and parameter.nbytes >= SHORT:
            lines = max(LINE // parameter.itemsize, 1)
            inside = (parameter.length * rank // size // lines * lines for rank in range(size))
            found.append((*inside, parameter.length))
            continue
        owner = load.index(min(load))
        load[owner] += parameter.nbytes
        found.append((0,) * (owner + 1) + (parameter.length,) * (size - owner))
    return Cuts(tuple(found))


def _border(parameters: Sequence[Parameter], ends: Sequence[int], place: int) -> int:
    """The nearest byte to a place at which a range may end."""
    index = min(bisect_right(ends, place) - 1, len(parameters) - 1)
    if index < 0:
        return 0
    start, stop = ends[index], ends[index + 1]
    if parameters[index].cuttable and stop - start >= SHORT:
        return start + (place - start) // LINE * LINE
    return start if place - start < stop - place else stop
