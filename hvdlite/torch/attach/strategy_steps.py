"""A strategy for a torch optimizer: `strategy=` of `DistributedOptimizer`.

    backward()      gradients stay this rank's own, or are averaged by an ordinary attachment (`Reach`)
    before step()   the strategy may see weights and gradients
    step()          the optimizer's own
    after step()    the strategy may change the weights

All weights of the optimizer take part, also those that are frozen now, so that the list stays the same.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import cast

import torch

from hvdlite.arrays import Array
from hvdlite.gradients.replica_check import Alike
from hvdlite.job import runtime
from hvdlite.job.groups import Group
from hvdlite.lanes.calls import calling, numbered
from hvdlite.lanes.signature import Facts
from hvdlite.strategies import Reach, Site, Strategy, require_joins
from hvdlite.strategies.averaging import largest
from hvdlite.strategies.hosts import host_set
from hvdlite.system.weak_references import weakly
from hvdlite.torch import cuda
from hvdlite.torch.attach import steps
from hvdlite.torch.attach.attachment import Attachment, attach
from hvdlite.torch.attach.own_steps import METHODS, Changed, OwnSteps
from hvdlite.torch.attach.parameters import flat
from hvdlite.torch.attach.replica_check import alike
from hvdlite.torch.attach.settings import TorchSettings
from hvdlite.torch.attach.steps import Arguments, Options
from hvdlite.torch.tensors import in_place, readable, to_tensor

KEY = "hvdlite_strategy"
"""The key of the strategy's state in state_dict()."""
KEPT = "_hvdlite_strategy"
"""The attribute of an optimizer whose state_dict() contains it."""
State = dict[str, object]


@dataclass(frozen=True)
class Asked:
    """What the user asked for.

    Attributes:
        strategy: The strategy.
        settings: How gradients are averaged while they are.
        passes: The number of backward() calls per round then.
    """

    strategy: Strategy
    settings: TorchSettings
    passes: int


@dataclass(frozen=True)
class Averaging:
    """How gradients are averaged now.

    Attributes:
        reach: The ranks.
        by: The ordinary attachment that does it; None if nobody does.
    """

    reach: Reach = Reach.NONE
    by: Attachment | None = None


class Phase(Enum):
    """Where an optimizer is."""

    BETWEEN = auto()  # two steps
    STEPPING = auto()  # step() has begun, and may have raised
    JOINED = auto()  # all ranks have joined since the last step


