"""The job's count of sent bytes over MPI: in shared memory and by messages, on all lanes, process sets and mailboxes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import hvdlite as hvd
from hvdlite.job import runtime
from hvdlite.lanes.mailbox import FIRST_KIND, HEADER, Letter, Mailbox
from hvdlite.transports.mpi import MpiTransport
from hvdlite.transports.sent_bytes import SentBytes, Tally
from tests.parallel.common import at_sizes, restart

LINE = 64


def counted(work: Callable[[], object]) -> tuple[int, int]:
    """The bytes to other hosts and to this host that `work` has added."""
    sent = runtime.current().observers.meter.sent
    before = sent.network, sent.memory
    work()
    return sent.network - before[0], sent.memory - before[1]


def check_a_job_begins_at_0() -> None:
    restart()
    sent = runtime.current().observers.meter.sent
    assert (sent.network, sent.memory) == (0, 0)
    hvd.barrier()
    assert (sent.network, sent.memory) == (0, 0)


def check_allreduces_by_every_way() -> None:
    """In memory and in a ring each rank sends 2n(p-1)/p bytes, if parts are equal; MPI's own counts as a ring."""
    p = hvd.size()
    for algorithm in ("auto", "shared", "ring", "native"):
        restart(ALGORITHM=algorithm)
        hvd.allreduce(np.ones(1))
        for lines in (1, 3, 2000):
            x = np.ones(8 * lines * p)
            found = counted(lambda x=x: [hvd.allreduce(x, op=hvd.Sum) for _ in range(3)])  # type: ignore[misc]
            doubling = algorithm == "auto" and lines < 2000  # short messages take another way on several ranks
            if not doubling or p == 2:
                assert found == (0, 3 * 2 * (p - 1) * lines * LINE), (algorithm, lines, found)
    restart()


def check_what_moves() -> None:
    """Each rank sends an all-gather's rows on, and an all-to-all's rows to the others. Rows of a reduce-scatter too."""
    p = hvd.size()
    for rows in (0, 1, 5000):
        x = np.ones((rows, 2))
        assert counted(lambda x=x: hvd.allgather(x)) == (0, 16 * rows * (p - 1))  # type: ignore[misc]
        x = np.ones((rows * p, 2))
        assert counted(lambda x=x: hvd.alltoall(x)) == (0, 16 * rows * (p - 1))  # type: ignore[misc]
        assert counted(lambda x=x: hvd.reducescatter(x)) == (0, 16 * rows * (p - 1))  # type: ignore[misc]
    for root in range(p):
        found = counted(lambda root=root: hvd.broadcast(np.ones(100), root))  # type: ignore[misc]
        everyone = hvd.allgather_object(found)
        assert [sum(kind) for kind in zip(*everyone, strict=True)] == [0, 800 * (p - 1)]
    assert counted(lambda: [hvd.barrier() for _ in range(5)]) == (0, 0)


@at_sizes(2, 3, 4)
def check_messages_of_two_ranks() -> None:
    """A message counts with its label, on the sender only. The roll calls of the two do not count."""
    r = hvd.rank()

    def message(length: int) -> tuple[int, int]:
        def work() -> None:
            if r == 0:
                hvd.send(np.ones(length), 1)
            elif r == 1:
                assert hvd.recv(0).shape == (length,)

        return counted(work)

    _, label = message(0)
    assert message(1000) == (0, label + 8000 if r == 0 else 0)
    assert 0 < label < 1024 if r == 0 else label == 0


@at_sizes(2, 3, 4)
def check_lanes_sets_and_mailboxes_share_one_count() -> None:
    """A set without rank 0 counts for its members. A letter counts with its header."""
    p, r = hvd.size(), hvd.rank()
    restart(DYNAMIC_PROCESS_SETS="1")
    several = hvd.add_process_set(range(1, p)) if p > 2 else None
    if several is not None:
        x = np.ones(8 * 1000 * (p - 1))
        found = counted(lambda: r and hvd.allreduce(x, op=hvd.Sum, process_set=several))
        assert found == (0, 2 * (p - 2) * 1000 * LINE if r else 0)
    group = runtime.current().everyone
    lane = group.new_lane("other", check_lanes_sets_and_mailboxes_share_one_count)
    for transport in (lane.transport, group.transport):
        assert transport.tally.sent is runtime.current().observers.meter.sent and transport.tally.near == set(range(p))
    mailbox = group.new_mailbox("letters", Silent())

    def letter() -> None:
        if r == 0:
            mailbox.post(1, Letter(FIRST_KIND, body=np.ones(10)))
        hvd.barrier()

    assert counted(letter) == (0, HEADER.size + 80 if r == 0 else 0)
    group.close_mailbox(mailbox)
    restart()


class Silent:
    """Drops letters."""

    def receive(self, mailbox: Mailbox, letter: Letter) -> None:
        """Read nothing."""

    def before_waiting(self) -> None:
        """Nobody waits for this rank."""


@at_sizes(2, 3, 4)
def check_each_call_of_mpi_counts_once() -> None:
    """Also in several pieces, and with persistent requests. Ranks that are alone on their hosts use the network."""
    base = runtime.current().everyone.transport
    assert isinstance(base, MpiTransport)
    p, r = hvd.size(), hvd.rank()
    following, previous = (r + 1) % p, (r - 1) % p
    for near, piece in (([r], 1 << 20), ([r], 100), (range(p), 1 << 20), (range(p), 100)):
        counts = SentBytes()
        transport = MpiTransport(base.comm.Dup(), piece, tally=Tally(counts, near))
        mine, theirs = np.full(30, r), np.empty(30, int)
        for _ in range(2):
            transport.exchange(mine, following, theirs, previous)
        transport.start_exchange(mine, following, theirs, previous).wait()
        run = transport.prepared_exchange(mine, following, theirs, previous)
        for _ in range(4):
            run()
        message = transport.start_message(mine, following, 3)
        arriving = transport.await_message(theirs, previous, 3)
        while not (message.test() & arriving.test()):
            pass
        for turn in range(2):
            if r % 2 == turn and r + 1 < p:
                transport.send(mine, r + 1)
            if r % 2 != turn and r > 0:
                transport.receive(theirs, r - 1)
        transport.barrier()
        transport.allgather_object(r)
        total = 240 * (8 + (r + 1 < p))
        assert counts.counts == ([0, total] if len(near) > 1 else [total, 0]), (near, piece, counts.counts)
        transport.close()


@at_sizes(3, 4)
def check_transports_of_some_ranks_know_their_hosts() -> None:
    """Even ranks are on one host, and odd ranks on another."""
    base = runtime.current().everyone.transport
    assert isinstance(base, MpiTransport)
    p, r = hvd.size(), hvd.rank()
    tally = Tally(SentBytes(), range(r % 2, p, 2))
    transport = MpiTransport(base.comm.Dup(), tally=tally)
    home, halves, order = transport.split(r % 2), transport.split(r // 2), transport.some(range(p - 1, -1, -1), 5)
    assert home is not None and home.tally.near == set(range(home.size))
    assert halves is not None and halves.tally.near == {halves.rank}
    assert order.tally.near == {p - 1 - each for each in range(r % 2, p, 2)}
    assert transport.duplicate().tally is tally
    for each in (home, halves, order):
        assert each.tally.sent is tally.sent
    assert transport.aside().tally.sent is not tally.sent
