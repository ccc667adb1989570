"""Averages gradients over the ranks that a strategy asks for: all of them, those of each host, or none, by update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from keras.optimizers import Optimizer

from hvdlite.gradients.lists import Gradients
from hvdlite.gradients.tensors import Gradient, Variable
from hvdlite.job import runtime
from hvdlite.job.groups import Group
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.keras.backends import strategies
from hvdlite.strategies import Reach, Strategy

LOOK_AHEAD = 1024
"""The updates that are looked through for the reaches of a strategy."""


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
        asked = {strategy.reach(update) for update in range(1, LOOK_AHEAD + 1)}
        self.reaches = [reach for reach in Reach if reach in asked]
        self.lists: dict[Reach, Gradients] = {}
        if Reach.EVERYONE in asked:
            self.lists[Reach.EVERYONE] = gradients
        group = gradients.group
        if Reach.HOST in asked and group is not None:
            self.average_in_hosts(gradients, group, optimizer)

    def average_in_hosts(self, gradients: Gradients, group: Group, optimizer: Optimizer) -> None:
        """Prepare averages within hosts. Collective."""
        members = host_set(group)
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


def host_set(group: Group) -> ProcessSet | None:
    """Return the process set of this rank's host; None if no other rank is on it. Collective over all ranks.

    Raises:
        NotImplementedError: The group has not all ranks.
    """
    live = runtime.current()
    if group is not live.everyone:
        raise NotImplementedError("a strategy that averages within hosts works for all ranks, not for a process_set")
    if live.topology.one_host:
        return global_process_set
    mine = None
    for ranks in live.topology.hosts:
        if len(ranks) == 1:
            continue
        theirs = ProcessSet(ranks)
        if ranks in live.groups.ranks.values():
            live.groups.find_again([theirs])
        else:
            live.groups.add(theirs)
        mine = theirs if live.topology.rank in ranks else mine
    return mine