class StrategyAttachment:
    """An attachment to one optimizer whose weights a strategy keeps together with other ranks'.

    Attributes:
        reference: The optimizer, held weakly, so that a dropped one is free at once, and refuses no join().
        asked: What the user asked for.
        runtime: The runtime that the optimizer was attached under.
        site: The optimizer as the strategy sees it.
        running: The strategy at work.
        number: The number of steps so far.
        gradients: How gradients are averaged now.
        equal: Whether all ranks have equal weights.
        phase: Where the optimizer is.
        alike: The comparison of the ranks' weights.
        steps: The hooks around step().
        renewed: Whether `elastic.run` attached the optimizer again.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, asked: Asked, renewed: bool = False) -> None:
        """Attach to an optimizer, which gains the methods that users call. Collective; waits for all ranks.

        Args:
            optimizer: The optimizer.
            asked: What the user asked for.
            renewed: Whether `elastic.run` attaches the optimizer again.

        Raises:
            MismatchError: Strategies or parameters differ.
        """
        self.reference, self.asked, self.renewed = weakref.ref(optimizer), asked, renewed
        self.runtime = runtime.current()
        group = self.runtime.groups.of(asked.settings.process_set)
        number = group.serial("optimizer")
        title = f"step() of DistributedOptimizer({type(optimizer).__name__}, strategy={asked.strategy!r})"
        parameters = flat(optimizer.param_groups)
        names = [asked.settings.name(p, f"parameter.{index}") for index, p in enumerate(parameters)]
        self.site = Site(group, f"optimizer.{number}", numbered(title, number), names, asked.settings.process_set)
        lane = group.new_lane(self.name, self, self.site.title, facts_of(asked.strategy, names, parameters))
        self.number = 0
        self.gradients = Averaging()
        self.average_gradients(asked.strategy.reach(1))
        self.running = asked.strategy.start(self.site)
        weakref.finalize(optimizer, self.running.abandon).atexit = False
        self.equal, self.phase = True, Phase.BETWEEN
        self.alike: Alike = alike(optimizer, asked.settings, state=False)
        self.alike.enter(lane, self.name)
        self.alike.agree()
        self.steps = OwnSteps(optimizer, weakly(self.begin), weakly(self.end))
        self.runtime.registries.renew_later(self)
        self.runtime.registries.count_in_join(self)
        self.runtime.registries.keep_together(self)
        keep_in_state_dict(optimizer)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""
        optimizer = self.reference()
        assert optimizer is not None
        return optimizer

    @property
    def settings(self) -> TorchSettings:
        """How gradients are averaged while they are."""
        return self.asked.settings

    @property
    def group(self) -> Group:
        """The ranks whose weights are kept together."""
        return self.site.group

    @property
    def name(self) -> str:
        """The name of the strategy's operations."""
        return self.site.name

    @property
    def alive(self) -> bool:
        """Whether the hooks are at work."""
        return bool(self.steps.handles) and self.runtime.live

    @property
    def apart(self) -> bool:
        """Whether weights may differ between ranks."""
        return not self.equal

    @property
    def sent_per_step(self) -> float:
        """The bytes of weights that this rank sends to other hosts, as a mean over all steps."""
        return self.running.sent_bytes / max(self.number, 1)

    # Steps

    def begin(self, args: Arguments, kwargs: Options) -> Changed:
        """A step() begins. Returns other arguments for it, if gradients are averaged and there is a closure."""
        runtime.require_attached(self.alive, True, least=1, lost="its weights would not be kept together")
        self.finish()
        with calling(self.site.title):
            if self.phase is Phase.JOINED:
                self.count_on()
            self.follow()
            by = self.gradients.by
            changed = steps.before(by, self.optimizer, args, kwargs) if by else None
            self.look_at_beginning()
            if self.running.update_begins():
                with self.weights() as weights:
                    self.running.before_update(weights, [gradient_of(p) for p in flat(self.optimizer.param_groups)])
        self.phase = Phase.STEPPING
        return changed

    def look_at_beginning(self) -> None:
        """Compare the ranks' weights before the first step. Waits for all ranks then.

        Raises:
            ValueError: Another attached optimizer has some of the parameters.
            MismatchError: The ranks have different weights; on every rank.
        """
        if self.number == 0 and self.alike.schedule.first:
            self.refuse_shared()
            self.alike.look()

    def refuse_shared(self) -> None:
        """Raise ValueError if another attached optimizer has some of the parameters: both would be wrong."""
        mine = self.members()

        def shared() -> bool:
            by = self.gradients.by
            ordinary = (each for each in self.runtime.registries.attachments if each is not by)
            return bool(by and by.is_shared) or any(mine & each.members() for each in (*ordinary, *self.others()))

        if shared():
            gc.collect()  # optimizers that nobody has any more
            if shared():
                raise ValueError(
                    f"{self.site.title}: another optimizer of hvd.DistributedOptimizer has some of these parameters. "
                    "With strategy=, give each parameter to one optimizer"
                )

    def others(self) -> Iterator[StrategyAttachment]:
        """Return the other optimizers with strategies."""
        found = self.runtime.registries.together(self.group)
        return (each for each in found if isinstance(each, StrategyAttachment) and each is not self)

    def members(self) -> set[int]:
        """Return the optimizer's parameters, by id(). Empty once the optimizer is gone."""
        optimizer = self.reference()
        return {id(p) for p in flat(optimizer.param_groups)} if optimizer and self.alive else set()

    def end(self, args: Arguments, kwargs: Options) -> None:
        """A step() has ended without an error. Waits for all ranks, if the strategy moves weights now."""
        if self.gradients.by:
            steps.after(self.gradients.by, self.optimizer, args, kwargs)
        self.finish()

    def finish(self) -> None:
        """Count the step that has begun, if any, and move weights if they are due. Waits for all ranks then.

        A step() that raises an error counts, too: other ranks have counted theirs, and may wait for this rank.
        """
        if self.phase is not Phase.STEPPING or not self.alive:
            return
        self.phase = Phase.BETWEEN
        self.number += 1
        self.equal = self.equal and self.gradients.reach is Reach.EVERYONE
        with calling(self.site.title):
            if self.running.update_ends():
                with self.weights() as weights, self.state() as state:
                    self.equal = self.running.after_update(weights, state)
                if self.equal:
                    self.alike.look()
            self.follow()

    def follow(self) -> None:
        """Average gradients of the next step over the ranks that the strategy names. Collective if these change."""
        reach = self.asked.strategy.reach(self.number + 1)
        if reach is not self.gradients.reach:
            self.average_gradients(reach)

    def average_gradients(self, reach: Reach) -> None:
        """Average gradients over these ranks from now on. Collective unless nobody does; then it waits for nobody."""
        if self.gradients.by is not None:
            self.gradients.by.let_go()
            self.gradients.by.detach()
        everyone = self.asked.settings.process_set
        ranks = everyone if reach is Reach.EVERYONE else host_set(everyone) if reach is Reach.HOST else None
        if ranks is None:
            self.gradients = Averaging(reach)
            self.optimizer.__dict__.update(METHODS)
        else:
            settings = replace(self.asked.settings, process_set=ranks)
            self.gradients = Averaging(reach, attach(self.optimizer, settings, self.asked.passes, hooked=False))
        self.optimizer.__dict__["_hvdlite"] = self

    @contextlib.contextmanager
    def weights(self) -> Iterator[Sequence[Array]]:
        """A context with the weights as arrays, which may change in place."""
        parameters = flat(self.optimizer.param_groups)
        pairs = [in_place(p) for p in parameters]
        gpu = cuda.gpu_of(parameters)
        with cuda.on_torchs_stream(gpu) if gpu else contextlib.nullcontext():
            yield [array for array, _ in pairs]
        for _, put_back in pairs:
            put_back(None)

    @contextlib.contextmanager
    def state(self) -> Iterator[Mapping[str, Array]]:
        """A context with the optimizer's state by name, if the strategy wants it. It may change in place."""
        found: dict[str, torch.Tensor] = {}
        if self.asked.strategy.wants_state:
            for index, p in enumerate(flat(self.optimizer.param_groups)):
                for key, value in self.optimizer.state.get(p, {}).items():
                    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == p.shape:
                        found[f"{index}.{key}"] = value
        pairs = {key: in_place(value) for key, value in found.items()}
        yield {key: array for key, (array, _) in pairs.items()}
        for _, put_back in pairs.values():
            put_back(None)

    # Its life

    def prepare(self) -> None:
        """This rank is about to settle: other ranks must not wait for its next step, or for one that has raised."""
        self.finish()
        self.running.prepare()

    def settle(self) -> None:
        """Finish what the strategy has under way. Collective; waits for all ranks."""
        self.finish()
        with calling(self.site.title), self.weights() as weights:
            self.running.settle(weights)

    def give_up(self) -> None:
        """This rank is about to join. Raises RuntimeError if other ranks could not go on."""
        require_joins(self.asked.strategy)
        self.running.pause()

    def start_over(self) -> None:
        """All ranks have joined: the next step goes on from the largest number of steps.

        Only then do all ranks use this optimizer again. One that nobody uses may be gone on some ranks. Until then this
        rank does not know whether others still average gradients. So the next backward() averages none, and the next
        step() does if it must.
        """
        self.phase = Phase.JOINED
        self.average_gradients(Reach.NONE)
        self.alike.expect()

    def count_on(self) -> None:
        """Go on from the largest number of steps of all ranks, which have joined. Waits for all ranks."""
        self.phase, self.equal = Phase.BETWEEN, True
        self.number = largest(self.group, self.number, f"{self.name} steps")
        self.running.start_over(self.number)
        self.settle()
        self.alike.look()

    def renew(self) -> None:
        """Attach the same optimizer again, in the same way, under the present runtime. Collective."""
        state, number = self.running.state(), self.number
        self.detach()
        StrategyAttachment(self.optimizer, self.asked, renewed=True).go_on(number, state)

    def go_on(self, number: int, state: Mapping[str, Array]) -> None:
        """Go on after so many steps, with what `Running.state` returned. Waits for nobody.

        If gradients are to be averaged over other ranks than now, the next step() begins that, since this rank may be
        the only one that loads a checkpoint now.

        Raises:
            ValueError: The state is another strategy's.
        """
        try:
            self.running.load(state)
        except KeyError as error:
            raise ValueError(
                f"the state has no {error}, which {self.asked.strategy!r} needs: it was saved with another strategy. "
                f"Attach that one, or remove the entry {KEY!r} from the optimizer's state_dict to begin anew"
            ) from None
        self.number = number
        if self.phase is Phase.STEPPING:  # a step() that raised before this does not count
            self.phase = Phase.BETWEEN
        if self.asked.strategy.reach(number + 1) is not self.gradients.reach:
            self.average_gradients(Reach.NONE)

    def detach(self) -> None:
        """Remove the hooks."""
        if self.gradients.by is not None:
            self.gradients.by.detach()
        self.steps.remove()
        self.running.close()
        self.runtime.registries.forget(self, self.alike)


