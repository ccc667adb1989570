"""The names of operations in errors, warnings and the stall watch's table, as users know them.

One call of a user may take several operations. Their keys, by which ranks match them, mean nothing to the user
("gradients 'optimizer.1 bucket 0'"). So a message names the first of these that exists: the user's call that the thread
is in (`calling`), the operation's optimizer or tape, the function and the name that the user gave.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

COLLECTIVE = "It is collective: every rank must call it."
UNNAMED = "noname."
"""The begin of the names of operations that the user gave no name. A number follows."""
GRADIENTS = "gradients "
"""The begin of the titles of operations within a backward."""


class Here(threading.local):
    """The user's call that each thread is in.

    Attributes:
        call: The call as the user writes it; "" outside calls, and in calls of a single operation.
    """

    call = ""

    @contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """Within this context, or in a function decorated with it, this thread's operations belong to `call`.

        If contexts are nested, the outermost call counts.
        """
        before = self.call
        self.call = before or call
        try:
            yield
        finally:
            self.call = before


_here = Here()
calling = _here.calling


def current() -> str:
    """The user's call that this thread is in, or ""."""
    return _here.call


def title(kind: str, name: str, call: str = "", user: str = "") -> str:
    """An operation's name in messages.

    Args:
        kind: The kind of operation.
        name: The name by which ranks match the operation.
        call: The user's call that the operation belongs to, or "".
        user: The optimizer or tape that the operation belongs to, or "".
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
    """The name of an optimizer or tape in messages. number: its place in the order of attachment, from 1."""
    return user if number <= 1 else f"{user} number {number}"
