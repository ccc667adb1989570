"""All-reduce of sparse tensors: ranks gather all entries, and each adds them up."""

from __future__ import annotations

import numpy as np
import torch

from hvdlite.algorithms import movement
from hvdlite.algorithms.reduction import Reduction
from hvdlite.lanes.workplace import Workplace
from hvdlite.torch.distributed.buffers import flat


def add_up(at: Workplace, tensor: torch.Tensor, how: Reduction) -> None:
    """Add all ranks' sparse tensors up, in place. Runs on the lane.

    Price: every rank receives all ranks' entries.
    """
    mine, size = tensor.coalesce(), at.transport.size
    counts = np.full((size, 1), mine.values().shape[0], np.int64)
    movement.allgather(at.transport, list(counts))
    lengths = [count for (count,) in counts.tolist()]
    indices = gathered(at, mine.indices().t().contiguous(), lengths).t()
    values = gathered(at, mine.values(), lengths)
    total = torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False).coalesce()
    if how.before != 1.0 or how.divisor != 1:
        total = total * (how.before / how.divisor)
    tensor.copy_(total)


def gathered(at: Workplace, rows: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """All ranks' rows, one after another. lengths: each rank's number of rows."""
    found = rows.new_empty(sum(lengths), *rows.shape[1:])
    pieces = [flat(piece) for piece in torch.split(found, lengths)]
    pieces[at.transport.rank][...] = flat(rows)
    movement.allgather(at.transport, pieces)
    return found
