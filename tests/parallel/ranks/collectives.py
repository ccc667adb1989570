"""Collectives on NumPy arrays: correct by arithmetic from rank and size, with the same bits on every rank."""

from __future__ import annotations

import tracemalloc
from pickle import PicklingError
from typing import Any

import ml_dtypes
import numpy as np

import hvdlite as hvd
from hvdlite import numpy, ops
from hvdlite.arrays import Array
from tests import averages
from tests.parallel.common import last, require_error, require_mismatch, require_same_bits

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
MIB = 1 << 20


def kind(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def lengths() -> list[int]:
    p = hvd.size()
    return sorted({0, 1, p - 1, p, p + 1, 1000})


def check_ranks_and_sizes() -> None:
    """On one host the local rank is the global one, and every rank is alone in its cross set."""
    assert 0 <= hvd.rank() < hvd.size()
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous() and hvd.is_initialized()
    assert hvd.global_process_set.ranks == list(range(hvd.size()))
    assert (hvd.global_process_set.rank(), hvd.global_process_set.size()) == (hvd.rank(), hvd.size())


def check_sum_of_every_dtype_and_length() -> None:
    """p ranks with i%7 + r give p (i%7) + p(p-1)/2, which is exact in every dtype."""
    p, r = hvd.size(), hvd.rank()
    for name in (*FLOATS, *INTEGERS):
        for length in lengths():
            base = np.arange(length) % 7
            result = hvd.allreduce((base + r).astype(kind(name)), op=hvd.Sum)
            np.testing.assert_array_equal(result, (base * p + p * (p - 1) // 2).astype(kind(name)))
            assert result.dtype == kind(name)


def check_averages_in_every_collective() -> None:
    """All-reduces, grouped ones, reductions to a root and reduce-scatters of numbers with sums that overflow."""
    p, r = hvd.size(), hvd.rank()
    for dtype in (*averages.FLOATS, *averages.INTEGERS):
        for rows in (p, 2 * p + 1, 1000):
            arrays = [array.reshape(rows, 7) for array in averages.given(p, rows * 7, dtype)]
            expected = averages.average([array.reshape(-1) for array in arrays], p).reshape(rows, 7)
            mine, own = arrays[r].copy(), np.array_split(expected, p)[r]
            for found in (hvd.allreduce(mine), *hvd.grouped_allreduce([mine, mine])):
                np.testing.assert_array_equal(found, expected, err_msg=str(dtype))
            for found in (hvd.reducescatter(mine), *hvd.grouped_reducescatter([mine, mine])):
                np.testing.assert_array_equal(found, own, err_msg=str(dtype))
            whole = hvd.reduce(mine, p - 1)
            assert (whole is None) == (r != p - 1)
            np.testing.assert_array_equal(expected if whole is None else whole, expected, err_msg=str(dtype))
            assert mine.tobytes() == arrays[r].tobytes()
            hvd.allreduce_(mine)
            np.testing.assert_array_equal(mine, expected, err_msg=str(dtype))


def check_a_sum_that_overflows_is_numpys() -> None:
    p = hvd.size()
    found = hvd.allreduce(np.full(3, 100, np.int8), op=hvd.Sum)
    assert (found == (100 * p + 128) % 256 - 128).all()
    assert np.isinf(hvd.allreduce(np.full(3, 40000, np.float16), op=hvd.Sum)).all() or p == 1


def check_booleans() -> None:
    """Max is or, Min is and. The same holds for Sum and Product."""
    p, r = hvd.size(), hvd.rank()
    require_error(ValueError, lambda: hvd.allreduce(np.array([True])), "no average", "hvd.Max")
    require_error(ValueError, lambda: hvd.reducescatter(np.ones(p, bool)), "no average", "hvd.Max")
    mine = np.array([True, False, r == 0, r != 0])
    some, every = [True, False, True, p > 1], [True, False, p == 1, False]
    for op, expected in ((hvd.Max, some), (hvd.Min, every), (hvd.Sum, some), (hvd.Product, every)):
        result = hvd.allreduce(mine, op=op)
        assert result.dtype == bool and result.tolist() == expected, (op, result)


def check_every_operation() -> None:
    p, r = hvd.size(), hvd.rank()
    ranks = np.arange(p, dtype=np.float64)
    mine = np.full(5, r + 1.0, np.float32)
    expected = {hvd.Average: (ranks + 1).mean(), hvd.Sum: (ranks + 1).sum(), hvd.Min: 1.0, hvd.Max: p,
                hvd.Product: (ranks + 1).prod()}  # fmt: skip
    for op, value in expected.items():
        np.testing.assert_array_equal(hvd.allreduce(mine, op=op), np.full(5, value, np.float32))
    np.testing.assert_array_equal(mine, np.full(5, r + 1.0, np.float32))  # the argument does not change


def check_integer_average_truncates_toward_zero() -> None:
    """Rank r has 7 and -7 plus r: sums p*(+-7) + p(p-1)/2, divided exactly, without floats."""
    p, r = hvd.size(), hvd.rank()
    for name in ("int8", "int32", "int64"):
        sums = [7 * p + p * (p - 1) // 2, -7 * p + p * (p - 1) // 2]
        result = hvd.allreduce(np.array([7 + r, -7 + r], name))
        assert result.tolist() == [sums[0] // p, -(-sums[1] // p)], (name, result)


def check_scaling() -> None:
    """Factors 2 before and 3 after the sum are exact in small integers. Average divides last."""
    p, r = hvd.size(), hvd.rank()
    total = p * (p + 1) // 2
    for name in (*FLOATS, "int32"):
        mine = np.full(10, r + 1, kind(name))
        result = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0)
        np.testing.assert_array_equal(result, np.full(10, 6 * total, kind(name)))
    average = hvd.allreduce(np.full(10, r + 1.0), prescale_factor=0.5, postscale_factor=4.0)
    # at most two roundings of half a unit each
    np.testing.assert_allclose(average, 2.0 * total / p, rtol=2 * 2.0**-53)


def check_random_averages_at_every_path() -> None:
    """Averages against a float64 sum, at sizes of all algorithms: p-1 additions and one scaling.

    Small floats are added in float32. Each addition has an error of at most eps times the sum of magnitudes, in the
    dtype of partial sums. The ring and the doublings round 16-bit floats after every step.
    """
    p = hvd.size()
    epsilon = {"float32": 2.0**-24, "float64": 2.0**-53, "float16": 2.0**-11, "bfloat16": 2.0**-8}
    for name in FLOATS:
        for nbytes in (400, 2048, 4096, 100_000, MIB + 64, 3 * MIB):
            length = nbytes // kind(name).itemsize
            everyone = [np.random.default_rng(rank).uniform(-8, 8, length).astype(kind(name)) for rank in range(p)]
            exact = np.mean([a.astype(np.float64) for a in everyone], axis=0)
            magnitude = np.sum([np.abs(a.astype(np.float64)) for a in everyone], axis=0)
            result = hvd.allreduce(everyone[hvd.rank()])
            bound = epsilon[name] * (magnitude * p / p + np.abs(exact)) + np.finfo(np.float32).tiny
            assert np.all(np.abs(result.astype(np.float64) - exact) <= bound), (name, nbytes)
            require_same_bits(result)
            mine, its, near = (np.array_split(a, p)[hvd.rank()] for a in (everyone[hvd.rank()], exact, bound))
            rows = hvd.reducescatter(everyone[hvd.rank()])
            assert rows.shape == mine.shape and rows.dtype == mine.dtype
            assert np.all(np.abs(rows.astype(np.float64) - its) <= near), (name, nbytes)


def check_ring_length() -> None:
    """Arrays longer than one staged piece, with odd numbers of elements: integers are exact."""
    p, r = hvd.size(), hvd.rank()
    for length in (300_000, 400_009, 2_200_000, 2_300_003):
        base = np.arange(length, dtype=np.float32) % 1024
        np.testing.assert_array_equal(hvd.allreduce(base + r, op=hvd.Sum), base * p + p * (p - 1) // 2)


def check_nan_and_infinity_reach_all() -> None:
    """A NaN on one rank is a NaN on every rank, at its place only, for every operation and algorithm."""
    p, r = hvd.size(), hvd.rank()
    for name in FLOATS:
        for length in (3, 3000, 600_000):
            mine = np.ones(length, kind(name))
            if r == p - 1:
                mine[1], mine[2] = np.nan, np.inf
            for op in (hvd.Average, hvd.Min, hvd.Max):
                result = hvd.allreduce(mine, op=op).astype(np.float32)
                assert np.isnan(result[1]) and not np.isnan(result[0]), (name, length, op)
                assert np.isinf(result[2]) == (op != hvd.Min or p == 1)
                require_same_bits(result)


def check_determinism() -> None:
    """The same call gives the same bits again."""
    for length in (5, 700, 3000, 50_000, 500_000):
        mine = np.random.default_rng(hvd.rank()).standard_normal(length).astype(np.float32)
        first = hvd.allreduce(mine)
        assert all(hvd.allreduce(mine).tobytes() == first.tobytes() for _ in range(3))


def check_shapes_and_scalars() -> None:
    """The result has the argument's shape. Plain numbers and non-contiguous arguments work."""
    p, r = hvd.size(), hvd.rank()
    total = p * (p - 1) // 2
    for shape in ((), (1,), (2, 3), (4, 0, 2), (2, 1, 3)):
        result = hvd.allreduce(np.full(shape, r, np.float32), op=hvd.Sum)
        assert result.shape == shape and (result == total).all()
    assert hvd.allreduce(r, op=hvd.Sum) == total
    assert hvd.allreduce(float(r)) == total / p
    strided = np.arange(12, dtype=np.float64).reshape(3, 4).T[::2]
    np.testing.assert_array_equal(hvd.allreduce(strided, op=hvd.Sum), strided * p)


def check_grouped() -> None:
    """Several arrays of different shapes and dtypes in one operation."""
    p, r = hvd.size(), hvd.rank()
    arrays: list[Array] = [np.full((2, 2), r, np.float32), np.full(3, r, np.int64), np.full(0, r, np.float16)]
    result = ops.grouped_allreduce_(arrays, ops.Sum)
    assert all((a == p * (p - 1) // 2).all() for a in arrays) and len(result) == 3


def check_grouped_in_shared_memory() -> None:
    """Results in place need separate memory, which new arrays have."""
    for size in (4, MIB):  # short arrays travel together
        whole = np.ones(2 * size)
        a, b = whole[:size], whole[size:]
        for wrong in ([a, a], [b, a, whole], [a, whole[size - 1 :]]):
            require_error(ValueError, lambda: hvd.grouped_allreduce_(wrong, op=hvd.Sum), "tensors", "share memory")
        both = hvd.grouped_allreduce([a, a], op=hvd.Sum)
        hvd.grouped_allreduce_([b, a, a[:0], a[:0]], op=hvd.Sum)
        assert all((result == hvd.size()).all() for result in (*both, whole))


def check_root_of_any_kind() -> None:
    """A root is a number of any type, and each rank has another type."""
    p, r = hvd.size(), hvd.rank()
    for root in range(p):
        given: Any = (root, np.int64(root), np.array(root))[r % 3]
        assert hvd.broadcast(np.full(3, r), given).tolist() == [root] * 3
        total = hvd.reduce(np.full(2, r), given, op=hvd.Sum)
        assert (total is None) == (r != root) and (r != root or total.tolist() == [p * (p - 1) // 2] * 2)


def check_grouped_short_and_long() -> None:
    """Short arrays of several dtypes travel together, in more than one batch. Each gets its own sum."""
    p, r = hvd.size(), hvd.rank()
    lengths = [(i * 37) % 50 + (40_000 if i % 13 == 5 else 0) for i in range(60)] + [30_000] * 20
    kinds = [kind(("float32", "bfloat16", "int64")[i % 3]) for i in range(len(lengths))]
    arrays = [np.full(length, i % 8 + r, k) for i, (length, k) in enumerate(zip(lengths, kinds, strict=True))]
    for op, expected in ((hvd.Sum, lambda i: p * (i % 8) + p * (p - 1) // 2), (hvd.Max, lambda i: i % 8 + p - 1)):
        results = ops.grouped_allreduce_([array.copy() for array in arrays], op)
        for i, (result, array) in enumerate(zip(results, arrays, strict=True)):
            assert result.shape == array.shape and (result == expected(i)).all(), (op, i, result)


def check_allgather() -> None:
    """Rank r gives r rows of the number r: the first dimensions are uneven, and one is zero."""
    p, r = hvd.size(), hvd.rank()
    for name in (*FLOATS, "int8", "int64", "bool"):
        for rest in ((), (3,), (2, 0)):
            result = hvd.allgather(np.full((r, *rest), r, kind(name)))
            assert result.shape == (p * (p - 1) // 2, *rest) and result.dtype == kind(name)
            expected = np.repeat(np.arange(p), np.arange(p)).astype(kind(name))
            assert (result == expected.reshape(-1, *(1 for _ in rest))).all()
    assert hvd.allgather(np.empty((0, 4))).shape == (0, 4)
    large = hvd.allgather(np.full(MIB, r, np.float32))
    np.testing.assert_array_equal(large[::MIB], np.arange(p))


def check_broadcast_from_each_root() -> None:
    p, r = hvd.size(), hvd.rank()
    for root in range(p):
        for name in (*FLOATS, "int8", "uint64", "bool"):
            for length in (0, 1, 1000, 2 * MIB):
                mine = np.full(length, r % 2 if name == "bool" else r + 1, kind(name))
                result = hvd.broadcast(mine, root)
                assert (result == (root % 2 if name == "bool" else root + 1)).all()
    for wrong in (-1, p):
        try:
            hvd.broadcast(np.ones(1), wrong)
        except ValueError as error:
            assert str(wrong) in str(error)
        else:
            raise AssertionError("a root that does not exist was accepted")


def check_broadcast_variables() -> None:
    """Arrays in a dict or a list are overwritten in place."""
    p, r = hvd.size(), hvd.rank()
    held: dict[str, Array] = {"w": np.full((2, 3), r, np.float32), "b": np.full(4, r, np.int64).reshape(2, 2).T}
    hvd.broadcast_variables(held, root_rank=p - 1)
    assert all((a == p - 1).all() for a in held.values())
    named = [("b", np.array([r])), ("a", np.array([r + 10]))]
    given = dict(reversed(named) if last() else named)  # in different orders
    hvd.broadcast_variables(given)
    assert (given["b"], given["a"]) == (0, 10)
    listed = [np.full(2, float(r))]
    hvd.broadcast_variables(listed)
    assert (listed[0] == 0).all()
    if p > 1:
        shorter = [np.ones(2)] * (1 if last() else 2)
        require_mismatch(lambda: hvd.broadcast_variables(shorter), "parameters differ", "array 1: float64[2]")


def check_subclasses_of_arrays() -> None:
    """A matrix, which always has two dimensions, and a masked array behave like plain arrays, in place too."""
    p = hvd.size()
    for length in (12, 120_000):
        plain = np.arange(float(length)).reshape(-1, 4)
        for make in (np.matrix, np.ma.masked_array):
            mine = make(plain.copy())
            assert hvd.allreduce_(mine, op=hvd.Sum) is mine
            np.testing.assert_array_equal(np.asarray(mine), plain * p)
            mine = make(plain.copy())
            np.testing.assert_array_equal(hvd.allreduce(mine, op=hvd.Sum), plain * p)
            np.testing.assert_array_equal(hvd.allgather(mine), np.concatenate([plain] * p))
            own = np.array_split(plain * p, p)[hvd.rank()]
            np.testing.assert_array_equal(hvd.reducescatter(mine, op=hvd.Sum), own)
            assert type(hvd.reducescatter(mine)) is np.ndarray


def check_objects() -> None:
    """Objects of different types and sizes per rank; a lambda among them."""
    p, r = hvd.size(), hvd.rank()
    for root in range(p):
        got = hvd.broadcast_object({"rank": r, "data": [r] * 10} if r % 2 == 0 else ("odd", r), root)
        assert got == ({"rank": root, "data": [root] * 10} if root % 2 == 0 else ("odd", root))
    assert hvd.broadcast_object(lambda x: x + 1, 0)(1) == 2
    everyone = hvd.allgather_object("x" * (1000 * r) if r else None)
    assert everyone == [None, *("x" * (1000 * other) for other in range(1, p))]


def check_large_arrays_in_objects() -> None:
    """Any number of arrays on each rank, in any layout, read-only or not. Results share no memory with arguments."""
    r, rows = hvd.rank(), 40_000

    def given(rank: int) -> dict[str, Any]:
        several = [np.full((rows, k + 1), rank + k, np.float32) for k in range(rank)]
        fixed = np.arange(float(rows)) + rank
        fixed.flags.writeable = False
        return {
            "several": several,
            "fixed": fixed,
            "turned": np.asfortranarray(np.full((300, 200), rank)),
            "small": [rank],
        }

    mine = given(r)
    everyone = hvd.allgather_object(mine)
    for root, found in enumerate([*everyone, hvd.broadcast_object(mine, 0)]):
        wanted = given(root % hvd.size())
        assert len(found["several"]) == len(wanted["several"]) and found["small"] == wanted["small"]
        assert all(map(np.array_equal, found["several"], wanted["several"]))
        assert np.array_equal(found["fixed"], wanted["fixed"]) and not found["fixed"].flags.writeable
        assert np.array_equal(found["turned"], wanted["turned"]) and found["turned"].flags.f_contiguous
    everyone[r]["turned"][...] = -1
    assert (mine["turned"] == r).all()
    assert hvd.allgather_object(np.full(rows, r) if r else "none")[0] == "none"


def check_objects_are_gathered_into_their_own_memory() -> None:
    """Almost all allocated memory is that of the results: there is no copy of the stream."""
    mine = np.ones(1 << 21)
    tracemalloc.start()
    try:
        found = hvd.allgather_object({"data": mine})
        assert tracemalloc.get_traced_memory()[1] < (hvd.size() + 0.5) * mine.nbytes
        assert len(found) == hvd.size()
    finally:
        tracemalloc.stop()


def check_objects_by_numpys_module() -> None:
    assert numpy.broadcast_object(hvd.rank(), 0) == 0
    assert numpy.allgather_object(hvd.rank()) == list(range(hvd.size()))


def check_objects_that_cannot_be_pickled() -> None:
    """Every rank gets an error with the rank and the reason, and the job goes on."""
    import threading

    obj = threading.Lock() if hvd.rank() == hvd.size() - 1 else "fine"
    why = f"rank {hvd.size() - 1}'s object cannot be pickled: TypeError: "
    require_error(PicklingError, lambda: hvd.broadcast_object(obj, hvd.size() - 1), why, "lock")
    require_error(PicklingError, lambda: hvd.allgather_object(obj), why, "lock")
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


def check_what_is_not_a_number() -> None:
    """Reductions refuse it by name, and the job goes on. Movements accept it."""
    for call in (hvd.allreduce, hvd.allgather, lambda array: hvd.broadcast(array, 0), hvd.alltoall):
        require_error(TypeError, lambda: call(np.array([None] * hvd.size())), "Python objects", "allgather_object")
    for array in (np.array(["a"]), np.array(["2026-01-01"], "M8[D]"), np.zeros(2, "i1,i1")):
        require_error(TypeError, lambda: hvd.allreduce(array), "Average of", "is not possible")
    require_error(TypeError, lambda: hvd.allreduce(np.array([1j]), op=hvd.Max), "Max of complex128")
    np.testing.assert_array_equal(hvd.allgather(np.array(["ab"])), ["ab"] * hvd.size())


def check_complex_numbers() -> None:
    p, mine = hvd.size(), np.array([1 + 2j, 3.5 - 1j]) * (hvd.rank() + 1)
    total = np.array([1 + 2j, 3.5 - 1j]) * p * (p + 1) / 2
    np.testing.assert_allclose(hvd.allreduce(mine), total / p)
    np.testing.assert_allclose(hvd.allreduce(mine, op=hvd.Sum), total)
    np.testing.assert_allclose(hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5), total / 2)
    np.testing.assert_allclose(hvd.allreduce(mine.astype(np.complex64), op=hvd.Sum, postscale_factor=0.5), total / 2)
    assert hvd.allreduce(np.array([complex(np.inf, 3)])) == complex(np.inf, 3)


def check_foreign_byte_order() -> None:
    """The values count, in place too."""
    mine = np.arange(3, dtype=">i4" if last() else "<i4")
    for found in (hvd.allgather(mine), hvd.allgather(np.ascontiguousarray(mine[::-1])[::-1])):
        np.testing.assert_array_equal(found, [0, 1, 2] * hvd.size())
        assert found.dtype.isnative
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    np.testing.assert_array_equal(mine, np.arange(3) * hvd.size())


def check_structures_with_other_fields() -> None:
    if hvd.size() > 1:
        mine = np.zeros(2, "i4,f4" if last() else "f4,i4")
        require_mismatch(lambda: hvd.allgather(mine), "dtype differs", "('f1', '<f4')")


def check_arrays_that_may_not_be_written() -> None:
    """They are refused before any message: later the other ranks would wait for ever."""
    fixed = np.ones(3)
    fixed.flags.writeable = False
    for call in (
        lambda: hvd.allreduce_(fixed),
        lambda: hvd.broadcast_(fixed, 0),
        lambda: hvd.broadcast_variables([fixed], 0),
    ):
        require_error(ValueError, call, "read-only")
    require_error(TypeError, lambda: numpy.allreduce_([1.0, 2.0]), "takes an array, not [1.0, 2.0]")  # type: ignore[arg-type]
    np.testing.assert_array_equal(hvd.allreduce(fixed), fixed)


def check_wrong_process_set() -> None:
    require_error(TypeError, lambda: hvd.allreduce(np.ones(1), process_set=1), "must be an hvd.ProcessSet, not 1")


def check_numbers_of_tensors_that_differ() -> None:
    if hvd.size() > 1:
        tensors = [np.ones(2)] * (1 if last() else 2)
        require_mismatch(lambda: hvd.grouped_allreduce(tensors), "number of tensors differs", "same number of tensors")


def check_barrier() -> None:
    """No rank leaves before the last one has come."""
    import time

    hvd.barrier()
    came = time.time()
    if hvd.rank() == hvd.size() - 1:
        time.sleep(0.3)
        came = time.time()
    hvd.barrier()
    left = time.time()
    assert max(hvd.allgather_object(came)) <= left + 0.05  # all ranks have the same clock


def check_numpy_scalars() -> None:
    """A NumPy scalar (array[i] or array.mean()) is no array, but a number that can be reduced."""
    p, r = hvd.size(), hvd.rank()
    assert hvd.allreduce(np.float64(r), op=hvd.Sum) == p * (p - 1) // 2
    assert hvd.broadcast(np.float32(r), p - 1) == p - 1
