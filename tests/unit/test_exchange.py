"""An exchange ends when the last of its variables is gone."""

from __future__ import annotations

from weakref import finalize

from hvdlite.gradients.compression import NoneCompressor
from hvdlite.gradients.exchange import Contents, Exchange
from hvdlite.gradients.settings import Settings
from hvdlite.gradients.terms import Terms
from hvdlite.gradients.watched import WatchedVariables


class Object:
    """Can be referred to weakly."""


def test_memory_goes_with_the_last_list_of_variables() -> None:
    """The lists may go in any order, and each has one finalizer."""
    exchange, variables = Exchange.__new__(Exchange), [Object() for _ in range(4)]
    exchange.contents = Contents(0, (), Settings(Terms(), NoneCompressor), None)
    exchange.watched = WatchedVariables((), exchange.contents.settings)
    exchange.watched.alike = exchange.reducer = Object()  # type: ignore[assignment]
    exchange.watched.lists.extend(variables)
    before = len(finalize._registry)  # type: ignore[attr-defined]
    exchange.end()
    while variables:
        assert len(finalize._registry) == before + len(variables) and exchange.reducer  # type: ignore[attr-defined]
        variables.pop()
    assert len(finalize._registry) == before and exchange.reducer is None  # type: ignore[attr-defined]
