"""Every algorithm with 1 to 9 ranks and odd lengths, on threads: right sums, and the same bits on every rank."""

from __future__ import annotations

import time
from timeit import repeat

import ml_dtypes
import numpy as np
import pytest

from hvdlite.algorithms import MESSAGES, by_messages, movement, pipeline, reduction, tree
from hvdlite.algorithms.reduction import Reduction, scaler
from hvdlite.algorithms.ring import longest_part, parts, same_part
from hvdlite.algorithms.shared import prepared
from hvdlite.algorithms.through_memory import prepared_allreduce
from hvdlite.arrays import LINE, on_boundary
from hvdlite.config import ALGORITHMS
from hvdlite.memory.workspace import Workspace
from hvdlite.transports.threads import ThreadTransport, run_ranks
from tests.by_messages import BY_MESSAGES

SIZES = range(1, 10)
NAMES = [*BY_MESSAGES, "shared", "at home"]
"""The algorithms that the setting has and that need no MPI; "at home" is `through_memory`."""
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int32", "int64", "uint8")
# half a unit in the last place, relative: the error of one rounding
EPSILON = {"float32": 2.0**-24, "float64": 2.0**-53, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def lengths(size: int) -> list[int]:
    """Lengths that leave ranks without a part, or that are not whole cache lines (64 bytes are 16 float32)."""
    return sorted({0, 1, size - 1, size, size + 1, 16 * size - 1, 16 * size, 16 * size + 1, 32 * size + 15, 1000})


def run(name: str, arrays: list[np.ndarray], reduction: Reduction) -> list[np.ndarray]:
    """Run the algorithm on copies of the arrays, one for each rank."""
    buffers, stages = [array.copy() for array in arrays], [np.full(4 * LINE, 7, np.uint8) for _ in arrays]

    def rank_main(transport: ThreadTransport) -> None:
        if name == "shared":
            transport.barrier()
            prepared(transport, buffers, reduction)()
        elif name == "at home":
            buffer = buffers[transport.rank]
            if buffer.size:
                two_shot = prepared_allreduce(transport, stages, buffer.size, buffer.dtype, reduction)
                two_shot(np.ones_like(buffer))
                two_shot(buffer)
        else:
            buffer = buffers[transport.rank]
            by_messages(name, transport, Workspace(), buffer, reduction)()

    run_ranks(len(arrays), rank_main)
    return buffers


def test_every_setting_is_an_algorithm() -> None:
    assert {*ALGORITHMS} == {*MESSAGES, "auto", "shared", "hierarchical"} - {"direct", "nccl", "adasum"}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_integers_sum_exactly(name: str, size: int) -> None:
    """p ranks with r + i give p(p-1)/2 + p i, in every dtype that can hold it."""
    for length in lengths(size):
        for dtype in ("float32", "int64", "float16"):
            arrays = [(np.arange(length) % 7 + rank).astype(dtype) for rank in range(size)]
            expected = (np.arange(length) % 7 * size + size * (size - 1) // 2).astype(dtype)
            for result in run(name, arrays, Reduction("sum")):
                np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_end_with_the_same_bits(name: str, dtype: str) -> None:
    """Averages of random numbers have the same bits on all ranks, and an error within that of the additions."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype) if dtype == "bfloat16" else dtype)
    for size in (2, 3, 5, 8):
        rng = np.random.default_rng(size)
        exact = [rng.uniform(-8, 8, 1000) for _ in range(size)]
        arrays = [np.abs(a).astype(kind) if kind.kind == "u" else a.astype(kind) for a in exact]
        results = run(name, arrays, Reduction("sum", divisor=size))
        assert len({result.tobytes() for result in results}) == 1
        total = sum(a.astype(np.float64) for a in arrays)
        if kind.kind in "iu":
            wrapped = sum((a for a in arrays[1:]), arrays[0])
            np.testing.assert_array_equal(results[0], np.trunc(wrapped / size).astype(kind))
        else:
            # size-1 additions and a scaling: each has an error of at most EPSILON times the largest partial sum
            bound = EPSILON[dtype] * 8 * size * (size + 1) / size
            assert np.max(np.abs(results[0].astype(np.float64) - total / size)) <= bound


@pytest.mark.parametrize("operation,expected", [("min", 2.0), ("max", 5.0), ("product", 120.0)])
@pytest.mark.parametrize("name", NAMES)
def test_other_operations(name: str, operation: str, expected: float) -> None:
    arrays = [np.full(5, 2.0 + rank, np.float32) for rank in range(4)]
    for result in run(name, arrays, Reduction(operation)):
        np.testing.assert_array_equal(result, np.float32(expected))


@pytest.mark.parametrize("operation", ["sum", "min", "max", "product"])
@pytest.mark.parametrize("name", NAMES)
def test_nan_on_one_rank_reaches_all(name: str, operation: str) -> None:
    for poisoned in range(3):
        arrays = [np.ones(4, np.float32) for _ in range(3)]
        arrays[poisoned][2] = np.nan
        for result in run(name, arrays, Reduction(operation)):
            assert np.isnan(result).tolist() == [False, False, True, False]


@pytest.mark.parametrize("name", NAMES)
def test_scaling_before_and_after(name: str) -> None:
    arrays = [np.full(3, 8.0, np.float32) for _ in range(2)]
    for result in run(name, arrays, Reduction("sum", before=0.25, after=3.0)):
        np.testing.assert_array_equal(result, np.float32(8 * 0.25 * 2 * 3))


def test_small_floats_are_summed_in_float32_by_the_two_shot() -> None:
    """1024 + 8 times 0.4: in float16 each 0.4 alone would be rounded away."""
    arrays = [np.array([1024.0], np.float16)] + [np.array([0.4], np.float16)] * 8
    assert run("shared", arrays, Reduction("sum"))[0][0] == np.float16(1024 + 8 * np.float32(np.float16(0.4)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
@pytest.mark.parametrize("before", [1.0, 0.5])
def test_a_two_shot_prepared_once_runs_many_times(dtype: str, before: float) -> None:
    """The second run has other numbers, and gives the sums of a new two-shot. The length does not divide evenly."""
    how = Reduction("sum", before, 1.0, 3)
    rounds = [[((np.arange(1000) * (rank + k)) % 61).astype(dtype) for rank in range(3)] for k in (1, 2)]
    buffers = [np.empty(1000, dtype) for _ in range(3)]

    def rank_main(transport: ThreadTransport) -> list[np.ndarray]:
        run_it, results = prepared(transport, buffers, how), []
        for arrays in rounds:
            buffers[transport.rank][:] = arrays[transport.rank]
            transport.barrier()
            run_it()
            results.append(buffers[transport.rank].copy())
            transport.barrier()
        return results

    for results in run_ranks(3, rank_main):
        for arrays, result in zip(rounds, results, strict=True):
            np.testing.assert_array_equal(result, run("shared", arrays, how)[0])
            np.testing.assert_allclose(result.astype(float), np.sum(arrays, 0) * before / 3, atol=1.0, rtol=1e-3)


@pytest.mark.parametrize(("dtype", "operation", "before"), [
    ("float32", "sum", 1.0), ("float64", "max", 1.0), ("float16", "sum", 1.0), ("bfloat16", "sum", 1.0), ("int32", "sum", 1.0),
    ("float32", "sum", 0.5), ("bool", "sum", 1.0),
])  # fmt: skip
@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_is_lent_is_read_where_it_lies(size: int, dtype: str, operation: str, before: float) -> None:
    """Lent addends of a rank's own part give the same bits as copied ones, and are not written.

    In the next call nothing is lent.
    """
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    divisor, length = 1 if dtype == "bool" else size, 1_700_000 if dtype == "float32" else 3000
    arrays = [(np.random.default_rng(rank).uniform(-90, 90, length)).astype(kind) for rank in range(size)]
    how = Reduction(operation, before, 1.0, divisor)
    expected, buffers = run("shared", arrays, how), [array.copy() for array in arrays]
    part = longest_part(arrays[0], size)

    def rank_main(transport: ThreadTransport) -> None:
        rank, lent = transport.rank, dict[int, np.ndarray]()
        mine, own = same_part(arrays, size, rank)[rank], same_part(buffers, size, rank)[rank]
        two_shot = prepared(transport, buffers, how, lent)
        for start, stop in ([(0, part // 3), (part // 2, part // 2 + 5)], [(7, part)], [(part // 3, own.size)])[
            rank % 3
        ]:
            lent[start] = mine[start:stop].copy()
            lent[start].flags.writeable = False
            own[start:stop] = 77
        for _ in range(2):
            transport.barrier()
            two_shot()
            assert buffers[rank].tobytes() == expected[rank].tobytes()
            lent.clear()
            transport.barrier()
            buffers[rank][:] = arrays[rank]

    run_ranks(size, rank_main)


def test_integer_averages_are_exact_and_truncate_toward_zero() -> None:
    values = np.array([49, 50, -49, -50, 2**62], np.int64)
    scaler(values, 1.0, 49)(values)
    assert values.tolist() == [1, 1, -1, -1, 2**62 // 49]


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_and_allgather(size: int) -> None:
    def rank_main(transport: ThreadTransport) -> bool:
        got = []
        for root in range(size):
            array = np.full(3, transport.rank)
            movement.broadcast(transport, array, root)
            got.append(array.tolist() == [root] * 3)
        pieces = [np.full(r, -1) for r in range(size)]
        pieces[transport.rank][:] = transport.rank
        movement.allgather(transport, pieces)
        return all(got) and all((piece == r).all() for r, piece in enumerate(pieces))

    assert all(run_ranks(size, rank_main))


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.int64, np.uint64])
@pytest.mark.parametrize("size", [3, 127, 128, 255, 256, 300, 70_000])
def test_integer_averages_over_more_ranks_than_their_dtype_counts(kind: type, size: int) -> None:
    least, most = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    numbers = [least, least // 2, 0, 5, most // 2, most]
    array: np.ndarray = np.array(numbers, kind)
    Reduction(divisor=size).postscale(array)
    assert array.tolist() == [abs(number) // size * (1 if number > 0 else -1) for number in numbers]


def test_scaled_integers_are_truncated_toward_zero() -> None:
    for how in (Reduction(after=0.5), Reduction(divisor=2), Reduction(after=1.5, divisor=2)):
        array = np.array([-7, -3, 3, 7])
        how.postscale(array)
        wanted = np.trunc(np.array([-7, -3, 3, 7]) * how.after / how.divisor)
        assert array.tolist() == wanted.tolist()


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("length", [0, 1, 64, 65, 200])
def test_reduce_to_a_root_in_chunks(size: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scratch memory has the size of one chunk."""
    monkeypatch.setattr(pipeline, "WHOLE", 64 * 8)
    monkeypatch.setattr(pipeline, "CHUNK", 16 * 8)

    def rank_main(transport: ThreadTransport) -> bool:
        for root in range(size):
            buffer = np.arange(length) * (transport.rank + 1.0)
            sends = tree.only_sends(transport, root)
            scratch = np.empty(0 if sends else pipeline.chunk_length(length, buffer))
            tree.reduce_to_root(transport, buffer, scratch, root, Reduction(divisor=size))
            wanted = np.arange(length) * (transport.rank + 1.0 if sends else (size + 1) / 2)
            if transport.rank == root or sends:
                assert (buffer == wanted).all()
        return True

    assert all(run_ranks(size, rank_main))


@pytest.mark.parametrize("dtype", ["uint8", "float32", "complex128"])
def test_parts_are_in_whole_cache_lines(dtype: str) -> None:
    """Together the parts are the buffer. All have the same length but one, and the first parts are longer."""
    for size in (1, 2, 3, 7):
        for length in (*lengths(size), 100 * size):
            buffer = np.arange(length).astype(dtype)
            cut = parts(buffer, size)
            np.testing.assert_array_equal(np.concatenate(cut), buffer)
            lines = [-(-part.nbytes // LINE) for part in cut]
            assert len(cut) == size and lines == sorted(lines, reverse=True) and lines[0] - lines[-1] <= 1
            starts = np.cumsum([0, *(part.nbytes for part in cut)])[:-1]
            assert all(start % LINE == 0 for start, part in zip(starts, cut, strict=True) if part.size)
            assert longest_part(buffer, size) == max(part.size for part in cut)
            for index, part in enumerate(cut):
                np.testing.assert_array_equal(same_part([buffer], size, index)[0], part)


def test_one_part_is_found_without_the_others() -> None:
    """Each call of a user looks for the longest part. With many ranks that must take 1 us, not 0.2 s."""
    buffer = np.zeros(1000, np.float32)
    assert min(repeat(lambda: longest_part(buffer, 10**6), number=1)) < 0.01
    assert min(repeat(lambda: same_part([buffer], 10**6, 1), number=1)) < 0.01


@pytest.mark.parametrize("operation", ["sum", "max"])
def test_long_arrays_are_combined_wherever_they_lie(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every place of a cache line. The numbers before and after the array do not change."""
    monkeypatch.setattr(reduction, "LONG", 100)
    for ahead in range(17):
        for length in (24, 25, 30, 31, 100):
            memory = on_boundary(4 * (length + 40)).view(np.float32)
            memory[:] = np.arange(memory.size)
            other, wanted = np.arange(length, dtype=np.float32)[::-1].copy(), memory.copy()
            mine = wanted[ahead : ahead + length]
            mine[:] = mine + other if operation == "sum" else np.maximum(mine, other)
            Reduction(operation).combine(memory[ahead : ahead + length], other)
            np.testing.assert_array_equal(memory, wanted)


@pytest.mark.parametrize("slow", range(3))
def test_pieces_through_memory_need_one_barrier_each(slow: int) -> None:
    """A rank that is late after every barrier still reads the others' pieces: they write the next in the other half."""
    memory, length = [np.zeros(4 * LINE, np.uint8) for _ in range(3)], 5 * 2 * LINE // 4 - 3  # five pieces

    def rank_main(transport: ThreadTransport) -> tuple[int, list[list[float]]]:
        wait, barriers, found = transport.barrier, 0, []

        def barrier() -> None:
            nonlocal barriers
            wait()
            barriers += 1
            time.sleep(0.01 * (transport.rank == slow))

        transport.barrier = barrier
        allreduce = prepared_allreduce(transport, memory, length, np.dtype(np.float32), Reduction())
        for turn in range(2):
            array = np.arange(length, dtype=np.float32) * (turn + 1) + transport.rank
            allreduce(array)
            found.append(array.tolist())
        return barriers, found

    expected = [[3.0 * i * (turn + 1) + 3 for i in range(length)] for turn in range(2)]
    assert run_ranks(3, rank_main) == [(12, expected)] * 3
