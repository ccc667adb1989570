"""The count of sent bytes on threads as ranks: each algorithm counts its price, and agreements count nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from hvdlite.algorithms import Place, allreduce, movement, prepared_in_arena
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array
from hvdlite.compression.column import Column
from hvdlite.gradients.scatter import prepared_scatter
from hvdlite.job.groups import Group, leave
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.mailbox import FIRST_KIND, HEADER, Letter, Mailbox
from hvdlite.lanes.workplace import HostWorkplace
from hvdlite.memory.workspace import STAGING_BYTES, Workspace
from hvdlite.ops import reductions
from hvdlite.transports.pair import PairTransport
from hvdlite.transports.sent_bytes import SentBytes, Tally
from hvdlite.transports.threads import ThreadTransport, alone, run_ranks
from tests.pretend.lanes import on_lanes, produced, stand_in, summed  # noqa: F401

SIZES = (2, 3, 4)
LINE = 64  # bytes
Hosts = Sequence[Sequence[int]]
Work = Callable[[ThreadTransport], object]


def sent(size: int, work: Work, hosts: Hosts = ()) -> list[tuple[int, int]]:
    """Each rank's bytes to other hosts and to its own host after work(transport). hosts: their ranks; default one."""

    def main(transport: ThreadTransport) -> tuple[int, int]:
        near = next((host for host in hosts if transport.rank in host), range(size))
        counts = SentBytes()
        work(ThreadTransport(transport.board, transport.rank, Tally(counts, near)))
        return counts.network, counts.memory

    return run_ranks(size, main)


def lengths(size: int) -> tuple[int, ...]:
    return 0, 1, size - 1, size, size + 1, 999, 16 * size


