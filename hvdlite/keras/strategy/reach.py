"""Averages gradients over the ranks that a strategy asks for: all of them, those of each host, or none, by update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from keras.optimizers import Optimizer

from hvdlite.gradients.lists import Gradients
from hvdlite.gradients.tensors import Gradient, Variable
from hvdlite.job.process_sets import global_process_set
from hvdlite.keras.backends import strategies
from hvdlite.strategies import Reach, Strategy
from hvdlite.strategies.hosts import host_set


class ReachedGradients:
    """Averages one optimizer's gradients over other ranks in each update.

    Attributes:
        strategy: The user's strategy.
        reaches: The reaches that may come, in a fixed order.
        lists: What reduces gradients, by reach; nothing for Reach.NONE.
    """

    def __init__(self, strategy: Strategy, gradients: Gradients, optimizer: Optimizer) -> None:
        """Collective over all ranks if hosts average.

        Raises:
            NotImplementedError: Hosts average, and the optimizer is one of a process set.
        """
        self.strategy = strategy
        asked = strategy.reaches
        self.reaches = [reach for reach in Reach if reach in asked]
        self.lists: dict[Reach, Gradients] = {}
        if Reach.EVERYONE in asked:
            self.lists[Reach.EVERYONE] = gradients
        if Reach.HOST in asked:
            self.average_in_hosts(gradients, optimizer)

    def average_in_hosts(self, gradients: Gradients, optimizer: Optimizer) -> None:
        """Prepare averages within hosts. Collective."""
        members = host_set(gradients.settings.process_set)
        if members is global_process_set:
            self.lists[Reach.HOST] = gradients
        elif members is not None:
            settings, title = replace(gradients.settings, process_set=members), f"{gradients.title} within a host"
            self.lists[Reach.HOST] = Gradients(settings, gradients.framework, "optimizer", title, user=optimizer)

    def replace(self, gradients: Gradients) -> None:
        """Free the memory of averages within hosts: the optimizer is attached again. gradients: the optimizer's own."""
        for each in self.lists.values():
            if each is not gradients:
                each.replace()

    @property
    def needed(self) -> bool:
        """Whether gradients are averaged in any update."""
        return bool(self.lists)

    def averaged(
        self,
        update: Callable[[], int | None],
        grads: list[Gradient],
        variables: Sequence[Variable],
        local: Sequence[Variable],
    ) -> list[Gradient]:
        """Return the gradients, averaged over the ranks that the update's reach names. Waits for those ranks.

        Args:
            update: Returns the number of the update, from 1, whenever the step runs.
            grads: This rank's gradients.
            variables: Their variables.
            local: Variables with gradients that stay this rank's own.

        Raises:
            NotImplementedError: In a graph, a variable has a gradient on some ranks only.
        """

        def which() -> int:
            return self.reaches.index(self.strategy.reach(update() or 0))

        def branch(reach: Reach) -> list[Gradient]:
            lists = self.lists.get(reach)
            return grads if lists is None else lists.reduce(grads, variables, local)

        found: list[Gradient] = strategies().choose(which, [partial(branch, reach) for reach in self.reaches])
        return found
