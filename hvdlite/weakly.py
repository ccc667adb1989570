"""Objects to come back to later, kept by what keeps none of them alive for it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any, TypeVarTuple
from weakref import WeakValueDictionary, ref

ArgumentTs = TypeVarTuple("ArgumentTs")


def weakly(method: Callable[[*ArgumentTs], None]) -> Callable[[*ArgumentTs], None]:
    """The same (a bound method), as long as its object lives; then it does nothing."""
    assert isinstance(method, MethodType)
    reference, function = ref(method.__self__), method.__func__

    def call(*arguments: *ArgumentTs) -> None:
        alive = reference()
        if alive is not None:
            function(alive, *arguments)

    return call


class Crowd:
    """Objects as long as they live, in the order in which they were added."""

    def __init__(self) -> None:
        self.members: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.many = 8

    def disperse(self) -> None:
        """Once they are many, collect those that only cycles of references keep, with all their memory: in a fifth of
        a second, hence now and then."""
        if len(self) >= self.many:
            gc.collect()
            self.many = 2 * len(self) + 8

    def append(self, member: Any) -> None:
        self.members[id(member)] = member

    def extend(self, members: Iterable[Any]) -> None:
        for member in members:
            self.append(member)

    def remove(self, member: Any) -> None:
        """Take one out, if it is there."""
        self.members.pop(id(member), None)

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Any]:
        # Not values(), whose guard against changes takes 30 us where the caches are cold.
        return iter([member for each in self.members.valuerefs() if (member := each()) is not None])
