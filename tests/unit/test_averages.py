"""An average that fits its dtype is right even if the sum does not fit: for all dtypes, algorithms, lengths and hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hvdlite.algorithms import Place, pipeline, prepared, prepared_in_arena, wide
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array
from hvdlite.lanes.workplace import HostWorkplace
from hvdlite.memory.workspace import Workspace
from hvdlite.ops import reductions
from hvdlite.transports.threads import ThreadTransport, run_ranks
from tests.averages import FLOATS, INTEGERS, average, given
from tests.by_messages import BY_MESSAGES

SIZES = (2, 3, 5)
WAYS = ("auto", *BY_MESSAGES, "shared", "in an arena", "native")
LAYOUTS = [(2, 2), pytest.param((3, 3), marks=pytest.mark.full), (2, 1), (3, 1, 1)]


def lengths(size: int) -> tuple[int, ...]:
    return (0, 1, size - 1, size + 1, 17, 289, 1000, 4913)


def reduced(arrays: Sequence[Array], way: str, how: Reduction, hosts: tuple[tuple[int, ...], ...] = ()) -> list[Array]:
    """Every rank's result. way: the forced algorithm, or 'in an arena', for buffers that a host's ranks share."""
    in_arena = way == "in an arena"
    place = Place(len(arrays), in_arena or bool(hosts) or way == "shared", "auto" if in_arena else way, hosts)

    def main(transport: ThreadTransport) -> Array:
        def native_allreduce(array: Array, operation: str) -> None:
            assert array.dtype.itemsize >= 4 and operation == "sum"
            array[:] = sum(transport.allgather_object(array.copy()))

        transport.native_allreduce = native_allreduce  # type: ignore[assignment]
        workspace, buffer = Workspace(), arrays[transport.rank].copy()
        if in_arena:
            buffers = workspace.levels(transport, hosts).local.allgather_object(buffer)
            run = prepared_in_arena(transport, workspace, place, buffers, how)
        else:
            run = prepared(transport, workspace, place, buffer, how)
        for _ in range(2):  # the second time as the first
            buffer[:] = arrays[transport.rank]
            transport.barrier()
            run()
            transport.barrier()
        return buffer

    return run_ranks(len(arrays), main)


def hosts_of(layout: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    ranks = iter(range(sum(layout)))
    return tuple(tuple(next(ranks) for _ in range(count)) for count in layout)


def require(results: list[Array], expected: Array, what: object) -> None:
    assert len({result.tobytes() for result in results}) == 1, what
    assert results[0].dtype == expected.dtype
    np.testing.assert_array_equal(results[0], expected, err_msg=str(what))


def require_near(results: list[Array], arrays: list[Array], hosts: int, what: object) -> None:
    """Check that results are within half a unit of each host's average and of the whole average, rounded once each."""
    assert len({result.tobytes() for result in results}) == 1, what
    dtype, wanted = arrays[0].dtype, np.mean([np.asarray(array, np.float64) for array in arrays], axis=0)
    unit = 2.0 ** (-11 if dtype == np.float16 else -8)
    largest = np.max([np.abs(array.astype(np.float64)) for array in arrays], axis=0, initial=0)
    bound = (hosts + 1) * (unit * largest + 2.0**-24) * 1.01
    assert (np.abs(results[0].astype(np.float64) - wanted) <= bound).all(), what


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_the_average_is_right_by_every_algorithm(way: str, dtype: np.dtype[Any]) -> None:
    for size in SIZES:
        for length in lengths(size):
            arrays = given(size, length, dtype)
            require(reduced(arrays, way, Reduction(divisor=size)), average(arrays, size), (size, length))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("way", ["auto", "hierarchical", "in an arena", "ring"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_average_is_right_on_several_hosts(layout: tuple[int, ...], way: str, dtype: np.dtype[Any]) -> None:
    """16-bit floats are rounded once for each host, and once at the end."""
    size, hosts = sum(layout), hosts_of(layout)
    for length in lengths(size):
        arrays = given(size, length, dtype)
        results = reduced(arrays, way, Reduction(divisor=size), hosts)
        if dtype.kind in "iu" or way == "ring":
            require(results, average(arrays, size), (size, length))
        else:
            require_near(results, arrays, len(hosts), (size, length))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", [(3,), (5,), (2, 2), (3, 3), (1, 1, 1)], ids=str)
def test_the_average_of_equal_arrays_is_the_array(layout: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    size, hosts = sum(layout), hosts_of(layout) if len(layout) > 1 else ()
    for way in ("auto", "in an arena", "hierarchical" if hosts else "doubling"):
        for length in (*lengths(size), 400_000):
            array = given(1, length, dtype)[0]
            require(reduced([array] * size, way, Reduction(divisor=size), hosts), array, (way, length))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_sums_of_16_bits_are_rounded_once(way: str, dtype: np.dtype[Any]) -> None:
    for size in SIZES:
        for length in lengths(size):
            arrays = [array / 8 for array in given(size, length, dtype)]
            require(reduced(arrays, way, Reduction()), average(arrays, 1), (size, length))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [np.float16, np.int8, np.uint16, np.int64])
def test_factors_apply_to_the_wide_numbers(way: str, dtype: type) -> None:
    """Numbers multiplied by 2 before the sum and by 1/2 after it do not overflow in between.

    With 64 bits that holds if the product fits.
    """
    most = 65504 if dtype is np.float16 else 2**61 if dtype is np.int64 else np.iinfo(dtype).max  # exact in double
    for size in SIZES:
        arrays: list[Array] = [np.full(100, most, dtype) for _ in range(size)]
        require(reduced(arrays, way, Reduction("sum", 2.0, 0.5, size)), arrays[0], size)
        if dtype is not np.int64:
            require(reduced(arrays, way, Reduction("sum", 1.0, 1.0 / 8)), average(arrays, 8), size)


@pytest.mark.parametrize("layout", [(2, 2), (2, 1)], ids=str)
def test_factors_on_several_hosts(layout: tuple[int, ...]) -> None:
    size = sum(layout)
    arrays = [np.full(9000, 60000, np.float16) for _ in range(size)]
    for before, after in ((2.0, 0.5), (1 / 16, 16.0)):
        for way in ("auto", "in an arena"):
            how = Reduction("sum", before, after, size)
            require(reduced(arrays, way, how, hosts_of(layout)), arrays[0], (before, way))


@pytest.mark.filterwarnings("ignore:overflow")
def test_what_a_sum_cannot_hold_is_numpys() -> None:
    arrays = [np.full(5, 100, np.int8)] * 2
    require(reduced(arrays, "auto", Reduction()), np.full(5, -56, np.int8), "int8")
    halves = [np.full(5, 40000, np.float16)] * 2
    require(reduced(halves, "auto", Reduction()), np.full(5, np.inf, np.float16), "float16")


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("shares", [True, False])
def test_reduce_scatter_and_reduce(shares: bool, dtype: np.dtype[Any]) -> None:
    """There are as many rows as ranks, or more, fewer, none.

    Short rows travel by messages, long rows through memory.
    """
    for size in SIZES:
        for rows, columns in ((size, 5), (2 * size + 1, 17), (size - 1, 3), (0, 4), (40, 1000)):
            arrays = [array.reshape(rows, columns) for array in given(size, rows * columns, dtype)]
            flat = average([array.reshape(-1) for array in arrays], size).reshape(rows, columns)

            def main(transport: ThreadTransport, arrays: list[Array] = arrays, size: int = size) -> tuple[Array, Any]:
                lane, mine = HostWorkplace(transport, Place(size, shares), range(size)), arrays[transport.rank].copy()
                own = reductions.own_rows(lane, mine, Reduction(divisor=size))
                whole = reductions.whole_at(lane, mine, 1, Reduction(divisor=size))
                assert mine.tobytes() == arrays[transport.rank].tobytes()
                return own, whole

            found = run_ranks(size, main)
            np.testing.assert_array_equal(np.concatenate([own for own, _ in found]), flat)
            assert [whole is None for _, whole in found] == [rank != 1 for rank in range(size)]
            np.testing.assert_array_equal(found[1][1], flat)


def test_long_arrays_travel_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank sends 2S(p-1)/p bytes, as in a ring."""
    length = 30_000
    for size in SIZES:
        sent = [0] * size

        def main(transport: ThreadTransport, sent: list[int] = sent, size: int = size) -> None:
            exchange = transport.exchange

            def counted(send: Array, dest: int, receive: Array, source: int) -> None:
                sent[transport.rank] += send.nbytes
                exchange(send, dest, receive, source)

            monkeypatch.setattr(transport, "exchange", counted)
            buffer = np.ones(length, np.float16)
            prepared(transport, Workspace(), Place(size, False, "ring"), buffer, Reduction(divisor=size))()

        run_ranks(size, main)
        assert all(abs(each - 2 * 2 * length * (size - 1) / size) <= 256 for each in sent)


def test_long_arrays_are_exchanged_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "WHOLE", 256)
    monkeypatch.setattr(pipeline, "CHUNK", 128)
    monkeypatch.setattr(wide, "MOST_ELEMENTS", 100)
    for size in SIZES:
        for dtype in (np.dtype(np.float16), np.dtype(np.int8), np.dtype(np.int64)):
            for way in ("ring", "halving_doubling"):
                arrays = given(size, 4913, dtype)
                require(reduced(arrays, way, Reduction(divisor=size)), average(arrays, size), (size, dtype, way))
