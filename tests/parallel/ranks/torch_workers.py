"""Processes that a DataLoader forks while training runs."""

from __future__ import annotations

import os

import torch
from torch.utils.data import DataLoader, Dataset

import hvdlite.torch as hvd
from tests.parallel.common import at_sizes, require_error, require_same_bits

SIZES = (1, 2, 3)


class Numbers(Dataset[torch.Tensor]):
    """Items made in worker processes, which also try to communicate where they are told to."""

    def __init__(self, communicate: bool = False) -> None:
        self.communicate = communicate

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        assert hvd.is_initialized() and 0 <= hvd.rank() < hvd.size() and hvd.local_rank() < hvd.local_size()
        if self.communicate:
            hvd.allreduce(torch.ones(1))
        return torch.full((4,), float(index))


def check_workers_forked_in_training() -> None:
    """Two epochs, each with new workers; they end, and the ranks agree to the bit."""
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(4, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model.named_parameters())
    for _ in range(2):
        for batch in DataLoader(Numbers(), batch_size=6, num_workers=2):
            optimizer.zero_grad()
            model(batch + hvd.rank()).sum().backward()
            optimizer.step()
    require_same_bits([p.detach() for p in model.parameters()])


def check_workers_that_communicate_are_told() -> None:
    if hvd.size() > 1:
        loader = DataLoader(Numbers(communicate=True), batch_size=6, num_workers=1)
        require_error(
            RuntimeError,
            lambda: list(loader),
            "in a process that a rank has started",
            "main process",
            "hvd.rank(), hvd.size()",
        )
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def check_a_child_leaves_its_parents_gradients_alone() -> None:
    """Though they lie in memory that both have mapped."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    (parameter.sum() * (hvd.rank() + 1)).backward()
    child = os.fork()
    if child == 0:
        try:
            optimizer.zero_grad(set_to_none=False)
            (parameter.sum() * 100).backward()
            os._exit(7 if (parameter.grad == 100).all() else 8)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert (parameter.grad == (hvd.size() + 1) / 2).all()


@at_sizes(2, 3, 4)
def check_a_step_in_a_child_is_refused() -> None:
    """It would be a step with gradients that nobody has averaged."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))

    class Stepping(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            optimizer.step()
            return super().__getitem__(index)

    loader = DataLoader(Stepping(), num_workers=1)
    require_error(RuntimeError, lambda: next(iter(loader)), "in a process that a rank has started")
