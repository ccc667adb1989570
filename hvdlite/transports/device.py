"""Messages from and to GPU memory, over a transport that knows nothing of streams.

    direct     the MPI is CUDA-aware: it is given device pointers once the lane's stream has computed what is sent
    staged     it is not: pieces pass through page-locked host memory, two buffers each way, so that the copy of one
               piece from the GPU, the message of the one before and the copy of the one before that to the GPU overlap

Both leave host arrays to the transport below. Everything here runs on a lane's thread with the lane's stream current
(`gpu.Side.working`); received data may be used on that stream when a call returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from hvdlite.arrays import Array, as_bytes, finish, is_host, recorded
from hvdlite.transports import Mail, Pending, Transport
from hvdlite.transports.nccl import Nccl

CHUNK = 4 << 20
"""Bytes of a staged piece: long enough for a copy over PCIe to be fast, short enough to overlap. Not measured."""


class DirectTransport:
    """A Transport that hands device arrays to `base`, which it does not own, as they are."""

    def __init__(self, base: Transport, xp: ModuleType) -> None:
        self.base, self.xp = base, xp
        self.rank, self.size, self.library = base.rank, base.size, base.library
        self.nccl: Nccl | None = None

    def exchange(self, send: Array, dest: int, receive: Array, source: int) -> None:
        finish(send)  # MPI ignores streams: what is sent must be computed, and what is overwritten be read
        self.base.exchange(send, dest, receive, source)

    def send(self, array: Array, dest: int) -> None:
        finish(array)
        self.base.send(array, dest)

    def receive(self, array: Array, source: int) -> None:
        finish(array)
        self.base.receive(array, source)

    def barrier(self) -> None:
        """A peer that passes may read what this rank's GPU has written, in memory that they share."""
        self.xp.cuda.get_current_stream().synchronize()
        self.base.barrier()

    def start_max(self, values: Array) -> Pending:
        return self.base.start_max(values)

    def start_exchange(self, send: Array, receive: Array, peer: int) -> Pending:
        return self.base.start_exchange(send, receive, peer)

    def native_allreduce(self, array: Array, op: str) -> None:
        """NCCL's: reductions of device memory by MPI crash in some MPIs. Collective at the first call, too."""
        if self.nccl is None:
            self.nccl = Nccl(self.base, self.xp)
        self.nccl.allreduce(array, op)

    def allgather_object(self, value: Any) -> list[Any]:
        return self.base.allgather_object(value)

    def like_this(self, base: Transport) -> DirectTransport:
        """This kind of transport over another one."""
        return DirectTransport(base, self.xp)

    def duplicate(self) -> DirectTransport:
        return self.like_this(self.base.duplicate())

    def split(self, color: int | None) -> DirectTransport | None:
        part = self.base.split(color)
        return None if part is None else self.like_this(part)

    def subset(self, ranks: Sequence[int]) -> DirectTransport | None:
        part = self.base.subset(ranks)
        return None if part is None else self.like_this(part)

    def mail(self) -> Mail:
        return self.base.mail()

    def aside(self) -> DirectTransport:
        return self.like_this(self.base.aside())

    def called_by(self, peer: int) -> bool:
        return self.base.called_by(peer)

    def ranks_of(self, comm: Any) -> list[int]:
        return self.base.ranks_of(comm)

    def close(self) -> None:
        """Closes `base`: for the transports made by duplicate, split and subset."""
        self.release()
        self.base.close()

    def release(self) -> None:
        """Let go of what was made over `base`. Collective."""
        if self.nccl is not None:
            self.nccl.close()


