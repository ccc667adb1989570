"""The names of operations in errors, warnings and the stall watch's table, as users know them.

One call of a user may take several operations, whose keys ("gradients 'optimizer.1 bucket 0'") mean nothing to the
user. So messages name, in this order: the call that the thread is in (`calling`), the operation's optimizer or tape, or
the function and name that the user gave. Ranks compare keys.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

COLLECTIVE = "It is collective: every rank must call it."
UNNAMED = "noname."
"""The names of operations without a name begin so; a number follows."""
GRADIENTS = "gradients "
"""The titles of operations within a backward begin so."""


class Here(threading.local):
    """Each thread's call, as the user writes it; empty if the call is a single operation."""

    call = ""


_here = Here()


@contextmanager
def calling(call: str) -> Iterator[None]:
    """Within this context, or in a function decorated with it, this thread's operations belong to `call`.

    If contexts are nested, the outermost one counts.
    """
    before = _here.call
    _here.call = before or call
    try:
        yield
    finally:
        _here.call = before


def current() -> str:
    """The user's call that this thread is in, or ""."""
    return _here.call


def title(kind: str, name: str, call: str = "", user: str = "") -> str:
    """An operation's name in messages.

    Args:
        kind: The kind of operation.
        name: The name that ranks match it by.
        call: The user's call that it belongs to.
        user: The optimizer or tape that it belongs to.
    """
    if call:
        return call
    if user:
        return f"{GRADIENTS}of {user}"
    if kind == "message":
        return letter(name)
    number = name.removeprefix(UNNAMED)
    return f"{kind} '{name}'" if number == name else f"{kind} (unnamed call {number})"


def letter(name: str) -> str:
    """A message's name in errors, from the name that `Post` gives it."""
    given, between, places = name.partition(" from rank ")
    number = given.removeprefix(UNNAMED)
    return f"message '{name}'" if number == given else f"message {number}{between}{places}"


def numbered(user: str, number: int) -> str:
    """The name of an optimizer or tape in messages. number: counted from 1 in the order of attachment."""
    return user if number <= 1 else f"{user} number {number}"
