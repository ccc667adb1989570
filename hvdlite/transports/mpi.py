"""The transport over MPI, through mpi4py.

Arrays travel as bytes, so every dtype works, and hvdlite does the arithmetic; only `native_allreduce` leaves it to MPI.
Long messages go in pieces. On one host a piece has at most 1 GiB, since counts are C ints in many MPIs. In jobs of
several hosts it has at most 1 MiB over a fabric, and 60 KiB if any host has only TCP. The module also has the stall
watch's mail, and finds the ranks that share a host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from mpi4py import MPI

from hvdlite.arrays import Array, as_bytes
from hvdlite.gpu_streams import NOTHING_PENDING, Mark
from hvdlite.transports import T, ask, in_main
from hvdlite.transports.mpi_requests import GIVEN_UP, MpiExchange, MpiMaximum, MpiRepeated
from hvdlite.transports.sent_bytes import SentBytes, Tally
from hvdlite.transports.shared_flags import FLAG_BYTES, SharedMaximum

PIECE = 1 << 30
TCP_PIECE = 60 * 1024
"""Over TCP long messages go in pieces below the usual eager limit of 64 KiB.

MPI sends a longer message only when its receiver has answered, and the receiver first sends its own data. So two ranks
that exchange long messages would send one after the other (MEASURED.md, "Details").
"""
FABRIC_PIECE = 1 << 20
FABRICS = ("/sys/class/infiniband", "/sys/class/cxi")
TAG, TAG_ASIDE = 7, 8  # and mpi_requests.TAG_MAXIMUM
FIRST_TAG = 16  # of messages that have a tag of their own
NATIVE_OPS = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "product": MPI.PROD}


class MpiTransport:
    """A Communicator over one of mpi4py's. It owns that communicator, unless `aside` made it.

    Args:
        comm: The communicator.
        piece: The longest message in bytes; equal on all ranks.
        tag: The tag of its messages.
        tally: Counts the bytes that this rank sends. None: apart from the job's.
    """

    def __init__(self, comm: MPI.Comm, piece: int = PIECE, tag: int = TAG, tally: Tally | None = None) -> None:
        self.comm, self.piece, self.tag = comm, piece, tag
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.library = library()
        self.tally = tally or Tally(SentBytes(), range(self.size))
        self.maxima: list[MpiMaximum] = []
        self.everyone: MpiMaximum | SharedMaximum | None = None
        """The barrier: a Maximum without values."""

    def exchange(self, send: Array, dest: int, receive: Array, source: int) -> None:
        if send.nbytes > self.piece or receive.nbytes > self.piece:
            self.start_exchange(send, dest, receive, source).wait()
            return
        self.tally.to(dest, send.nbytes)
        if not in_main():
            self.comm.Sendrecv([send, MPI.BYTE], dest, self.tag, [receive, MPI.BYTE], source, self.tag)
        else:
            # The same as start_exchange, without its lists and objects (about 16 us; MEASURED.md, "Details").
            incoming = self.comm.Irecv([receive, MPI.BYTE], source, self.tag)
            outgoing = self.comm.Isend([send, MPI.BYTE], dest, self.tag)
            try:
                ask(incoming.Test)
                ask(outgoing.Test)
            except BaseException:
                GIVEN_UP.append((incoming, receive, outgoing, send))
                raise

    def start_exchange(
        self, send: Array, dest: int, receive: Array, source: int, after: Mark = NOTHING_PENDING
    ) -> MpiExchange:
        self.tally.to(dest, send.nbytes)
        incoming = [self.comm.Irecv([piece, MPI.BYTE], source, self.tag) for piece in self.pieces(receive)]
        outgoing = [self.comm.Isend([piece, MPI.BYTE], dest, self.tag) for piece in self.pieces(send)]
        return MpiExchange(incoming, outgoing, send, receive)

    def prepared_exchange(self, send: Array, dest: int, receive: Array, source: int) -> Callable[[], None]:
        if send.nbytes > self.piece or receive.nbytes > self.piece:
            return partial(self.exchange, send, dest, receive, source)
        called, made, count = False, None, partial(self.tally.to, dest, send.nbytes)

        def exchange() -> None:
            nonlocal called, made
            if made is None:
                if not called:  # many exchanges run only once, and persistent requests take longer to make
                    called = True
                    self.exchange(send, dest, receive, source)
                    return
                made = MpiRepeated(self.comm, send, dest, receive, source, self.tag)
            count()
            made.run()

        return exchange

    def send(self, array: Array, dest: int) -> None:
        self.tally.to(dest, array.nbytes)
        for piece in self.pieces(array):
            MpiExchange([], [self.comm.Isend([piece, MPI.BYTE], dest, self.tag)], piece).wait()

    def receive(self, array: Array, source: int) -> None:
        for piece in self.pieces(array):
            MpiExchange([self.comm.Irecv([piece, MPI.BYTE], source, self.tag)], [], piece).wait()

    def pieces(self, array: Array) -> list[Array]:
        """The array's bytes, one array for each message. An empty array is one empty message."""
        flat = as_bytes(array)
        return [flat[start : start + self.piece] for start in range(0, max(flat.size, 1), self.piece)]

    def barrier(self) -> None:
        everyone = self.everyone = self.everyone or self.maximum(0)
        everyone.meet()

    def maximum(self, count: int) -> MpiMaximum:
        self.maxima.append(MpiMaximum(self.comm, count))
        return self.maxima[-1]

    def share(self, flags: Sequence[Array]) -> SharedMaximum:
        half = FLAG_BYTES // 2
        self.everyone = SharedMaximum([each[:half] for each in flags], self.rank, self.called_by)
        return SharedMaximum([each[half:] for each in flags], self.rank, self.called_by)

    def native_allreduce(self, array: Array, op: str) -> None:
        flat, step = array.reshape(-1), PIECE // array.itemsize
        kind = MPI.Datatype.fromcode(array.dtype.str[1:])  # mpi4py finds none for an array that is not aligned
        for start in range(0, flat.size, step):
            self.comm.Allreduce(MPI.IN_PLACE, [flat[start : start + step], kind], NATIVE_OPS[op])

    def allgather_object(self, value: T) -> list[T]:
        return list(self.comm.allgather(value))

    def mail(self) -> MpiMail:
        return MpiMail(self.comm.Dup())

    def duplicate(self) -> MpiTransport:
        return MpiTransport(self.comm.Dup(), self.piece, tally=self.tally)

    def split(self, color: int | None) -> MpiTransport | None:
        part = self.comm.Split(MPI.UNDEFINED if color is None else color, self.rank)
        return None if part == MPI.COMM_NULL else self.of_some(part)

    def some(self, ranks: Sequence[int], tag: int) -> MpiTransport:
        return self.of_some(some_of(self.comm, ranks, tag % (1 << 15)))  # every MPI has that many tags

    def of_some(self, comm: MPI.Comm) -> MpiTransport:
        """A transport over a communicator of some of the ranks."""
        return MpiTransport(comm, self.piece, tally=self.tally.of(self.ranks_of(comm)))

    def aside(self) -> MpiTransport:
        return MpiTransport(self.comm, self.piece, TAG_ASIDE)

    def start_message(self, array: Array, dest: int, tag: int) -> MpiMessage:
        self.tally.to(dest, array.nbytes)
        return MpiMessage(self.comm.Isend([as_bytes(array), MPI.BYTE], dest, self.tag_of(tag)), array)

    def await_message(self, array: Array, source: int | None, tag: int) -> MpiMessage:
        rank = MPI.ANY_SOURCE if source is None else source
        return MpiMessage(self.comm.Irecv([as_bytes(array), MPI.BYTE], rank, self.tag_of(tag)), array)

    def tag_of(self, tag: int) -> int:
        """MPI's tag of a message. Raises ValueError if the MPI has no such tag."""
        most = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0) - FIRST_TAG  # not all MPIs give it to others
        if not 0 <= tag <= most:
            raise ValueError(f"tag={tag} is not possible: {self.library} has the tags 0-{most}")
        return FIRST_TAG + tag

    def called_by(self, peer: int) -> bool:
        return bool(self.comm.Iprobe(peer, self.tag))

    def probe(self, tag: int) -> tuple[int, int] | None:
        status = MPI.Status()
        if not self.comm.Iprobe(MPI.ANY_SOURCE, self.tag_of(tag), status):
            return None
        return status.Get_source(), status.Get_count(MPI.BYTE)

    def ranks_of(self, comm: MPI.Comm) -> list[int]:
        """The ranks here of another communicator's members; an empty list for a null communicator.

        Raises:
            ValueError: Some members have no rank here.
        """
        if comm == MPI.COMM_NULL:
            return []
        theirs, mine = comm.Get_group(), self.comm.Get_group()
        found = list(MPI.Group.Translate_ranks(theirs, None, mine))
        theirs.Free()
        mine.Free()
        if MPI.UNDEFINED in found:
            raise ValueError(
                "a process set's communicator has members that are not of the job's communicator: pass "
                "a communicator of some of the job's ranks"
            )
        return found

    def close(self) -> None:
        if self.comm != MPI.COMM_NULL and not MPI.Is_finalized():
            self.everyone = None
            for each in self.maxima:  # their requests would keep the communicator's number
                each.close()
            self.maxima.clear()
            self.comm.Free()


