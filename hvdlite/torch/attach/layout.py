"""What is made for one plan, and replaced with it: the parameters as they were then, memory, and the way there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hvdlite.gradients.departure import Departure
from hvdlite.gradients.policy import planned
from hvdlite.gradients.reducer import Memory, Reducer
from hvdlite.torch import cuda
from hvdlite.torch.attach.gradients import Gradients
from hvdlite.torch.attach.packing import Packing, Way
from hvdlite.torch.attach.parameters import Parameter, Planned
from hvdlite.torch.attach.ranks import Ranks


@dataclass(frozen=True)
class Layout:
    """One plan's parameters, and what brings their gradients to the peers."""

    planned: Planned
    reducer: Reducer
    packing: Packing
    streams: cuda.Streams | None
    """Of the GPU that the parameters lie on."""


def lay_out(
    to_be: Planned, ranks: Ranks, gradients: Gradients, settled: Callable[[torch.Tensor], bool | None],
    order: Sequence[int] | None,
) -> Layout:
    """Plan, and share memory with the other ranks. Collective; if it raises, the plan before stays.

    settled: see `Way`. order: that in which gradients come, if it is known.
    """
    now: Sequence[Parameter] = to_be.parameters
    layout, overlap = planned(to_be.specs, ranks.runtime.config, ranks.lane.place, order)
    gpu, how = cuda.gpu_of(now), to_be.settings.terms.reduction(ranks.size)
    departure = Departure(overlap, learn=order is None and gpu is None)
    reducer = Reducer(ranks.lane, layout, how, ranks.name, departure, Memory(gpu))
    streams = cuda.Streams(gpu.number) if gpu else None
    gradients.plan(now, reducer.views)
    way = Way(
        take=gradients.take,
        settled=settled,
        singly=gradients.need_taking,
        urgent={bucket.members[-1] for bucket in layout.buckets if reducer.overlap},  # with them a bucket may leave
        to_lend=reducer.to_lend,
        at_end=overlap is False,
    )
    return Layout(to_be, reducer, Packing(now, gradients.slots, way), streams)
