"""One optimizer's strategy at work: counts updates, and gives the strategy its arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import finalize

import numpy as np
from keras.optimizers import Optimizer

from hvdlite.arrays import Array
from hvdlite.gradients import attaching
from hvdlite.gradients.lists import Gradients
from hvdlite.gradients.tensors import Gradient, Tensor, Variable
from hvdlite.gradients.variables import common_name, fixed_shape, inside, is_one_of
from hvdlite.job import runtime
from hvdlite.job.groups import Group
from hvdlite.keras import private_api
from hvdlite.keras.backends import strategies
from hvdlite.keras.strategy.check import SyncCheck
from hvdlite.keras.strategy.reach import ReachedGradients
from hvdlite.lanes.calls import calling
from hvdlite.ops.common import Operation
from hvdlite.ops.objects import broadcast_object
from hvdlite.strategies import Running, Site, Strategy, require_joins
from hvdlite.strategies.averaging import largest
from hvdlite.system.weak_references import weakly

PASSES = "keras.passes"
"""The name of the number of passes in what a checkpoint contains."""
OWN = ("gradient_accumulator", "iteration", "learning_rate")
"""The ends of names of the optimizer's variables that no strategy changes."""


@dataclass
class News:
    """What has happened since the last update, and what the next one must do.

    Attributes:
        moved: Whether weights have been changed from outside.
        joined: Whether all ranks have joined.
        unsettled: Whether the strategy must settle, since ranks have joined.
        looks: Whether the strategy wants to see the weights before the update.
    """

    moved: bool = False
    joined: bool = False
    unsettled: bool = False
    looks: bool = False

    def note_moved(self, moved: bool = True) -> None:
        """Note whether weights have been changed from outside."""
        self.moved = moved

    def note_joined(self) -> None:
        """All ranks have joined."""
        self.joined = True

    def note_looks(self, looks: bool) -> None:
        """Note whether the strategy wants to see the weights."""
        self.looks = looks

    def take_moved(self) -> bool:
        """Return `moved`, and reset it."""
        moved, self.moved = self.moved, False
        return moved

    def take_joined(self) -> bool:
        """Return `joined`, and reset it. If ranks have joined, the strategy is unsettled."""
        joined, self.joined = self.joined, False
        self.unsettled = self.unsettled or joined
        return joined

    def take_unsettled(self) -> bool:
        """Return `unsettled`, and reset it."""
        unsettled, self.unsettled = self.unsettled, False
        return unsettled


