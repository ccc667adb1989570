"""MPI's requests: messages under way, one at a time, in pieces, or the same again and again."""

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
"""Who waits for long messages looks LOOKS times at the piece that is next, then sleeps: the kernel's buffers keep the
wire busy. With Open MPI 5 at 1 Gbit/s, 40 MiB in 370 ms: 48 ms of a rank's CPU time, which backward can use, instead
of 105 with naps of 0.1 ms and looks at all pieces. Where the CPU is the limit (7 Gbit/s) it takes 46 ms instead of
43."""
TAG_MAXIMUM = 9

GIVEN_UP: list[Any] = []
"""What MPI may still write to or read, though nobody waits for it any more (a signal's handler raised meanwhile)."""


class MpiExchange:
    """A message out and one in, both under way, in pieces; keeps their buffers alive."""

    def __init__(self, incoming: list[MPI.Request], outgoing: list[MPI.Request], *arrays: Array) -> None:
        self.incoming, self.outgoing, self.arrays = incoming, outgoing, arrays

    def __del__(self) -> None:
        if any(self.incoming) or any(self.outgoing):
            GIVEN_UP.append((self.incoming, self.outgoing, self.arrays))

    def test(self) -> bool:
        return bool(MPI.Request.Testall(self.incoming + self.outgoing))

    def wait(self) -> None:
        """Sleeps in between where the messages are long."""
        if len(self.incoming) < 2 and len(self.outgoing) < 2:
            if in_main():
                ask(self.test)
            else:
                MPI.Request.Waitall(self.incoming + self.outgoing)
            return
        finish(self.incoming)
        finish(self.outgoing)


def finish(pieces: list[MPI.Request]) -> None:
    """Wait for a long message's pieces, which end in about this order: look at the next one only, and between looks
    sleep half of the time that the rest will take at the pace so far."""
    began = time.monotonic()
    for done, piece in enumerate(pieces):
        while not any(piece.Test() for _ in range(LOOKS)):
            rest = (time.monotonic() - began) / max(done, 1) * (len(pieces) - done)
            time.sleep(min(max(rest / 2, SHORTEST_NAP), LONGEST_NAP))


class MpiRepeated:
    """A message out and one in, of the same memory again and again, by persistent requests: what mpi4py looks up of an
    array, and an MPI of a message, is looked up once. sent, received: whatever has bytes; kept alive."""

    def __init__(self, comm: MPI.Comm, sent: Any, dest: int, received: Any, source: int, tag: int) -> None:
        self.sent, self.received, self.process = sent, received, os.getpid()
        self.incoming = comm.Recv_init([received, MPI.BYTE], source, tag)
        self.outgoing = comm.Send_init([sent, MPI.BYTE], dest, tag)

    def __del__(self, getpid: Callable[[], int] = os.getpid, finalized: Callable[[], bool] = MPI.Is_finalized) -> None:
        if self.process == getpid() and not finalized():  # at Python's end there are no modules any more
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
        """Once."""
        self.start()
        try:
            self.wait()
        except BaseException:
            GIVEN_UP.append(self)
            raise

    def free(self) -> None:
        """Neither is under way."""
        for request in (self.incoming, self.outgoing):
            if request:
                request.Free()


class MpiMaximum:
    """A Maximum, by dissemination (Hensgen, Finkel & Manber 1988): in step k each rank sends what it knows by then to
    the rank 2^k behind it. ceil(log2 p) steps for any p, since a value may count twice.

    Rejected: MPI_Iallreduce. Behind a training step, when nothing of it is in the caches, it took 37 us to start, and
    this 15; NumPy, to find the larger one of five numbers, 46.
    """

    def __init__(self, comm: MPI.Comm, count: int) -> None:
        self.form = Struct(f"{count}q")
        self.values: Sequence[int] = ()
        self.steps: list[MpiRepeated] = []
        self.rest: list[MpiRepeated] = []
        """The steps to come, the last one first; the one under way is among them."""
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
        """A barrier, where there are no values."""
        self.start(())
        self.wait()

    def wait(self) -> None:
        """Block until complete; elsewhere than in Python's main thread inside MPI, in nobody's way."""
        if in_main():
            ask(self.test)
        while self.rest:
            self.rest[-1].wait()
            self.test()

    def close(self) -> None:
        """Free what MPI keeps for it, unless something is under way."""
        if not self.rest:
            for step in self.steps:
                step.free()
