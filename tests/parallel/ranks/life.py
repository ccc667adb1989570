"""The life of a job: several inits and shutdowns, ranks that leave early, forked children, memory that stays valid."""

from __future__ import annotations

import os
import platform
import struct
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import hvdlite as hvd
from hvdlite import ops
from hvdlite.job import runtime
from hvdlite.lanes.request import Handle, Request
from hvdlite.lanes.signature import Signature
from hvdlite.memory.workspace import Workspace
from tests.parallel.common import at_sizes, require_error


def total() -> int:
    """The sum of all ranks' numbers, found by communication."""
    return int(hvd.allreduce(np.array([hvd.rank()]), op=hvd.Sum)[0])


def check_init_twice() -> None:
    live = runtime.current()
    hvd.init()
    assert runtime.current() is live


def check_shutdown_and_init_again() -> None:
    """Ten jobs in one process, each with its own sums. Between them every call reports that init() is missing."""
    p, r = hvd.size(), hvd.rank()
    for _ in range(10):
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.cross_size, hvd.barrier, lambda: hvd.allreduce(1.0)):
            require_error(hvd.NotInitializedError, call, "hvd.init()")
            require_error(ValueError, call)  # Horovod's class
        hvd.init()
        assert (hvd.rank(), hvd.size()) == (r, p) and total() == p * (p - 1) // 2


def check_init_with_a_communicator() -> None:
    """A communicator in reverse order reverses the ranks. Other objects are refused."""
    p, r = hvd.size(), hvd.rank()
    from mpi4py import MPI

    hvd.shutdown()
    require_error(ValueError, lambda: hvd.init(comm=5), "mpi4py communicator")  # type: ignore[arg-type]
    reverse = MPI.COMM_WORLD.Split(0, p - r)
    hvd.init(comm=reverse)
    assert (hvd.rank(), hvd.size()) == (p - 1 - r, p) and total() == p * (p - 1) // 2
    hvd.shutdown()
    assert reverse.Get_size() == p  # the user's communicator still exists
    reverse.Free()
    hvd.init()


def check_rank_that_shuts_down_early() -> None:
    """Each rank in turn leaves. The others' collective names that rank. Then all can leave and start again."""
    p, r = hvd.size(), hvd.rank()
    for early in range(p if p > 1 else 0):
        if r != early:
            require_error(
                hvd.ShutdownError,
                lambda: hvd.allreduce(np.ones(3), name="loss"),
                "allreduce 'loss'",
                f"rank {early} shut down",
            )
            handle = ops.allreduce_.start(np.ones(3))
            require_error(hvd.ShutdownError, handle.wait, "shut down")
        hvd.shutdown()
        hvd.init()
        assert total() == p * (p - 1) // 2


def check_rank_that_shuts_down_early_with_more_lanes() -> None:
    """It leaves all lanes at once: the others get the error on any lane."""
    p, r = hvd.size(), hvd.rank()
    for wanted in range(3 if p > 1 else 0):
        live = runtime.current()
        lane = [live.everyone.eager, live.everyone.new_lane("one", live), live.everyone.new_lane("two", live)][wanted]
        if r != 0:
            call = partial(lane.run, Request(Signature("test", "loss"), lambda lane: None))
            require_error(hvd.ShutdownError, call, "rank 0 shut down")
        hvd.shutdown()
        hvd.init()
        assert total() == p * (p - 1) // 2


def check_shutdown_completes_what_was_submitted() -> None:
    """After shutdown(), handles for which nobody waited are done and correct."""
    p, r = hvd.size(), hvd.rank()
    handles = [ops.allreduce_.start(np.full(1000, i + r), ops.Sum) for i in range(5)]
    hvd.shutdown()
    for i, handle in enumerate(handles):
        assert (handle.wait() == i * p + p * (p - 1) // 2).all()
    hvd.init()


def check_error_in_one_rank_of_a_set_of_arguments() -> None:
    """A wrong argument on one rank raises at once on that rank only, and other ranks go on."""
    p, r = hvd.size(), hvd.rank()
    if r == 0:
        require_error(ValueError, lambda: hvd.broadcast(np.ones(1), root_rank=99), "99")
        require_error(TypeError, lambda: hvd.allreduce("text"), "str")
    assert total() == p * (p - 1) // 2


def check_memory_outlives_shutdown() -> None:
    """Views of an arena, of one's own and of other ranks', are ordinary memory while somebody uses them."""
    p, r = hvd.size(), hvd.rank()
    lane = runtime.current().everyone.eager
    arena = lane.run(Request(Signature("test", "arena"), lambda lane: lane.workspace.allocate(
        "test", lane.transport, 1 << 16, lane.place.shares_memory, lane.place.hosts)))  # fmt: skip
    mine, peers = arena.view(128, 100, np.int32), arena.peer_views(128, 100, np.int32) or []
    del arena
    mine[:] = r
    hvd.barrier()
    hvd.shutdown()
    assert (mine == r).all() and [int(view[99]) for view in peers] == (list(range(p)) if p > 1 else [])
    hvd.init()
    hvd.barrier()  # every rank has read its views
    mine[:] = r + 100
    hvd.barrier()
    assert [int(view[0]) for view in peers] == ([100 + other for other in range(p)] if p > 1 else [])


def check_shared_memory_leaves_no_file_and_no_descriptor() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    lane = runtime.current().everyone.eager
    before = descriptors()
    for i in range(5):
        arena = lane.run(Request(Signature("test", f"arena {i}"), lambda lane: lane.workspace.allocate(
            "test", lane.transport, 1 << 16, lane.place.shares_memory, lane.place.hosts)))  # fmt: skip
        assert descriptors() <= before + hvd.size()  # the mappings of this one arena
        del arena


def in_a_child(function: Callable[[], object]) -> int:
    """The exit code of a forked child that calls this."""
    child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(99)
        os._exit(17)
    deadline = time.monotonic() + 10
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        assert time.monotonic() < deadline, "the child hangs"
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])


