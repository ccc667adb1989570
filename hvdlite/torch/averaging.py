"""`average_parameters`: the ranks' average model, for evaluation and saving while a strategy lets the ranks differ."""

from __future__ import annotations

import contextlib
from types import TracebackType

import torch

from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.lanes.calls import calling
from hvdlite.strategies.averaging import average_model_, settle
from hvdlite.strategies.staleness import server
from hvdlite.torch import cuda
from hvdlite.torch.attach.strategy_steps import strategy_of
from hvdlite.torch.tensors import in_place


class AveragedParameters:
    """A model whose values are the ranks' averages. As a context it restores this rank's values at the end.

    Attributes:
        values: The model's tensors.
        own: This rank's values of them.
    """

    def __init__(self, values: list[torch.Tensor], own: list[torch.Tensor]) -> None:
        self.values, self.own = values, own

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with torch.no_grad():
            for value, own in zip(self.values, self.own, strict=True):
                value.copy_(own)


def average_parameters(model: torch.nn.Module, process_set: ProcessSet = global_process_set) -> AveragedParameters:
    """Overwrite a model's parameters and buffers with their averages over all ranks.

        hvd.average_parameters(model)             the ranks continue from the average
        with hvd.average_parameters(model):       they continue from their own values after the block
            evaluate(model)

    Strategies finish what they have under way. Buffers of integers, such as BatchNorm's count of batches, become the
    ranks' maximum; booleans stay as they are. Collective; waits for all ranks. Price: an all-reduce of the model, and a
    copy of it until the result is dropped.

    Args:
        model: A module, the same on every rank: the model, or an average of its weights over time (EMA).
        process_set: The ranks that take part.

    Returns:
        A context manager. Its end gives the model this rank's own values back, and waits for nobody.

    Raises:
        TypeError: `model` is no module.
        MismatchError: Models differ between ranks.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"hvd.average_parameters takes a torch.nn.Module, not a {type(model).__name__}")
    return averaged(model, process_set)


def averaged(model: torch.nn.Module, process_set: ProcessSet, counts: bool = True) -> AveragedParameters:
    """As `average_parameters`. counts: whether this rank's values count."""
    group = runtime.group_of(process_set)
    with calling("hvd.average_parameters"):
        settle(group)
        values = values_of(model)
        own = [value.detach().clone() for value in values]
        gpu = cuda.gpu_of(values)
        with cuda.on_torchs_stream(gpu) if gpu else contextlib.nullcontext():
            pairs = [in_place(value) for value in values]
            average_model_(group, [array for array, _ in pairs], counts)
        for _, put_back in pairs:
            put_back(None)
    return AveragedParameters(values, own)


def serve_parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Be a parameter server: keep a part of the parameters for the ranks that train, until all of them shut down.

    The last ranks call this instead of a training loop, if the optimizer has `BoundedStaleness(servers=...)`. They take
    part in the workers' `average_parameters(model)`. Workers must not call other collectives of all ranks meanwhile.

    Args:
        optimizer: The attached optimizer.
        model: The model, as on the workers. It is overwritten by each average.

    Raises:
        ValueError: This rank is no server.
        MismatchError: The ranks begin with different weights; on every rank.
        HvdliteError: Communication has broken.
    """
    attached = strategy_of(optimizer)
    running = server(attached.running if attached else None)
    if attached:
        attached.look_at_beginning()  # as the workers' first step() does
    running.serve(lambda: averaged(model, running.site.process_set, counts=False))


def values_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return a model's parameters and buffers, each once, in order; no booleans."""
    found = [*model.parameters(), *model.buffers()]
    once = {(value.data_ptr(), value.numel()): value for value in reversed(found) if value.numel()}
    return [value for value in reversed(once.values()) if value.dtype is not torch.bool]
