"""Weak references: a weak bound method, and an ordered set that does not keep its members alive."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, TypeVarTuple
from weakref import WeakMethod, WeakValueDictionary

ArgumentTs = TypeVarTuple("ArgumentTs")
R = TypeVar("R")


def weakly(method: Callable[[*ArgumentTs], R]) -> Callable[[*ArgumentTs], R | None]:
    """A function that calls the bound method while its object lives, and afterwards returns None."""
    reference = WeakMethod(method)

    def call_it(*arguments: *ArgumentTs) -> R | None:
        alive = reference()
        return None if alive is None else alive(*arguments)

    return call_it


class Crowd:
    """A set of living objects, in the order in which they were added. Members need not be hashable."""

    def __init__(self) -> None:
        self.members: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.many = 8

    def disperse(self) -> None:
        """If there are many members, collect those that only cycles of references keep.

        A collection takes a fifth of a second, so the limit grows with the number that live.
        """
        if len(self) >= self.many:
            gc.collect()
            self.many = 2 * len(self) + 8

    def append(self, member: Any) -> None:
        """Add an object, unless it is a member."""
        self.members.setdefault(id(member), member)

    def extend(self, members: Iterable[Any]) -> None:
        """Add several objects in order."""
        for member in members:
            self.append(member)

    def remove(self, member: Any) -> None:
        """Remove an object, if it is a member."""
        self.members.pop(id(member), None)

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self.members.values()))
