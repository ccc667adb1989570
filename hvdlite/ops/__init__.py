"""Collectives on NumPy or CuPy arrays.

Each builds a request for the lane of the user's calls (the eager lane) of its process set. Each is a `Collective`: a
call waits for the result, and `.start(...)` returns a `Handle` at once. Arrays are contiguous; adapters turn a
framework's tensors into arrays that share their memory. Some errors one rank alone can see: bad splits, not a member of
the process set, a name in flight. That rank raises ValueError at once. If the ranks' arguments differ, every rank
raises MismatchError.

Belongs here: everything that users or adapters call on arrays or objects. Not here: how bytes are reduced and moved
(`algorithms/`), and in what order requests run (`lanes/`).
"""

from hvdlite.ops.common import Adasum, Average, Max, Min, Op, Product, Sum, op_of, reduction, resolve_op, sparse_facts
from hvdlite.ops.messages import letter_from, letter_to
from hvdlite.ops.movement import (
    allgather,
    allgather_several,
    alltoall,
    barrier,
    broadcast_,
    broadcast_several_,
    gather,
    grouped_allgather,
    scatter,
)
from hvdlite.ops.reductions import (
    allreduce_,
    amplification,
    grouped_allreduce_,
    grouped_allreduce_of_none,
    grouped_reducescatter,
    reduce,
    reducescatter,
    require_adasum,
)

__all__ = [
    "Adasum", "Average", "Max", "Min", "Op", "Product", "Sum", "allgather", "allgather_several", "allreduce_",
    "alltoall", "amplification", "barrier", "broadcast_", "broadcast_several_", "gather", "grouped_allgather",
    "grouped_allreduce_", "grouped_allreduce_of_none", "grouped_reducescatter", "letter_from", "letter_to", "op_of",
    "reduce", "reducescatter", "reduction", "require_adasum", "resolve_op", "scatter", "sparse_facts",
]  # fmt: skip
