"""Transports: how bytes travel between ranks. Algorithms and lanes use the Protocol `Transport`, and never MPI itself.

A transport is a private communicator: one transport never receives another's messages. `mpi` sends over MPI. In
`threads` ranks are threads of one process, for unit tests and for a job of one rank. These two are `Communicator`s:
process sets are made from them. Other transports use one of these: `pair` for two of its ranks, `device` for arrays on
GPUs. `sent_bytes` counts what a rank sends. Not here: which rank sends what (`algorithms/`), and in which order
operations run (`lanes/`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hvdlite.arrays import Array
from hvdlite.gpu_streams import NOTHING_PENDING, Mark
from hvdlite.transports.sent_bytes import Tally

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

LOOKS = 4
"""How often a thread that waits for MPI tests its request after each nap. An MPI receives one part of a message per
call, so one test per nap is too few (MEASURED.md, "Details").
"""
MAIN = threading.main_thread().ident


def in_main() -> bool:
    """Whether this is the thread in which Python runs signal handlers.

    Python runs no handler while that thread is inside MPI. So the main thread polls MPI and does not block: Ctrl-C
    works even if another rank has left.
    """
    return threading.get_ident() == MAIN


def ask(test: Callable[[], bool]) -> None:
    """Poll until `test()` is true. Between polls other processes may run."""
    for _ in range(LOOKS):
        if test():
            return
    while not test():
        os.sched_yield()


class Pending(Protocol):
    """A non-blocking agreement that has begun."""

    def test(self) -> bool:
        """Whether the agreement is complete. Never blocks, and makes progress."""
        ...


class Maximum(Pending, Protocol):
    """An element-wise MAX all-reduce of a few int64s, for many calls. It is also a barrier.

    Attributes:
        values: Once complete, each element's maximum over all ranks.
    """

    values: Sequence[int]

    def start(self, values: tuple[int, ...]) -> bool:
        """Begin an all-reduce of these values, once the previous one is complete. Returns what `test` would."""
        ...


class Message(Pending, Protocol):
    """A message with a tag, under way.

    Attributes:
        source: Once it is received, the rank that has sent it.
        nbytes: Once it is received, its length in bytes. If it is longer than the array: one more than the array's.
    """

    @property
    def source(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

    def cancel(self) -> None:
        """Give up waiting for a message that nobody has sent."""
        ...


class Exchange(Pending, Protocol):
    """An outgoing and an incoming message, both under way."""

    def wait(self) -> None:
        """Block until both are done. A pair of ranks must wait for its exchanges in the order of their starts."""
        ...


class Mail(Protocol):
    """Letters (small picklable values) to ranks that do not expect any. `post` and `fetch` wait for no other rank."""

    def post(self, letter: object, dest: int) -> None:
        """Send a letter and return at once, even if `dest` never reads it."""
        ...

    def fetch(self) -> tuple[int, Any] | None:
        """The sender of a letter that has arrived, and the letter; None if there is none."""
        ...

    def close(self) -> None:
        """Read and drop the letters that are under way. Collective; waits for all ranks."""
        ...


class Transport(Protocol):
    """Point-to-point messages and a few agreements among `size` ranks. All arrays are contiguous.

    Attributes:
        rank: This rank's number.
        size: The number of ranks.
        library: The MPI's name and version; "" without MPI.
        tally: Counts the bytes that this rank sends. Each message is counted where it is sent.
    """

    rank: int
    size: int
    library: str
    tally: Tally

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
            after: Wait for this mark first. After the mark `send` is computed, and `receive` may be overwritten.
        """
        ...

    def send(self, array: Array, dest: int) -> None:
        """Send an array. Blocks until it may be overwritten."""
        ...

    def receive(self, array: Array, source: int) -> None:
        """Fill an array, as long as the one sent. Blocks until it has arrived."""
        ...

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        ...

    def maximum(self, count: int) -> Maximum:
        """An agreement on `count` int64s. Sends nothing yet."""
        ...

    def share(self, flags: Sequence[Array]) -> Maximum | None:
        """Use shared memory for the barrier, and for the Maximum that this returns. Collective.

        Args:
            flags: For each rank FLAG_BYTES zeros, which all ranks share.

        Returns:
            A Maximum of five values; None if messages are as fast.
        """
        ...

    def native_allreduce(self, array: Array, op: str) -> None:
        """The library's own all-reduce, in place, of a dtype that `choose` allows. op: "sum", "min", ... Collective."""
        ...

    def allgather_object(self, value: T) -> list[T]:
        """Every rank's value, small and picklable, in rank order. Collective."""
        ...

    def split(self, color: int | None) -> Transport | None:
        """A transport of the ranks with this color, in their order; None for color None. Collective."""
        ...

    def close(self) -> None:
        """Release the transport. No message may be under way. Collective."""
        ...


class Communicator(Transport, Protocol):
    """A transport from which others are made."""

    def mail(self) -> Mail:
        """A Mail among the same ranks, separate from this transport's messages. Collective."""
        ...

    def duplicate(self) -> Communicator:
        """A private copy of this transport. Collective."""
        ...

    def split(self, color: int | None) -> Communicator | None: ...

    def some(self, ranks: Sequence[int], tag: int) -> Communicator:
        """A transport of these ranks of the job, in this order. Collective over these ranks alone.

        Args:
            ranks: Ranks of this transport; this rank is one of them.
            tag: Equal on these ranks. It tells apart calls of the same ranks at the same time.
        """
        ...

    def aside(self) -> Communicator:
        """A transport of the same ranks for point-to-point messages only, separate from this transport's. Not
        collective.

        It ends with this transport. Its tally is not the job's, since it also carries agreements of pairs: its user
        counts the other messages.
        """
        ...

    def start_message(self, array: Array, dest: int, tag: int) -> Message:
        """Begin to send an array that must not change before the message is complete. tag: from 0 on."""
        ...

    def await_message(self, array: Array, source: int | None, tag: int) -> Message:
        """Begin to receive an array of at most this length, with this tag, from a rank, or from any (None)."""
        ...

    def called_by(self, peer: int) -> bool:
        """Whether a message from rank `peer` waits to be received."""
        ...

    def probe(self, tag: int) -> tuple[int, int] | None:
        """The sender and the length in bytes of a message with this tag that waits to be received; None if none does.

        If one thread alone receives such messages, its next `await_message` from that sender gets this message.
        """
        ...

    def ranks_of(self, comm: MPI.Comm) -> list[int]:
        """The ranks that the members of an mpi4py communicator have here.

        Raises:
            ValueError: Some members have no rank here.
        """
        ...
