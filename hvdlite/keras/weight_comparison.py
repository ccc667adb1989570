"""The comparison of all ranks' weights after each epoch."""

from __future__ import annotations

import logging

from hvdlite.errors import HvdliteError
from hvdlite.gradients.registry import registry
from hvdlite.gradients.variables import common_name
from hvdlite.job import runtime
from hvdlite.keras.common_variables import CommonVariables
from hvdlite.lanes.matching import ranks
from hvdlite.ops.objects import allgather_object


class WeightComparison:
    """Compares checksums of all trained weights between ranks.

    Attributes:
        variables: The model's variables.
        warned: Whether this object has reported a difference.
    """

    def __init__(self, variables: CommonVariables) -> None:
        self.variables = variables
        self.warned = False

    def compare(self, epoch: int) -> None:
        """Compare the weights of all ranks. Waits for all ranks.

        Args:
            epoch: The epoch that has ended, from 0.

        Raises:
            HvdliteError: Weights differ, and the optimizer's replica_check= is "error"; on every rank.
        """
        if self.variables.attachment is not None and self.variables.attachment.strategy:
            return  # between synchronizations ranks have different weights
        everyones = allgather_object(self.variables.checksums([*registry.own, *registry.in_process_sets]))
        for number in everyones[0]:  # only the members of a process set leave its variables out
            if all(number in theirs for theirs in everyones):
                values = [theirs[number] for theirs in everyones]
                if len(set(values)) > 1:
                    self.report(self.difference(epoch, number, values))
                    return

    def difference(self, epoch: int, number: int, values: list[int]) -> str:
        """Return the text of the error or warning.

        Args:
            epoch: The epoch that has ended, from 0.
            number: The index of the first variable that differs.
            values: That variable's checksum on each rank.
        """
        others = [rank for rank, value in enumerate(values) if value != values[0]]
        return (
            f"after epoch {epoch + 1} the ranks' weights differ: {common_name(self.variables.trained()[number])} "
            f"(variable {number}) is the first that differs between rank 0 and {ranks(others)}. Something "
            "changed weights or the learning rate on some ranks only: a callback before MetricAverageCallback, or an "
            "optimizer that is not distributed, say. If variables are meant to differ, give them to the callback as "
            "local_variables= [HVD302]"
        )

    def report(self, difference: str) -> None:
        """Raise HvdliteError, log a warning, or do nothing, depending on the optimizer's replica_check=."""
        attachment = self.variables.attachment
        mode = runtime.replica_check(attachment.settings.replica_check if attachment else None)
        if mode == "error":
            raise HvdliteError(difference)
        if mode == "warn" and runtime.rank() == 0 and not self.warned:
            logging.getLogger("hvdlite").warning(difference)
        self.warned = True
