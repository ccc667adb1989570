"""MPI messages under way, for `transports.mpi`.

`MpiExchange` is one exchange, in pieces if long. `MpiRepeated` repeats one with the same memory. `MpiMaximum` is the
small MAX all-reduce of roll calls and barriers by messages. The main thread polls instead of blocking, so Ctrl-C works.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any

from mpi4py import MPI

from hvdlite.arrays import Array
from hvdlite.transports import LOOKS, ask, in_main

SHORTEST_NAP, LONGEST_NAP = 1e-4, 1e-3
"""Naps while waiting for a long message, in seconds. After each nap a rank tests the next piece LOOKS times. Meanwhile
the kernel's buffers keep the network busy, and backward can use the CPU (MEASURED.md, "Details").
"""
TAG_MAXIMUM = 9

GIVEN_UP: list[object] = []
"""Requests and buffers that MPI still uses after a signal handler raised an error. They are never freed."""


class MpiExchange:
    """An outgoing and an incoming message in pieces, both under way. Keeps their buffers alive."""

    def __init__(self, incoming: list[MPI.Request], outgoing: list[MPI.Request], *arrays: Array) -> None:
        self.incoming, self.outgoing, self.arrays = incoming, outgoing, arrays

    def __del__(self) -> None:
        if any(self.incoming) or any(self.outgoing):
            GIVEN_UP.append((self.incoming, self.outgoing, self.arrays))

    def test(self) -> bool:
        return bool(MPI.Request.Testall(self.incoming + self.outgoing))

    def wait(self) -> None:
        """Block until both are done. Sleep between tests if a message has several pieces."""
        if len(self.incoming) < 2 and len(self.outgoing) < 2:
            if in_main():
                ask(self.test)
            else:
                MPI.Request.Waitall(self.incoming + self.outgoing)
            return
        finish(self.incoming)
        finish(self.outgoing)


def finish(pieces: list[MPI.Request]) -> None:
    """Wait for a long message's pieces, which arrive in about this order.

    Test only the next piece. Between tests sleep half of the time that the rest will take at the average pace.
    """
    began = time.monotonic()
    for done, piece in enumerate(pieces):
        while not any(piece.Test() for _ in range(LOOKS)):
            rest = (time.monotonic() - began) / max(done, 1) * (len(pieces) - done)
            time.sleep(min(max(rest / 2, SHORTEST_NAP), LONGEST_NAP))


class MpiRepeated:
    """An outgoing and an incoming message that are repeated with the same memory, as persistent requests.

    mpi4py checks the arrays only once, and MPI prepares the messages only once.

    Attributes:
        sent: An object with a buffer; kept alive.
        received: An object with a buffer; kept alive.
    """

    def __init__(self, comm: MPI.Comm, sent: Any, dest: int, received: Any, source: int, tag: int) -> None:
        self.sent, self.received, self.process = sent, received, os.getpid()
        self.incoming = comm.Recv_init([received, MPI.BYTE], source, tag)
        self.outgoing = comm.Send_init([sent, MPI.BYTE], dest, tag)

    def __del__(self, getpid: Callable[[], int] = os.getpid, finalized: Callable[[], bool] = MPI.Is_finalized) -> None:
        if self.process == getpid() and not finalized():  # defaults, because Python clears modules when it ends
            self.free()

    def start(self) -> None:
        self.incoming.Start()
        self.outgoing.Start()

    def test(self) -> bool:
        return self.incoming.Test() and self.outgoing.Test()

    def wait(self) -> None:
        if in_main():
            ask(self.incoming.Test)
            ask(self.outgoing.Test)
        else:
            MPI.Request.Waitall([self.incoming, self.outgoing])

    def run(self) -> None:
        """Send and receive once."""
        self.start()
        try:
            self.wait()
        except BaseException:
            GIVEN_UP.append(self)
            raise

    def free(self) -> None:
        """Free the requests. None may be under way."""
        for request in (self.incoming, self.outgoing):
            if request:
                request.Free()


class MpiMaximum:
    """A Maximum by dissemination (Hensgen, Finkel & Manber 1988): ceil(log2 p) steps for any p.

    In step k rank r sends its maximum to rank r + 2^k. (A rank's value may arrive twice, which changes no maximum.)
    Rejected: MPI_Iallreduce, which takes twice as long to start (MEASURED.md, "Details").
    """

    def __init__(self, comm: MPI.Comm, count: int) -> None:
        self.form = Struct(f"{count}q")
        self.values: Sequence[int] = ()
        self.steps: list[MpiRepeated] = []
        self.rest: list[MpiRepeated] = []
        """The steps that are not done, in reverse order. The last of them is under way."""
        rank, size = comm.Get_rank(), comm.Get_size()
        for distance in (1 << k for k in range((size - 1).bit_length())):
            sent, received = bytearray(self.form.size), bytearray(self.form.size)
            dest, source = (rank + distance) % size, (rank - distance) % size
            self.steps.append(MpiRepeated(comm, sent, dest, received, source, TAG_MAXIMUM))

    def __del__(self) -> None:
        if self.rest:
            GIVEN_UP.append(self.steps)

    def start(self, values: Sequence[int]) -> bool:
        self.values, self.rest = values, self.steps[::-1]
        self.begin()
        return not self.rest

    def begin(self) -> None:
        """Start the next step, if there is one."""
        if self.rest:
            step = self.rest[-1]
            self.form.pack_into(step.sent, 0, *self.values)
            step.start()

    def test(self) -> bool:
        if self.rest and self.rest[-1].test():
            theirs = self.form.unpack(self.rest.pop().received)
            self.values = list(map(max, self.values, theirs))
            self.begin()
        return not self.rest

    def meet(self) -> None:
        """Wait for all ranks: a barrier, if the maximum has no values."""
        self.start(())
        self.wait()

    def wait(self) -> None:
        """Block until complete. Only Python's main thread polls; others block inside MPI."""
        if in_main():
            ask(self.test)
        while self.rest:
            self.rest[-1].wait()
            self.test()

    def close(self) -> None:
        """Free the requests, unless a step is under way."""
        if not self.rest:
            for step in self.steps:
                step.free()