class MpiMessage:
    """A Message over MPI."""

    def __init__(self, request: MPI.Request, array: Array) -> None:
        self.request, self.array = request, array  # the array lives as long as the request
        self.status = MPI.Status()
        self.nbytes = 0

    def test(self) -> bool:
        try:
            done = bool(self.request.Test(self.status))
            self.nbytes = self.status.Get_count(MPI.BYTE) if done else 0
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            done, self.nbytes = True, self.array.nbytes + 1
        return done

    @property
    def source(self) -> int:
        return self.status.Get_source()

    def cancel(self) -> None:
        self.request.Cancel()
        self.request.Wait()


class MpiMail:
    """A Mail over a separate communicator.

    Sends are synchronous: a send is complete when its letter has been read. So when all sends of all ranks are
    complete, no letter is under way, and `close` may free the communicator (Hoefler, Siebert & Lumsdaine 2010, "NBX").
    A letter to a freed communicator could reach the next communicator with that number.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm = comm
        self.sent: list[MPI.Request] = []

    def post(self, letter: object, dest: int) -> None:
        self.sent.append(self.comm.issend(letter, dest, TAG))

    def fetch(self) -> tuple[int, Any] | None:
        if self.sent:
            self.sent = [request for request in self.sent if not request.test()[0]]
        status = MPI.Status()
        message = self.comm.improbe(MPI.ANY_SOURCE, TAG, status)
        return None if message is None else (status.Get_source(), message.recv())

    def close(self) -> None:
        while self.sent:
            self.fetch()
        everyone = self.comm.Ibarrier()
        while not everyone.Test():
            self.fetch()
        self.comm.Free()


def library() -> str:
    """The MPI library's name and version."""
    return " ".join(MPI.Get_library_version().splitlines()[0].partition(",")[0].strip("\0 ").split())


