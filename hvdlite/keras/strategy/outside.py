"""Changes of weights from outside of updates: strategies must forget what depends on the old ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import keras

from hvdlite.gradients.replica_check import checksum
from hvdlite.gradients.tensors import Variable
from hvdlite.gradients.variables import is_one_of
from hvdlite.job.process_sets import ProcessSet
from hvdlite.keras.strategy.steps import StrategySteps, at_work
from hvdlite.ops.objects import allgather_object


def keeping(variables: Sequence[Variable]) -> list[StrategySteps]:
    """The strategies at work that keep some of these variables together."""
    return [each for each in at_work() if any(is_one_of(variable, variables) for variable in each.variables)]


@contextlib.contextmanager
def moving(variables: Sequence[Variable], process_set: ProcessSet) -> Iterator[None]:
    """Return a context that gives all ranks equal values. If values change on any rank, strategies are told.

    Collective if a strategy keeps some of the variables together; waits for all ranks of the process set.

    Args:
        variables: The variables, the same on all ranks.
        process_set: The ranks.
    """
    concerned = keeping(variables)
    before = checksums(variables) if concerned else []
    yield
    if concerned and any(allgather_object(before != checksums(variables), process_set=process_set)):
        for each in concerned:
            each.note_moved()


def checksums(variables: Sequence[Variable]) -> list[int]:
    """Return a checksum of each variable's value."""
    return [checksum(keras.ops.convert_to_numpy(each)) for each in variables]