def part_bytes(nbytes: int, count: int) -> list[int]:
    """The bytes of each of `count` parts, which are whole cache lines. The first parts have one more."""
    lines = -(-nbytes // LINE)
    edges = [min(nbytes, LINE * (index * (lines // count) + min(index, lines % count))) for index in range(count + 1)]
    return [stop - start for start, stop in pairwise(edges)]


def reduce(place: Place, array: Array, transport: ThreadTransport) -> None:
    allreduce(transport, Workspace(), place, array.copy(), Reduction())


def reduce_in_arena(place: Place, array: Array, times: int, transport: ThreadTransport) -> None:
    workspace, buffer = Workspace(), array.copy()
    buffers = workspace.levels(transport, place.hosts).local.allgather_object(buffer)
    run = prepared_in_arena(transport, workspace, place, buffers, Reduction())
    for _ in range(times):
        transport.barrier()  # the roll call's part
        run()
    transport.barrier()


# In shared memory


@pytest.mark.parametrize("size", SIZES)
def test_two_shot(size: int) -> None:
    """Others read all but this rank's part m; it writes m to each other buffer: 2n(p-1)/p if parts are equal."""
    for length in lengths(size):
        work = partial(reduce_in_arena, Place(size, True, "shared"), np.ones(length, np.float32), 3)
        n = 4 * length
        assert sent(size, work) == [(0, 3 * (n - m + (size - 1) * m)) for m in part_bytes(n, size)]
    assert sent(size, work) == [(0, 3 * 2 * (size - 1) * LINE)] * size  # the last length: one line for each rank


@pytest.mark.parametrize("size", SIZES)
def test_allreduce_through_memory(size: int) -> None:
    """Each piece of half of the staging memory counts as a two-shot."""
    half = STAGING_BYTES // 2
    for nbytes in (*(4 * length for length in lengths(size)), half, 2 * half + 4 * size):
        work = partial(reduce, Place(size, True, "shared"), np.ones(nbytes // 4, np.float32))
        pieces = [min(half, nbytes - start) for start in range(0, nbytes, half)]
        parts = [part_bytes(piece, size) for piece in pieces]
        expected = [
            sum(n - its[rank] + (size - 1) * its[rank] for n, its in zip(pieces, parts, strict=True))
            for rank in range(size)
        ]
        assert sent(size, work) == [(0, each) for each in expected]
        assert sum(expected) == 2 * nbytes * (size - 1)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter(size: int, shares: bool) -> None:
    """Through memory others read all rows but this rank's own. In a ring it sends as many."""
    for rows in (0, 1, size - 1, size, size + 1, 40_001):
        array = np.ones((rows, 3), np.float32)
        owned = [12 * (rows // size + (rank < rows % size)) for rank in range(size)]

        def work(transport: ThreadTransport, array: Array = array) -> None:
            at = HostWorkplace(transport, Place(size, shares), range(transport.size))
            reductions.own_rows(at, array, Reduction())

        assert sent(size, work) == [(0, 12 * rows - own) for own in owned]


@pytest.mark.parametrize("size", SIZES)
def test_scatter_of_a_bucket(size: int) -> None:
    """Others read their parts of this rank's buffer. Elements that nobody owns do not cross."""
    parts = [[slice(5 * rank, 5 * rank + rank), slice(100 + rank, 101 + rank)] for rank in range(size)]

    def work(transport: ThreadTransport) -> None:
        buffer = np.ones(200)
        at = HostWorkplace(transport, Place(size, True), range(transport.size))
        run = prepared_scatter(at, buffer, transport.allgather_object(buffer), parts, Reduction())
        run()
        run()

    counted = [rank + 1 for rank in range(size)]
    assert sent(size, work) == [(0, 2 * 8 * (sum(counted) - mine)) for mine in counted]


@pytest.mark.parametrize("in_arena", [True, False])
@pytest.mark.parametrize("hosts", [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0,), (1, 2)), ((0,), (1,)), ((0, 1, 2), (3,))])
def test_hierarchical(hosts: Hosts, in_arena: bool) -> None:
    """A host with L ranks moves 2n(L-1) bytes in memory. Two hosts send n each, whatever the number of drivers."""
    size, drivers = sum(map(len, hosts)), min(map(len, hosts))
    place = Place(size, True, "hierarchical", tuple(map(tuple, hosts)))
    for length in lengths(size):
        array = np.ones(length, np.float32)
        found = sent(
            size, partial(reduce_in_arena, place, array, 1) if in_arena else partial(reduce, place, array), hosts
        )
        parts = part_bytes(4 * length, drivers)
        for host in hosts:
            assert sum(found[rank][0] for rank in host) == 4 * length
            for number, rank in enumerate(host):
                m = parts[number] if number < drivers else 0
                assert found[rank][1] == 4 * length - m + (len(host) - 1) * m
                assert found[rank][0] == (m if number < drivers else 0)


# By messages


@pytest.mark.parametrize("size", SIZES)
def test_ring(size: int) -> None:
    """Rank r sends all parts but r+1, and then all parts but r+2. For 16-bit floats: all but r, then all but r+1."""
    for length in lengths(size):
        for kind, first in ((np.float32, 1), (np.float16, 0)):
            array = np.ones(length, kind)
            n, parts = array.nbytes, part_bytes(array.nbytes, size)
            expected = [2 * n - parts[(r + first) % size] - parts[(r + first + 1) % size] for r in range(size)]
            assert sent(size, partial(reduce, Place(size, False, "ring"), array)) == [(0, each) for each in expected]


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_over_hosts(size: int) -> None:
    """Each rank sends to the next one: ranks alone on their hosts send all over the network."""
    array = np.ones(16 * size, np.float32)  # a line for each rank
    ring = partial(reduce, Place(size, False, "ring"), array)
    each = 2 * (size - 1) * LINE
    assert sent(size, ring, [[rank] for rank in range(size)]) == [(each, 0)] * size
    expected = [(0, each)] * (size - 2) + [(each, 0)] * 2  # the last rank is on another host
    assert sent(size, ring, [range(size - 1), [size - 1]]) == expected


def test_halving_and_doubling() -> None:
    """On 4 ranks doubling sends 2n, and halving and doubling 2n(p-1)/p."""
    array = np.ones(64, np.float32)
    assert sent(4, partial(reduce, Place(4, False, "doubling"), array)) == [(0, 2 * 256)] * 4
    assert sent(4, partial(reduce, Place(4, False, "halving_doubling"), array)) == [(0, 2 * 256 * 3 // 4)] * 4


@pytest.mark.parametrize("size", SIZES)
def test_the_librarys_own_allreduce(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as a ring, in which each rank sends 2n(p-1)/p to the next one."""
    monkeypatch.setattr(ThreadTransport, "native_allreduce", lambda *_: None)
    native = partial(reduce, Place(size, False, "native"), np.ones(12, np.float32))
    each = 2 * 48 * (size - 1) // size
    assert sent(size, native, [range(size - 1), [size - 1]]) == [(0, each)] * (size - 2) + [(each, 0)] * 2


@pytest.mark.parametrize("size", SIZES)
def test_movement(size: int) -> None:
    """All ranks of a broadcast send n(p-1); other operations count what each rank sends."""
    for length in lengths(size):

        def broadcast(transport: ThreadTransport, length: int = length) -> None:
            movement.broadcast(transport, np.ones(length), size - 1)

        def allgather(transport: ThreadTransport, length: int = length) -> None:
            movement.allgather(transport, [np.ones(length + rank) for rank in range(size)])

        def alltoall(transport: ThreadTransport, length: int = length) -> None:
            outgoing = [np.ones(length + dest) for dest in range(size)]
            movement.alltoall(transport, outgoing, [np.ones(length + transport.rank) for _ in range(size)])

        def scatter(transport: ThreadTransport, length: int = length) -> None:
            pieces = [np.ones(length + rank) for rank in range(size)]
            if transport.rank == 0:
                movement.scatter(transport, pieces)
            else:
                transport.receive(pieces[transport.rank], 0)

        whole = 8 * (size * length + size * (size - 1) // 2)
        mine = [8 * (length + rank) for rank in range(size)]
        assert sum(memory for _, memory in sent(size, broadcast)) == 8 * length * (size - 1)
        assert sent(size, allgather) == [(0, whole - mine[(rank + 1) % size]) for rank in range(size)]
        assert sent(size, alltoall) == [(0, whole - own) for own in mine]
        assert sent(size, scatter) == [(0, whole - mine[0])] + [(0, 0)] * (size - 1)


@pytest.mark.parametrize("size", SIZES)
def test_a_broadcast_enters_each_host_once(size: int) -> None:
    hosts = [range(size - 1), [size - 1]]
    found = sent(size, lambda transport: movement.broadcast(transport, np.ones(5), 0, hosts), hosts)
    assert [sum(kind) for kind in zip(*found, strict=True)] == [40, 40 * (size - 2)]


def test_each_way_to_send_counts_once() -> None:
    def work(transport: ThreadTransport) -> None:
        other = 1 - transport.rank
        transport.exchange(np.ones(1), other, np.ones(1), other)  # 8 bytes
        transport.start_exchange(np.ones(2), other, np.ones(2), other).wait()  # 16
        run = transport.prepared_exchange(np.ones(4), other, np.ones(4), other)
        run()  # 32
        run()  # 32
        transport.send(np.ones(16), other)  # 128
        transport.receive(np.ones(16), other)
        transport.start_message(np.ones(32), other, 0)  # 256

    assert sent(2, work) == [(0, 472)] * 2
    assert sent(2, work, [[0], [1]]) == [(472, 0)] * 2


def test_agreements_count_nothing() -> None:
    def work(transport: ThreadTransport) -> None:
        transport.barrier()
        transport.allgather_object("text")
        maximum = transport.maximum(5)
        maximum.start([1] * 5)
        while not maximum.test():
            pass
        transport.duplicate().split(0)

    assert sent(3, work) == [(0, 0)] * 3


# Transports made from others


def test_other_transports_count_for_the_same_job() -> None:
    """Ranks 0 and 2 are on one host. Other transports number them anew."""
    hosts = [[0, 2], [1, 3]]

    def over(make: Callable[[ThreadTransport], Any], transport: ThreadTransport) -> None:
        made = make(transport)
        assert made.tally.sent is transport.tally.sent
        movement.allgather(made, [np.ones(1)] * made.size)  # each rank sends 8(p-1) bytes to the next one

    def halves(transport: ThreadTransport) -> Any:
        return transport.split(transport.rank // 2)

    def home(transport: ThreadTransport) -> Any:
        return transport.split(transport.rank % 2)

    def order(transport: ThreadTransport) -> Any:
        return transport.some([0, 2, 3, 1], 7)

    assert sent(4, partial(over, ThreadTransport.duplicate), hosts) == [(24, 0)] * 4
    assert sent(4, partial(over, halves), hosts) == [(8, 0)] * 4
    assert sent(4, partial(over, home), hosts) == [(0, 8)] * 4
    assert sent(4, partial(over, order), hosts) == [(0, 24), (24, 0), (24, 0), (0, 24)]


def test_pairs_count_messages_and_no_agreements() -> None:
    """Rank 2 is on another host than ranks 0 and 1. Only the exchange and the message count."""

    def work(transport: ThreadTransport) -> None:
        if transport.rank == 1:
            return
        pair = PairTransport(transport.aside(), 2 - transport.rank, transport.tally)
        maximum = pair.maximum(5)
        maximum.start([1] * 5)
        while not maximum.test():
            pass
        pair.allgather_object("text")
        assert transport.tally.sent.counts == [0, 0]
        pair.exchange(np.ones(2), 1 - pair.rank, np.ones(2), 1 - pair.rank)
        if pair.rank == 0:
            pair.send(np.ones(1), 1)
        else:
            pair.receive(np.ones(1), 0)

    assert sent(3, work, [[0, 1], [2]]) == [(24, 0), (0, 0), (16, 0)]
    assert sent(3, work) == [(0, 24), (0, 0), (0, 16)]


def test_messages_of_a_process_set() -> None:
    """Messages on pair lanes count, and their roll calls do not."""

    def work(transport: ThreadTransport) -> None:
        groups: list[Group] = []

        def family() -> list[Lane]:
            return [lane for group in groups for lane in (*group.lanes, *group.post.lanes.values())]

        group = Group((0, 1), transport.duplicate(), Place(2, False), (), family)
        groups.append(group)
        pair = group.post.lane(1 - transport.rank).transport
        array = np.ones(3)
        pair.exchange(array, 1 - transport.rank, array.copy(), 1 - transport.rank)
        leave([group])

    assert sent(2, work, [[0], [1]]) == [(24, 0)] * 2


class Silent:
    """Reads letters."""

    def receive(self, mailbox: Mailbox, letter: Letter) -> None:
        """Drop it."""

    def before_waiting(self) -> None:
        """Nobody waits for this rank."""


def test_letters_count_with_their_headers() -> None:
    """A rank sends one letter with a body of 24 bytes, and each rank says at the end that it leaves."""

    def work(transport: ThreadTransport) -> None:
        group = Group((0, 1), transport, Place(2, False), (), lambda: [group.eager])
        mailbox = group.new_mailbox("letters", Silent())
        if transport.rank == 0:
            mailbox.post(1, Letter(FIRST_KIND, body=np.ones(3)))
            mailbox.post(0, Letter(FIRST_KIND, body=np.ones(300)))  # to itself
        group.close_mailbox(mailbox)
        leave([group])

    assert HEADER.size == 64
    assert sent(2, work, [[0], [1]]) == [(64 + 24 + 64, 0), (64, 0)]


def test_compressed_columns_count_what_they_report() -> None:
    def work(transport: ThreadTransport) -> None:
        column = Column(transport)
        column.gather(np.ones(5))
        column.sum(np.ones(100))
        assert column.sent_bytes == transport.tally.sent.network == 40 + 800

    assert sent(2, work, [[0], [1]]) == [(840, 0)] * 2


@pytest.mark.parametrize("aware", [True, False], ids=["direct", "staged"])
@pytest.mark.parametrize("way", ["ring", "shared"])
def test_arrays_on_gpus(way: str, aware: bool) -> None:
    """Pieces of an array add up to the array: 2n(p-1)/p bytes for each of 3 ranks, with 4 lines per rank."""

    def rank_main(lane: Lane) -> list[int]:
        summed(lane, produced(lane, 3 * 64))
        return lane.transport.tally.sent.counts

    assert on_lanes(3, way, aware, rank_main) == [[0, 2 * 2 * 4 * LINE]] * 3


# The numbers


def test_a_rank_alone_sends_nothing() -> None:
    transport = alone()
    reduce(Place(1, True), np.ones(100), transport)
    movement.allgather(transport, [np.ones(100)])
    movement.broadcast(transport, np.ones(100), 0)
    assert transport.tally.sent.counts == [0, 0]


def test_threads_lose_no_counts() -> None:
    """4 threads that add 50,000 times, and that Python switches as often as it can, count 200,000 messages."""
    counts, before = SentBytes(), sys.getswitchinterval()
    tally = Tally(counts, [1])

    def add() -> None:
        for _ in range(25_000):
            tally.to(0, 3)
            tally.to(1, 5)
            tally.in_memory(2)

    threads = [threading.Thread(target=add) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert (counts.network, counts.memory) == (300_000, 700_000)
