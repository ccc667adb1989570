"""How ranks reach each other. Algorithms and lanes know the Protocol `Transport`, and nothing of MPI.

A transport is a private communicator: its messages never meet those of another. `mpi` is the real one. In `threads`
ranks are threads of one process, for unit tests and for a job of one rank. These two are `Communicator`s: process sets
are made from them. Others stand on one of them: `pair` for two of its ranks, `device` for arrays on GPUs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hvdlite.arrays import Array
from hvdlite.gpu_streams import NOTHING_PENDING, Mark

LOOKS = 4
"""How often a thread looks when it wakes from a nap while it waits for MPI. An MPI receives one part of a message per
call, so one look per nap is too few (MEASURED.md, "Details").
"""


MAIN = threading.main_thread().ident


def in_main() -> bool:
    """Whether this is the thread in which Python runs signal handlers.

    Python runs no handler while that thread is inside MPI. So the main thread polls MPI instead of blocking, and Ctrl-C
    works even where another rank has left.
    """
    return threading.get_ident() == MAIN


def ask(test: Callable[[], bool]) -> None:
    """Poll until `test()` is true, and let other processes run in between."""
    for _ in range(LOOKS):
        if test():
            return
    while not test():
        os.sched_yield()


class Pending(Protocol):
    """A non-blocking agreement that has begun."""

    def test(self) -> bool:
        """True once complete. Never blocks, and makes progress."""
        ...


class Maximum(Pending, Protocol):
    """An element-wise MAX all-reduce of some int64s, used again and again. It is a barrier, too."""

    values: Sequence[int]
    """Once complete, the largest of all ranks."""

    def start(self, values: tuple[int, ...]) -> bool:
        """Begin one; the previous one must be complete. Returns whether this one is complete already."""
        ...


class Exchange(Pending, Protocol):
    """One message out and one in, both under way."""

    def wait(self) -> None:
        """Block until both are done. Exchanges of one pair of ranks are waited for in the order in which they were
        started.
        """
        ...


class Mail(Protocol):
    """Small letters (any picklable value) to ranks that do not expect any. No call waits for the other rank."""

    def post(self, letter: Any, dest: int) -> None:
        """Send a letter and return at once, even if `dest` never reads it."""
        ...

    def fetch(self) -> tuple[int, Any] | None:
        """A letter that has arrived, with its sender; None if there is none."""
        ...

    def close(self) -> None:
        """Read and drop the letters that are under way. Collective; waits for all ranks."""
        ...


class Transport(Protocol):
    """Point-to-point messages and a few agreements among `size` ranks. Arrays are contiguous, and no call copies them.

    Attributes:
        rank: This rank's number.
        size: The number of ranks.
        library: The MPI's name and version; "" without MPI.
    """

    rank: int
    size: int
    library: str
    """The MPI's name and version; '' without MPI."""

    def exchange(self, send: Array, dest: int, receive: Array, source: int) -> None:
        """Send one array and receive another at the same time. Blocks until both are done."""
        ...

    def prepared_exchange(self, send: Array, dest: int, receive: Array, source: int) -> Callable[[], None]:
        """A function that does `exchange` with these arrays, for many calls. Sends nothing yet."""
        ...

    def start_exchange(
        self, send: Array, dest: int, receive: Array, source: int, after: Mark = NOTHING_PENDING
    ) -> Exchange:
        """Begin to send one array and to receive another.

        Args:
            send: The array to send.
            dest: The rank that gets it.
            receive: The array to fill.
            source: The rank that sends it.
            after: Wait for this mark first: then `send` is computed and the old contents of `receive` are read. Later
                work on the same stream is not waited for.
        """
        ...

    def send(self, array: Array, dest: int) -> None: ...

    def receive(self, array: Array, source: int) -> None: ...

    def barrier(self) -> None: ...

    def maximum(self, count: int) -> Maximum:
        """An agreement on `count` int64s. Sends nothing yet."""
        ...

    def share(self, flags: Sequence[Array]) -> Maximum | None:
        """Agree in memory from now on, in the barrier, too. Collective.

        Returns the Maximum that does so; None if messages go through memory anyway. flags: for each rank FLAG_BYTES
        zeros, which all ranks share.
        """
        ...

    def native_allreduce(self, array: Array, op: str) -> None:
        """The library's own all-reduce, in place, for arrays that `choose` gives it."""
        ...

    def allgather_object(self, value: Any) -> list[Any]:
        """Every rank's (small, pickled) value, in rank order."""
        ...

    def split(self, color: int | None) -> Transport | None:
        """A transport of the ranks with this color, in their order; None for color None. Collective."""
        ...

    def close(self) -> None: ...


class Communicator(Transport, Protocol):
    """A transport from which others are made."""

    def mail(self) -> Mail:
        """Letters among the same ranks, separate from this transport's messages. Collective."""
        ...

    def duplicate(self) -> Communicator:
        """A private copy of this transport. Collective."""
        ...

    def split(self, color: int | None) -> Communicator | None: ...

    def aside(self) -> Communicator:
        """The same ranks, for point-to-point messages that never meet this transport's. Not collective. It ends with
        this transport.
        """
        ...

    def called_by(self, peer: int) -> bool:
        """Whether a message from that rank waits to be received."""
        ...

    def ranks_of(self, comm: Any) -> list[int]:
        """The ranks that the members of an mpi4py communicator have here.

        Raises:
            ValueError: Some members have no rank here.
        """
        ...
