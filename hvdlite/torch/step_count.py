"""Counts training steps for the summary: each step() of any torch optimizer, attached or not, ends one.

So steps under DistributedDataParallel and FSDP count as well.
"""

from __future__ import annotations

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from hvdlite.job import runtime
from hvdlite.torch.private_api import step_is_nested


def count_steps() -> RemovableHandle:
    """Count from now on. Returns torch's handle of the hook."""
    return register_optimizer_step_post_hook(end_step)


def end_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """An optimizer has stepped."""
    if not step_is_nested(optimizer):
        runtime.end_step(id(optimizer))
