"""Operations that move data without arithmetic, by messages, for any dtype.

operation    steps                          elements sent per rank
broadcast    ceil(log2 h) + ceil(log2 L)    up to n log2(p)          h hosts, L ranks on each
all-gather   p-1                            n(p-1)/p                 n in all
all-to-all   p-1                            n(p-1)/p                 n outgoing
gather       1 per other rank               its piece
scatter      1 per other rank               the root: all pieces
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from hvdlite.arrays import Array
from hvdlite.transports import Transport


def broadcast(transport: Transport, buffer: Array, root: int, hosts: Sequence[Sequence[int]] = ()) -> None:
    """Broadcast along trees: first between hosts, to one rank of each, then within each host. Data enter a host once.

        4 ranks on each of 2 hosts, root 0:   0 -> 4;   0 -> 1, 4 -> 5;   0 -> 2, 1 -> 3, 4 -> 6, 5 -> 7

    Price: ceil(log2 h) + ceil(log2 L) rounds on h hosts with L ranks each.

    Args:
        transport: The ranks that take part.
        buffer: Contiguous, equally large on all ranks. The root's is read, and the others are overwritten.
        root: A rank of the transport.
        hosts: The ranks on each host; empty if all are on one.
    """
    hosts = hosts or [range(transport.size)]
    heads = [root if root in ranks else ranks[0] for ranks in hosts]
    mine = next(number for number, ranks in enumerate(hosts) if transport.rank in ranks)
    if transport.rank in heads:
        pass_on(transport, buffer, heads, root)
    pass_on(transport, buffer, hosts[mine], heads[mine])


def pass_on(transport: Transport, buffer: Array, members: Sequence[int], root: int) -> None:
    """Broadcast along a binomial tree: in round k members with data send them 2^k places on. ceil(log2 n) rounds."""
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
    """Gather pieces of any lengths along a ring: p-1 steps, and each rank passes on the piece that it received last.

    pieces: one contiguous array per rank, each equally long on all ranks. This rank's own piece is read, and the others
    are overwritten.
    """
    prepared_allgather(transport, pieces, first=0)()


def prepared_allgather(transport: Transport, pieces: Sequence[Array], first: int) -> Callable[[], None]:
    """A function that does `allgather` with these pieces, for many calls. It reads this rank's piece rank + `first`."""
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
    """Send one piece to each rank. p-1 steps; in step s to the rank s places on. This rank's own piece is copied.

    outgoing, incoming: one contiguous array per rank. Rank a's outgoing[b] is as long as rank b's incoming[a], and may
    be empty.
    """
    rank, size = transport.rank, transport.size
    incoming[rank][...] = outgoing[rank]
    for step in range(1, size):
        dest, source = (rank + step) % size, (rank - step) % size
        transport.exchange(outgoing[dest], dest, incoming[source], source)


def gather(transport: Transport, mine: Array, pieces: Sequence[Array]) -> None:
    """Receive a piece from each other rank, and copy this rank's piece `mine`. p-1 messages. pieces: contiguous."""
    for source, piece in enumerate(pieces):
        if source == transport.rank:
            piece[...] = mine
        else:
            transport.receive(piece, source)


def scatter(transport: Transport, pieces: Sequence[Array]) -> None:
    """Send each other rank its piece. p-1 messages. pieces: contiguous."""
    for dest, piece in enumerate(pieces):
        if dest != transport.rank:
            transport.send(piece, dest)
