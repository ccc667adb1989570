"""Fused sums on a GPU: one kernel reads each addend once, adds, scales, rounds once, and writes each result once.

    y0 = y1 = narrow((wide(y0) + wide(y1)) * s0);       two-shot of 2 ranks, in place in both ranks' memory

Price: the two-shot of p ranks moves 2p arrays through memory. With CuPy's own kernels it would move 5p - 3: p - 1 sums,
a scaling, and p - 1 copies. 16-bit floats are added in float32 without float32 copies in memory. Integers and minima,
which are seldom large on a GPU, use CuPy's kernels (`possible`). For times see MEASURED.md, "On a GPU" and "Details".

The bits are the host's: the same operations in the same order and precision, and multiplications and additions are not
contracted. Subnormal float32 and bfloat16 numbers become zero, since CuPy always compiles with -ftz=true, and the bits
of NaN may differ. All ranks of a GPU sum have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from hvdlite.arrays import Array, accumulator, bfloat16, is_float, is_host, module

MOST = 16  # addends; the number of a kernel's arguments is limited
Scaling = tuple[tuple[str, float], ...]
"""The scaling of a sum, in order: ("*", factor) or ("/", divisor)."""

WIDE_AND_NARROW = {
    "float64": "__device__ double wide(double x) { return x; } __device__ double narrow(double x) { return x; }",
    "float32": "__device__ float wide(float x) { return x; } __device__ float narrow(float x) { return x; }",
    "float16": "__device__ float wide(float16 x) { return (float)x; } "
               "__device__ float16 narrow(float x) { return float16(x); }",
    "bfloat16": """
__device__ float wide(unsigned short x) { return __uint_as_float((unsigned int)x << 16); }
__device__ unsigned short narrow(float x) {
    unsigned int bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16 & 0x8000u) | 0x7fc0u;  // NaN
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;  // to the nearest, ties to even
}""",
}  # fmt: skip


def possible(blocks: Sequence[Array], operation: str) -> bool:
    """Whether `add_up` can add these blocks."""
    first = blocks[0]
    return not is_host(first) and operation == "sum" and is_float(first.dtype) and len(blocks) <= MOST


def add_up(blocks: Sequence[Array], targets: int, before: float = 1.0, scaling: Scaling = ()) -> None:
    """Write the scaled sum of blocks * before into the first `targets` blocks, with one kernel on the current stream.

    blocks: equally long flat float arrays on a GPU, added in this order.
    """
    xp, kind = module(blocks[0]), str(blocks[0].dtype.name)
    run = kernel(xp.ElementwiseKernel, kind, len(blocks), targets, before != 1.0, "".join(sign for sign, _ in scaling))
    # CuPy has no name for bfloat16 in kernels before its version 14.
    given = [block.view("uint16") if block.dtype == bfloat16 else block for block in blocks]
    wide = accumulator(blocks[0].dtype).type
    factors = [wide(value) for value in ([before] if before != 1.0 else []) + [value for _, value in scaling]]
    run(*given[targets:], *factors, *given[:targets])


@cache
def kernel(elementwise: Any, kind: str, count: int, targets: int, before: bool, signs: str) -> Any:
    """The kernel for `count` addends. Its text is valid in C++ and in Python, so that tests run it without a GPU."""
    addends = [f"wide(y{i})" if i < targets else f"wide(x{i})" for i in range(count)]
    total = " + ".join(f"{addend} * before" if before else addend for addend in addends)
    for index, sign in enumerate(signs):
        total = f"({total}) {sign} s{index}"
    results = " = ".join(f"y{i}" for i in range(targets))
    stored, added = "uint16" if kind == "bfloat16" else kind, accumulator(np.dtype(kind)).name
    inputs = [f"{stored} x{i}" for i in range(targets, count)] + [f"{added} before"] * before
    inputs += [f"{added} s{index}" for index in range(len(signs))]
    return elementwise(
        ", ".join(inputs), ", ".join(f"{stored} y{i}" for i in range(targets)), f"{results} = narrow({total});",
        f"hvdlite_sum_{kind}", preamble=WIDE_AND_NARROW[kind], options=("--fmad=false",),
    )  # fmt: skip
