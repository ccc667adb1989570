"""The batches of grouped all-reduces."""

from __future__ import annotations

import numpy as np

from hvdlite.algorithms import Place
from hvdlite.algorithms.grouped import SHORT_BYTES, allreduce_all, batches
from hvdlite.algorithms.reduction import Reduction
from hvdlite.memory.workspace import Workspace
from hvdlite.transports.threads import ThreadTransport, run_ranks


def test_short_arrays_of_a_dtype_travel_together() -> None:
    arrays = [
        np.zeros(3, "f4"),
        np.zeros(2, "i8"),
        np.zeros(5, "f4"),
        np.zeros(SHORT_BYTES + 1, "i1"),
        np.zeros(4, "i8"),
    ]
    assert batches(arrays, 1 << 20) == [[0, 2], [1, 4], [3]]


def test_a_batch_that_is_full_is_followed_by_another() -> None:
    arrays = [np.zeros(10, "i1")] * 7
    assert batches(arrays, 30) == [[0, 1, 2], [3, 4, 5], [6]]


def test_each_alone() -> None:
    assert batches([np.zeros(3, "f4")] * 3, 0) == [[0], [1], [2]]


def test_adasum_takes_each_by_itself() -> None:
    """Orthogonal arrays are added, and equal arrays averaged. As one array they would be neither."""

    def main(transport: ThreadTransport) -> list[list[float]]:
        arrays = [np.eye(2)[transport.rank], np.ones(2)]
        allreduce_all(transport, Workspace(), Place(2, False), arrays, Reduction("adasum"))
        return [array.tolist() for array in arrays]

    assert run_ranks(2, main) == [[[1.0, 1.0], [1.0, 1.0]]] * 2
