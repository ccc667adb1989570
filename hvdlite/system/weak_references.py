"""Weak references: a weak bound method, and an ordered set that does not keep its members alive."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, TypeVarTuple
from weakref import WeakMethod, WeakValueDictionary

ArgumentTs = TypeVarTuple("ArgumentTs")
R = TypeVar("R")


def weakly(method: Callable[[*ArgumentTs], R]) -> Callable[[*ArgumentTs], R | None]:
    """A function that calls the bound method while its object lives. Afterwards it returns None."""
    reference = WeakMethod(method)

    def call_it(*arguments: *ArgumentTs) -> R | None:
        alive = reference()
        return None if alive is None else alive(*arguments)

    return call_it


class Crowd:
    """A set of weak references to objects, in the order of their addition. Members need not be hashable."""

    def __init__(self) -> None:
        self.members: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.many = 8

    def disperse(self) -> None:
        """If there are many members, run the garbage collector, which frees those that only reference cycles keep.

        A collection takes about 0.2 s, so the limit grows with the number of living members.
        """
        if len(self) >= self.many:
            gc.collect()
            self.many = 2 * len(self) + 8

    def append(self, member: object) -> None:
        """Add an object, unless it is a member."""
        self.members.setdefault(id(member), member)

    def extend(self, members: Iterable[object]) -> None:
        """Add several objects in order."""
        for member in members:
            self.append(member)

    def remove(self, member: object) -> None:
        """Remove an object, if it is a member."""
        self.members.pop(id(member), None)

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self.members.values()))
