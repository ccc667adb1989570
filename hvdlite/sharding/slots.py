"""Slots: variables of an optimizer's state that are one rank's part of a whole value.

An adapter marks each such variable with a `Slot`. Checkpoints ask a slot for the whole value, and for this rank's part
of one. Calls that would take a part for the whole refuse it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from hvdlite.arrays import Array

ATTRIBUTE = "_hvdlite_slot"
"""The attribute of a variable that has its slot."""


class Slot(Protocol):
    """One rank's part of a value."""

    @property
    def owner(self) -> str:
        """The optimizer in messages."""
        ...

    def whole(self) -> Array | None:
        """The whole value on rank 0; None on other ranks. Collective among the ranks that share the state."""
        ...

    def part(self, whole: Array) -> Array:
        """This rank's part of a whole value, in the variable's shape. Raises ValueError if there is none."""
        ...


def slot_of(variable: object) -> Slot | None:
    """Return a variable's slot; None if the variable is whole."""
    return getattr(variable, "__dict__", {}).get(ATTRIBUTE)


def first_slot(variables: Iterable[object]) -> Slot | None:
    """Return the slot of the first variable that has one; None if all variables are whole."""
    return next((slot for variable in variables if (slot := slot_of(variable))), None)


def refuse_slots(call: str, variables: Iterable[object]) -> None:
    """Raise ValueError if one of the variables is a rank's part of a whole value.

    Args:
        call: The user's call.
        variables: Its variables.
    """
    if slot := first_slot(variables):
        raise ValueError(
            f"{call}: each rank has another part of the state of {slot.owner}. Use hvd.save and hvd.load [HVD411]"
        )
