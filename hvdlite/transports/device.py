"""Messages from and to GPU memory, over a transport that knows no streams.

    direct     for a CUDA-aware MPI, which gets device pointers once the lane's stream has computed the array
    staged     for other MPIs: pieces pass through page-locked host memory. Several buffers each way let three things
               overlap: the copy of piece k to the host, the message of piece k-1, and the copy of k-2 to the GPU

Host arrays go to the base transport unchanged. `native_allreduce` is NCCL's. The lane's stream is the current one
during all calls (`lanes.gpu_side.Side.working`). When a call returns, received data may be used on that stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import NoReturn

import numpy as np

from hvdlite.arrays import Array, as_bytes, is_host
from hvdlite.gpu_streams import NOTHING_PENDING, Event, Mark, finish, issued, recorded
from hvdlite.transports import Exchange, Maximum, T, Transport
from hvdlite.transports.nccl import Nccl

CHUNK = 4 << 20
"""Bytes of a staged piece: long enough for a fast copy over PCIe, short enough to overlap (MEASURED.md, "Details")."""


class DirectTransport:
    """A Transport that passes device arrays to `base` unchanged. It does not own `base`."""

    def __init__(self, base: Transport, xp: ModuleType) -> None:
        self.base, self.xp = base, xp
        self.rank, self.size, self.library = base.rank, base.size, base.library
        self.tally = base.tally
        self.nccl: Nccl | None = None

    def exchange(self, send: Array, dest: int, receive: Array, source: int) -> None:
        finish(send)  # MPI ignores streams: wait until `send` is computed and `receive` has been read
        self.base.exchange(as_bytes(send), dest, as_bytes(receive), source)  # not every dtype crosses by DLPack

    def send(self, array: Array, dest: int) -> None:
        finish(array)
        self.base.send(array, dest)

    def receive(self, array: Array, source: int) -> None:
        finish(array)
        self.base.receive(array, source)

    def barrier(self) -> None:
        """Wait for all ranks. Then they may read what this rank's GPU has written to shared memory. Collective."""
        self.xp.cuda.get_current_stream().synchronize()
        self.base.barrier()

    def maximum(self, count: int) -> Maximum:
        return self.base.maximum(count)

    def share(self, flags: Sequence[Array]) -> Maximum | None:
        return self.base.share(flags)

    def prepared_exchange(self, send: Array, dest: int, receive: Array, source: int) -> Callable[[], None]:
        return partial(self.exchange, send, dest, receive, source)

    def start_exchange(
        self, send: Array, dest: int, receive: Array, source: int, after: Mark = NOTHING_PENDING
    ) -> Exchange:
        after.wait()
        return self.base.start_exchange(send, dest, receive, source)

    def native_allreduce(self, array: Array, op: str) -> None:
        """All-reduce with NCCL, since some MPIs crash on device memory. The first call makes NCCL's communicator."""
        if self.nccl is None:
            self.nccl = Nccl(self.base, self.xp)
        self.nccl.allreduce(array, op)

    def allgather_object(self, value: T) -> list[T]:
        return self.base.allgather_object(value)

    def like_this(self, base: Transport) -> DirectTransport:
        """A transport of this kind over another base."""
        return DirectTransport(base, self.xp)

    def split(self, color: int | None) -> DirectTransport | None:
        part = self.base.split(color)
        return None if part is None else self.like_this(part)

    def close(self) -> None:
        """Close `base`, too. Only for transports made by `split`."""
        self.release()
        self.base.close()

    def release(self) -> None:
        """Release NCCL's communicator, and keep `base`. Collective."""
        if self.nccl is not None:
            self.nccl.close()


class StagedTransport(DirectTransport):
    """A Transport that sends host copies of device arrays over `base`. It does not own `base`."""

    def __init__(self, base: Transport, xp: ModuleType, staging: Staging | None = None) -> None:
        super().__init__(base, xp)
        self.staging = staging or Staging(xp)

    def like_this(self, base: Transport) -> StagedTransport:
        return StagedTransport(base, self.xp, self.staging)

    def exchange(self, send: Array, dest: int, receive: Array, source: int) -> None:
        if is_host(send):
            self.base.exchange(send, dest, receive, source)
        else:
            self.start_exchange(send, dest, receive, source, issued(send)).wait()

    def start_exchange(
        self, send: Array, dest: int, receive: Array, source: int, after: Mark = NOTHING_PENDING
    ) -> Exchange:
        if is_host(send):
            return self.base.start_exchange(send, dest, receive, source)
        return StagedExchange(self, chunks(send), dest, chunks(receive), source, after)

    def send(self, array: Array, dest: int) -> None:
        if is_host(array):
            self.base.send(array, dest)
        else:
            StagedExchange(self, chunks(array), dest, [], dest, issued(array)).wait()

    def receive(self, array: Array, source: int) -> None:
        if is_host(array):
            self.base.receive(array, source)
        else:
            StagedExchange(self, [], source, chunks(array), source, issued(array)).wait()


