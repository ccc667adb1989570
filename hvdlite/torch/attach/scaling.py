"""Loss scaling and lossy compression: what was not sent is kept without a scale, so the scale must be known."""

from __future__ import annotations

import torch

from hvdlite.gradients.compression import lossy_of
from hvdlite.torch.attach.settings import TorchSettings
from hvdlite.torch.private_api import scaler_that_steps


def refuse_unknown_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Have each step() of an attached optimizer raise an error if a GradScaler calls it that hvdlite does not know."""
    optimizer.register_step_pre_hook(require_known_scaler)


def require_known_scaler(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Raise ValueError if an unknown GradScaler calls step(). The optimizer may have been attached again since."""
    settings: TorchSettings = optimizer.__dict__["_hvdlite"].settings
    scaler = scaler_that_steps()
    if scaler is not None and scaler is not settings.scaler and lossy_of(settings.compression):
        raise ValueError(
            f"compression={settings.compression} keeps what was not sent without the loss scale, and must know the "
            "scale: pass grad_scaler=scaler to hvd.DistributedOptimizer, with the GradScaler that calls step()"
        )
