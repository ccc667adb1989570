"""Handles: submitted in any order under names, matched by name, finished once."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import hvdlite as hvd
import hvdlite.numpy
from hvdlite import ops
from hvdlite.job import runtime
from hvdlite.transports.threads import ThreadTransport
from tests.parallel.common import at_sizes, last, require_error, restart


def check_submission_in_different_orders() -> None:
    """Each rank submits the same 20 names in its own order, several times. Every sum is that of its name."""
    p, r = hvd.size(), hvd.rank()
    shuffled = random.Random(r)
    for _ in range(5):
        names = list(range(20))
        shuffled.shuffle(names)
        handles = {}
        for n in names:
            mine = np.full(n * 37 + 1, n + r, np.float64)
            handles[n] = ops.allreduce_.start(mine, ops.Sum, f"item {n}")
        for n, handle in handles.items():
            assert (handle.wait() == n * p + p * (p - 1) // 2).all()


def check_kinds_in_different_orders() -> None:
    """All-reduce, all-gather and broadcast, reversed on odd ranks."""
    p, r = hvd.size(), hvd.rank()
    calls = [
        lambda: ops.allreduce_.start(np.full(3, r), ops.Max, "largest"),
        lambda: ops.allgather.start(np.full(r, r), "rows"),
        lambda: ops.broadcast_.start(np.full(2, r), p - 1, "from the last"),
    ]
    expected = [[p - 1] * 3, np.repeat(np.arange(p), np.arange(p)).tolist(), [p - 1] * 2]
    order = [2, 1, 0] if r % 2 else [0, 1, 2]
    handles = {i: calls[i]() for i in order}
    for i, handle in handles.items():
        assert handle.wait().tolist() == expected[i]


def check_what_passes_through_memory_in_different_orders() -> None:
    """Operations of one round follow each other without another agreement.

    A fast rank must not overwrite data that a slow rank has not copied.
    """
    p, r = hvd.size(), hvd.rank()
    mine = np.full(p * 33_000, 1.0 + r, np.float32)
    for turn in range(40):
        calls = [hvd.allreduce_async, hvd.reducescatter_async, hvd.allreduce_async, hvd.allgather_async]
        options: list[dict[str, Any]] = [{"op": hvd.Sum}, {"op": hvd.Sum}, {"op": hvd.Sum}, {}]
        given, handles = [mine, mine + 100, mine + 1000, mine + 10_000], {}
        for number in range(4) if r == 0 else range(3, -1, -1):
            handles[number] = calls[number](given[number], name=f"{turn}.{number}", **options[number])
        first, rows, second, everyone = (hvd.synchronize(handles[number]) for number in range(4))
        total = p * (p + 1) / 2
        assert (first == total).all() and (rows == total + 100 * p).all() and (second == total + 1000 * p).all()
        assert (everyone.reshape(p, -1) == np.arange(10_001, 10_001 + p)[:, None]).all()


def check_synchronous_calls_from_threads_in_different_orders() -> None:
    """Two threads per rank call under their own names; the first call of one rank is the second of another."""
    p, r = hvd.size(), hvd.rank()
    results = {}

    def call(name: str) -> None:
        for turn in range(10):
            results[name, turn] = hvd.allreduce(np.full(100, turn + r), op=hvd.Sum, name=f"{name} {turn}")

    threads = [threading.Thread(target=call, args=(name,)) for name in ("a", "b")]
    for thread in reversed(threads) if r % 2 else threads:
        thread.start()
        time.sleep(0.002)
    for thread in threads:
        thread.join()
    for (_, turn), value in results.items():
        assert (value == turn * p + p * (p - 1) // 2).all()
    assert len(results) == 20


def check_one_name_for_two_kinds_in_threads() -> None:
    """Each thread has its own kind of operation under the name, and meets that kind on other ranks in any order."""

    def loop(call: Callable[..., Any], expected: Any) -> None:
        for _ in range(50):
            np.testing.assert_array_equal(call(np.ones(1), name="metric"), expected)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(loop, hvd.allreduce, [1]), pool.submit(loop, hvd.allgather, [1] * hvd.size())]:
            done.result()


def check_one_name_for_two_kinds_asynchronously() -> None:
    """A rank has one kind queued when another rank begins with the other kind."""
    calls = [
        lambda: hvd.numpy.allreduce_async(np.ones(1), name="both"),
        lambda: hvd.numpy.allgather_async(np.ones(1), name="both"),
    ]
    order = calls[::-1] if last() else calls
    handles = []
    for call in order:
        handles.append(call())
        time.sleep(0.05)
    found = [hvd.numpy.synchronize(handle) for handle in (handles[::-1] if last() else handles)]
    assert found[0] == 1 and (found[1] == 1).all() and len(found[1]) == hvd.size()


def check_one_name_for_two_kinds_around_a_synchronous_call() -> None:
    """A rank's synchronous call is done but has not returned.

    Next the rank calls the operation for which the others wait.
    """
    calls: list[Callable[..., Any]] = [hvd.numpy.allreduce_async, hvd.numpy.allgather_async]
    for turn in range(50):
        one, other = calls[::-1] if last() else calls
        first = one(np.ones(1), name=f"both {turn}")
        hvd.allreduce(np.ones(1), name="between")
        second = other(np.ones(1), name=f"both {turn}")
        found = [hvd.numpy.synchronize(handle) for handle in ((second, first) if last() else (first, second))]
        assert found[0] == 1 and (found[1] == 1).all() and len(found[1]) == hvd.size()


@at_sizes(2, 3, 4)
def check_a_wait_that_is_interrupted_can_be_repeated() -> None:
    """After Ctrl-C at a notebook's prompt the handle is still valid."""
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(np.ones(3), op=hvd.Sum, name="x")

        def wait() -> None:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            hvd.synchronize(handle)

        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        require_error(KeyboardInterrupt, wait)
        signal.signal(signal.SIGALRM, before)
    hvd.broadcast(0, 0, name="go")
    if hvd.rank() > 0:
        handle = hvd.allreduce_async(np.ones(3), op=hvd.Sum, name="x")
    assert (hvd.synchronize(handle) == hvd.size()).all()


