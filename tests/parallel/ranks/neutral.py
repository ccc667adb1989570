"""hvdlite's own functions on NumPy arrays, in every form: plain, asynchronous, in place."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch

import hvdlite as hvd
from hvdlite.job import runtime
from tests.parallel.common import at_sizes, last, require_error, require_mismatch, rows_of

MOVED = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
         "complex64")  # fmt: skip


def check_reductions_in_every_form() -> None:
    p, r = hvd.size(), hvd.rank()
    total = p * (p - 1) // 2
    for mine in (np.full((2, 3), r), np.arange(24.0).reshape(4, 6)[::2, ::3] * 0 + r, np.float32(r)):
        for result in (
            hvd.allreduce(mine, op=hvd.Sum),
            hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Sum)),
            hvd.grouped_allreduce([mine], op=hvd.Sum)[0],
            hvd.synchronize(hvd.grouped_allreduce_async([mine, mine], op=hvd.Sum))[1],
        ):
            assert result.shape == np.shape(mine) and (result == total).all()
        assert (mine == r).all()
    for change in (
        lambda a: hvd.allreduce_(a, op=hvd.Sum),
        lambda a: hvd.synchronize(hvd.allreduce_async_(a, op=hvd.Sum)),
        lambda a: hvd.grouped_allreduce_([a], op=hvd.Sum)[0],
        lambda a: hvd.synchronize(hvd.grouped_allreduce_async_([a], op=hvd.Sum))[0],
    ):
        whole = np.full((4, 6), r)
        part = whole[::2, 1::2].T
        assert (
            change(part) is part and (part == total).all() and (whole[1::2] == r).all() and (whole[:, ::2] == r).all()
        )
    for root in range(p):
        for result in (
            hvd.reduce(np.full(4, r), root, op=hvd.Sum),
            hvd.synchronize(hvd.reduce_async(np.full(4, r), root, op=hvd.Sum)),
        ):
            assert (result == total).all() if r == root else result is None
        for factor in (1.0, 2.0):
            given = np.full((2, 3), float(r))
            result = hvd.reduce(given, root, op=hvd.Sum, prescale_factor=factor)
            assert (given == r).all() and (result is None or (result == factor * total).all())
            assert result is None or (result.shape == (2, 3) and not np.shares_memory(result, given))
    mine = np.tile(np.arange(p), (2, 1)).T + r
    for result in (
        hvd.reducescatter(mine, op=hvd.Sum),
        hvd.synchronize(hvd.reducescatter_async(mine, op=hvd.Sum)),
        hvd.grouped_reducescatter([mine], op=hvd.Sum)[0],
        hvd.synchronize(hvd.grouped_reducescatter_async([mine, mine], op=hvd.Sum))[1],
    ):
        assert result.tolist() == [[r * p + total] * 2]


def check_tensors_by_name() -> None:
    """Every form has the same names for its tensors as the plain form."""
    for tensor in (np.ones(hvd.size()), torch.ones(hvd.size())):
        for name in (name for name in hvd.__all__ if name.startswith("grouped_")):
            result = getattr(hvd, name)(tensors=[tensor])
            (result,) = hvd.synchronize(result) if "_async" in name else result
            assert type(result) is type(tensor) and (result == 1).all()
        assert (hvd.synchronize(hvd.allreduce_async_(tensor=tensor)) == 1).all()


def check_what_is_no_handle() -> None:
    wrong: Any
    for wrong in ("loss", None, [1], np.ones(1), torch.ones(1)):
        for call in (hvd.synchronize, hvd.poll):
            require_error(TypeError, lambda: call(wrong), "_async", f"not {type(wrong).__name__}")
    handle = hvd.allreduce_async(np.ones(2))
    number: Any = np.int64(handle)
    assert (hvd.synchronize(number) == 1).all() and hvd.synchronize(handle) is None


def check_movement_of_every_dtype_in_every_form() -> None:
    p, r = hvd.size(), hvd.rank()
    for name in (*MOVED, "bfloat16"):
        kind = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        mine, everyone = np.full((r + 1, 2), r).astype(kind), np.repeat(np.arange(p), np.arange(p) + 1).astype(kind)
        for result in (
            hvd.allgather(mine),
            hvd.synchronize(hvd.allgather_async(mine)),
            hvd.grouped_allgather([mine])[0],
            hvd.synchronize(hvd.grouped_allgather_async([mine]))[0],
        ):
            assert result.dtype == kind and (result == everyone[:, None]).all()
        for root in {0, p - 1}:
            for result in (hvd.gather(mine, root), hvd.synchronize(hvd.gather_async(mine, root))):
                assert result is None if r != root else result.dtype == kind and (result == everyone[:, None]).all()
            given = np.arange(2 * p + 1).astype(kind) if r == root else None
            start = sum(rows_of(other, 2 * p + 1) for other in range(r))
            for result in (
                hvd.scatter(given, root),
                hvd.synchronize(hvd.scatter_async(given if r == root else 0, root)),
            ):
                assert (
                    result.dtype == kind
                    and (result == np.arange(start, start + rows_of(r, 2 * p + 1)).astype(kind)).all()
                )
                assert given is None or not np.shares_memory(result, given)
            copy = np.full(3, r).astype(kind)
            for result in (hvd.broadcast(copy, root), hvd.synchronize(hvd.broadcast_async(copy, root))):
                assert (
                    result.dtype == kind
                    and (result == np.array(root).astype(kind)).all()
                    and (copy == np.array(r).astype(kind)).all()
                )
            assert (
                hvd.synchronize(hvd.broadcast_async_(copy, root)) is copy
                and (copy == np.array(root).astype(kind)).all()
            )
            assert hvd.broadcast_(copy, root) is copy
        sent = np.full(2 * p, r).astype(kind)
        expected = np.repeat(np.arange(p), 2).astype(kind)
        assert (hvd.alltoall(sent) == expected).all() and (hvd.alltoall(sent, [2] * p)[0] == expected).all()
        rows, received = hvd.synchronize(hvd.alltoall_async(sent))
        assert (rows == expected).all() and received.tolist() == [2] * p and received.dtype == np.int32


def check_scatter_refusals() -> None:
    p = hvd.size()
    if hvd.rank() == 0:
        require_error(ValueError, lambda: hvd.scatter(None, 0), "root must give")
        require_error(ValueError, lambda: hvd.scatter(np.ones(3), 0, splits=[4] * p), "add up")
        require_error(ValueError, lambda: hvd.scatter(np.array(["text"]), 0), "dtype")
        require_error(ValueError, lambda: hvd.reduce(np.ones(3), p), "root_rank")
        require_error(ValueError, lambda: hvd.poll(123456), "not a pending handle")
        require_error(NotImplementedError, lambda: hvd.reduce(np.ones(3), 0, op=hvd.Adasum))
    hvd.barrier()


@at_sizes(2, 3, 4)
def check_mismatches() -> None:
    mine = np.ones((2, 2 + last()))
    for call, words in (
        (lambda: hvd.alltoall(mine, [0] * hvd.size(), name="w"), "alltoall 'w'"),
        (lambda: hvd.gather(mine, 0, name="w"), "gather 'w'"),
        (lambda: hvd.reduce(mine, 0, name="w"), "reduce 'w'"),
        (lambda: hvd.reducescatter(mine, name="w"), "reducescatter 'w'"),
        (lambda: hvd.grouped_allgather([mine], name="w"), "grouped_allgather 'w'"),
    ):
        require_mismatch(call, words, "shape", "(2,)" if "gather" in words or "alltoall" in words else "(2, 2)")
    factor = 2.0 if last() else 1.0
    require_mismatch(lambda: hvd.reducescatter(np.ones(4), prescale_factor=factor, name="w"), "prescale_factor differs")
    move: Callable[..., object] = hvd.alltoall if last() else hvd.reducescatter
    require_mismatch(lambda: move(np.ones(hvd.size()), name="thing"), "kind differs", "alltoall", "reducescatter")


def check_a_refused_call_is_not_counted() -> None:
    """After a call that was refused on one rank, unnamed calls stay in step."""

    def interrupted(number: int, frame: object) -> None:
        if runtime.current().everyone.eager.turn.lent:  # otherwise the machine is slow, and the call has not begun
            require_error(hvd.HvdliteError, lambda: hvd.allreduce(np.ones(1)), "in the middle of another call")
            refused.append(number)

    refused: list[int] = []
    if last():
        require_error(ValueError, lambda: hvd.broadcast_object("x", 99), "root_rank=99")
    assert hvd.broadcast_object(hvd.rank(), 0) == 0
    before = signal.signal(signal.SIGUSR1, interrupted)
    hvd.barrier()
    if hvd.size() > 1:
        if last():
            for seconds in (0.1, 0.2, 0.3):
                threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        else:
            time.sleep(0.4)  # meanwhile the last one waits
        for _ in range(2):
            np.testing.assert_array_equal(hvd.allreduce(np.ones(1), op=hvd.Sum), [hvd.size()])
        time.sleep(0.4)  # until no signal can come any more
        assert bool(refused) == last()
    signal.signal(signal.SIGUSR1, before)


def check_what_nobody_can_send() -> None:
    """The error comes before any message, and the job goes on."""
    held = {"w": np.ones(2), "names": np.array([None, "a"])}
    require_error(TypeError, lambda: hvd.broadcast_variables(held, 0), "names: an array of Python objects")
    for given, what in ((3, "array 0 is of type int"), ({"w": held["w"], "x": [1.0]}, "x is of type list")):
        require_error(TypeError, lambda: hvd.broadcast_variables(given, 0), "a dict or sequence of arrays", what)
    require_error(TypeError, lambda: hvd.DistributedOptimizer(5), "hvdlite.numpy has no DistributedOptimizer()")
    assert hvd.allreduce(np.ones(1), op=hvd.Sum) == hvd.size()


def check_lengths_around_those_that_pass_through_shared_memory() -> None:
    """Lengths go from below the least to above the largest one that uses shared memory.

    Uneven lengths come several times, so that a slow rank may still be reading.
    """
    p, r = hvd.size(), hvd.rank()
    mib = 1 << 20
    for nbytes in (30_000, 32 * 1024, 100_003, mib, mib + 1, 1_500_000, 2 * mib, 2 * mib + 1, 5_000_000, 8 * mib + 1):
        pattern = np.arange(nbytes, dtype=np.uint32).astype(np.uint8)
        for turn in range(4):
            total = (pattern * np.uint8(p) + np.uint8(p * turn + p * (p - 1) // 2)).astype(np.uint8)
            assert (hvd.allreduce(pattern + np.uint8(r + turn), op=hvd.Sum) == total).all()
            assert (hvd.reducescatter(pattern + np.uint8(r + turn), op=hvd.Sum) == np.array_split(total, p)[r]).all()
            assert (hvd.broadcast(pattern + r + turn, turn % p) == pattern + np.uint8(turn % p + turn)).all()
            mine = pattern[: nbytes - r * 1000] + np.uint8(r + turn)
            parts = np.split(hvd.allgather(mine), np.cumsum([nbytes - o * 1000 for o in range(p - 1)]))
            assert all(
                (part == pattern[: nbytes - o * 1000] + np.uint8(o + turn)).all() for o, part in enumerate(parts)
            )
            splits = [(nbytes - r * 1000) // p - 10 * d for d in range(p)]
            rows, received = hvd.alltoall(mine, splits)
            assert received.tolist() == [(nbytes - o * 1000) // p - 10 * r for o in range(p)]
            for o, part in enumerate(np.split(rows, np.cumsum(received)[:-1])):
                start = sum((nbytes - o * 1000) // p - 10 * d for d in range(r))
                assert (part == pattern[start : start + len(part)] + np.uint8(o + turn)).all()


@at_sizes(2, 3, 4)
def check_long_messages_go_in_pieces() -> None:
    """Pieces of 1000 bytes give the same results as pieces of a gigabyte."""
    from hvdlite.job import runtime

    p, r = hvd.size(), hvd.rank()
    hvd_transport: Any = runtime.current().everyone.eager.transport
    before, hvd_transport.piece = hvd_transport.piece, 1000
    try:
        hvd.barrier()
        assert (hvd.broadcast(np.full(5001, r, np.int8), p - 1) == p - 1).all()
        assert hvd.allgather(np.full(1001 + r, r, np.int16)).sum() == sum((1001 + o) * o for o in range(p))
        assert (hvd.allreduce(np.full(400_009, r, np.float32), op=hvd.Sum) == p * (p - 1) // 2).all()
        assert (hvd.alltoall(np.full(p * 777, r)) == np.repeat(np.arange(p), 777)).all()
        handle = hvd.send_async(np.full(3003, r, np.uint8), (r + 1) % p)
        assert (hvd.recv((r - 1) % p) == (r - 1) % p).all()
        hvd.synchronize(handle)
        hvd.barrier()
    finally:
        hvd_transport.piece = before


@at_sizes(2, 3, 4)
def check_more_elements_than_a_c_int_counts() -> None:
    """2^31 + 5 elements are divided into pieces that MPI can count. Nothing is sent, and no page is touched."""
    from hvdlite.transports.mpi import PIECE, MpiTransport

    transport = object.__new__(MpiTransport)  # its communicator is not needed
    transport.piece = PIECE
    for length, kind in ((2**31 + 5, np.uint8), (2**30 + 1, np.int16)):
        pieces = transport.pieces(np.empty(length, kind))
        assert (
            max(piece.nbytes for piece in pieces) <= PIECE < 2**31
            and sum(piece.nbytes for piece in pieces) == length * kind().itemsize
        )
        addresses = [piece.ctypes.data for piece in pieces]
        assert all(b - a == PIECE for a, b in itertools.pairwise(addresses))
