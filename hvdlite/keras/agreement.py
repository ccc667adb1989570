"""Ranks agree on epochs and steps: a rank with fewer would leave the others waiting for ever."""

from __future__ import annotations

from collections.abc import Mapping

from hvdlite.errors import HvdliteError
from hvdlite.ops.objects import allgather_object

STOP_TOGETHER = (
    "Give callbacks that may stop it (EarlyStopping) averaged metrics: put hvd.callbacks.MetricAverageCallback() "
    "before them; and begin at the same epoch"
)
BEGIN_TOGETHER = (
    "Begin at the same epoch: give fit() the same initial_epoch= on every rank, and BackupAndRestore to every rank, "
    'with a folder for each: keras.callbacks.BackupAndRestore(f"backup/{hvd.rank()}")'
)


def agree_on_length(params: Mapping[str, int | None] | None) -> None:
    """Compare what fit() is about to do on each rank. Waits for all ranks.

    Args:
        params: What Keras tells callbacks; None or empty in a training loop of the user's own.

    Raises:
        HvdliteError: On every rank, when numbers of epochs or steps differ.
    """
    known = params or {}
    said = allgather_object((known.get("epochs"), known.get("steps")))
    for what, numbers in zip(("epochs", "steps in an epoch"), zip(*said, strict=True), strict=True):
        if None not in numbers and len(set(numbers)) > 1:
            raise HvdliteError(
                f"fit() has other numbers of {what} on other ranks (by rank: {', '.join(map(str, numbers))}), and "
                "some would wait for ever. Drop the remainder of the data, or give steps_per_epoch= and epochs="
            )


def go_on_together(what: str) -> None:
    """Compare what each rank does next. Waits for all ranks.

    Args:
        what: 'begins epoch 2' or 'stops'.

    Raises:
        HvdliteError: On every rank, when ranks do different things.
    """
    said = allgather_object(what)
    if len(set(said)) > 1:
        everyone = ", ".join(f"rank {rank} {what}" for rank, what in enumerate(said))
        cure = STOP_TOGETHER if "stops" in said else BEGIN_TOGETHER
        raise HvdliteError(f"training would go on without some ranks: {everyone}. {cure}")
