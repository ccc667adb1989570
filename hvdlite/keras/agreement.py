"""Checks that all ranks run the same number of epochs and steps; otherwise raises on every rank.

Without these checks the ranks with more steps would wait for ever. `ConsistencyCallback` calls them in `fit`.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvdlite.errors import HvdliteError
from hvdlite.ops.objects import allgather_object

STOP_TOGETHER = (
    "If a callback may stop training (EarlyStopping), put hvd.callbacks.MetricAverageCallback() before that callback, "
    "so that all ranks stop after the same epoch; and begin at the same epoch on every rank"
)
BEGIN_TOGETHER = (
    "Begin at the same epoch: give fit() the same initial_epoch= on every rank, and BackupAndRestore to every rank, "
    'with a folder for each: keras.callbacks.BackupAndRestore(f"backup/{hvd.rank()}")'
)


def agree_on_length(params: Mapping[str, int | None] | None) -> None:
    """Compare the numbers of epochs and steps that fit() is about to run on each rank. Waits for all ranks.

    Args:
        params: The parameters that Keras gives callbacks; None or empty in a user's own training loop.

    Raises:
        HvdliteError: The numbers of epochs or steps differ; on every rank.
    """
    known = params or {}
    everyones = allgather_object((known.get("epochs"), known.get("steps")))
    for what, numbers in zip(("epochs", "steps in an epoch"), zip(*everyones, strict=True), strict=True):
        if None not in numbers and len(set(numbers)) > 1:
            raise HvdliteError(
                f"ranks gave fit() different numbers of {what} (by rank: {', '.join(map(str, numbers))}): the ranks "
                "with more would wait forever. Drop the remainder of the data, or give steps_per_epoch= and "
                "epochs= [HVD310]"
            )


def go_on_together(what: str) -> None:
    """Compare the next action of each rank. Waits for all ranks.

    Args:
        what: 'begins epoch 2' or 'stops'.

    Raises:
        HvdliteError: The ranks' actions differ; on every rank.
    """
    everyones = allgather_object(what)
    if len(set(everyones)) > 1:
        actions = ", ".join(f"rank {rank} {action}" for rank, action in enumerate(everyones))
        cure = STOP_TOGETHER if "stops" in everyones else BEGIN_TOGETHER
        raise HvdliteError(f"training would go on without some ranks: {actions}. {cure} [HVD311]")
