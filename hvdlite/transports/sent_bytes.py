"""Counts the bytes that this rank sends to other ranks, for a summary at the end of a job.

A job has one `SentBytes`, which all its transports share. Each transport has a `Tally`, which knows its ranks on this
host. Two ways of sending count:

    messages         The bytes of an array that this rank sends. A transport counts each message when it begins.
    shared memory    The bytes that other ranks read from this rank's memory, and the bytes that this rank writes to
                     theirs. Algorithms count these by their price, each time they run. A copy that a rank makes in its
                     own memory does not count, and no byte counts on two ranks.

So the two-shot of n bytes on p ranks counts 2n(p-1)/p on each rank, as a ring by messages does. All-reduces inside MPI
or NCCL are counted as such a ring, from each rank to the next one. Not counted: agreements (roll calls, barriers,
`allgather_object`), the stall watch's letters, and what a network adds (headers, repetitions).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class SentBytes:
    """The bytes that this rank has sent since the job began.

    Attributes:
        counts: The bytes to ranks on other hosts, and those to ranks on this host. All threads add to them, without a
            lock: under the GIL, CPython runs no other thread in the middle of `counts[place] += nbytes`.
    """

    def __init__(self) -> None:
        self.counts = [0, 0]

    @property
    def network(self) -> int:
        """The bytes to ranks on other hosts."""
        return self.counts[0]

    @property
    def memory(self) -> int:
        """The bytes to ranks on this host, by messages or in shared memory."""
        return self.counts[1]


class Tally:
    """Counts what one transport sends. A count takes about 0.1 us.

    Attributes:
        sent: The job's numbers.
        near: The transport's ranks on this host.
    """

    def __init__(self, sent: SentBytes, near: Iterable[int]) -> None:
        self.sent, self.near = sent, frozenset(near)

    def to(self, dest: int, nbytes: int) -> None:
        """Count a message to rank `dest`."""
        self.sent.counts[dest in self.near] += nbytes

    def in_memory(self, nbytes: int) -> None:
        """Count bytes that cross in shared memory."""
        self.sent.counts[1] += nbytes

    def of(self, ranks: Sequence[int]) -> Tally:
        """The tally of a transport of these ranks, in this order, for the same job."""
        return Tally(self.sent, (new for new, old in enumerate(ranks) if old in self.near))
