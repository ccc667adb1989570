"""A transport that counts the bytes that this rank sends in messages of arrays, and notes when."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hvdlite.arrays import Array
from hvdlite.gpu_streams import NOTHING_PENDING, Mark
from hvdlite.transports import Exchange, Maximum, T, Transport


class Counted:
    """Another transport's messages, counted. Barriers and agreements are not counted.

    Attributes:
        inner: The transport that sends.
        sent_bytes: The bytes of all arrays that were sent so far.
        first, last: When the first message since `restart` began, and the last one ended; 0.0 without messages.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.size, self.library = inner.rank, inner.size, inner.library
        self.tally = inner.tally
        self.sent_bytes = 0
        self.restart()

    def restart(self) -> None:
        """Forget when messages were sent."""
        self.first = self.last = 0.0

    def count(self, array: Array, send: Callable[[], object]) -> None:
        """Send an array, and count it."""
        self.sent_bytes += array.nbytes
        self.first = self.first or time.monotonic()
        send()
        self.last = time.monotonic()

    def exchange(self, send: Array, dest: int, receive: Array, source: int) -> None:
        self.count(send, lambda: self.inner.exchange(send, dest, receive, source))

    def prepared_exchange(self, send: Array, dest: int, receive: Array, source: int) -> Callable[[], None]:
        run = self.inner.prepared_exchange(send, dest, receive, source)
        return lambda: self.count(send, run)

    def start_exchange(
        self, send: Array, dest: int, receive: Array, source: int, after: Mark = NOTHING_PENDING
    ) -> Exchange:
        self.sent_bytes += send.nbytes
        self.first = self.first or time.monotonic()
        return Noted(self, self.inner.start_exchange(send, dest, receive, source, after))

    def send(self, array: Array, dest: int) -> None:
        self.count(array, lambda: self.inner.send(array, dest))

    def receive(self, array: Array, source: int) -> None:
        self.inner.receive(array, source)
        self.end()

    def end(self) -> None:
        """A message has ended."""
        self.last = time.monotonic()

    def barrier(self) -> None:
        self.inner.barrier()

    def maximum(self, count: int) -> Maximum:
        return self.inner.maximum(count)

    def share(self, flags: Sequence[Array]) -> Maximum | None:
        return self.inner.share(flags)

    def native_allreduce(self, array: Array, op: str) -> None:
        self.inner.native_allreduce(array, op)

    def allgather_object(self, value: T) -> list[T]:
        return self.inner.allgather_object(value)

    def split(self, color: int | None) -> Transport | None:
        return self.inner.split(color)

    def close(self) -> None:
        self.inner.close()


class Noted:
    """An exchange under way, whose end is noted."""

    def __init__(self, counted: Counted, inner: Exchange) -> None:
        self.counted, self.inner = counted, inner

    def test(self) -> bool:
        return self.inner.test()

    def wait(self) -> None:
        self.inner.wait()
        self.counted.end()
