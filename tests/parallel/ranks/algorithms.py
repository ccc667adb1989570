"""Every algorithm, forced with HVDLITE_ALGORITHM: correct sums, and the same bits on every rank."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import hvdlite as hvd
from hvdlite import algorithms
from hvdlite.algorithms import pipeline
from hvdlite.algorithms.reduction import Reduction
from hvdlite.config import ALGORITHMS
from hvdlite.job import runtime
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.memory import arena
from hvdlite.transports.mpi import MpiTransport
from hvdlite.transports.mpi_requests import MpiRepeated
from tests import averages
from tests.parallel.common import at_sizes, require_same_bits, restart
from tests.parallel.ranks.collectives import FLOATS, MIB, kind, lengths


def require_right_sums() -> None:
    """Check that integers have exact sums in every dtype, at odd and large lengths, and random means have equal bits."""
    p, r = hvd.size(), hvd.rank()
    for name in (*FLOATS, "int8", "int64"):
        for length in (*lengths(), 30_000, *([MIB + 3] if name in ("float32", "float16") else [])):
            base = np.arange(length) % 7
            result = hvd.allreduce((base + r).astype(kind(name)), op=hvd.Sum)
            np.testing.assert_array_equal(result, (base * p + p * (p - 1) // 2).astype(kind(name)))
    for op, expected in ((hvd.Min, 1), (hvd.Max, p), (hvd.Product, np.prod(np.arange(p) + 1))):
        np.testing.assert_array_equal(hvd.allreduce(np.full(100, r + 1.0), op=op), np.full(100, float(expected)))
    assert hvd.allreduce(np.array([r == 0]), op=hvd.Max).all() and (p > 1) != hvd.allreduce(
        np.array([r == 0]), op=hvd.Min
    )
    for op in (hvd.Min, hvd.Max, hvd.Sum):
        for poisoned in range(p):
            assert np.isnan(hvd.allreduce(np.array([1.0, np.nan if r == poisoned else r]), op=op)).tolist() == [
                False,
                True,
            ]
    for length in (3, 3000, 300_000):
        mine = np.random.default_rng(r).standard_normal(length).astype(np.float32)
        everyone = [np.random.default_rng(other).standard_normal(length).astype(np.float32) for other in range(p)]
        result = hvd.allreduce(mine, prescale_factor=0.5)
        exact = np.mean(np.asarray(everyone, np.float64), axis=0) / 2
        bound = 2.0**-24 * (np.sum(np.abs(everyone), axis=0) + np.abs(exact))  # p-1 additions, over p; one division
        assert np.all(np.abs(result - exact) <= bound)
        if runtime.current().config.algorithm != "native":  # MPI's own all-reduce does not guarantee equal bits
            require_same_bits(result)


def check_every_algorithm() -> None:
    for name in ALGORITHMS:
        restart(ALGORITHM=name)
        assert runtime.current().everyone.eager.place.forced == name
        require_right_sums()
    restart()


def check_averages_that_the_dtype_holds() -> None:
    """By every algorithm, averages are exact even if sums overflow; 16-bit floats are rounded once."""
    p, r = hvd.size(), hvd.rank()
    for name in ALGORITHMS:
        restart(ALGORITHM=name)
        for dtype in (*averages.FLOATS, *averages.INTEGERS):
            for length in (1, 17, 289, 4913, 100_000 if dtype.itemsize == 2 else 1000):
                arrays = averages.given(p, length, dtype)
                expected = averages.average(arrays, p)
                np.testing.assert_array_equal(hvd.allreduce(arrays[r]), expected, err_msg=f"{name}, {dtype}, {length}")
    restart()


def check_native_takes_arrays_that_are_not_aligned() -> None:
    restart(ALGORITHM="native")
    for dtype in (np.float64, np.float32, np.int64):
        odd = np.zeros(5 * np.dtype(dtype).itemsize + 1, np.uint8)[1:].view(dtype)
        odd[:] = hvd.rank()
        hvd.allreduce_(odd, op=hvd.Sum, name="odd")
        assert not odd.flags.aligned and (odd == sum(range(hvd.size()))).all()
    restart()


def check_native_leaves_to_the_ring_what_mpis_add_otherwise() -> None:
    """MPIs add complex numbers in another way, and small integers, which wrap around."""
    restart(ALGORITHM="native")
    for name in ("int8", "uint8", "int16", "uint16"):
        mine = np.full(100, np.iinfo(name).max, name)
        np.testing.assert_array_equal(hvd.allreduce(mine, op=hvd.Sum), sum([mine] * hvd.size(), np.zeros(100, name)))
    np.testing.assert_array_equal(hvd.allreduce(np.full(9, 1 + 2j), op=hvd.Sum), np.full(9, hvd.size() * (1 + 2j)))
    restart()


def check_subnormal_sums_where_some_threads_flush_them() -> None:
    """Rank 0's thread takes subnormal numbers for zeros.

    Its sums are those of the other ranks, also if each rank adds up everything.
    """
    from torch import set_flush_denormal

    p, bits = hvd.size(), np.int32(100)
    ops = (hvd.Sum, hvd.Average) + ((hvd.Adasum,) if p in (1, 2, 4) else ())
    set_flush_denormal(hvd.rank() == 0)
    try:
        for length in (1, 1000, 100_000):
            least = np.full(length, bits).view(np.float32)
            sums = {op: hvd.allreduce(least, op=op).view(np.int32) for op in ops}
            assert (sums[hvd.Sum] == bits * p).all() and (sums[hvd.Average] == bits).all(), sums
            require_same_bits(list(sums.values()))
    finally:
        set_flush_denormal(False)


def check_long_parts_travel_in_chunks() -> None:
    """With much shorter chunks than usual, the sums and bits are those of whole parts."""
    mine = np.random.default_rng(hvd.rank()).standard_normal(30_000).astype(np.float32)
    usual = pipeline.WHOLE, pipeline.CHUNK
    for name in ("ring", "halving_doubling"):
        restart(ALGORITHM=name)
        whole = hvd.allreduce(mine)
        pipeline.WHOLE = pipeline.CHUNK = 3000
        try:
            assert hvd.allreduce(mine).tobytes() == whole.tobytes()
            require_right_sums()
        finally:
            pipeline.WHOLE, pipeline.CHUNK = usual
    restart()


def check_a_prepared_ring_runs_many_times() -> None:
    """It runs in the caller's thread and in the lane's, with whole messages or pieces.

    From the second time on, whole messages are MPI's persistent requests, which are freed with the ring.
    """
    lane, p, r = runtime.current().everyone.eager, hvd.size(), hvd.rank()
    if p == 1:
        return

    def again(run: Callable[[], None], lane: Workplace) -> None:
        run()

    base: Any = lane.transport
    place = replace(lane.place, forced="ring")
    for length, whole in ((1, True), (1000, True), (300_000, True), (300_000, False)):
        buffer = np.empty(length, np.float32)
        transport = MpiTransport(base.comm, buffer.nbytes if whole else 10_000)
        with counted_exchanges(transport) as plain:
            run = algorithms.prepared(transport, lane.host.workspace, place, buffer, Reduction())
            for time, call in enumerate([lane.run, lambda request: lane.submit(request).wait()] * 3):
                buffer[:] = np.arange(length) % 7 + r + time
                call(Request(Signature("test", "ring"), partial(again, run)))
                np.testing.assert_array_equal(buffer, (np.arange(length) % 7 + time) * p + p * (p - 1) // 2)
        assert len(plain) == 2 * (p - 1) * (1 if whole else 6), (length, whole, plain)
        kept = [each for each in gc.get_objects() if type(each) is MpiRepeated and isinstance(each.sent, np.ndarray)]
        requests = [request for each in kept for request in (each.incoming, each.outgoing)]
        assert bool(requests) == whole and all(requests)
        del kept, run
        gc.collect()
        assert not any(requests)


@contextmanager
def counted_exchanges(transport: MpiTransport) -> Iterator[list[int]]:
    """A context that collects the destinations of exchanges that are new to MPI."""
    found: list[int] = []
    usual = transport.exchange
    transport.exchange = lambda send, dest, *others: found.append(dest) or usual(send, dest, *others)
    yield found
    del transport.exchange


def check_forced_algorithm_runs() -> None:
    """The setting reaches the function that chooses."""
    for name in ALGORITHMS[1:]:
        restart(ALGORITHM=name)
        with noted_runs() as runs:
            hvd.allreduce(np.ones(1000))
        expected = "shared" if name == "hierarchical" else name  # all ranks are on one host
        assert runs == ([expected] if hvd.size() > 1 else []), (name, runs)
    restart()


@contextmanager
def noted_runs() -> Iterator[list[str]]:
    """A context that collects the names of the algorithms that run."""
    runs: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: runs.append(name) or function(*args)

    usual, shared, through_memory = dict(algorithms.MESSAGES), algorithms.shared, algorithms.through_memory
    two_shots = shared.prepared, through_memory.prepared_allreduce
    algorithms.MESSAGES.update({name: way._replace(prepare=noted(name, way.prepare)) for name, way in usual.items()})
    shared.prepared, through_memory.prepared_allreduce = (noted("shared", function) for function in two_shots)
    yield runs
    algorithms.MESSAGES.update(usual)
    shared.prepared, through_memory.prepared_allreduce = two_shots


def check_without_shared_memory() -> None:
    restart(SHARED_MEMORY="0")
    assert not runtime.current().everyone.eager.place.shares_memory
    require_right_sums()
    restart(SHARED_MEMORY="0", ALGORITHM="shared")  # falls back to the ring
    require_right_sums()
    restart()


def check_shared_memory_turned_off_on_one_rank() -> None:
    """If one rank does not want shared memory, no rank makes any."""
    restart(SHARED_MEMORY="0" if hvd.rank() == hvd.size() - 1 else "1")
    assert not runtime.current().everyone.eager.place.shares_memory
    require_right_sums()
    restart()


def check_shared_memory_refused_on_one_rank() -> None:
    """One rank cannot open other ranks' memory, or has no room for its own. All ranks use the ring together."""
    attach, create = arena.attach, arena.SharedFile.create
    for what in ("attach", "create"):
        restart()
        if hvd.rank() == hvd.size() - 1 and what == "attach":
            arena.attach = lambda card: None
        if hvd.rank() == hvd.size() - 1 and what == "create":
            arena.SharedFile.create = classmethod(lambda cls, nbytes: None)  # type: ignore[assignment]
        require_right_sums()
        stage = runtime.current().everyone.eager.host.workspace.stage
        assert hvd.size() == 1 or stage.peers is None
        arena.attach, arena.SharedFile.create = attach, create
    restart()
    require_right_sums()
    assert hvd.size() == 1 or len(runtime.current().everyone.eager.host.workspace.stage.peers) == hvd.size()


@at_sizes(2, 3, 4)
def check_setting_that_differs_between_ranks() -> None:
    """If one rank has another algorithm or bucket size, all ranks get an error with all values. Then init works."""
    last = hvd.rank() == hvd.size() - 1
    for name, one, two in (("ALGORITHM", "ring", "native"), ("BUCKET_MB", "1", "2"), ("OVERLAP", "auto", "1")):
        try:
            restart(**{name: two if last else one})
        except hvd.HvdliteError as error:
            assert f"HVDLITE_{name}" in str(error) and "differs" in str(error), error
        else:
            raise AssertionError(f"ranks with different HVDLITE_{name} started")
        assert not hvd.is_initialized()
        restart()
        assert (hvd.allreduce(np.ones(3), op=hvd.Sum) == hvd.size()).all()


def check_bits_are_the_same_after_a_restart() -> None:
    """A second run, with new communicators and new memory, gives the same bits."""
    arrays = [
        np.random.default_rng(hvd.rank()).standard_normal(n).astype(np.float32) for n in (50, 1500, 40_000, 500_000)
    ]
    first = [hvd.allreduce(array).tobytes() for array in arrays]
    restart()
    assert [hvd.allreduce(array).tobytes() for array in arrays] == first
