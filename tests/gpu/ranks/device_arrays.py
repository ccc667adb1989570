"""Every collective with CuPy arrays: by messages with device pointers, by staged messages, and with CUDA IPC."""

from __future__ import annotations

from typing import Any

import cupy
import ml_dtypes
import numpy as np

import hvdlite as hvd
from hvdlite import ops
from hvdlite.algorithms import pipeline
from hvdlite.algorithms.reduction import Reduction
from hvdlite.gpu_streams import on_host
from hvdlite.gradients.departure import Departure
from hvdlite.gradients.plan import Spec, plan
from hvdlite.gradients.reducer import Memory, Reducer
from hvdlite.gradients.use import Use
from hvdlite.job import runtime
from hvdlite.lanes import gpu_side
from hvdlite.lanes.signature import Round
from hvdlite.transports import device
from tests.by_messages import BY_MESSAGES
from tests.parallel.common import require_error, require_same_bits, restart

WAYS = [  # by messages with device pointers, by staged messages, in memory that the GPUs share
    *({"ALGORITHM": way, "CUDA_AWARE": aware} for way in BY_MESSAGES for aware in "10"),
    {"ALGORITHM": "shared", "CUDA_AWARE": "0"},
]
LENGTHS = (0, 1, 2, 5, 1000, 300_000)
device.CHUNK = 1 << 18  # the last of them is staged in several pieces,
pipeline.WHOLE = pipeline.GPU_CHUNK = 1 << 17  # and sent in several chunks


