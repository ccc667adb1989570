"""Ranks that disagree: the same MismatchError on every rank, with both sides, and the job goes on."""

from __future__ import annotations

import numpy as np

import hvdlite as hvd
import hvdlite.numpy
from hvdlite import ops
from tests.parallel.common import last, require_mismatch

SIZES = (2, 3, 4)


def others() -> str:
    """Ranks 0 to p-2, as messages name them."""
    return "rank 0" if hvd.size() == 2 else f"ranks 0-{hvd.size() - 2}"


def check_shape() -> None:
    length = 10 if last() else 1
    require_mismatch(
        lambda: hvd.allreduce(np.ones(length), name="loss"),
        "allreduce 'loss'",
        "shape differs",
        f"rank {hvd.size() - 1} has (10,)",
        f"{others()} ha",
        "(1,)",
        "pad, or use allgather",
        "[HVD201]",
    )


def check_same_element_count_is_not_enough() -> None:
    shape: tuple[int, ...] = (2, 3) if last() else (3, 2)
    require_mismatch(lambda: hvd.allreduce(np.ones(shape), name="matrix"), "shape differs", "(2, 3)", "(3, 2)")
    shape = (6,) if last() else (6, 1)
    require_mismatch(lambda: hvd.broadcast(np.ones(shape), 0, name="vector"), "shape differs", "(6,)", "(6, 1)")


def check_dtype() -> None:
    dtype = np.float32 if last() else np.float64
    for call in (
        lambda: hvd.allreduce(np.ones(4, dtype), name="w"),
        lambda: hvd.broadcast(np.ones(4, dtype), 0, name="w"),
        lambda: hvd.allgather(np.ones(4, dtype), name="w"),
    ):
        require_mismatch(call, "dtype differs", f"rank {hvd.size() - 1} has float32", "float64", "cast")


def check_operation_and_factors() -> None:
    op = hvd.Sum if last() else hvd.Average
    require_mismatch(lambda: hvd.allreduce(np.ones(4), op=op, name="w"), "operation differs", "Sum", "Average")
    factor = 2.0 if last() else 1.0
    require_mismatch(
        lambda: hvd.allreduce(np.ones(4), prescale_factor=factor, name="w"),
        "prescale_factor differs",
        f"rank {hvd.size() - 1} has 2.0",
        "1.0",
    )
    require_mismatch(lambda: hvd.allreduce(np.ones(4), postscale_factor=factor, name="w"), "postscale_factor differs")


def check_root() -> None:
    root = 1 if last() else 0
    require_mismatch(
        lambda: hvd.broadcast(np.ones(4), root, name="w"),
        "root rank differs",
        f"rank {hvd.size() - 1} has 1",
        "root_rank",
    )


def check_kind() -> None:
    """Different functions under one name."""
    call = hvd.allgather if last() else hvd.allreduce
    require_mismatch(lambda: call(np.ones(4), name="thing"), "kind differs", "allgather", "allreduce")


def check_rows_of_allgather_may_differ_only_in_number() -> None:
    shape: tuple[int, ...] = (2, 4) if last() else (2, 3)
    require_mismatch(
        lambda: hvd.allgather(np.ones(shape), name="rows"), "shape after the first dimension differs", "(4,)", "(3,)"
    )
    shape = (2, 3, 1) if last() else (2, 3)
    require_mismatch(lambda: hvd.allgather(np.ones(shape), name="rows"), "(3, 1)", "(3,)")


def check_groups() -> None:
    """A group of another length or with another member."""
    arrays = [np.ones(2), np.ones(3)]
    if last():
        arrays.append(np.ones(1))
    require_mismatch(
        lambda: ops.grouped_allreduce_(arrays, name="group"), "grouped_allreduce 'group'", "number of tensors"
    )
    arrays = [np.ones(2), np.ones(3 + last())]
    require_mismatch(lambda: ops.grouped_allreduce_(arrays, name="group"), "shape of tensor 1", "(3,)", "(4,)")


def check_unnamed_calls() -> None:
    """Without names, calls are matched by their number."""
    require_mismatch(lambda: hvd.allreduce(np.ones(4 + last())), "allreduce (unnamed call ", "shape differs")


def check_unnamed_calls_of_different_shapes_in_another_order() -> None:
    """Both calls are errors on every rank, and the next call works."""
    lengths = [3, 4] if last() else [4, 3]
    for length in lengths:
        require_mismatch(
            lambda: hvd.allreduce(np.ones(length)), "allreduce (unnamed call ", "shape differs", "(3,)", "(4,)"
        )
    handles = [ops.allreduce_.start(np.ones(length)) for length in lengths]
    for handle in handles:
        require_mismatch(handle.wait, "allreduce (unnamed call ", "shape differs", "(3,)", "(4,)")


def check_a_named_call_that_one_rank_skips() -> None:
    """Other ranks' later calls run, and the skipped one waits until that rank makes it."""
    p, r = hvd.size(), hvd.rank()
    handle = ops.allreduce_.start(np.full(3, r), ops.Sum, "skipped") if r != 0 else None
    for i in range(3):
        assert (hvd.allreduce(np.full(2, i), op=hvd.Sum, name=f"later {i}") == i * p).all()
    if handle is None:
        handle = ops.allreduce_.start(np.full(3, r), ops.Sum, "skipped")
    assert (handle.wait() == p * (p - 1) // 2).all()


def check_agreeing_requests_around_a_mismatch_succeed() -> None:
    """One wrong name among ten in flight: nine right results, one error."""
    p, r = hvd.size(), hvd.rank()
    handles = [ops.allreduce_.start(np.full(5 + (last() and i == 4), i + r), ops.Sum, f"item {i}")
               for i in range(10)]  # fmt: skip
    for i, handle in enumerate(handles):
        if i == 4:
            require_mismatch(handle.wait, "item 4")
        else:
            assert (handle.wait() == i * p + p * (p - 1) // 2).all()


def check_objects_with_different_roots() -> None:
    require_mismatch(lambda: hvd.broadcast_object("x", 1 if last() else 0, name="thing"), "root rank differs")


def check_variables_with_different_roots() -> None:
    mine = np.full(4, 1.0 + hvd.rank())
    require_mismatch(lambda: hvd.numpy.broadcast_variables([mine], 1 if last() else 0), "root rank differs")
    assert (mine == 1.0 + hvd.rank()).all()


def check_memory_after_a_mismatch_is_untouched() -> None:
    """An array that could not be reduced keeps its values."""
    mine = np.full(4 + last(), 7.0)
    require_mismatch(lambda: ops.allreduce_(mine, name="kept"), "kept")
    assert (mine == 7.0).all()