class StrategySteps:
    """Calls a strategy around each update of one Keras optimizer.

    Attributes:
        strategy: The user's settings.
        gradients: The optimizer's place in the job.
        optimizer: The optimizer; the inner one of a LossScaleOptimizer.
        local: The variables that stay this rank's own.
        variables: The variables that the strategy keeps together; empty before the first update.
        running: The strategy at work; None before the first update, and after a restart.
        passes: The calls of apply() with gradients.
        news: What has happened since the last update.
        loaded: What a checkpoint contained, until the strategy starts.
        check: Compares weights that should be equal.
        reached: Averages gradients in the updates in which the strategy asks for it.
        farewell: Abandons the strategy at work when the optimizer is gone. This object goes with the optimizer, so it
            cannot.
    """

    farewell: finalize[[], StrategySteps]

    def __init__(
        self, strategy: Strategy, gradients: Gradients, optimizer: Optimizer, local: list[Variable], mode: str
    ) -> None:
        """Collective.

        Args:
            strategy: The attribute of that name.
            gradients: The attribute of that name.
            optimizer: The attribute of that name.
            local: The attribute of that name.
            mode: The reaction to weights that differ: one of `config.REPLICA_CHECKS`.
        """
        self.strategy = strategy
        self.gradients = gradients
        self.optimizer = optimizer
        self.local = local
        self.variables: list[Variable] = []
        self.running: Running | None = None
        self.passes = 0
        self.news = News()
        self.loaded: Mapping[str, Array] = {}
        self.check = SyncCheck(mode)
        self.reached = ReachedGradients(strategy, gradients, optimizer)
        self.register()

    # The place in a job

    @property
    def group(self) -> Group:
        """The ranks whose models are kept together."""
        assert self.gradients.group is not None
        return self.gradients.group

    @property
    def name(self) -> str:
        """The name of the strategy's operations, the same on all ranks."""
        return f"{self.gradients.name}.strategy"

    @property
    def title(self) -> str:
        """The optimizer in messages."""
        return self.gradients.title

    @property
    def alike(self) -> SyncCheck:
        """The comparison that a loaded checkpoint begins anew."""
        return self.check

    def register(self) -> None:
        """Take part in restarts and in `join()` of the present job."""
        registries = runtime.current().registries
        registries.renew_later(self)
        registries.count_in_join(self)
        registries.keep_together(self)

    def renew(self) -> None:
        """Go on under the present runtime, from the first rank's state. Collective."""
        if not attaching.can_renew(self.gradients.settings.process_set):
            return
        self.register()
        members = self.gradients.settings.process_set
        state = broadcast_object(self.state(), self.group.ranks[0], f"{self.name} state", members)
        self.end()
        self.loaded = state
        self.news.note_moved()

    def end(self) -> None:
        """Stop the strategy: the optimizer is attached again. Collective; waits for all ranks."""
        running, self.running = self.running, None
        if running is not None:
            self.farewell.detach()
            running.close()

    def replace(self) -> None:
        """Stop the strategy and leave the job's registries: the optimizer is attached again."""
        runtime.current().registries.forget(self)
        self.reached.replace(self.gradients)
        self.end()

    def give_up(self) -> None:
        """This rank is about to join. Raises RuntimeError if other ranks could not go on."""
        require_joins(self.strategy)
        if self.running is not None:
            self.running.pause()

    def start_over(self) -> None:
        """All ranks have joined: the next update goes on from the largest number of passes.

        Only then do all ranks use this optimizer again. One that nobody uses may be gone on some ranks.
        """
        self.news.note_joined()
        self.check.expect()

    @property
    def sent_per_step(self) -> float:
        """The bytes of weights that this rank sends to other hosts, as a mean over all updates."""
        return 0.0 if self.running is None else self.running.sent_bytes / max(self.update() - 1, 1)

    def started(self) -> Running:
        """The strategy at work. Collective when it starts: at the first update, and at the first after a restart.

        Raises:
            MismatchError: The ranks' variables differ; on every rank.
        """
        if self.running is None:
            known = private_api.trainable_variables(self.optimizer)
            self.variables = [each for each in known if not is_one_of(each, self.local)]
            names = [common_name(each) for each in self.variables]
            lines = [f"{name}: {each.dtype}{list(fixed_shape(each))}"
                     for name, each in zip(names, self.variables, strict=True)]  # fmt: skip
            facts = (("number of variables", len(lines)), *((f"variable {n}", line) for n, line in enumerate(lines)))
            site = Site(self.group, self.name, self.title, names, self.gradients.settings.process_set)
            with calling(self.title):
                Operation(self.group, "strategy", self.name, facts, lambda at: None).run()
                self.running = self.strategy.start(site)
            self.farewell = finalize(self, self.running.abandon)
            self.farewell.atexit = False
            with private_api.outside_of_graphs():
                # After a restart a graph begins here when the first update has moved weights already.
                first = None if self.loaded else self.read()
                self.check.begin(self.gradients.working_lane(), self.name, names, first)
            self.restore()
        return self.running

    # An update

    @property
    def looks_before(self) -> bool:
        """Whether the strategy may have work before updates."""
        return type(self.started()).update_begins is not Running.update_begins

    def around(
        self, go_on: Callable[[list[Gradient]], object], grads: Sequence[Gradient], given: Sequence[Variable]
    ) -> None:
        """Update the weights, and have the strategy work before and afterwards. It may wait for other ranks.

        Args:
            go_on: Applies gradients.
            grads: This rank's gradients.
            given: Their variables.

        Raises:
            RuntimeError: A variable has become local since the first update.
        """
        grads, looks_before = list(grads), self.looks_before
        if own := [each for each in self.variables if is_one_of(each, self.local)]:
            raise RuntimeError(
                f"{self.title}: all ranks keep {common_name(own[0])} together since the first update. Call "
                "register_local_var() before the first fit() or apply()"
            )
        if self.reached.needed:
            grads = self.reached.averaged(weakly(self.update), grads, given, self.local)
        if looks_before:
            places = {id(inside(each)): place for place, each in enumerate(self.variables)}
            seen = {places[id(inside(each))]: gradient for gradient, each in zip(grads, given, strict=True)
                    if gradient is not None and id(inside(each)) in places}  # fmt: skip
            work = partial(weakly(self.before), tuple(seen))
            self.change(weakly(self.begins), work, self.variables, list(seen.values()))
        go_on(grads)
        self.change(weakly(self.ends), weakly(self.after), [*self.variables, *self.state_variables().values()], ())

    def change(
        self,
        due: Callable[[], bool | None],
        work: Callable[[Sequence[Array]], None],
        variables: Sequence[Variable],
        seen: Sequence[Tensor],
    ) -> None:
        """Have the backend call `work` if `due`, now or when the graph runs. See `on_torch.change`."""
        with calling(f"apply() of {self.title}"):
            strategies().change(due, work, variables, seen)

    def present(self) -> Running:
        """The strategy at work, which knows of changes from outside. Collective after `join()`."""
        running = self.started()
        if self.news.take_joined():
            self.passes = largest(self.group, self.passes, f"{self.name} passes")
            running.start_over(self.update() - 1)
        if self.news.take_moved():
            running.moved()
        return running

    def update(self) -> int:
        """The number of the next update, from 1."""
        return self.passes // (self.optimizer.gradient_accumulation_steps or 1) + 1

    def begins(self) -> bool:
        """An update begins. Returns whether `before` must follow."""
        running = self.present()
        if not self.moves(self.passes + 1):
            return False
        self.news.note_looks(running.update_begins())
        return self.news.looks or self.news.unsettled

    def ends(self) -> bool:
        """An update has ended. Returns whether `after` must follow."""
        running = self.present()
        self.passes += 1
        runtime.end_step(id(self))
        return self.moves(self.passes) and running.update_ends()

    def moves(self, passes: int) -> bool:
        """Whether Keras updates weights in this pass, and does not only add up gradients."""
        return passes % (self.optimizer.gradient_accumulation_steps or 1) == 0

    def before(self, places: Sequence[int], arrays: Sequence[Array]) -> None:
        """Have the strategy work before an update.

        Args:
            places: For each gradient the number of its variable.
            arrays: The weights, then the gradients.
        """
        running, count = self.started(), len(self.variables)
        if self.news.take_unsettled():
            running.settle(arrays[:count])
        if self.news.looks:
            gradients = dict(zip(places, arrays[count:], strict=True))
            running.before_update(arrays[:count], [gradients.get(place) for place in range(count)])

    def after(self, arrays: Sequence[Array]) -> None:
        """Have the strategy work after an update. arrays: the weights, then the optimizer's state."""
        count = len(self.variables)
        state = dict(zip(self.state_variables(), arrays[count:], strict=True))
        if self.started().after_update(arrays[:count], state):
            self.check.synchronized(arrays[:count])

    def state_variables(self) -> dict[str, Variable]:
        """The optimizer's variables that the strategy wants to see, by names that are equal on all ranks."""
        if not self.strategy.wants_state:
            return {}
        found = [each for each in self.optimizer.variables if not each.name.endswith(OWN)]
        return {f"{number} {common_name(each)}": each for number, each in enumerate(found)}

    def read(self) -> list[Array]:
        """Copies of the weights."""
        values: list[Array] = []
        strategies().change(
            lambda: True, lambda arrays: values.extend(each.copy() for each in arrays), self.variables, ()
        )
        return values

    # Changes from outside, and checkpoints

    def note_moved(self) -> None:
        """Weights have been changed from outside, on all ranks to the same values."""
        self.news.note_moved()
        self.check.forget()

    def prepare(self) -> None:
        """This rank is about to settle: others must not wait for its next update."""
        if self.running is not None:
            self.running.prepare()

    def settle(self) -> None:
        """Finish what is under way, outside of graphs. Collective; waits for all ranks."""
        running = self.running
        if running is not None:
            strategies().change(lambda: True, running.settle, self.variables, ())

    def state(self) -> dict[str, Array]:
        """What a checkpoint must contain."""
        if self.running is None:
            return dict(self.loaded)
        return {**self.running.state(), PASSES: np.array(self.passes)}

    def load(self, state: Mapping[str, Array]) -> None:
        """Continue from what a checkpoint contained; without state, from the weights alone."""
        self.loaded = state
        self.news.note_moved(not state)
        self.check.forget()
        if self.running is not None:
            self.restore()

    def restore(self) -> None:
        """Give the strategy at work what a checkpoint contained."""
        state, self.loaded = dict(self.loaded), {}
        if state and self.running is not None:
            self.passes = int(state.pop(PASSES, np.array(0)))
            self.running.load(state)


def at_work() -> Iterator[StrategySteps]:
    """The strategies of all attached optimizers in this job."""
    return (each for each in runtime.current().registries.renewables() if isinstance(each, StrategySteps))
