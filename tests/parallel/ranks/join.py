"""join(): ranks make different numbers of calls, and zeros take the place of ranks that have joined."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import hvdlite as hvd
from hvdlite import ops
from tests import averages
from tests.parallel.common import require_error, require_mismatch, restart

SIZES = (1, 2, 3, 4)


def require_last(expected: int | None = None) -> int:
    """Check that all ranks get the same last rank, and that unnamed calls work afterwards."""
    last = hvd.join()
    assert set(hvd.allgather_object(last)) == {last}
    assert expected is None or last == expected, (last, expected)
    assert hvd.allreduce(np.ones(3), op=hvd.Sum)[0] == hvd.size()
    return last


def check_rank_r_calls_r_times() -> None:
    """Ranks i+1 and up make call i. Average divides by all. This happens twice in a row, in either direction."""
    p, r = hvd.size(), hvd.rank()
    for calls in ([2 * i for i in range(p)], [2 * i for i in reversed(range(p))], [2 * i for i in range(p)]):
        for i in range(calls[r]):
            callers = [other for other in range(p) if calls[other] > i]
            assert (hvd.allreduce(np.full(5, float(r)), op=hvd.Sum) == sum(callers)).all()
            assert (hvd.allreduce(np.full(3, 1.0)) == len(callers) / p).all()
        require_last(calls.index(max(calls)))


def check_averages_beside_ranks_that_have_joined() -> None:
    """Sums would overflow. The last rank's numbers stand alone, and the average divides by all ranks."""
    p, r = hvd.size(), hvd.rank()
    for dtype in (*averages.FLOATS, *averages.INTEGERS):
        for length in (3, 4913):
            arrays = [
                array if other else np.zeros_like(array) for other, array in enumerate(averages.given(p, length, dtype))
            ]
            if r != 0:
                np.testing.assert_array_equal(hvd.allreduce(arrays[r]), averages.average(arrays, p), err_msg=str(dtype))
    require_last(None if p > 1 else 0)