def gradient_of(p: torch.Tensor) -> Array | None:
    """Return a parameter's gradient as an array; None if there is none."""
    if p.grad is None:
        return None
    return readable(p.grad.to_dense() if p.grad.layout is not torch.strided else p.grad)


def facts_of(strategy: Strategy, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> Facts:
    """Return what all ranks must agree on."""
    shapes = tuple(f"{name} {tuple(p.shape)}" for name, p in zip(names, parameters, strict=True))
    return (("strategy", repr(strategy)), ("parameters", shapes))


# State in checkpoints


def keep_in_state_dict(optimizer: torch.optim.Optimizer) -> None:
    """Have state_dict() contain the strategy's state, and load_state_dict() take it. Safe to call twice."""
    if KEPT not in vars(optimizer):
        optimizer.__dict__[KEPT] = True
        optimizer.register_state_dict_post_hook(add)
        optimizer.register_load_state_dict_pre_hook(take)


def add(optimizer: torch.optim.Optimizer, state: State) -> State:
    """A hook after state_dict(): add the strategy's state."""
    attached = strategy_of(optimizer)
    if attached is None:
        return state
    return {
        **state,
        KEY: {"steps": attached.number, **{name: to_tensor(array) for name, array in attached.running.state().items()}},
    }


def take(optimizer: torch.optim.Optimizer, state: State) -> State:
    """A hook before load_state_dict(): take the strategy's state out. A state without it changes nothing."""
    attached, found = strategy_of(optimizer), cast("dict[str, torch.Tensor] | None", state.get(KEY))
    if attached is not None and found is not None:
        its = {name: readable(value.cpu()) for name, value in found.items() if name != "steps"}
        attached.go_on(int(found["steps"]), its)
    return {key: value for key, value in state.items() if key != KEY}


def strategy_of(optimizer: object) -> StrategyAttachment | None:
    """Return the attachment of an optimizer with a strategy; None for another."""
    found = getattr(optimizer, "_hvdlite", None)
    return found if isinstance(found, StrategyAttachment) else None
