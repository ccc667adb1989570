"""The hierarchical all-reduce on threads as hosts: right sums, equal bits, and the bytes between hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hvdlite.algorithms import Place, hierarchical, prepared, prepared_in_arena
from hvdlite.algorithms.choice import FOLDED_STEP_BYTES, STEP_BYTES, across, choose
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array, bfloat16
from hvdlite.memory.workspace import NETWORK_STAGING_BYTES, Workspace
from hvdlite.transports import Transport
from hvdlite.transports.threads import ThreadTransport, run_ranks
from hvdlite.transports.two_levels import split

LAYOUTS = [(1, 1), (2, 2), (3, 1), (1, 4), (2, 3, 1), (2, 2, 2), (4, 4), (1, 1, 1, 1, 1)]


def hosts_of(layout: tuple[int, ...], order: str) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host: 'block' fills one host after another, 'cyclic' takes the hosts in turns."""
    if order == "block":
        starts = np.cumsum([0, *layout])
        return tuple(tuple(range(start, start + count)) for start, count in zip(starts, layout, strict=False))
    found: list[list[int]] = [[] for _ in layout]
    left = list(layout)
    for rank in range(sum(layout)):
        host = max(range(len(layout)), key=lambda h: (left[h] == max(left), -h))
        found[host].append(rank)
        left[host] -= 1
    return tuple(map(tuple, found))


def reduced(
    layout: tuple[int, ...], order: str, arrays: Sequence[Array], how: Reduction, in_arena: bool
) -> list[Array]:
    """Every rank's result of an all-reduce on these hosts."""
    place = Place(sum(layout), True, "hierarchical", hosts_of(layout, order))

    def main(transport: ThreadTransport) -> Array:
        workspace, buffer = Workspace(), arrays[transport.rank].copy()
        assert choose(place, buffer.nbytes, buffer.dtype, in_arena) == "hierarchical"
        if in_arena:
            levels = workspace.levels(transport, place.hosts)
            run = prepared_in_arena(transport, workspace, place, levels.local.allgather_object(buffer), how)
            transport.barrier()  # the roll call's part
        else:
            run = prepared(transport, workspace, place, buffer, how)
        run()
        return buffer

    return run_ranks(sum(layout), main)


@pytest.mark.parametrize("in_arena", [True, False])
@pytest.mark.parametrize("order", ["block", "cyclic"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_are_right_on_every_layout(layout: tuple[int, ...], order: str, in_arena: bool) -> None:
    """p ranks with r + i give p(p-1)/2 + p i."""
    size = sum(layout)
    for length in (0, 1, size - 1, size + 1, 1000):
        arrays = [np.arange(length, dtype=np.float32) + rank for rank in range(size)]
        expected = size * (size - 1) / 2 + size * np.arange(length, dtype=np.float32)
        for result in reduced(layout, order, arrays, Reduction(), in_arena):
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float64, np.int32])
def test_all_ranks_end_with_the_same_bits(dtype: Any) -> None:
    """Random averages with scaling are within (p + h) roundings of half a unit of the largest partial sum."""
    rng = np.random.default_rng(0)
    exact = [rng.integers(-8, 8, 999) if dtype is np.int32 else rng.uniform(-8, 8, 999) for _ in range(6)]
    arrays = [array.astype(dtype) for array in exact]
    results = reduced((2, 3, 1), "block", arrays, Reduction("sum", before=0.5, after=2.0, divisor=6), True)
    assert len({result.tobytes() for result in results}) == 1
    if dtype is not np.int32:
        wanted = sum(array.astype(np.float64) for array in arrays) / 6
        unit = 2.0 ** -{np.float16: 11, bfloat16: 8, np.float64: 53}[dtype]
        assert np.max(np.abs(results[0].astype(np.float64) - wanted)) <= 9 * unit * 8 * 6 / 6


def test_a_buffer_longer_than_the_staging_goes_through_in_pieces() -> None:
    length = NETWORK_STAGING_BYTES // 8 + 5
    arrays = [np.full(length, rank + 1, np.float64) for rank in range(3)]
    for result in reduced((2, 1), "block", arrays, Reduction("max"), in_arena=False):
        assert (result == 3).all()


def test_drivers_are_as_many_as_the_smallest_host_has_ranks() -> None:
    def main(transport: ThreadTransport) -> tuple[int, int | None, int]:
        levels = split(transport, ((0, 1, 2), (3, 4)))
        return levels.local.size, levels.cross.size if levels.cross else None, levels.drivers

    assert run_ranks(5, main) == [(3, 2, 2), (3, 2, 2), (3, None, 2), (2, 2, 2), (2, 2, 2)]


