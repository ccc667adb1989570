"""Averages over the ranks that have a value: some ranks may have joined, or lack a part of the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from hvdlite.arrays import Array, module
from hvdlite.job import runtime
from hvdlite.job.groups import Group
from hvdlite.lanes.request import Handle
from hvdlite.lanes.workplace import Workplace
from hvdlite.ops import Average, Max
from hvdlite.ops.common import Operation
from hvdlite.ops.reductions import grouped

Forms: TypeAlias = dict[str, tuple[tuple[int, ...], str]]
"""Shapes and dtypes of arrays by name."""


class Averages:
    """An average of several arrays over ranks, in place. It may be under way.

    A rank that has joined takes part with zeros, which averaged into weights would be wrong. So the ranks also average
    a number for each array: 1 where a rank has the array. The array's average is divided by that number's.
    """

    def __init__(self, group: Group, arrays: Sequence[Array], name: str, have: Iterable[bool] = ()) -> None:
        """
        Args:
            group: The ranks.
            arrays: At least one; equal shapes and dtypes on all ranks, all on the host or all on one GPU.
            name: Names the operation.
            have: Whether this rank's array counts, for each array. An array that does not must be zeros. By default all
                count.
        """
        self.arrays = arrays
        numbers = list(have) or [True] * len(arrays)
        self.counts: Array = module(arrays[0]).asarray(numbers, dtype=np.float64)  # as exact as any weight
        self.operation = grouped(group, [*arrays, self.counts], Average, name)
        self.handle: Handle[list[Array]] | None = None

    def start(self) -> Averages:
        """Begin in the background. The arrays must not be used until `wait`. Waits for nobody."""
        self.handle = self.operation.start()
        return self

    def wait(self) -> None:
        """Replace the arrays by their averages. Waits for all ranks."""
        if self.handle is None:
            self.operation.run()
        else:
            self.handle.wait()
        for array, count in zip(self.arrays, self.counts.tolist(), strict=True):
            if count not in (0.0, 1.0):
                np.divide(array, array.dtype.type(count), out=array)  # type: ignore[call-overload]  # or CuPy's


def average_(group: Group, arrays: Sequence[Array], name: str, counts: bool = True) -> None:
    """Replace arrays by their averages over the ranks that have not joined, in place. Waits for all ranks.

    Args:
        group: The ranks.
        arrays: As for `Averages`, or none.
        name: Names the operation.
        counts: Whether this rank's values count. If not, they are overwritten only.
    """
    if not counts:
        for array in arrays:
            array[...] = 0
    if arrays:
        Averages(group, arrays, name, have=[counts] * len(arrays)).wait()


def average_model_(group: Group, arrays: Sequence[Array], counts: bool) -> None:
    """Replace a model's values by their averages over all ranks, and integers by the largest. Waits for all ranks.

    Args:
        group: The ranks.
        arrays: Numbers, no booleans; otherwise as for `average_`.
        counts: Whether this rank's values count in averages.
    """
    average_(group, [array for array in arrays if array.dtype.kind not in "iu"], "average_parameters", counts)
    if whole := [array for array in arrays if array.dtype.kind in "iu"]:
        grouped(group, whole, Max, "average_parameters counts").run()


def average_known_(group: Group, arrays: Mapping[str, Array], name: str) -> None:
    """Replace arrays by their averages over the ranks that have them, in place. Waits for all ranks.

    An optimizer's state comes with a parameter's first gradient, and some ranks may not have had one. The state of such
    a rank stays missing.

    Args:
        group: The ranks.
        arrays: By name. Names may differ between ranks, but not the shape and dtype of one name.
        name: Names the operations.
    """
    forms: Forms = {key: (array.shape, array.dtype.name) for key, array in arrays.items()}
    everyones = gathered(group, forms, f"{name} names")
    every = dict(sorted((key, form) for theirs in everyones for key, form in theirs.items()))
    if every:
        xp = module(next(iter(arrays.values()), np.empty(0)))
        given = [arrays[key] if key in arrays else xp.zeros(*form) for key, form in every.items()]
        Averages(group, given, name, have=[key in arrays for key in every]).wait()


def settle(group: Group) -> None:
    """Have the strategies of all optimizers that all ranks have finish what is under way. Waits for all ranks."""
    mine = {each.name: each for each in runtime.current().registries.together(group)}
    for each in mine.values():
        each.prepare()
    names: list[list[str]] = Operation(
        group, "names", "settle", (), lambda at: at.transport.allgather_object(list(mine))
    ).run()
    for name in sorted(set(mine).intersection(*names)):
        mine[name].settle()


def present(group: Group, name: str) -> float:
    """Return the share of the ranks that have not joined. Waits for all ranks."""
    return grouped(group, [np.ones(1)], Average, name).run()[0].item()


def largest(group: Group, number: int, name: str) -> int:
    """Return the largest of all ranks' numbers. Waits for all ranks."""
    return int(grouped(group, [np.array([number])], Max, name).run()[0].item())


class Nothing:
    """What a joined rank gives to `gathered`: no arrays. Picklable."""

    def __call__(self, at: Workplace) -> None:
        at.transport.allgather_object(Forms())


def gathered(group: Group, mine: Forms, name: str) -> list[Forms]:
    """Return every rank's dict, in rank order. Waits for all ranks."""

    def work(at: Workplace) -> list[Forms]:
        return list(at.transport.allgather_object(mine))

    return Operation(group, "names", name, (), work, stand_in=Nothing).run()
