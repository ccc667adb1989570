"""Exchange and combine in chunks: while one is added, the next is under way.

    messages   | 0 | 1 | 2 | 3 |            chunk k arrives in slot k % 3 of scratch; its message starts when the add of
    adds           | 0 | 1 | 2 | 3 |        chunk k-3 is done, which read that slot

On a GPU adds run on the lane's stream, which MPI knows nothing of. A mark behind each of them says when the chunk that
it finished may be sent, and the slot that it read be overwritten. Nobody waits for the stream itself: the lane passes
messages on while the GPU adds. On the host marks are nothing, and chunks are added while they are in the cache.
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
"""Bytes. Longer arrays than WHOLE travel in chunks. Measured on 2 ranks of one host, beside a ring of whole parts:
16 MiB 0.83 of its time, 32 MiB 0.84, 64 MiB 0.77, 256 MiB 0.75; at 4 MiB it would be 1.1. On 4 ranks 0.83 at 64 MiB.
Between two hosts over TCP, where the kernel sends while chunks are added, 16 and 64 MiB took 0.93 and 0.90 at
10 Gbit/s, 0.99 and 0.98 at 1 Gbit/s. On a GPU each chunk costs 0.1 ms, in kernels that wait for each other: 2 ranks on
one H200 took 8.8 ms for 256 MiB in chunks of 4 MiB, 2.5 in 32, 1.8 in 64 or whole."""
SLOTS = 3  # for what arrives, for what is next to be waited for, and for what is being added


class Step(NamedTuple):
    """`outgoing` is sent to dest, and `mine` is combined with what source sends: flat, as long as the other rank's
    counterparts. Of 16-bit floats `mine` is float32."""

    outgoing: Array
    dest: int
    mine: Array
    source: int



def prepared_steps(
    transport: Transport, steps: Sequence[Step], scratch: Array, reduction: Reduction
) -> Callable[[], None]:
    """What does, in each step: send outgoing to dest, receive from source, and combine that with mine, in place. To be
    called many times: between short messages Python would take as long as they do.

    1 message each way per step and chunk. What a step sends may be what the step before combined, but no earlier one.
    The longest array among the steps is equally long on all ranks. scratch: `scratch_length` of it, same dtype; on a
    GPU it may be used, at each call, when the current stream has come to where it is then, and so may the results.
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


def exchange_chunks(
    transport: Transport, chunks: Sequence[Step], slots: Sequence[Array], combine: Combiner
) -> None:
    """The picture above. slots: of scratch, each as long as the longest chunk that arrives there."""
    added = [issued(slots[0])] * len(slots)  # by slot: behind what read it last
    messages: deque[Exchange] = deque()

    def arriving(number: int) -> Array:
        return slots[number % len(slots)][: chunks[number].mine.size]

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
    """How many elements of like's dtype travel at a time: an equal part of the longest array, in whole cache lines, or
    all of it."""
    nbytes: int = longest * like.itemsize
    if nbytes <= WHOLE:
        return longest
    count, line = -(-nbytes // (CHUNK if is_host(like) else GPU_CHUNK)), per_line(like)
    return -(-longest // (count * line)) * line


def scratch_length(longest: int, like: Array) -> int:
    """How many elements of scratch are enough."""
    return min(longest, SLOTS * chunk_length(longest, like))


def in_chunks(steps: Sequence[Step], longest: int, length: int) -> list[Step]:
    """Each step in equally many, the last ones shorter or empty. So what is sent was combined, if at all, as many
    chunks ago as a step has, which are no fewer than the slots."""
    starts = range(0, longest, length)
    return [
        Step(outgoing[start : start + length], dest, mine[start : start + length], source)
        for outgoing, dest, mine, source in steps
        for start in starts
    ]