def check_poll_and_late_ranks() -> None:
    """While one rank is late, a handle is not done. Polling never blocks, and the result is there afterwards."""
    p, r = hvd.size(), hvd.rank()
    hvd.barrier()
    if p > 1 and r == 0:
        time.sleep(0.3)
    handle = ops.allreduce_.start(np.full(10, r), ops.Sum)
    if p > 1 and r != 0:
        began = time.perf_counter()
        assert not handle.done and time.perf_counter() - began < 0.1
    assert (handle.wait() == p * (p - 1) // 2).all() and handle.done
    assert handle.wait() is handle.wait()


def check_same_name_in_flight_twice() -> None:
    """The second call fails at once on its rank. The first is not affected, and then the name is free."""
    p, r = hvd.size(), hvd.rank()
    hvd.barrier()
    if r != 0:
        time.sleep(0.2)  # so rank 0's first call cannot be done before its second
    first = ops.allreduce_.start(np.full(5, 1), ops.Sum, "twice")
    if r == 0 and p > 1:
        for call in (ops.allreduce_.start, ops.allreduce_):
            try:
                call(np.full(5, 100), ops.Sum, "twice")
            except ValueError as error:
                assert "twice" in str(error) and "in flight" in str(error)
            else:
                raise AssertionError("a name in flight was accepted again")
    assert (first.wait() == p).all()
    assert (hvd.allreduce(np.full(5, 2), op=hvd.Sum, name="twice") == 2 * p).all()


def check_synchronous_call_behind_asynchronous_ones() -> None:
    """A synchronous call runs after all operations submitted before it."""
    p, r = hvd.size(), hvd.rank()
    handles = [ops.allreduce_.start(np.full(50_000, i + r), ops.Sum) for i in range(10)]
    assert hvd.allreduce(np.ones(()), op=hvd.Sum) == p
    assert all(handle.done for handle in handles)
    for i, handle in enumerate(handles):
        assert (handle.wait() == i * p + p * (p - 1) // 2).all()


def check_forked_child_of_a_job_without_mpi() -> None:
    """The child may go on by itself, though it has none of its parent's threads."""
    if not isinstance(runtime.current().world, ThreadTransport):
        return
    assert hvd.synchronize(hvd.allreduce_async(np.ones(3), name="parent"))[0] == 1  # the lane has a thread now
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        done = hvd.synchronize(hvd.allreduce_async(np.ones(3), name="child"))[0] == 1
        os._exit(0 if done else 1)
    assert os.waitpid(child, 0)[1] == 0


def check_threads_and_callers_meet() -> None:
    """One rank waits in its caller's thread, and another in its lane's thread. All messages between them must match."""
    for algorithm in ("shared", "ring", "halving_doubling", "native"):
        restart(ALGORITHM=algorithm)
        for caller in range(hvd.size()):
            ones = np.ones(50_000, np.float32)
            if hvd.rank() == caller:
                found = hvd.allreduce(ones, op=hvd.Sum, name="x")
            else:
                found = hvd.synchronize(hvd.allreduce_async(ones, op=hvd.Sum, name="x"))
            assert (found == hvd.size()).all()
            hvd.barrier()
    restart()
