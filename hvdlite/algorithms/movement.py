"""Data moved without arithmetic, by messages: broadcast, all-gather, all-to-all, gather, scatter. Of any dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from hvdlite.arrays import Array
from hvdlite.transports import Transport


def broadcast(transport: Transport, buffer: Array, root: int, hosts: Sequence[Sequence[int]] = ()) -> None:
    """Trees: among the hosts, one rank of each, and then within each. Data enter a host once.

        4 ranks on each of 2 hosts, root 0:   0 -> 4;   0 -> 1, 4 -> 5;   0 -> 2, 1 -> 3, 4 -> 6, 5 -> 7

    ceil(log2 h) + ceil(log2 L) rounds on h hosts with L ranks each.

    buffer: contiguous, equally large everywhere; the root's is read, the others' overwritten. root: a rank of the
    transport. hosts: its ranks on each host; none: they are on one.
    """
    hosts = hosts or [range(transport.size)]
    heads = [root if root in ranks else ranks[0] for ranks in hosts]
    mine = next(number for number, ranks in enumerate(hosts) if transport.rank in ranks)
    if transport.rank in heads:
        pass_on(transport, buffer, heads, root)
    pass_on(transport, buffer, hosts[mine], heads[mine])


def pass_on(transport: Transport, buffer: Array, members: Sequence[int], root: int) -> None:
    """Binomial tree: in round k the members that have the data pass it 2^k places on. ceil(log2 n) rounds."""
    size, mine = len(members), members.index(transport.rank)
    place, distance = (mine - members.index(root)) % size, 1  # places count from the root
    while distance < size:
        if place < distance:
            if place + distance < size:
                transport.send(buffer, members[(mine + distance) % size])
        elif place < 2 * distance:
            transport.receive(buffer, members[(mine - distance) % size])
        distance *= 2


def allgather(transport: Transport, pieces: Sequence[Array]) -> None:
    """Ring all-gather of pieces of any lengths: p-1 steps, each rank passes on what it got last.

    pieces: as many contiguous arrays as ranks, each equally long on all; this rank's own is filled, the others are
    overwritten.
    """
    prepared_allgather(transport, pieces, first=0)()


def prepared_allgather(transport: Transport, pieces: Sequence[Array], first: int) -> Callable[[], None]:
    """`allgather` of these very pieces, of which piece rank + `first` is filled, to be called many times."""
    rank, size = transport.rank, transport.size
    order = [pieces[(rank + first - step) % size] for step in range(size)]
    exchanges = [
        transport.prepared_exchange(outgoing, (rank + 1) % size, incoming, (rank - 1) % size)
        for outgoing, incoming in pairwise(order)
    ]

    def allgather() -> None:
        for exchange in exchanges:
            exchange()

    return allgather


def alltoall(transport: Transport, outgoing: Sequence[Array], incoming: Sequence[Array]) -> None:
    """Each rank sends a piece of its own to each rank. p-1 steps; in step s to the rank s places on.

    outgoing, incoming: one contiguous array per rank, rank a's outgoing[b] as long as rank b's incoming[a]; lengths
    may be 0. This rank's own piece is copied.
    """
    rank, size = transport.rank, transport.size
    incoming[rank][...] = outgoing[rank]
    for step in range(1, size):
        dest, source = (rank + step) % size, (rank - step) % size
        transport.exchange(outgoing[dest], dest, incoming[source], source)


def gather(transport: Transport, mine: Array, pieces: Sequence[Array]) -> None:
    """Receive a piece, a contiguous array, from each other rank, which sends it straight here. p-1 messages.

    mine: this rank's piece, copied.
    """
    for source, piece in enumerate(pieces):
        if source == transport.rank:
            piece[...] = mine
        else:
            transport.receive(piece, source)


def scatter(transport: Transport, pieces: Sequence[Array]) -> None:
    """Send each other rank its piece, a contiguous array. p-1 messages."""
    for dest, piece in enumerate(pieces):
        if dest != transport.rank:
            transport.send(piece, dest)
