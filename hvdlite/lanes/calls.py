"""What users call the operations that ranks match by keys: the names in errors, warnings and the stall watch's table.

One call of a user's may take several operations, and their keys ("gradients 'optimizer.1 bucket 0'") mean nothing to
him. So messages name, in this order: the call that this thread is in (`calling`), the optimizer or tape that an
operation belongs to, or the function and name that the user gave. Keys stay what ranks compare.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

COLLECTIVE = "It is collective: every rank must call it."
UNNAMED = "noname."
"""Names of operations without one begin so; a number follows."""
GRADIENTS = "gradients "
"""Titles of what is part of a backward begin so."""


class Here(threading.local):
    """call: what the user called in this thread, as he writes it; empty where that is one operation alone."""

    call = ""


_here = Here()


@contextmanager
def calling(call: str) -> Iterator[None]:
    """Inside, and in functions so decorated, operations of this thread are parts of this call; the outermost counts."""
    before = _here.call
    _here.call = before or call
    try:
        yield
    finally:
        _here.call = before


def current() -> str:
    """The user's call that this thread is in; empty where there is none."""
    return _here.call


def title(kind: str, name: str, call: str = "", user: str = "") -> str:
    """An operation's name in messages. call: the user's, of which the operation is a part. user: the optimizer or tape
    that the operation belongs to."""
    if call:
        return call
    if user:
        return f"{GRADIENTS}of {user}"
    if kind == "message":
        return letter(name)
    number = name.removeprefix(UNNAMED)
    return f"{kind} '{name}'" if number == name else f"{kind} (unnamed call {number})"


def letter(name: str) -> str:
    """The same for a message, from the name that `Post` gives it."""
    given, between, places = name.partition(" from rank ")
    number = given.removeprefix(UNNAMED)
    return f"message '{name}'" if number == given else f"message {number}{between}{places}"


def numbered(user: str, number: int) -> str:
    """An optimizer or tape in messages. number: of those that were attached, from 1."""
    return user if number <= 1 else f"{user} number {number}"