def check_every_operation_sees_zeros() -> None:
    """Rank 0 joins at once. Min, Max and Product see the other ranks' numbers and 0."""
    p, r = hvd.size(), hvd.rank()
    if r != 0:
        expected = {hvd.Min: 0, hvd.Max: p - 1, hvd.Product: 0, hvd.Sum: p * (p - 1) // 2}
        for op, value in expected.items():
            for length in (1, 3000, 300_000):
                assert (hvd.allreduce(np.full(length, r), op=op) == value).all(), (op, length)
        assert (hvd.allreduce(np.full(2, -1.0), op=hvd.Max) == 0).all()
        for kind in ("float16", "float64", "int8", "bool"):
            assert (hvd.allreduce(np.ones(4, kind), op=hvd.Max) == 1).all()
        a, b = ops.grouped_allreduce_([np.full(3, r), np.full((2, 2), 1.0)], ops.Sum)
        assert (a == p * (p - 1) // 2).all() and (b == p - 1).all()
        short = [np.full(7, i, ("f4", "i8")[i % 2]) for i in range(30)]  # they travel together
        assert all((each == i * (p - 1)).all() for i, each in enumerate(ops.grouped_allreduce_(short, ops.Sum)))
        handles = [
            ops.allreduce_.start(np.full(10, i), ops.Sum, f"x{i}") for i in (range(8) if r % 2 else reversed(range(8)))
        ]
        assert sorted(int(handle.wait()[0]) for handle in handles) == [i * (p - 1) for i in range(8)]
        if p in (2, 4):
            mine = np.zeros(4)
            mine[r] = r
            assert hvd.allreduce(mine, op=hvd.Adasum).tolist() == [float(i if i < p else 0) for i in range(4)]
    require_last()


def check_what_cannot_go_on_is_an_error() -> None:
    """The error is on the calling ranks. All-reduces and join go on."""
    p, r = hvd.size(), hvd.rank()
    if r != p - 1 or p == 1:
        calls: list[Callable[[], Any]] = [
            lambda: hvd.allgather(np.ones(3), name="x"),
            lambda: hvd.broadcast(np.ones(3), 0, name="x"),
            lambda: ops.alltoall(np.ones(p), name="x"),
            lambda: ops.reducescatter(np.ones(p), name="x"),
            lambda: ops.gather(np.ones(3), 0, name="x"),
            hvd.barrier,
        ]
        for call in calls if p > 1 else []:
            require_error(hvd.MismatchError, call, f"rank {p - 1} has joined", "all-reduces")
            assert (hvd.allreduce(np.ones(3), op=hvd.Sum) == p - 1).all()
    require_last()


def check_disagreement_while_a_rank_has_joined() -> None:
    """Only the live ranks get a mismatch. Calls in another order are matched."""
    p, r = hvd.size(), hvd.rank()
    if p > 2 and r != 1:
        for turn in range(2):
            mine = np.ones(1 + (r == 0))
            text = require_error(
                hvd.MismatchError, lambda: hvd.allreduce(mine, name="loss"), "'loss'", "rank 0 has (2,)"
            )
            assert "rank 1 " not in text, turn
            assert hvd.allreduce(np.ones(1), op=hvd.Sum) == p - 1
        order = ["a", "b", "c"] if r % 2 else ["c", "b", "a"]
        handles = {name: ops.allreduce_.start(np.full(2, float(ord(name))), ops.Sum, name) for name in order}
        assert all((handle.wait() == ord(name) * (p - 1)).all() for name, handle in handles.items())
    require_last()


def check_the_last_in_time() -> None:
    """With equal numbers of calls, the last rank in time is the last one."""
    for late in range(hvd.size()):
        hvd.barrier()
        if hvd.rank() == late and hvd.size() > 1:
            time.sleep(0.1)
        require_last(late)


def check_calls_count_before_time() -> None:
    """Clocks of hosts differ. So the rank with more calls is the last one, though another joins later."""
    p, r = hvd.size(), hvd.rank()
    for most in range(p):
        handles = [ops.allreduce_.start(np.ones(2), ops.Sum, f"x{i}") for i in range(2 * (r == most))]
        if r != most:
            time.sleep(0.2)
        assert hvd.join() == most
        assert all((handle.wait() == 1).all() for handle in handles)
        hvd.barrier()


def check_two_join_while_one_goes_on() -> None:
    """This is repeated with each rank in turn as the one."""
    p, r = hvd.size(), hvd.rank()
    for one in (*range(p), *range(p)):
        if r == one:
            for i in range(3):
                assert (hvd.allreduce(np.full(4, i + 1.0), op=hvd.Sum) == i + 1).all()
                assert (hvd.allreduce(np.full(4, i + 1.0)) == (i + 1) / p).all()
        assert require_last(one) == one


def check_waiting_takes_no_core() -> None:
    hvd.barrier()
    if hvd.rank() == 0:
        time.sleep(0.8)
    used, began = time.process_time(), time.monotonic()
    hvd.join()
    used, waited = time.process_time() - used, time.monotonic() - began
    assert hvd.rank() == 0 or hvd.size() == 1 or used < 0.5 * waited, (used, waited)


def check_shutdown_while_others_have_joined() -> None:
    """Ranks that wait in join() learn that a rank will not come."""
    p, r = hvd.size(), hvd.rank()
    if p > 1 and r != 0:
        require_error(hvd.ShutdownError, hvd.join, "join", "rank 0 shut down")
    hvd.shutdown()
    hvd.init()
    require_last()


def check_objects_and_optimizer_names_afterwards() -> None:
    """All ranks continue with the numbers of the ranks that went on."""
    if hvd.rank() == 0 and hvd.size() > 1:
        for _ in range(3):
            require_error(hvd.MismatchError, lambda: hvd.broadcast_object("x"), "joined")
    require_last()
    assert hvd.broadcast_object(hvd.rank()) == 0


def check_subnormal_sums_where_who_has_joined_flushes_them() -> None:
    """The joined rank adds up its part of the others' sums, in a thread that inherits the setting."""
    from torch import set_flush_denormal

    p, r, bits = hvd.size(), hvd.rank(), np.int32(100)
    set_flush_denormal(r == 0)
    try:
        restart()
        if r != 0:
            for length in (1, 1000, 100_000):
                least = np.full(length, bits).view(np.float32)
                assert (hvd.allreduce(least, op=hvd.Sum).view(np.int32) == bits * (p - 1)).all(), length
        require_last()
    finally:
        set_flush_denormal(False)
    restart()


def check_what_fails_fails_for_who_has_joined_too() -> None:
    """The joined rank goes on waiting."""
    if hvd.size() in (2, 4) and hvd.rank() != 0:
        require_error(hvd.HvdliteError, lambda: hvd.allreduce(np.ones(3, int), op=hvd.Adasum), "floating-point")
    require_last()


def check_mismatch_afterwards() -> None:
    """Errors work after join() as before."""
    require_last()
    if hvd.size() > 1:
        require_mismatch(lambda: hvd.allreduce(np.ones(1 + (hvd.rank() == 0)), name="w"), "shape differs")