def network_piece(comm: MPI.Comm) -> int:
    """The longest message between hosts, in bytes. It is short if any host has only TCP. Collective."""
    fabric = any(os.path.isdir(folder) and os.listdir(folder) for folder in FABRICS)
    return int(comm.allreduce(FABRIC_PIECE if fabric else TCP_PIECE, MPI.MIN))


def host_leaders(comm: MPI.Comm) -> list[int]:
    """For each rank, the lowest rank that shares memory with it. Collective."""
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    leader = host.bcast(comm.Get_rank(), root=0)
    host.Free()
    return list(comm.allgather(leader))


def some_of_the_world(ranks: Any) -> MPI.Comm:
    """A communicator of these ranks of MPI_COMM_WORLD, in this order. Collective over these ranks alone.

    Raises:
        ValueError: Some number is no rank or occurs twice, or this process' rank is not among them.
    """
    world = MPI.COMM_WORLD
    wanted = list(ranks) if isinstance(ranks, Iterable) else [ranks]
    fine = all(isinstance(rank, int) and 0 <= rank < world.size for rank in wanted)
    if not fine or len(set(wanted)) < len(wanted):
        raise ValueError(
            f"init(comm=...) takes an mpi4py communicator, or a list of some of the ranks "
            f"0-{world.size - 1}, each once, not {ranks!r}"
        )
    if world.rank not in wanted:
        raise ValueError(f"world rank {world.rank} is not in init(comm={wanted}): only the ranks listed may call it")
    return some_of(world, wanted)


def some_of(comm: MPI.Comm, ranks: Sequence[int], tag: int = 0) -> MPI.Comm:
    """A communicator of these ranks of another, in this order. Collective over these ranks alone."""
    everyone = comm.Get_group()
    members = everyone.Incl(ranks)
    made: MPI.Comm = comm.Create_group(members, tag)  # type: ignore[attr-defined]  # of an intracommunicator
    members.Free()
    everyone.Free()
    return made
