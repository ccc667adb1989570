"""Lists of what is to be called later, that keep no object alive for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from weakref import WeakMethod

Call = Callable[[], None]


class Calls:
    """Functions, and methods of objects as long as these live, in the order in which they were added."""

    def __init__(self) -> None:
        self.references: list[Callable[[], Call | None]] = []

    def append(self, call: Call) -> None:
        self.references = [each for each in self.references if each() is not None]
        self.references.append(WeakMethod(call) if isinstance(call, MethodType) else lambda: call)

    def remove(self, call: Call) -> None:
        """Take one off, if it is there."""
        self.references = [each for each in self.references if each() != call]

    def __iter__(self) -> Iterator[Call]:
        return iter([call for each in self.references if (call := each()) is not None])
