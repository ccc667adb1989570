"""c10d's reduce operations as hvdlite's reductions."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist

from hvdlite.algorithms.reduction import Reduction
from hvdlite.torch.tensors import dtype_name

OPERATIONS = {
    "SUM": "sum", "AVG": "sum", "PREMUL_SUM": "sum", "PRODUCT": "product", "MIN": "min", "MAX": "max", "BAND": "and",
    "BOR": "or", "BXOR": "xor",
}  # fmt: skip
"""hvdlite's operations by c10d's names."""


def reduction(op: dist.ReduceOp, size: int, tensor: torch.Tensor) -> Reduction:
    """The reduction of a c10d operation.

    Args:
        op: The operation.
        size: The number of ranks.
        tensor: A tensor that is to be reduced.

    Raises:
        ValueError: The tensor's dtype has no such reduction.
    """
    kind, factor = cast("tuple[dist.ReduceOp.RedOpType, float]", whole_op(op).__getstate__())
    name, dtype = kind.name, tensor.dtype
    dtype_name(tensor)
    whole = not (dtype.is_floating_point or dtype.is_complex)
    possible = {
        "BAND": whole, "BOR": whole, "BXOR": whole, "AVG": dtype != torch.bool, "MIN": not dtype.is_complex,
        "MAX": not dtype.is_complex,
    }  # fmt: skip
    if not possible.get(name, True):
        raise ValueError(f"ReduceOp.{name} of {dtype} is not possible")
    return Reduction(OPERATIONS[name], float(factor or 1.0), divisor=size if name == "AVG" else 1)


def whole_op(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> dist.ReduceOp:
    """The operation, which may be given by its kind alone."""
    return dist.ReduceOp(op) if isinstance(op, dist.ReduceOp.RedOpType) else op