def check_forked_child_is_told() -> None:
    """A forked child knows its parent's rank, and gets a clear error from every call that communicates.

    It may call shutdown(), and exits. The parent goes on.
    """
    p, numbers = hvd.size(), (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_rank(), hvd.mpi_enabled())

    def calls() -> None:
        for call in (hvd.init, lambda: hvd.allreduce(np.ones(3)), hvd.barrier):
            require_error(hvd.HvdliteError, call, "in a process that a rank has started", "main process")
        assert hvd.is_initialized()
        assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_rank(), hvd.mpi_enabled()) == numbers
        hvd.shutdown()

    if not hvd.mpi_enabled():
        assert in_a_child(hvd.rank) == 17  # they share nothing, and both go on
        return
    for _ in range(2):
        assert in_a_child(calls) == 17
        assert total() == p * (p - 1) // 2


def check_forked_child_waits_for_nothing_of_its_parents() -> None:
    """Fork while requests are pending and a thread holds the lane's lock.

    Their handles are errors in the child, and continue in the parent.
    """
    p, r = hvd.size(), hvd.rank()
    lane, held, release = runtime.current().everyone.eager, threading.Event(), threading.Event()

    def submit() -> list[Handle]:
        return [ops.allreduce_.start(np.ones(3), ops.Sum, f"late {i}") for i in range(2)]

    def hold() -> None:
        with lane.queue.changed:
            held.set()
            release.wait(10)

    def ask(handles: list[Handle]) -> None:
        for handle in handles:
            require_error(hvd.HvdliteError, handle.wait, "in a process that a rank has started")

    if p == 1:
        return
    handles = submit() if r == 0 else []
    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    code = in_a_child(lambda: ask(handles))
    release.set()
    holder.join()
    assert code == 17
    hvd.barrier()
    for handle in handles or submit():
        assert (handle.wait() == p).all()


def check_late_rank() -> None:
    """Ranks that wait for a computing rank sleep, and take no core."""
    hvd.barrier()
    if hvd.rank() == 0:
        time.sleep(1.0)
    used, began = time.process_time(), time.monotonic()
    hvd.barrier()
    used, waited = time.process_time() - used, time.monotonic() - began
    if hvd.rank() != 0:
        assert used < 0.5 * waited, f"used {used:.2f} s of processor time in {waited:.2f} s of waiting"


def in_memory(transport: Any) -> Any:
    """A Maximum in shared memory; None if ranks share none, or if they may see writes in another order."""
    place = runtime.current().everyone.eager.place
    if not place.shares_memory or platform.machine() != "x86_64":
        return None
    found, barrier = Workspace().agree_in_memory(transport, place.hosts), transport.everyone
    assert found is not None and type(barrier) is type(found)
    return found


@at_sizes(2, 3, 4)
def check_a_maximum_is_everybodys() -> None:
    """A maximum works many times, tested and waited for. A maximum of nothing is a barrier."""
    from mpi4py import MPI

    from hvdlite.transports import mpi, mpi_requests

    transport, last = mpi.MpiTransport(MPI.COMM_WORLD.Dup()), hvd.size() - 1
    for make in (lambda: transport.maximum(5), lambda: in_memory(transport)):
        maximum = make()
        for call in range(50 if maximum else 0):
            largest = call % hvd.size()  # each rank has mapped it once
            maximum.start((1 << 62 if hvd.rank() == largest else -call, hvd.rank(), -hvd.rank(), call, 7))
            if (call + hvd.rank()) % 3 and isinstance(maximum, mpi_requests.MpiMaximum):
                maximum.wait()
            while not maximum.test():
                time.sleep(0)
            assert list(maximum.values) == [1 << 62, last, 0, call, 7]
            transport.barrier()
    steps = [step for each in transport.maxima for step in each.steps]
    assert len(steps) == 2 * (hvd.size() - 1).bit_length()
    transport.close()
    assert not any(step.incoming or step.outgoing for step in steps) and not transport.maxima


@at_sizes(2, 3, 4)
def check_a_wait_that_is_given_up_keeps_its_memory() -> None:
    """MPI may write to the memory later, when the other ranks have come."""
    from mpi4py import MPI

    from hvdlite.transports import mpi, mpi_requests

    comm = MPI.COMM_WORLD.Split(hvd.rank() < 2, hvd.rank())
    given_up: list[Any] = mpi_requests.GIVEN_UP
    transport = mpi.MpiTransport(comm)
    if hvd.rank() < 2:
        pending = transport.maximum(5)
        pending.start([hvd.rank()] * 5)
        if hvd.rank() == 0:
            transport.maxima.clear()
            del pending  # nobody holds it
            comm.Barrier()
            (step,) = given_up.pop()
            step.wait()
            assert step.received == struct.pack("5q", *[1] * 5)
            step.free()
        else:
            comm.Barrier()
            pending.wait()
            assert pending.values == [1] * 5
        assert not mpi_requests.GIVEN_UP
    if hvd.rank() < 2:
        mine, theirs = np.full(10, hvd.rank()), np.zeros(10, int)
        exchange = transport.start_exchange(mine, 1 - hvd.rank(), theirs, 1 - hvd.rank())
        if hvd.rank() == 0:
            del exchange
            (incoming, outgoing, _) = given_up.pop()
            MPI.Request.Waitall(incoming + outgoing)
        else:
            exchange.wait()
        assert (theirs == 1 - hvd.rank()).all()
    transport.close()
