"""The training-step benchmark: the overhead of data-parallel training, beside torch's DDP on gloo.

Copies of each model take turns: one without communication, one with `hvdlite.torch.DistributedOptimizer`, and three in
DistributedDataParallel (DDP): two over the backend hvdlite, with and without gradient_as_bucket_view, and one on gloo.
The overhead is the difference to the copy without communication in the same round. Each rank has one thread, random
data and plain SGD. Afterwards the weights of hvdlite and each DDP must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvdlite.torch as hvd
from hvdlite.bench.contenders import start_gloo
from hvdlite.bench.tasks import TASKS, Task, copy_of
from hvdlite.bench.timing import Action, Floats, Progress, Quartiles, interleaved, pin, rounds_for
from hvdlite.errors import HvdliteError

WARM_UP = 4  # steps: DDP rebuilds its buckets after the first
LEARNING_RATE = 0.001
Weights: TypeAlias = Mapping[str, torch.Tensor]
SECONDS = 25.0  # for each model, if the number of steps is not given
RESAMPLED = 2000  # times
TOLERANCE = 1e-3  # relative; the two sum in different orders and round differently, over up to 300 small steps


@dataclass(frozen=True)
class Result:
    """The times of one model.

    Attributes:
        name: The model.
        parameters: The number of its parameters.
        tensors: The number of tensors that they form.
        steps: Timed steps per copy.
        seconds: Median seconds per step, by copy: 'none', 'hvdlite', 'ddp_views', 'ddp_copies', 'ddp' (on gloo).
        overhead: Median overhead in seconds per step, for all that communicate.
        ratio: hvdlite's overhead in units of gloo's (with DDP, or with FSDP).
        likely: The 90 % interval of the ratio, from the steps' scatter (by bootstrap).
        crowded: As in `timing.Timing`.
        spread: The quartiles of the seconds, by copy.
    """

    name: str
    parameters: int
    tensors: int
    steps: int
    seconds: dict[str, float]
    overhead: dict[str, float]
    ratio: float
    likely: tuple[float, float]
    crowded: float
    spread: dict[str, Quartiles] = field(default_factory=dict)


def compare(
    comm: MPI.Comm, names: Sequence[str], steps: int | None, pinned: bool, progress: Progress, device: str = "cpu"
) -> list[Result]:
    """Run the named tasks. Collective; waits for all ranks.

    Args:
        comm: All ranks.
        names: The tasks, of `tasks.TASKS`.
        steps: Timed steps per copy; None: as many as fit in SECONDS.
        pinned: Whether no two ranks share a core.
        progress: Called before each task.
        device: 'cpu', or 'cuda' for this rank's GPU.

    Returns:
        The results, equal on all ranks.

    Raises:
        HvdliteError: The weights of hvdlite and DDP differ afterwards.
    """
    torch.set_num_threads(1)
    start_gloo()
    if pinned and device == "cpu":  # with a GPU, the lane's thread and the thread that issues kernels need two cores
        pin(comm)
    results = []
    for done, name in enumerate(names):
        progress(done, len(names), name)
        results.append(run(TASKS[name], comm, steps, device))
    return results


def run(task: Task, comm: MPI.Comm, steps: int | None, device: str) -> Result:
    """Train the three copies in turns."""
    copies = {key: copy_of(task).to(device) for key in ("none", "hvdlite", "ddp_views", "ddp_copies", "ddp")}
    torch.manual_seed(1 + comm.Get_rank())
    batch = tuple(part.to(device) for part in task.batch(task.count))
    optimizers = {key: torch.optim.SGD(model.parameters(), LEARNING_RATE) for key, model in copies.items()}
    hvd.DistributedOptimizer(optimizers["hvdlite"], copies["hvdlite"].named_parameters())
    ours = torch.distributed.new_group(backend="hvdlite")
    wrapped = copies | {
        "ddp_views": DistributedDataParallel(copies["ddp_views"], process_group=ours, gradient_as_bucket_view=True),
        "ddp_copies": DistributedDataParallel(copies["ddp_copies"], process_group=ours),
        "ddp": DistributedDataParallel(copies["ddp"]),
    }
    actions: dict[str, Action] = {key: stepper(wrapped[key], optimizers[key], batch) for key in copies}
    interleaved(actions, comm, WARM_UP, warm=False)
    steps = steps or rounds_for(actions, comm, SECONDS, 1, warm=False)
    timing = interleaved(actions, comm, steps, warm=False)
    for key in ("ddp_views", "ddp_copies", "ddp"):
        same_weights(task.name, weights_of(copies["hvdlite"]), weights_of(copies[key]), "DDP's")
    torch.distributed.destroy_process_group(ours)
    lengths = [p.numel() for p in copies["none"].parameters()]
    more = {key: (timing.rounds[key] - timing.rounds["none"]).reshape(-1) for key in copies if key != "none"}
    overhead, ratio, likely = compared(more, "ddp")
    return Result(
        task.name, sum(lengths), len(lengths), steps, timing.seconds, overhead, ratio, likely, timing.crowded,
        timing.spread,
    )  # fmt: skip


def compared(more: dict[str, Floats], other: str) -> tuple[dict[str, float], float, tuple[float, float]]:
    """Compute `overhead`, `ratio` and `likely` of a `Result`.

    Args:
        more: The overhead of each step in seconds, by copy.
        other: The copy whose overhead is the ratio's unit.
    """
    ours, theirs = more["hvdlite"], more[other]
    picks = np.random.default_rng(0).integers(0, len(ours), (RESAMPLED, len(ours)))
    ratios = np.median(ours[picks], axis=1) / np.median(theirs[picks], axis=1)
    low, high = np.percentile(ratios, (5, 95)).tolist()
    overhead = {key: float(np.median(each)) for key, each in more.items()}
    return overhead, overhead["hvdlite"] / overhead[other], (low, high)


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Sequence[torch.Tensor]) -> Callable[[], None]:
    """A function that makes one training step, and waits for the GPU."""
    inputs, labels = batch
    finish: Action = torch.cuda.synchronize if inputs.is_cuda else lambda: None

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        finish()

    return step


def weights_of(model: nn.Module) -> Weights:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def same_weights(name: str, ours: Weights, theirs: Weights, whose: str, who: str = "hvdlite") -> None:
    """Raise HvdliteError if the two copies have different weights: then their times mean nothing.

    Args:
        name: The model.
        ours: One copy's weights by name.
        theirs: The other copy's.
        whose: The other copy, for the error: "DDP's".
        who: The one copy, for the error.
    """
    if next(iter(ours.values())).is_cuda:  # a GPU adds in a different order each time, and small parameters differ most
        ours, theirs = ({"weight vector": torch.cat([p.flatten() for p in each.values()])}
                        for each in (ours, theirs))  # fmt: skip
    for parameter, a in ours.items():
        b = theirs[parameter]
        difference = float((a - b).norm() / b.norm().clamp(min=1e-12))
        if not difference <= TOLERANCE:
            raise HvdliteError(
                f"{name}: after the same steps {parameter} of {who} differs from {whose} by {difference:.2g} "
                f"(relative; {TOLERANCE} is allowed). This is a bug. The times were discarded."
            )
