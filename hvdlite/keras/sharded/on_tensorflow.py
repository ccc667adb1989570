"""All ranks get all pieces, on TensorFlow: one node takes this rank's pieces, and returns the others' variables.

A variable's memory may be shared with tensors that have been read from it. So nothing is written in place: the node
receives into new memory, which TensorFlow takes over without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from hvdlite.arrays import Array, on_boundary
from hvdlite.gradients.variables import fixed_shape, inside
from hvdlite.keras.sharded.stand_ins import Share
from hvdlite.tensorflow_graph.gpu import on_host
from hvdlite.tensorflow_graph.graph import node, tensorflow_errors, to_tensors


def give(shares: Sequence[Share], run: Callable[[Sequence[Array]], None]) -> None:
    """Give every rank all pieces of the variables. Waits for all ranks, now or when the graph runs.

    Args:
        shares: The variables.
        run: Overwrites, in the bytes of all variables, the pieces of other ranks with theirs.
    """
    mine = [share for share in shares if not share.is_empty]
    others = [share for share in shares if not share.is_whole]

    def work(*arrays: Array) -> list[Array]:
        given = {id(share): bytes_of(array) for share, array in zip(mine, arrays, strict=True)}
        found = {id(share): received(share, given.get(id(share))) for share in others}
        run([bytes_of(found[id(share)]) if id(share) in found else given[id(share)] for share in shares])
        return list(found.values())

    inputs = [tf.convert_to_tensor(inside(share.stand_in)) for share in mine]
    if tf.executing_eagerly():
        with tensorflow_errors():
            results = to_tensors(work(*map(on_host, inputs)))
    else:
        outputs = [tf.TensorSpec(fixed_shape(share.whole), inside(share.whole).dtype) for share in others]
        results, _ = node(work, inputs, outputs, "hvdlite_stepped")
    for share, result in zip(others, results, strict=True):
        inside(share.whole).assign(result)


def received(share: Share, piece: Array | None) -> Array:
    """Return new memory for a variable, with this rank's piece of it. piece: its bytes."""
    dtype, shape = np.dtype(inside(share.whole).dtype.as_numpy_dtype), fixed_shape(share.whole)
    whole = on_boundary(int(np.prod(shape)) * dtype.itemsize)
    if piece is not None:
        whole[share.start * dtype.itemsize : share.stop * dtype.itemsize] = piece
    return whole.view(dtype).reshape(shape)


def bytes_of(array: Array) -> Array:
    """Return the bytes of a contiguous array, in the same memory."""
    return array.reshape(-1).view(np.uint8)
