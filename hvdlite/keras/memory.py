"""`memory_report`: where each rank's memory goes."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from keras.optimizers import Optimizer

from hvdlite.api.memory import report
from hvdlite.gradients.lists import Gradients
from hvdlite.gradients.tensors import Variable
from hvdlite.gradients.variables import fixed_shape
from hvdlite.job import runtime
from hvdlite.keras.attachment import attachment_of
from hvdlite.keras.sharded.stand_ins import itemsize


def memory_report() -> list[dict[str, float]]:
    """Print how much memory each rank uses, as a table on rank 0. Collective; waits for all ranks.

    Parameters and state are those of attached optimizers that have been built. Keras keeps no gradients after a step:
    their column is 0. While a step runs they lie in the arenas, which ranks of a host share: the table has each rank's
    part. Scratch is what operations receive, add and pack in. `process` is all memory of the process on the host.

    Returns:
        For each rank the megabytes (10**6 bytes) by column: "parameters", "gradients", "optimizer state", "arenas",
        "scratch", "process".
    """
    lists = (each for each in runtime.current().registries.renewables() if isinstance(each, Gradients))
    users = {id(user): user for each in lists if isinstance(user := each.user(), Optimizer)}
    attachments = [each for user in users.values() if (each := attachment_of(user))]
    parameters = [variable for each in attachments for variable in each.built_for(each.optimizer)]
    state = [variable for each in attachments for variable in each.optimizer.variables]
    return report(nbytes(parameters), 0.0, nbytes(state))


def nbytes(variables: Iterable[Variable]) -> float:
    """Return the bytes of all these variables."""
    found = {id(each): each for each in variables}.values()
    return float(sum(prod(fixed_shape(each)) * itemsize(each) for each in found))
