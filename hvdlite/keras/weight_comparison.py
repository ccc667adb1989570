"""Compares the weights of all ranks after each epoch."""

from __future__ import annotations

import logging

from hvdlite.errors import HvdliteError
from hvdlite.gradients.registry import registry
from hvdlite.gradients.variables import common_name
from hvdlite.job import runtime
from hvdlite.keras.common_variables import CommonVariables
from hvdlite.ops.objects import allgather_object


class WeightComparison:
    """Compares checksums of all trained weights, which every rank reads for it.

    Attributes:
        variables: The model's.
        warned: Whether a difference has been reported.
    """

    def __init__(self, variables: CommonVariables) -> None:
        self.variables = variables
        self.warned = False

    def compare(self, epoch: int) -> None:
        """Compare the ranks after this epoch, from 0. Waits for all ranks.

        Raises:
            HvdliteError: On every rank, when weights differ, unless the optimizer's replica_check= says otherwise.
        """
        everyone = allgather_object(self.variables.checksums([*registry.own, *registry.in_process_sets]))
        for number in everyone[0]:  # only the members of a process set know that it reduces a variable
            if all(number in theirs for theirs in everyone) and len({theirs[number] for theirs in everyone}) > 1:
                self.report(
                    f"after epoch {epoch + 1} the ranks' weights differ, of "
                    f"{common_name(self.variables.trained()[number])} (variable {number}) first: something changed "
                    "them, or the learning rate, on some ranks only (a callback before MetricAverageCallback, an "
                    "optimizer that is not distributed). Variables that are meant to differ are given as "
                    "local_variables="
                )
                return

    def report(self, difference: str) -> None:
        """Raise HvdliteError, log a warning, or do nothing: as the optimizer's replica_check= says."""
        attachment = self.variables.attachment
        mode = runtime.replica_check(attachment.settings.replica_check if attachment else None)
        if mode == "error":
            raise HvdliteError(difference)
        if mode == "warn" and runtime.rank() == 0 and not self.warned:
            logging.getLogger("hvdlite").warning(difference)
        self.warned = True
