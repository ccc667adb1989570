"""How ranks reach each other. `Transport` is the seam: algorithms and lanes know it and nothing of MPI.

A transport is one private communicator: messages on one never meet messages on another. `mpi` is the real one, and
`threads` has p ranks as p threads of one process (unit tests, and p = 1 for a job without a launcher). These two are
`Communicator`s, from which a job's process sets are made. Others stand on one of them: `pair` for two of its ranks,
`device` for arrays on GPUs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hvdlite.arrays import Array
from hvdlite.gpu_streams import NOTHING_PENDING, Mark

LOOKS = 4
"""Who sleeps while waiting for MPI looks so often when it wakes: an MPI takes in one part of a message per call. With
one look per nap of at most 1 ms, an agreement over TCP was known 3 ms late."""


MAIN = threading.main_thread().ident


def in_main() -> bool:
    """Whether this is the thread in which Python runs signals' handlers: never while it is inside MPI. So there MPI is
    asked again and again instead, and Ctrl-C is noticed where another rank has left."""
    return threading.get_ident() == MAIN


def ask(test: Callable[[], bool]) -> None:
    """Until that is true, politely."""
    for _ in range(LOOKS):
        if test():
            return
    while not test():
        os.sched_yield()


class Pending(Protocol):
    """A non-blocking agreement under way."""

    def test(self) -> bool:
        """True once complete; never blocks, and makes progress."""
        ...


class Maximum(Pending, Protocol):
    """An element-wise MAX all-reduce of some int64s, again and again. It is a barrier, too."""

    values: Sequence[int]
    """Once complete, the largest of all ranks."""

    def start(self, values: tuple[int, ...]) -> bool:
        """Begin one; the last must be complete. Whether this one is already."""
        ...


class Exchange(Pending, Protocol):
    """A message out and one in, both under way."""

    def wait(self) -> None:
        """Block until both are done; those of one pair of ranks in the order in which they were started."""
        ...


class Mail(Protocol):
    """Small letters (any picklable value) between ranks that are not expecting any: nobody waits in either call."""

    def post(self, letter: Any, dest: int) -> None:
        """Send a letter; returns at once, also where dest never reads it."""
        ...

    def fetch(self) -> tuple[int, Any] | None:
        """A letter that has come, and its sender; None where there is none."""
        ...

    def close(self) -> None:
        """Read and drop what is still under way. Collective; waits for all."""
        ...


class Transport(Protocol):
    """Point-to-point bytes and a few agreements among `size` ranks. Arrays are contiguous; no call copies them."""

    rank: int
    size: int
    library: str
    """The MPI's name and version; '' without MPI."""

    def exchange(self, send: Array, dest: int, receive: Array, source: int) -> None:
        """Send one array and receive another at the same time; blocks until both are done."""
        ...

    def prepared_exchange(self, send: Array, dest: int, receive: Array, source: int) -> Callable[[], None]:
        """`exchange` of these very arrays, to be called many times. Sends nothing yet."""
        ...

    def start_exchange(
        self, send: Array, dest: int, receive: Array, source: int, after: Mark = NOTHING_PENDING
    ) -> Exchange:
        """Begin to send one array and to receive another. after: once passed, the one is computed and what the other
        held is read; what was issued later on the same stream is not waited for."""
        ...

    def send(self, array: Array, dest: int) -> None: ...

    def receive(self, array: Array, source: int) -> None: ...

    def barrier(self) -> None: ...

    def maximum(self, count: int) -> Maximum:
        """What agrees on so many int64s. Sends nothing yet."""
        ...

    def share(self, flags: Sequence[Array]) -> Maximum | None:
        """Agree in memory from now on, in the barrier, too: the Maximum that does, or None where messages go through
        memory anyway. flags: FLAG_BYTES zeros of each rank, in rank order, which all share. Collective."""
        ...

    def native_allreduce(self, array: Array, op: str) -> None:
        """The library's own all-reduce, in place, of what `choose` gives it."""
        ...

    def allgather_object(self, value: Any) -> list[Any]:
        """Every rank's (small, pickled) value, in rank order."""
        ...

    def split(self, color: int | None) -> Transport | None:
        """A transport of the ranks with this color, in their order; None for color None. Collective."""
        ...

    def close(self) -> None: ...


class Communicator(Transport, Protocol):
    """A transport that others are made from."""

    def mail(self) -> Mail:
        """Letters among the same ranks, apart from this transport's messages. Collective."""
        ...

    def duplicate(self) -> Communicator:
        """A private copy of this transport. Collective."""
        ...

    def split(self, color: int | None) -> Communicator | None: ...

    def aside(self) -> Communicator:
        """The same ranks, with messages that never meet this transport's: point-to-point calls only. Not collective,
        and of no use once this transport is closed."""
        ...

    def called_by(self, peer: int) -> bool:
        """Whether a message from that rank waits to be received."""
        ...

    def ranks_of(self, comm: Any) -> list[int]:
        """The ranks that the members of an mpi4py communicator have here. ValueError where some have none."""
        ...
