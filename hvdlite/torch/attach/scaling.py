"""Loss scaling and lossy compression: what was not sent is kept without a scale, so the scale must be known."""

from __future__ import annotations

import torch

from hvdlite.torch.attach.settings import TorchSettings
from hvdlite.torch.private_api import scaler_that_steps


def refuse_unknown_scaler(optimizer: torch.optim.Optimizer, settings: TorchSettings) -> None:
    """Have each step() raise an error if a GradScaler calls it that hvdlite does not know.

    Args:
        optimizer: An attached optimizer with a lossy compressor.
        settings: Its settings.
    """

    def check(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        scaler = scaler_that_steps()
        if scaler is not None and scaler is not settings.scaler:
            raise ValueError(
                f"compression={settings.compression} keeps what was not sent without the loss scale, and must know the "
                "scale: pass grad_scaler=scaler to hvd.DistributedOptimizer, with the GradScaler that calls step()"
            )

    optimizer.register_step_pre_hook(check)
