"""Exchanges and additions in chunks: while one chunk is added, the next one is under way.

    messages   | 0 | 1 | 2 | 3 |            chunk k arrives in slot k % 3 of scratch; its message starts when the add of
    adds           | 0 | 1 | 2 | 3 |        chunk k-3 is done, which read that slot

`ring` and `direct` reduce-scatter with it, and `halving_doubling` halves with it. Arrays up to 4 MiB are not cut.

On a GPU the lane's stream adds, and MPI ignores streams. After the mark that follows each add, its chunk may be sent
and its slot overwritten. So the lane sends and receives while the GPU adds, and never waits for the whole stream. On
the host marks do nothing, and chunks are added while they are in the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from hvdlite.algorithms.reduction import Combiner, Reduction
from hvdlite.arrays import Array, is_host, per_line
from hvdlite.gpu_streams import issued
from hvdlite.transports import Exchange, Transport

WHOLE, CHUNK, GPU_CHUNK = 4 << 20, 1 << 20, 64 << 20
"""Bytes. Arrays longer than WHOLE travel in chunks (MEASURED.md, "Details"). On a GPU each chunk costs about 0.1 ms,
since kernels wait for each other.
"""
SLOTS = 3  # one arrives, the next one is requested, and one is being added


class Step(NamedTuple):
    """Send `outgoing` to `dest`, and combine `mine` with the array that `source` sends.

    Both arrays are flat and as long as their counterparts on the other rank. For 16-bit floats `mine` is float32.
    """

    outgoing: Array
    dest: int
    mine: Array
    source: int


def prepared_steps(
    transport: Transport, steps: Sequence[Step], scratch: Array, reduction: Reduction
) -> Callable[[], None]:
    """A function that runs the steps in order, for many calls. 1 message each way per step and chunk.

    A step may send the array that the previous step combined, but no array of an earlier step. On a GPU, each call
    begins and ends in the order of the current stream.

    Args:
        transport: The ranks that take part.
        steps: The longest array among them is equally long on all ranks.
        scratch: `scratch_length` of the longest array, same dtype.
        reduction: The operation.
    """
    longest = max((max(step.outgoing.size, step.mine.size) for step in steps), default=0)
    length = chunk_length(longest, scratch)
    if length < longest:
        chunks = in_chunks(steps, longest, length)
        slots = [scratch[start : start + length] for start in range(0, min(longest, SLOTS * length), length)]
        return partial(exchange_chunks, transport, chunks, slots, reduction.combiner(scratch))
    arriving = [scratch[: step.mine.size] for step in steps]
    done = [
        (transport.prepared_exchange(outgoing, dest, incoming, source), reduction.prepared_combine(mine, incoming))
        for (outgoing, dest, mine, source), incoming in zip(steps, arriving, strict=True)
    ]

    def exchange_whole() -> None:
        for exchange, combine in done:
            exchange()
            combine()

    return exchange_whole


def exchange_chunks(transport: Transport, chunks: Sequence[Step], slots: Sequence[Array], combine: Combiner) -> None:
    """Exchange and add as in the module's picture. slots: parts of scratch, each as long as the longest chunk."""
    added = [issued(slots[0])] * len(slots)  # for each slot a mark after the add that read it last
    messages: deque[Exchange] = deque()

    def arriving(number: int) -> Array:
        room: Array = slots[number % len(slots)][: chunks[number].mine.size]
        return room

    def add(number: int) -> None:
        messages.popleft().wait()
        combine(chunks[number].mine, arriving(number))
        added[number % len(slots)] = issued(slots[0])

    for number, (outgoing, dest, _, source) in enumerate(chunks):
        before = added[number % len(slots)]
        messages.append(transport.start_exchange(outgoing, dest, arriving(number), source, before))
        if number > 0:
            add(number - 1)
    add(len(chunks) - 1)


def chunk_length(longest: int, like: Array) -> int:
    """The number of elements of like's dtype in a chunk: an equal part of the longest array, in whole cache lines.

    Arrays of up to WHOLE bytes are one chunk.
    """
    nbytes: int = longest * like.itemsize
    if nbytes <= WHOLE:
        return longest
    count, line = -(-nbytes // (CHUNK if is_host(like) else GPU_CHUNK)), per_line(like)
    return -(-longest // (count * line)) * line


def scratch_length(longest: int, like: Array) -> int:
    """The number of elements of scratch that `prepared_steps` needs."""
    return min(longest, SLOTS * chunk_length(longest, like))


def in_chunks(steps: Sequence[Step], longest: int, length: int) -> list[Step]:
    """Cut all steps into the same number of chunks. The last chunks of a step may be shorter, or empty.

    So the chunk that a step sends was combined one step ago, and a step has at least as many chunks as there are slots.
    """
    starts = range(0, longest, length)
    return [
        Step(outgoing[start : start + length], dest, mine[start : start + length], source)
        for outgoing, dest, mine, source in steps
        for start in starts
    ]
