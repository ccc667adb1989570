"""Ranks with fewer batches than others: `join()`, and a context that calls it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hvdlite.job import runtime
from hvdlite.ops import join as joining
from hvdlite.torch.functions import broadcast_variables


def join(device: int = -1) -> int:
    """Wait until all ranks have joined. Until then, this rank gives zeros to the others' reductions.

    Args:
        device: Ignored; accepted for Horovod's sake.

    Returns:
        The global rank that joined last. Its weights are the newest: a rank's weights do not change once it has joined.

    Raises:
        RuntimeError: An optimizer is sharded: a rank that has joined would no longer step its part.
    """
    refuse_sharded("hvd.join()")
    return joining.join()


@contextlib.contextmanager
def uneven_inputs(*variables: object) -> Iterator[None]:
    """A context for a training loop in which ranks may have different numbers of batches, or none.

        with hvd.uneven_inputs(model, optimizer):
            for images, labels in loader: ...

    At its end a rank joins, and waits until all ranks have; then `variables` are overwritten with the values of the
    rank that joined last. Within the context ranks may only call all-reduces. An exception passes through, and ends the
    job as usual.

    Args:
        *variables: Modules and optimizers, as for `broadcast_variables`.

    Yields:
        None.

    Raises:
        RuntimeError: As for `join`.
    """
    refuse_sharded("hvd.uneven_inputs()")
    yield
    last = joining.join()
    for each in variables:
        broadcast_variables(each, last)
    for attachment in runtime.current().registries.attachments:
        attachment.name_root("0")  # all ranks have the same weights now


def refuse_sharded(call: str) -> None:
    """Raise RuntimeError if an attached optimizer is sharded."""
    if any(attachment.settings.sharded for attachment in runtime.current().registries.attachments):
        raise RuntimeError(
            f"{call} is not possible with DistributedOptimizer(sharded=True): a rank that has joined would no longer "
            "step its part of the parameters. Give all ranks equally many batches [HVD431]"
        )