class StagedExchange:
    """An exchange in pieces: message k carries piece k out and piece k in.

    If one array has fewer pieces, the last messages go one way. The first piece is copied to the host at once. Each
    later piece is copied during the message before it.
    """

    def __init__(
        self,
        over: StagedTransport,
        outgoing: Sequence[Array],
        dest: int,
        incoming: Sequence[Array],
        source: int,
        after: Mark,
    ) -> None:
        self.base, self.staging = over.base, over.staging
        self.outgoing, self.dest, self.incoming, self.source = outgoing, dest, incoming, source
        self.fetched: deque[Fetched] = deque()
        self.staging.follow(after)
        self.fetch(0)

    def fetch(self, step: int) -> None:
        if step < len(self.outgoing):
            self.fetched.append(self.staging.fetch(self.outgoing[step]))

    def test(self) -> NoReturn:
        raise NotImplementedError("a staged exchange cannot be tested, since the host copies each piece: call wait()")

    def wait(self) -> None:
        for step in range(max(len(self.outgoing), len(self.incoming))):
            self.fetch(step + 1)
            leaving = self.fetched.popleft() if step < len(self.outgoing) else None
            arriving = self.staging.vacant(self.incoming[step]) if step < len(self.incoming) else None
            if leaving is not None and arriving is not None:
                self.base.exchange(leaving.bytes(), self.dest, arriving, self.source)
            elif leaving is not None:
                self.base.send(leaving.bytes(), self.dest)
            elif arriving is not None:
                self.base.receive(arriving, self.source)
            if leaving is not None:
                self.staging.free.append(leaving.buffer)
            if arriving is not None:
                self.staging.deliver(self.incoming[step])


def chunks(array: Array) -> list[Array]:
    """The array's bytes in pieces of CHUNK; none for an empty array."""
    flat = as_bytes(array)
    return [flat[start : start + CHUNK] for start in range(0, flat.size, CHUNK)]


@dataclass(frozen=True)
class Fetched:
    """A piece that is being copied to the host: `nbytes` of `buffer`, valid once the GPU has passed `copied`."""

    buffer: Array
    nbytes: int
    copied: Event

    def bytes(self) -> Array:
        """Wait for the copy, and return it."""
        self.copied.synchronize()
        copied: Array = self.buffer[: self.nbytes]
        return copied


class Staging:
    """Page-locked host buffers: two for arriving pieces, used in turn, and as many for leaving pieces as needed."""

    def __init__(self, xp: ModuleType) -> None:
        self.xp = xp
        self.free: list[Array] = []
        """Buffers of leaving pieces that have been sent."""
        self.into = [self.locked(), self.locked()]
        self.emptied: list[Event | None] = [None, None]
        """For each buffer of `into` an event after the copy of its last contents to the GPU."""
        self.turn = 0
        self.down = xp.cuda.Stream(non_blocking=True)
        """The stream for copies to the host. On the lane's stream they would wait for copies to the GPU."""

    def locked(self) -> Array:
        return np.frombuffer(self.xp.cuda.alloc_pinned_memory(CHUNK), np.uint8, CHUNK)

    def follow(self, after: Mark) -> None:
        """Make later fetches wait for this mark."""
        for event in after.events:
            self.xp.cuda.runtime.streamWaitEvent(self.down.ptr, event.ptr)

    def fetch(self, piece: Array) -> Fetched:
        """Start copying a piece to a free buffer."""
        runtime, buffer = self.xp.cuda.runtime, self.free.pop() if self.free else self.locked()
        runtime.memcpyAsync(buffer.ctypes.data, piece.data.ptr, piece.nbytes, runtime.memcpyDeviceToHost, self.down.ptr)
        return Fetched(buffer, piece.nbytes, recorded(self.xp, self.down.ptr))

    def vacant(self, piece: Array) -> Array:
        """The buffer for an arriving piece. Waits until the buffer's last contents are on the GPU."""
        self.turn = 1 - self.turn
        if (emptied := self.emptied[self.turn]) is not None:
            emptied.synchronize()
        room: Array = self.into[self.turn][: piece.nbytes]
        return room

    def deliver(self, piece: Array) -> None:
        """Start copying the last arrival to its piece, on the lane's stream."""
        runtime, lane = self.xp.cuda.runtime, int(self.xp.cuda.get_current_stream().ptr)
        runtime.memcpyAsync(
            piece.data.ptr, self.into[self.turn].ctypes.data, piece.nbytes, runtime.memcpyHostToDevice, lane
        )
        self.emptied[self.turn] = recorded(self.xp, lane)
