"""Numbers of rows that are equal on all ranks, or differ, in any order of calls.

The roll call finds equal numbers. Different ones need a message. Both happen one after another, and if calls are
matched by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import hvdlite as hvd
from hvdlite import ops
from tests.parallel.common import last, require_error, require_mismatch

Rows = Callable[[int], int]
ROWS: dict[str, Rows] = {
    "equal": lambda rank: 3,
    "none": lambda rank: 0,
    "rank many": lambda rank: rank,
    "equal again": lambda rank: 2,
    "none but on the last": lambda rank: 2 * (rank == hvd.size() - 1),
    "one more on rank 0": lambda rank: 4 + (rank == 0),
}


def block(rank: int, rows: int) -> Any:
    return np.full((rows, 2), 10.0 * rank + rows)


def everyones(rows: Rows) -> Any:
    return np.concatenate([block(rank, rows(rank)) for rank in range(hvd.size())])


def check_allgather_and_gather() -> None:
    r, root = hvd.rank(), hvd.size() - 1
    for what, rows in ROWS.items():
        np.testing.assert_array_equal(hvd.allgather(block(r, rows(r))), everyones(rows), what)
        at_root = hvd.gather(block(r, rows(r)), root)
        assert (at_root is None) == (r != root)
        if at_root is not None:
            np.testing.assert_array_equal(at_root, everyones(rows), what)


def check_groups() -> None:
    """One of three arrays differs: then the counts of all three are exchanged."""
    r = hvd.rank()
    for first in ROWS.values():
        for second in ROWS.values():
            group = first, second, ROWS["equal"]
            found = hvd.grouped_allgather([block(r, rows(r)) for rows in group])
            for array, rows in zip(found, group, strict=True):
                np.testing.assert_array_equal(array, everyones(rows))


def check_groups_that_differ_only_in_order() -> None:
    """The total is the same on all ranks, and the first array's rows on two ranks, but the counts differ."""
    r = hvd.rank()
    group: list[Rows] = [lambda rank: 1, lambda rank: 2 + rank % 2, lambda rank: 3 - rank % 2]
    for array, rows in zip(hvd.grouped_allgather([block(r, rows(r)) for rows in group]), group, strict=True):
        np.testing.assert_array_equal(array, everyones(rows))


def sent(source: int, dest: int, rows: int) -> Any:
    return np.full((rows, 2), 100.0 * source + 10 * dest + rows)


def require_alltoall(parts: Callable[[int, int], int], splits: bool, what: str) -> None:
    """Check an all-to-all. parts: how many rows a sends to b."""
    p, r = hvd.size(), hvd.rank()
    mine = np.concatenate([sent(r, dest, parts(r, dest)) for dest in range(p)])
    rows, received = ops.alltoall(mine, [parts(r, dest) for dest in range(p)] if splits else None)
    assert received.tolist() == [parts(source, r) for source in range(p)] and received.dtype == np.int32, what
    expected = np.concatenate([sent(source, r, parts(source, r)) for source in range(p)])
    np.testing.assert_array_equal(rows, expected, what)


def check_alltoall() -> None:
    p, r = hvd.size(), hvd.rank()
    last = r == p - 1
    for what, rows in ROWS.items():
        require_alltoall(lambda a, b: rows(a), False, f"equal parts: {what}")
        require_alltoall(lambda a, b: rows(a), True, f"equal splits: {what}")
        require_alltoall(lambda a, b: rows(a), last, f"equal splits, given on one rank: {what}")
        require_alltoall(lambda a, b: rows(b), True, f"unequal splits: {what}")
        require_alltoall(lambda a, b: rows(a) * (b == 0), True, f"all to rank 0: {what}")
    require_alltoall(lambda a, b: b if a == p - 1 else 2, last, "unequal splits on one rank, none on the others")
    require_alltoall(lambda a, b: a + b, True, "unequal everywhere")


def check_alltoall_that_leaves_a_tail() -> None:
    """Splits do not use all rows. Every rank sends the same number to each, and some have more rows."""
    p, r = hvd.size(), hvd.rank()
    rows, received = ops.alltoall(np.full(2 * p + r, float(r)), [2] * p)
    assert rows.tolist() == [float(source) for source in range(p) for _ in range(2)] and received.tolist() == [2] * p
    require_error(ValueError, lambda: ops.alltoall(np.ones(2), [2**63 - 1] * p), "splits add up to")
    require_error(ValueError, lambda: ops.alltoall(np.ones(2), [*[0] * (p - 1), -1]), "whole numbers")


def check_calls_matched_by_name() -> None:
    """Ranks call in different orders, so equal and unequal counts are compared in common rounds."""
    p, r = hvd.size(), hvd.rank()
    names = list(ROWS)
    for turn in range(4):
        order = names if (r + turn) % 2 else list(reversed(names))
        gathers = {name: ops.allgather.start(block(r, ROWS[name](r)), f"a {name}") for name in order}
        moves = {name: ops.alltoall.start(np.full(p * ROWS[name](r), float(r)), None, f"b {name}")
                 for name in reversed(order)}  # fmt: skip
        for name, rows in ROWS.items():
            np.testing.assert_array_equal(gathers[name].wait(), everyones(rows), name)
            found, received = moves[name].wait()
            assert received.tolist() == [rows(source) for source in range(p)], name
            assert found.tolist() == [float(source) for source in range(p) for _ in range(rows(source))], name


def check_while_one_is_late() -> None:
    """Rank 0 calls another operation first, so the others wait in rounds with equal and unequal counts."""
    p, r = hvd.size(), hvd.rank()
    early = ops.allgather.start(block(r, 1), "early") if r == 0 else None
    for what, rows in ROWS.items():
        np.testing.assert_array_equal(hvd.allgather(block(r, rows(r)), name=what), everyones(rows))
    early = early or ops.allgather.start(block(r, 1), "early")
    assert len(early.wait()) == p


def check_scalars() -> None:
    """Scalars have no rows: an error on all ranks. A scalar on one rank only is distinguished from a vector."""
    for call in (
        hvd.allgather,
        lambda x, **name: hvd.gather(x, 0, **name),
        lambda x, **name: hvd.grouped_allgather([x], **name),
    ):
        for kind in (hvd.HvdliteError, ValueError, IndexError):
            require_error(kind, lambda: call(np.float32(1)), "dimension", "(1,)")
            require_error(kind, lambda: call(3), "dimension")
        if hvd.size() > 1:
            mine = np.ones(()) if last() else np.ones(1)
            require_mismatch(lambda: call(mine, name="x"), f"rank {hvd.size() - 1} has no dimension", "()")
    handle = hvd.allgather_async(np.ones(()))
    require_error(hvd.HvdliteError, lambda: hvd.synchronize(handle), "dimension")
    require_error(ValueError, lambda: ops.grouped_allgather([]), "at least one")


def check_after_all_have_joined() -> None:
    p, r = hvd.size(), hvd.rank()
    for _ in range(r):
        hvd.allreduce(np.ones(2))
    hvd.join()
    for rows in ROWS.values():
        np.testing.assert_array_equal(hvd.allgather(block(r, rows(r))), everyones(rows))
    require_alltoall(lambda a, b: 2, False, f"{p} ranks")
