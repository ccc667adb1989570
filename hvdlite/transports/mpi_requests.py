"""MPI requests: a message in one piece or several, and messages that are sent again and again."""

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
"""Naps while waiting for a long message, in seconds. After each nap a rank looks LOOKS times at the next piece. The
kernel's buffers keep the wire busy meanwhile, and backward can use the CPU time (MEASURED.md, "Details").
"""
TAG_MAXIMUM = 9

GIVEN_UP: list[Any] = []
"""Buffers that MPI may still use, though no one waits any more: a signal handler raised an error."""


class MpiExchange:
    """One message out and one in, both under way, in pieces. Keeps their buffers alive."""

    def __init__(self, incoming: list[MPI.Request], outgoing: list[MPI.Request], *arrays: Array) -> None:
        self.incoming, self.outgoing, self.arrays = incoming, outgoing, arrays

    def __del__(self) -> None:
        if any(self.incoming) or any(self.outgoing):
            GIVEN_UP.append((self.incoming, self.outgoing, self.arrays))

    def test(self) -> bool:
        return bool(MPI.Request.Testall(self.incoming + self.outgoing))

    def wait(self) -> None:
        """Block until both are done. For long messages, sleep in between."""
        if len(self.incoming) < 2 and len(self.outgoing) < 2:
            if in_main():
                ask(self.test)
            else:
                MPI.Request.Waitall(self.incoming + self.outgoing)
            return
        finish(self.incoming)
        finish(self.outgoing)


def finish(pieces: list[MPI.Request]) -> None:
    """Wait for a long message's pieces, which end in about this order.

    Looks only at the next piece. Between looks it sleeps half of the time that the rest will take at the pace so far.
    """
    began = time.monotonic()
    for done, piece in enumerate(pieces):
        while not any(piece.Test() for _ in range(LOOKS)):
            rest = (time.monotonic() - began) / max(done, 1) * (len(pieces) - done)
            time.sleep(min(max(rest / 2, SHORTEST_NAP), LONGEST_NAP))


class MpiRepeated:
    """One message out and one in, with the same memory again and again, as persistent requests.

    mpi4py looks at the arrays once, and MPI at the messages. sent, received: objects with a buffer; kept alive.
    """

    def __init__(self, comm: MPI.Comm, sent: Any, dest: int, received: Any, source: int, tag: int) -> None:
        self.sent, self.received, self.process = sent, received, os.getpid()
        self.incoming = comm.Recv_init([received, MPI.BYTE], source, tag)
        self.outgoing = comm.Send_init([sent, MPI.BYTE], dest, tag)

    def __del__(self, getpid: Callable[[], int] = os.getpid, finalized: Callable[[], bool] = MPI.Is_finalized) -> None:
        if self.process == getpid() and not finalized():  # at Python's end, modules are gone
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

    In step k each rank sends what it knows to rank r + 2^k. A value may count twice. Rejected: MPI_Iallreduce, which
    takes twice as long to start (MEASURED.md, "Details").
    """

    def __init__(self, comm: MPI.Comm, count: int) -> None:
        self.form = Struct(f"{count}q")
        self.values: Sequence[int] = ()
        self.steps: list[MpiRepeated] = []
        self.rest: list[MpiRepeated] = []
        """The steps not yet done, the last one first. The step under way is among them."""
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
        """A barrier, for a maximum without values."""
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
