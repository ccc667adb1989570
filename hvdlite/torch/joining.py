"""Ranks with fewer batches than others: `join()`, and a context in which nobody need call it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hvdlite.job import runtime
from hvdlite.ops import join as joining
from hvdlite.torch.functions import broadcast_variables


def join(device: int = -1) -> int:
    """Wait until all ranks have joined; meanwhile the others' gradients go on being reduced, with zeros from here.

    Returns the rank that joined last, whose weights are the newest: those of the others have not moved since they
    joined. device: accepted for Horovod's sake.
    """
    return joining.join()


@contextlib.contextmanager
def uneven_inputs(*variables: Any) -> Iterator[None]:
    """A training loop in which ranks may have different numbers of batches, or none.

        with hvd.uneven_inputs(model, optimizer):
            for images, labels in loader: ...

    A rank whose loop has ended helps the others until all have; then every rank gets the last one's `variables`
    (modules, optimizers: see `broadcast_variables`). Only all-reduces may be called in the loop. An exception in it
    passes, and ends the job as usual.
    """
    yield
    last = joining.join()
    for each in variables:
        broadcast_variables(each, last)
    for attachment in runtime.current().attachments:
        attachment.name_root("0")  # all have the last one's now
