"""Everything that is made for one plan and replaced with it: the parameters' facts, memory, and the way of packing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from hvdlite.gradients.departure import Departure
from hvdlite.gradients.lossy import marked
from hvdlite.gradients.policy import planned
from hvdlite.gradients.reducer import Memory, Reducer
from hvdlite.torch import cuda
from hvdlite.torch.attach.gradients import Gradients
from hvdlite.torch.attach.packing import Packing, Way
from hvdlite.torch.attach.parameters import Parameter, Planned
from hvdlite.torch.attach.part import Parts
from hvdlite.torch.attach.ranks import Ranks


@dataclass(frozen=True)
class Layout:
    """One plan, and the objects that bring its gradients to the other ranks.

    Attributes:
        planned: The parameters as they were when the plan was made.
        reducer: Sends the plan's buckets.
        packing: Copies gradients into their views.
        streams: The streams of the GPU that the parameters lie on; None for parameters on the host.
    """

    planned: Planned
    reducer: Reducer
    packing: Packing
    streams: cuda.Streams | None


def lay_out(
    to_be: Planned,
    ranks: Ranks,
    gradients: Gradients,
    settled: Callable[[torch.Tensor], bool | None],
    order: Sequence[int] | None,
) -> Layout:
    """Make a plan, and share memory with the other ranks. Collective. If this raises, the last plan stays.

    Args:
        to_be: The parameters of the new plan.
        ranks: The ranks that reduce together.
        gradients: The optimizer's gradients, which lie in the new memory from now on.
        settled: See `Way`.
        order: The order in which gradients come, as indices; None if it is not known.
    """
    now: Sequence[Parameter] = to_be.parameters
    config, store, place, specs = ranks.runtime.config, gradients.store, ranks.lane.place, tuple(to_be.specs)
    if store:
        specs = marked(dict(zip(to_be.names, specs, strict=True)), store, place, config.compress_within_host)
    layout, overlap = planned(specs, config, place, order)
    parts = None
    if to_be.settings.borders and ranks.group:
        mine, layout = ranks.group.rank, replace(layout, borders=to_be.settings.borders(now))
        parts = Parts([slice(*borders[mine : mine + 2]) for borders in layout.borders], to_be.settings.process_set)
    gpu, how = cuda.gpu_of(now), to_be.settings.terms.reduction(ranks.size)
    departure = Departure(overlap, learn=order is None and gpu is None)
    memory = Memory(gpu, store=store, within_host=config.compress_within_host)
    reducer = Reducer(ranks.lane, layout, how, ranks.name, departure, memory)
    streams = cuda.Streams(gpu.number) if gpu else None
    gradients.plan(now, reducer.views, parts)
    way = Way(
        take=gradients.take,
        settled=settled,
        singly=gradients.need_taking,
        urgent={bucket.members[-1] for bucket in layout.buckets if reducer.overlap},
        to_lend=reducer.to_lend,
        at_end=overlap is False,
    )
    return Layout(to_be, reducer, Packing(now, gradients.slots, way), streams)
