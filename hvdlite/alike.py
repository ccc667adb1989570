"""What must be the same on all ranks, and what is not.

Averaging gradients keeps models together that begin together. If they do not, or if learning rates differ, each rank
trains a model of its own with gradients of all the others', and no operation fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdlite.engine import Lane
from hvdlite.matching import ranks, sides
from hvdlite.requests import Request, Signature

Sides = list[tuple[Any, list[int]]]
MOST = 3  # sides that a message names


def apart(everyone: Sequence[Mapping[str, Any]], members: Sequence[int]) -> dict[str, Sides]:
    """By name what is not the same everywhere: the values, and the ranks that have each; None where a rank has none.

    everyone: each rank's values by name. members: the ranks, in the same order.
    """
    names = dict.fromkeys(name for theirs in everyone for name in theirs)
    found = {name: sides([theirs.get(name) for theirs in everyone], members) for name in names}
    return {name: parties for name, parties in found.items() if len(parties) > 1}


def compared(lane: Lane, name: str, mine: Mapping[str, Any]) -> dict[str, Sides]:
    """`apart` over the lane's ranks, the same result on all. name: of what is compared. Collective; waits for all.

    While ranks have joined nothing is compared: they train no more.
    """

    def work(lane: Lane) -> dict[str, Sides]:
        return {} if lane.without_all else apart(lane.transport.allgather_object(dict(mine)), lane.members)

    found: dict[str, Sides] = lane.run(Request(Signature("weights", name), work, stand_in=lambda: nothing))
    return found


def nothing(lane: Lane) -> None:
    """What a rank that has joined contributes."""


def named(found: Mapping[str, Sides]) -> str:
    """'fc.weight and 3 more differ between rank 1 and ranks 0, 2'."""
    (first, parties), others = next(iter(found.items())), len(found) - 1
    what = f"{first} and {others} more differ" if others else f"{first} differs"
    return f"{what} between {' and '.join(ranks(who) for _, who in parties[:MOST])}"


def valued(found: Mapping[str, Sides]) -> str:
    """'lr is 0.1 on rank 1, 0.01 on ranks 0, 2'."""
    each = {name: [f"{value} on {ranks(who)}" for value, who in parties[:MOST]] for name, parties in found.items()}
    return "; ".join(f"{name} is {', '.join(values)}" for name, values in each.items())
