"""How an exchange ends: with the last of its variables."""

from __future__ import annotations

from weakref import finalize

from hvdlite.gradients.exchange import Exchange
from hvdlite.system.weak_references import Crowd


class Object:
    """May be referred to weakly."""


def test_memory_goes_with_the_last_list_of_variables() -> None:
    """Each is waited for once, however many lists there are and in whatever order they go."""
    exchange, variables = Exchange.__new__(Exchange), [Object() for _ in range(4)]
    exchange.gpu, exchange.released, exchange.lists = None, False, Crowd()
    exchange.alike = exchange.reducer = Object()  # type: ignore[assignment]
    exchange.lists.extend(variables)
    before = len(finalize._registry)  # type: ignore[attr-defined]
    exchange.end()
    while variables:
        assert len(finalize._registry) == before + len(variables) and not exchange.released  # type: ignore[attr-defined]
        variables.pop()
    assert len(finalize._registry) == before and exchange.released and not hasattr(exchange, "reducer")  # type: ignore[attr-defined]
