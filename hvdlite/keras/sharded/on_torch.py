"""All ranks get all pieces, on PyTorch: they travel from the owner's variable into the others' variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvdlite.arrays import Array
from hvdlite.gradients.variables import inside, name_of
from hvdlite.keras.sharded.stand_ins import Share
from hvdlite.torch.sharded.pieces import memory_of


@torch.no_grad()
def give(shares: Sequence[Share], run: Callable[[Sequence[Array]], None]) -> None:
    """Give every rank all pieces of the variables. Waits for all ranks.

    Args:
        shares: The variables.
        run: Overwrites, in the bytes of all variables, the pieces of other ranks with theirs.

    Raises:
        ValueError: A variable is not contiguous in memory.
    """
    values: list[torch.Tensor] = [inside(share.whole) for share in shares]
    for share, value in zip(shares, values, strict=True):
        if not value.is_contiguous():
            raise ValueError(f"sharded=True needs contiguous variables: {name_of(share.whole)} has {value.stride()}")
        if not share.is_whole and not share.is_empty:
            value.reshape(-1)[share.start : share.stop].copy_(inside(share.stand_in))
    run([memory_of(value) for value in values])
    torch.autograd.graph.increment_version(values)
