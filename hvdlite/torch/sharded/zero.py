"""`ZeroRedundancyOptimizer`: torch's name and arguments for a sharded optimizer.

A function, as `DistributedOptimizer` is: the result is an object of the optimizer's own class. Rejected: a class around
it, as torch has, because schedulers, scalers and `hvd.save` would see two optimizers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from hvdlite.job import runtime
from hvdlite.torch.optimizer import DistributedOptimizer
from hvdlite.torch.sharded.states import State, shard_of

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


def ZeroRedundancyOptimizer(
    params: Iterable[object],
    optimizer_class: Callable[..., OptimizerT],
    process_group: None = None,
    parameters_as_bucket_view: bool = False,
    overlap_with_ddp: bool = False,
    **defaults: object,
) -> OptimizerT:
    """Make an optimizer, and attach it with `sharded=True`, in the words of torch.distributed.optim.

    backward() averages the gradients, so the model needs no DistributedDataParallel. The optimizer gains
    `consolidate_state_dict(to=0)`, which all ranks call. After it, `state_dict()` on rank `to` has all of the state, as
    it was then. On other ranks, and before, `state_dict()` raises RuntimeError once the state is in pieces.
    `load_state_dict()` takes a whole state, on every rank. `hvd.save` and `hvd.load` need neither.

    Collective: every rank makes the same optimizer for the same model.

    Args:
        params: Parameters or groups, as for optimizer_class.
        optimizer_class: A class of optimizers.
        process_group: None: all ranks.
        parameters_as_bucket_view: Ignored: large parameters travel without copies in any case.
        overlap_with_ddp: False.
        **defaults: Arguments of optimizer_class.

    Returns:
        An optimizer of that class.

    Raises:
        ValueError: An argument means nothing here, or the optimizer cannot be divided.
        MismatchError: Optimizers or models differ between ranks; on every rank.
    """
    if process_group is not None:
        raise ValueError(
            "ZeroRedundancyOptimizer: hvdlite has process sets instead of process_group. Use "
            "hvd.DistributedOptimizer(optimizer, sharded=True, process_set=...)"
        )
    if overlap_with_ddp:
        raise ValueError(
            "ZeroRedundancyOptimizer: overlap_with_ddp=True needs DistributedDataParallel, but here backward() reduces "
            "the gradients without it. Leave it out"
        )
    optimizer = optimizer_class(params, **defaults)
    DistributedOptimizer(optimizer, sharded=True)
    found = Consolidated(optimizer)
    optimizer.__dict__.update(consolidate_state_dict=found.consolidate_state_dict, state_dict=found.state_dict)
    return optimizer


class Consolidated:
    """The optimizer's `state_dict` and `consolidate_state_dict`. Does not keep the optimizer alive.

    Attributes:
        reference: The optimizer.
        state: The last whole state, on the rank that asked for it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.reference = weakref.ref(optimizer)
        self.state: object = None

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Give one rank the whole state, for its `state_dict()`. Collective; waits for all ranks.

        Args:
            to: The rank.

        Raises:
            ValueError: There is no such rank.
        """
        if not 0 <= to < runtime.size():
            raise ValueError(f"consolidate_state_dict(to={to}): ranks are 0 to {runtime.size() - 1}")
        shard = shard_of(self.reference())
        whole = shard.whole(to) if shard else None
        self.state = whole["state"] if whole and runtime.rank() == to else None

    def state_dict(self) -> State:
        """Return the groups as they are, and the state as it was when it was consolidated.

        Raises:
            RuntimeError: It has not been consolidated on this rank.
        """
        optimizer = self.reference()
        assert optimizer is not None
        shard = shard_of(optimizer)
        if not shard or not shard.division.in_pieces:
            return type(optimizer).state_dict(optimizer)
        if self.state is None:
            raise RuntimeError(
                "this rank has a part of the optimizer's state only: call "
                f"consolidate_state_dict(to={runtime.rank()}) on all ranks before state_dict(), or use hvd.save "
                "[HVD411]"
            )
        return {**shard.unmarked(), "state": self.state}