@pytest.mark.parametrize("layout", [(2, 2), (2, 2, 2), (4, 4)])
def test_no_more_bytes_leave_a_host_than_must(layout: tuple[int, ...]) -> None:
    """A host sends 2S(h-1)/h bytes for S bytes. Messages between ranks of different hosts are counted."""
    length, hosts = 4 * 960 * 1024, len(layout)
    place = Place(sum(layout), True, "auto", hosts_of(layout, "block"))
    sent: list[list[int]] = [[] for _ in layout]

    def main(transport: ThreadTransport) -> None:
        workspace, buffer = Workspace(), np.ones(length, np.float32)
        levels = workspace.levels(transport, place.hosts)
        peers = levels.local.allgather_object(buffer)
        home = next(host for host, ranks in enumerate(place.hosts) if transport.rank in ranks)
        exchange = levels.cross.exchange

        def counted(send: Array, dest: int, receive: Array, source: int) -> None:
            sent[home].append(send.nbytes)
            exchange(send, dest, receive, source)

        levels.cross.exchange = counted
        transport.barrier()
        prepared_in_arena(transport, workspace, place, peers, Reduction())()

    run_ranks(sum(layout), main)
    assert all(abs(sum(host) - 2 * 4 * length * (hosts - 1) / hosts) <= 64 for host in sent)


def test_the_choice() -> None:
    hosts = ((0, 1), (2, 3))
    network, flat = Place(4, True, "auto", hosts), Place(4, False, "auto", ((0,), (1,), (2,), (3,)))
    f4 = np.dtype(np.float32)
    assert choose(network, 100, f4, in_arena=False) == "doubling"
    assert choose(network, 100, f4, in_arena=True) == "hierarchical"
    assert choose(network, 1 << 28, f4, in_arena=False) == "hierarchical"
    assert choose(flat, 4 * STEP_BYTES - 4, f4, in_arena=False) == "halving_doubling"
    assert choose(flat, 4 * STEP_BYTES, f4, in_arena=False) == "ring"
    assert across(3, 3 * FOLDED_STEP_BYTES, f4) == "ring"  # with folding, three hosts would send all bytes twice more
    assert across(3, 3 * FOLDED_STEP_BYTES - 4, f4) == "halving_doubling"
    assert choose(Place(4, True, "shared", hosts), 1 << 20, f4, in_arena=True) == "hierarchical"
    assert choose(Place(4, True, "hierarchical"), 1 << 20, f4, in_arena=True) == "shared"
    assert choose(Place(4, True), 1 << 28, f4, in_arena=False) == "shared"
    assert choose(Place(4, False), 1 << 28, f4, in_arena=False) == "ring"


@pytest.mark.parametrize("borders", [(0, 0, 1000), (0, 1000, 1000), (0, 7, 1000), (0, 640, 1000)])
def test_drivers_get_the_parts_between_given_borders(borders: tuple[int, ...]) -> None:
    """Two hosts of two and three ranks. Each driver's exchange sees its host's sum of its part, and fills in results."""

    def main(transport: ThreadTransport) -> tuple[Array, list[Array]]:
        levels = split(transport, ((0, 1), (2, 3, 4)))
        buffer, seen = np.arange(1000, dtype=np.float32) + transport.rank, list[Array]()

        def between(cross: Transport, values: Array, how: Reduction) -> Callable[[], None]:
            assert cross is levels.cross and how == Reduction(divisor=5)

            def exchange() -> None:
                seen.append(values.copy())
                values[...] = -np.arange(borders[levels.local.rank], borders[levels.local.rank + 1])

            return exchange

        peers = levels.local.allgather_object(buffer)
        run = hierarchical.prepared(levels, peers, Reduction(divisor=5), between, borders)
        transport.barrier()
        run()
        return buffer, seen

    found = run_ranks(5, main)
    for rank, (buffer, seen) in enumerate(found):
        np.testing.assert_array_equal(buffer, -np.arange(1000.0))
        driver, count, addend = (rank, 2, 1) if rank < 2 else (rank - 2, 3, 9)
        if driver == 2:
            assert not seen
        else:
            np.testing.assert_array_equal(seen[0], count * np.arange(*borders[driver : driver + 2]) + addend)
