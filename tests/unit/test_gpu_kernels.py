"""Sums in one kernel have the bits of the host's arithmetic.

The pretend CuPy runs the kernel's text, and the machine's C compiler runs the C++ around it.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hvdlite.algorithms import allreduce, fused
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array
from hvdlite.lanes import gpu_side
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.transports import nccl
from tests import averages
from tests.by_messages import BY_MESSAGES
from tests.pretend import cupy
from tests.pretend.lanes import on_lanes, stand_in  # noqa: F401
from tests.unit.test_algorithms import run
from tests.unit.test_averages import require

pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
FLOATS = ("float16", "bfloat16", "float32", "float64")
REDUCTIONS = (
    Reduction(), Reduction(divisor=3), Reduction(divisor=4), Reduction(before=0.3, after=1.7),
    Reduction(before=1 / 3, after=0.1, divisor=3), Reduction("max", divisor=1),
)  # fmt: skip


def given(size: int, dtype: str, length: int = 500) -> list[np.ndarray]:
    """Random numbers of many magnitudes, one array for each rank. Some infinities cancel to NaN."""
    arrays = []
    for rank in range(size):
        rng = np.random.default_rng(rank)
        array = (rng.standard_normal(length) * 2.0 ** rng.integers(-12, 12, length)).astype(np.dtype(dtype))
        array[[3, 5]], array[7] = np.inf, np.inf if rank else -np.inf
        arrays.append(array)
    return arrays


def on_gpus(way: str, arrays: Sequence[Array], reduction: Reduction, hosts: Any = ()) -> list[Any]:
    def rank_main(lane: Lane) -> Any:
        array: Any = cupy.asarray(arrays[lane.transport.rank])

        def work(lane: Workplace) -> None:
            allreduce(lane.transport, lane.workspace, lane.place, array, reduction)

        request = Request(Signature("allreduce", "x"), work)
        gpu_side.on_gpu(lane, request, array)
        lane.run(request)
        return array.get()

    return on_lanes(len(arrays), way, True, rank_main, hosts)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether arrays have the same bits, except in NaNs."""
    nan = np.isnan(a.astype(np.float64))
    return bool((nan == np.isnan(b.astype(np.float64))).all()) and a[~nan].tobytes() == b[~nan].tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("way", ["shared", *BY_MESSAGES])
def test_the_bits_are_the_hosts(way: str, dtype: str) -> None:
    for size in (2, 3, 4):
        arrays = given(size, dtype)
        for reduction in REDUCTIONS:
            (expected, *_), results = run(way, arrays, reduction), on_gpus(way, arrays, reduction)
            assert all(same(result, expected) for result in results), (size, reduction)


@pytest.mark.parametrize("way", ["auto", "shared"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_bits_on_several_hosts(dtype: str, way: str) -> None:
    """Each host has two ranks.

    With messages, 16 bits are rounded once; in shared memory, each host's average is rounded too.
    """
    arrays = [array[8:] for array in given(4, dtype)]
    kind = np.dtype(dtype)
    wide = np.dtype("float64" if dtype == "float64" else "float32").type
    a, b, c, d = (array.astype(wide) for array in arrays)
    first, then = (0.5, 0.5) if kind.itemsize == 2 else (1.0, 0.25)
    sums = [(x + y) * wide(first) for x, y in ((a, b), (c, d))]
    near, far = sums if way == "auto" else [each.astype(kind).astype(wide) for each in sums]
    expected = ((near + far) * wide(then)).astype(kind)
    for result in on_gpus(way, arrays, Reduction(divisor=4), ((0, 1), (2, 3))):
        assert same(result, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "uint16", "int32", "int64", "uint64"])
@pytest.mark.parametrize("way", ["auto", *BY_MESSAGES, "shared", "nccl"])
def test_averages_do_not_overflow_on_a_gpu(way: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "check", lambda cards: None)  # one GPU for each rank
    if way == "nccl" and np.dtype(dtype).kind in "iu":
        pytest.skip("the stand-in's NCCL adds float32 only")
    for size in (2, 3):
        for length in (0, 1, 17, 289, 4913):
            arrays = averages.given(size, length, np.dtype(dtype))
            expected = averages.average(arrays, size)
            require(on_gpus(way, arrays, Reduction(divisor=size)), expected, (size, length))


def test_the_two_shot_is_one_kernel() -> None:
    for dtype in FLOATS:
        cupy.LOG.clear()
        on_gpus("shared", given(3, dtype), Reduction(divisor=3))
        kernels = [entry[0] for entry in cupy.LOG if entry[0] in ("add", "multiply", "divide") or "sum" in entry[0]]
        assert kernels == [f"hvdlite_sum_{dtype}"] * 3  # one on each rank


def test_more_ranks_than_a_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "MOST", 2)
    arrays = given(3, "float16")[:3]
    with np.errstate(all="ignore"):
        (expected, *_), results = run("shared", arrays, Reduction()), on_gpus("shared", arrays, Reduction())
    assert all(same(result, expected) for result in results)


@pytest.mark.skipif(not shutil.which("cc"), reason="NOT RUN: the C++ of bfloat16 kernels. There is no cc")
def test_bfloat16_in_c_is_ml_dtypes(tmp_path: Path) -> None:
    """Widen every bfloat16. Narrow every float32 that its upper 18 bits define, and the neighbours of ties."""
    source = tmp_path / "casts.c"
    source.write_text(f"""
#include <string.h>
#define __device__ static
float __uint_as_float(unsigned int x) {{ float y; memcpy(&y, &x, 4); return y; }}
unsigned int __float_as_uint(float x) {{ unsigned int y; memcpy(&y, &x, 4); return y; }}
{fused.WIDE_AND_NARROW["bfloat16"]}
void wide_all(unsigned short *x, float *y, long n) {{ for (long i = 0; i < n; i++) y[i] = wide(x[i]); }}
void narrow_all(float *x, unsigned short *y, long n) {{ for (long i = 0; i < n; i++) y[i] = narrow(x[i]); }}
""")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", tmp_path / "casts.so", source], check=True)
    casts = ctypes.CDLL(str(tmp_path / "casts.so"))

    def apply(function: Any, values: np.ndarray, dtype: Any) -> np.ndarray:
        found = np.empty(values.size, dtype)
        function(ctypes.c_void_p(values.ctypes.data), ctypes.c_void_p(found.ctypes.data), ctypes.c_long(values.size))
        return found

    short = np.arange(1 << 16, dtype=np.uint16)
    widened = apply(casts.wide_all, short, np.float32)
    assert widened.tobytes() == short.view(ml_dtypes.bfloat16).astype(np.float32).tobytes()
    bits = (np.arange(1 << 18, dtype=np.uint32) << 14)[:, None] + np.array([0, 1, (1 << 14) - 1], np.uint32)
    values = bits.reshape(-1).view(np.float32)
    with np.errstate(all="ignore"):
        assert apply(casts.narrow_all, values, np.uint16).tobytes() == values.astype(ml_dtypes.bfloat16).tobytes()
