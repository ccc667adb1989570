"""What `DistributedOptimizer` requires of a strategy: settings that fit it, and the same strategy on all ranks."""

from __future__ import annotations

import keras

from hvdlite.gradients.compression import NoneCompressor
from hvdlite.gradients.settings import Settings
from hvdlite.gradients.terms import Terms
from hvdlite.job import runtime
from hvdlite.ops import Average
from hvdlite.ops.common import Operation
from hvdlite.strategies import Strategy, require_strategy


def require_served(strategy: object, settings: Settings) -> None:
    """Refuse strategies and settings that do not fit together.

    Raises:
        TypeError: `strategy` is no strategy.
        NotImplementedError: The backend is JAX, or a setting tells how gradients are reduced.
    """
    require_strategy(strategy)
    name = f"strategy=hvd.{type(strategy).__name__}(...)"
    if keras.backend.backend() == "jax":
        raise NotImplementedError(
            f"{name} works for Keras on TensorFlow and on PyTorch, not on JAX, whose compiled step holds the weights: "
            "set KERAS_BACKEND"
        )
    each = "each rank applies its own gradients, which are not reduced"
    if settings.sharded:
        raise NotImplementedError(f"{name} with sharded=True: every rank needs all of the optimizer's state")
    if settings.compression is not NoneCompressor:
        raise NotImplementedError(
            f"{name} with compression={settings.compression}: {each}. Give compression to the strategy, if it has it"
        )
    if settings.terms != Terms(Average, 1.0):
        raise NotImplementedError(f"{name} with op= or gradient_predivide_factor=: {each}. Leave the argument out")


def require_same(strategy: Strategy | None, settings: Settings) -> None:
    """Check that all ranks have the same strategy. Collective; waits for all ranks.

    Raises:
        MismatchError: The strategies differ; on every rank.
    """
    group, name = runtime.group_of(settings.process_set), "hvd.DistributedOptimizer"
    Operation(group, "strategy", name, (("strategy", repr(strategy)),), lambda at: None).run()