def kind(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def check_sums() -> None:
    """Sums of i % 7 + r over p ranks are exactly p (i % 7) + p(p-1)/2, with the same bits on all ranks."""
    p, r = hvd.size(), hvd.rank()
    for way in WAYS:
        restart(**way)
        for length in LENGTHS:
            pattern = np.arange(length) % 7
            result = hvd.allreduce(cupy.asarray((pattern + r).astype(np.float32)), op=hvd.Sum)
            np.testing.assert_array_equal(result.get(), pattern * p + p * (p - 1) // 2, str((way, length)))
            require_same_bits(result.get())
    restart()


def check_peers_reach_each_others_memory() -> None:
    """The GPUs share memory. (If CUDA refused that, the other checks would pass by messages.)"""
    restart(ALGORITHM="shared", CUDA_AWARE="0")
    hvd.allreduce(cupy.zeros(1000, np.float32), op=hvd.Sum)
    side = runtime.current().everyone.eager.host.gpu
    assert isinstance(side, gpu_side.Side) and side.workspace.stage is not None
    assert side.workspace.stage.peers is not None, "CUDA IPC is refused here: the two-shot has not run"
    restart()


def check_small_arenas_are_shared_too() -> None:
    """Many arenas, at the same time as messages, for which Open MPI opens small pieces of GPU memory."""
    restart(CUDA_AWARE="1")
    everyone = runtime.current().everyone
    lane, here = everyone.new_lane("test", everyone), gpu_side.gpu_of(cupy.zeros(1))
    small = [cupy.asarray(np.full(1000, hvd.rank() + 1.0)) for _ in range(8)]
    for number, array in enumerate(small):
        reducer = Reducer(
            lane,
            plan([Spec("p", (100,), "float32", "cuda")], 40_000, 8_000),
            Reduction("sum"),
            f"r{number}",
            Departure(True),
            Memory(here),
        )
        assert hvd.size() == 1 or reducer.arenas["cuda"].peers is not None, f"CUDA IPC was refused for arena {number}"
        np.testing.assert_array_equal(
            hvd.allreduce(array, op=hvd.Sum).get(), np.full(1000, hvd.size() * (hvd.size() + 1) / 2)
        )
    restart()


def check_dtypes_and_operations() -> None:
    p, r = hvd.size(), hvd.rank()
    for way in (WAYS[0], WAYS[-1]):
        restart(**way)
        for name in ("float64", "float16", "bfloat16", "int8", "int32", "int64", "uint8"):
            mine = cupy.asarray((np.arange(100) % 7 + r).astype(kind(name)))
            result = hvd.allreduce(mine, op=hvd.Sum).get()
            assert result.dtype == kind(name)
            np.testing.assert_array_equal(result.astype(float), np.arange(100) % 7 * p + p * (p - 1) // 2)
        for op, expected in ((hvd.Min, 1), (hvd.Max, p), (hvd.Product, np.prod(np.arange(p) + 1))):
            result = hvd.allreduce(cupy.asarray(np.full(100, r + 1.0)), op=op)
            np.testing.assert_array_equal(result.get(), np.full(100, float(expected)))
        mean = hvd.allreduce(cupy.asarray(np.full(10, r, np.int64) * 3))
        np.testing.assert_array_equal(mean.get(), np.full(10, 3 * (p - 1) // 2))
        scaled: Any = ops.allreduce_(cupy.asarray(np.full(10, 1.0)), ops.Sum, None, 0.5, 4.0)
        np.testing.assert_array_equal(scaled.get(), np.full(10, 2.0 * p))
    restart()


def check_the_bits_are_the_hosts() -> None:
    """Kernels add, scale and round floats as NumPy does, with any scaling."""
    rng = np.random.default_rng(hvd.rank())
    for way in (WAYS[0], WAYS[-1]):
        restart(**way)
        for name in ("float16", "bfloat16", "float32", "float64"):
            mine = (rng.standard_normal(5000) * 2.0 ** rng.integers(-12, 12, 5000)).astype(kind(name))
            for how in ((hvd.Sum, 1.0, 1.0), (hvd.Average, 1.0, 1.0), (hvd.Average, 0.3, 1.7), (hvd.Max, 1.0, 1.0)):
                op, before, after = how
                here = ops.allreduce_(mine.copy(), op, None, before, after)
                there: Any = ops.allreduce_(cupy.asarray(mine), op, None, before, after)
                assert here.tobytes() == there.get().tobytes(), (way, name, how)
    restart()


def check_movement() -> None:
    """Broadcast, all-gather, all-to-all and reduce-scatter, with device pointers and with staged messages."""
    p, r = hvd.size(), hvd.rank()
    for aware in "10":
        restart(CUDA_AWARE=aware)
        for root in range(p):
            result = hvd.broadcast(cupy.asarray(np.full(70_000, float(r))), root)
            np.testing.assert_array_equal(result.get(), np.full(70_000, float(root)))
        rows = hvd.allgather(cupy.asarray(np.full((r, 3), r, np.int32)))
        np.testing.assert_array_equal(rows.get()[:, 0], np.repeat(np.arange(p), np.arange(p)))
        mixed: Any
        mixed, counts = ops.alltoall(cupy.asarray(np.arange(p) + 10 * r))
        np.testing.assert_array_equal(mixed.get(), np.arange(p) * 10 + r)
        np.testing.assert_array_equal(counts, np.ones(p))
        part: Any = ops.reducescatter(cupy.asarray(np.arange(2.0 * p)), ops.Sum)
        np.testing.assert_array_equal(part.get(), p * np.arange(2.0 * r, 2.0 * r + 2))
    restart()


def check_asynchronous() -> None:
    """Many operations at once, in the program's order. The stream that waits can read the results."""
    restart(CUDA_AWARE="1")
    arrays = [cupy.asarray(np.full(1000, float(i + hvd.rank()))) for i in range(20)]
    handles: list[Any] = [ops.allreduce_.start(array, ops.Sum, f"a{i}") for i, array in enumerate(arrays)]
    p = hvd.size()
    for i, handle in enumerate(handles):
        np.testing.assert_array_equal(handle.wait().get(), np.full(1000, p * i + p * (p - 1) / 2))
    restart()


def check_host_and_device_differ() -> None:
    """If one rank's array is on the GPU and another's on the host, all raise the same error, and the job continues."""
    if hvd.size() > 1:
        mine = np.ones(3) if hvd.rank() else cupy.asarray(np.ones(3))
        require_error(hvd.MismatchError, lambda: hvd.allreduce(mine, name="x"), "device")
    assert (hvd.allreduce(np.ones(3), op=hvd.Sum) == hvd.size()).all()


def check_ranks_that_have_joined_take_part() -> None:
    """Joined ranks take part with zeros on their GPU, even if they have not used it before."""
    p, last = hvd.size(), hvd.size() - 1
    for way in (*WAYS[:2], WAYS[-1]):
        for used in (False, True):
            restart(**way)
            if used:
                hvd.allreduce(cupy.asarray(np.ones(10)))
            if hvd.rank() != last or p == 1:
                for length in (10, 50_000):
                    result = hvd.allreduce(cupy.asarray(np.full(length, 2.0)), op=hvd.Sum, name=f"left {length}")
                    np.testing.assert_array_equal(result.get(), np.full(length, 2.0 * max(p - 1, 1)))
            hvd.join()
    restart()


def check_rounds_of_a_reducer() -> None:
    """One plan has buckets on the host and on the GPU. A new plan replaces the memory of the old one."""
    p, r = hvd.size(), hvd.rank()
    for way in (*WAYS[:2], WAYS[-1]):
        restart(**way)
        everyone = runtime.current().everyone
        lane = everyone.new_lane("test", everyone)
        for count in (3, 12):
            specs = [Spec(f"p{i}", (1000, i + 1), "float32", "cuda" if i % 3 else "host") for i in range(count)]
            layout = plan(specs, 40_000, 8_000)
            reducer = Reducer(
                lane, layout, Reduction("sum"), "r", Departure(True), Memory(gpu_side.gpu_of(cupy.asarray(np.ones(1))))
            )
            for step in range(3):
                for i in reversed(range(count)):
                    reducer.views[i][...] = i + step + r
                    reducer.mark_ready([i], Round("step {}", (step,)))
                reducer.finish_round(lambda index: Use.UNUSED, Round("step {}", (step,)))
                for i, view in enumerate(reducer.views):
                    assert (on_host(view) == p * (i + step) + p * (p - 1) // 2).all(), (way, step, i)
    restart()
