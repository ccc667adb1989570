"""Objects to come back to later, kept by what keeps none of them alive for it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import call, is_not
from types import MethodType
from typing import Any, TypeVar, TypeVarTuple
from weakref import ref

ArgumentTs = TypeVarTuple("ArgumentTs")
R = TypeVar("R")
present = partial(is_not, None)


def weakly(method: Callable[[*ArgumentTs], R]) -> Callable[[*ArgumentTs], R | None]:
    """The same (a bound method), as long as its object lives; then it does nothing, and returns None."""
    assert isinstance(method, MethodType)
    reference, function = ref(method.__self__), method.__func__

    def call_it(*arguments: *ArgumentTs) -> R | None:
        alive = reference()
        return None if alive is None else function(alive, *arguments)

    return call_it


class Crowd:
    """Objects as long as they live, in the order in which they were added."""

    def __init__(self) -> None:
        self.members: dict[int, ref[Any]] = {}  # quicker to go through than a WeakValueDictionary, which guards itself
        self.many = 8

    def disperse(self) -> None:
        """Once they are many, collect those that only cycles of references keep, with all their memory: in a fifth of
        a second, hence now and then."""
        if len(self) >= self.many:
            gc.collect()
            self.many = 2 * len(self) + 8

    def append(self, member: Any) -> None:
        leave, number = self.members.pop, id(member)
        self.members.setdefault(number, ref(member, lambda _: leave(number, None)))

    def extend(self, members: Iterable[Any]) -> None:
        for member in members:
            self.append(member)

    def remove(self, member: Any) -> None:
        """Take one out, if it is there."""
        self.members.pop(id(member), None)

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Any]:
        return filter(present, map(call, list(self.members.values())))
