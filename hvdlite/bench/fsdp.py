"""The FSDP benchmark: what communication costs in a step of torch's fully_shard (FSDP2), beside gloo.

Copies of the transformer take turns: the whole model, one that is sharded over one rank, and two that are sharded over
all ranks, over the backend hvdlite and over gloo. The copy on one rank computes and copies as FSDP2 does, and no byte
leaves the rank: the time above it in the same round is communication. (Its optimizer updates all weights, and the
others' a part. So their communication takes a little longer than the figure.) Each rank has one thread, random data
and plain SGD. Afterwards the weights of both sharded copies must agree.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hvdlite.bench.contenders import start_gloo
from hvdlite.bench.step import (
    LEARNING_RATE,
    SECONDS,
    WARM_UP,
    Result,
    Weights,
    compared,
    same_weights,
    stepper,
    weights_of,
)
from hvdlite.bench.tasks import TASKS, copy_of
from hvdlite.bench.timing import Action, Progress, interleaved, pin, rounds_for

TASK = TASKS["transformer"]


def compare(comm: MPI.Comm, steps: int | None, pinned: bool, progress: Progress) -> Result:
    """Train all copies in turns. Collective; waits for all ranks.

    Args:
        comm: All ranks.
        steps: Timed steps per copy; None: as many as fit in SECONDS.
        pinned: Whether no two ranks share a core.
        progress: Called before the steps.

    Returns:
        The result, equal on all ranks: seconds of 'whole', 'none' (on one rank), 'hvdlite' and 'gloo'.

    Raises:
        HvdliteError: The weights of hvdlite and gloo differ afterwards.
    """
    torch.set_num_threads(1)
    start_gloo()
    if pinned:
        pin(comm)
    progress(0, 1, f"{TASK.name}: {f'{steps} steps' if steps else f'{SECONDS:.0f} s'} of each contender")
    ours = dist.new_group(backend="hvdlite")
    alone, _ = dist.new_subgroups(1)  # type: ignore[no-untyped-call]
    models = {
        "whole": copy_of(TASK),
        "none": sharded(alone),
        "hvdlite": sharded(ours),
        "gloo": sharded(dist.group.WORLD),
    }
    torch.manual_seed(1 + comm.Get_rank())
    batch = TASK.batch(TASK.count)
    actions: dict[str, Action] = {
        key: stepper(model, torch.optim.SGD(model.parameters(), LEARNING_RATE), batch) for key, model in models.items()
    }
    interleaved(actions, comm, WARM_UP, warm=False)
    steps = steps or rounds_for(actions, comm, SECONDS, 1, warm=False)
    timing = interleaved(actions, comm, steps, warm=False)
    same_weights(TASK.name, gathered(models["hvdlite"]), gathered(models["gloo"]), "gloo's")
    dist.destroy_process_group(ours)
    lengths = [parameter.numel() for parameter in models["whole"].parameters()]
    more = {key: (timing.rounds[key] - timing.rounds["none"]).reshape(-1) for key in ("hvdlite", "gloo")}
    times, ratio, likely = compared(more, "gloo")
    return Result(
        TASK.name, sum(lengths), len(lengths), steps, timing.seconds, times, ratio, likely, timing.crowded,
        timing.spread,
    )  # fmt: skip


def sharded(group: dist.ProcessGroup | None) -> nn.Module:
    """The transformer, each layer and the rest sharded over the ranks of a group."""
    model, mesh = copy_of(TASK), DeviceMesh.from_group(group, "cpu")  # type: ignore[arg-type]
    for layer in model[0].layers:  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def gathered(model: nn.Module) -> Weights:
    """All weights, whole, on every rank. Collective."""
    found = weights_of(model).items()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found}