class StagedTransport(DirectTransport):
    """A Transport that sends host copies of device arrays over `base`, which it does not own."""

    def __init__(self, base: Transport, xp: ModuleType, staging: Staging | None = None) -> None:
        super().__init__(base, xp)
        self.staging = staging or Staging(xp)

    def like_this(self, base: Transport) -> StagedTransport:
        return StagedTransport(base, self.xp, self.staging)

    def exchange(self, send: Array, dest: int, receive: Array, source: int) -> None:
        if is_host(send):
            self.base.exchange(send, dest, receive, source)
        else:
            self.move(chunks(send), dest, chunks(receive), source)

    def send(self, array: Array, dest: int) -> None:
        if is_host(array):
            self.base.send(array, dest)
        else:
            self.move(chunks(array), dest, [], dest)

    def receive(self, array: Array, source: int) -> None:
        if is_host(array):
            self.base.receive(array, source)
        else:
            self.move([], source, chunks(array), source)

    def move(self, outgoing: Sequence[Array], dest: int, incoming: Sequence[Array], source: int) -> None:
        """Message k carries chunk k of both; where one side has fewer chunks, the rest go one way."""
        staging = self.staging
        staging.follow_lane()
        staging.fetch(outgoing, 0)
        for step in range(max(len(outgoing), len(incoming))):
            staging.fetch(outgoing, step + 1)  # on its way while this step's message is
            leaving = staging.fetched(outgoing, step)
            arriving = staging.vacant(incoming, step)
            if leaving is not None and arriving is not None:
                self.base.exchange(leaving, dest, arriving, source)
            elif leaving is not None:
                self.base.send(leaving, dest)
            elif arriving is not None:
                self.base.receive(arriving, source)
            staging.deliver(incoming, step)


def chunks(array: Array) -> list[Array]:
    """The array's bytes, CHUNK at a time; none for an empty array."""
    flat = as_bytes(array)
    return [flat[start : start + CHUNK] for start in range(0, flat.size, CHUNK)]


class Staging:
    """Two page-locked host buffers each way, and the events that say when each may be used again."""

    def __init__(self, xp: ModuleType) -> None:
        self.xp = xp
        self.out, self.into = (
            [np.frombuffer(xp.cuda.alloc_pinned_memory(CHUNK), np.uint8, CHUNK) for _ in range(2)] for _ in range(2)
        )
        self.down = xp.cuda.Stream(non_blocking=True)
        """For copies to the host: on the lane's stream they would wait for those to the GPU."""
        self.filled: list[Any] = [None, None]
        self.emptied: list[Any] = [None, None]

    def lane(self) -> int:
        return int(self.xp.cuda.get_current_stream().ptr)

    def follow_lane(self) -> None:
        """What is fetched from now on is what the lane's stream has computed."""
        computed = recorded(self.xp, self.lane())
        self.xp.cuda.runtime.streamWaitEvent(self.down.ptr, computed.ptr)

    def fetch(self, pieces: Sequence[Array], step: int) -> None:
        """Start copying piece `step` (if there is one) to its buffer, whose last message has left."""
        if step < len(pieces):
            runtime, piece, buffer = self.xp.cuda.runtime, pieces[step], self.out[step % 2]
            runtime.memcpyAsync(
                buffer.ctypes.data, piece.data.ptr, piece.nbytes, runtime.memcpyDeviceToHost, self.down.ptr
            )
            self.filled[step % 2] = recorded(self.xp, self.down.ptr)

    def fetched(self, pieces: Sequence[Array], step: int) -> Array | None:
        """The host copy of piece `step`; waits for it."""
        if step >= len(pieces):
            return None
        self.filled[step % 2].synchronize()
        return self.out[step % 2][: pieces[step].nbytes]

    def vacant(self, pieces: Sequence[Array], step: int) -> Array | None:
        """Where piece `step` is to be received; waits until what was there is on the GPU."""
        if step >= len(pieces):
            return None
        if self.emptied[step % 2] is not None:
            self.emptied[step % 2].synchronize()
        return self.into[step % 2][: pieces[step].nbytes]

    def deliver(self, pieces: Sequence[Array], step: int) -> None:
        """Start copying what was received to piece `step` on the lane's stream."""
        if step < len(pieces):
            runtime, piece, buffer = self.xp.cuda.runtime, pieces[step], self.into[step % 2]
            runtime.memcpyAsync(
                piece.data.ptr, buffer.ctypes.data, piece.nbytes, runtime.memcpyHostToDevice, self.lane()
            )
            self.emptied[step % 2] = recorded(self.xp, self.lane())
