"""What happens around an attached optimizer's step(): gradients that no backward has reduced are reduced before it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, Protocol

import torch

from hvdlite.errors import RemovedError
from hvdlite.job import runtime
from hvdlite.system.user_warnings import warn
from hvdlite.torch.attach.backward import Backward
from hvdlite.torch.attach.ranks import Ranks
from hvdlite.torch.attach.results import Results
from hvdlite.torch.attach.round import IDLE, Round
from hvdlite.torch.private_api import step_is_nested

Arguments = tuple[Any, ...]
Options = dict[str, Any]


class Steps:
    """The steps of one optimizer, and what had been reduced when it took the last one."""

    def __init__(self) -> None:
        self.depth = 0
        """How many step() calls of the optimizer are under way: a subclass's calls another. More if one has raised."""
        self.number = 0
        """How many steps it has taken."""
        self.seen: dict[str, int] = {}
        """How many rounds an attachment, by name, had completed at the last step."""
        self.synchronized: dict[str, int] = {}
        """The same at the user's last synchronize(), where results are averages."""
        self.skipping = False
        """step() is not to reduce anything, as within skip_synchronize()."""
        self.apart = False
        """This rank's own gradients may move its weights until the next step, as in SAM."""
        self.handles: list[Any] = []

    def hook(self, optimizer: torch.optim.Optimizer, attached: Attached) -> None:
        """Have `before` and `after` called around each step."""
        self.handles = [
            optimizer.register_step_pre_hook(partial(before, attached)),
            optimizer.register_step_post_hook(partial(after, attached)),
        ]

    def unhook(self) -> None:
        for handle in self.handles:
            handle.remove()

    def enter(self, optimizer: torch.optim.Optimizer) -> bool:
        """A step() begins. Returns whether it is no part of another one."""
        nested = self.depth > 0 and step_is_nested(optimizer)
        self.depth = self.depth + 1 if nested else 1
        return not nested

    def leave(self) -> None:
        """A step() has ended."""
        self.depth -= 1

    def count(self) -> None:
        """The optimizer takes one more step."""
        self.number += 1

    def note_seen(self, name: str, done: int) -> None:
        """What the attachment of this name has reduced is applied."""
        self.seen[name] = done

    def note_synchronized(self, done: Mapping[str, int]) -> None:
        """The user has called synchronize()."""
        self.synchronized = dict(done)

    def come_apart(self, apart: bool) -> None:
        """Weights may differ between ranks from now on, or no longer."""
        self.apart = apart

    def start_over(self, done: Mapping[str, int]) -> None:
        """All ranks count steps from 0. done: what counts as seen."""
        self.number, self.seen = 0, dict(done)

    @contextlib.contextmanager
    def skipping_rounds(self) -> Iterator[None]:
        """Inside, step() reduces nothing."""
        before, self.skipping = self.skipping, True
        try:
            yield
        finally:
            self.skipping = before


class Attached(Protocol):
    """An attachment, as its optimizer's steps see it."""

    @property
    def alive(self) -> bool: ...
    @property
    def ranks(self) -> Ranks: ...
    @property
    def round(self) -> Round: ...
    @property
    def backward(self) -> Backward: ...
    @property
    def steps(self) -> Steps: ...
    @property
    def results(self) -> Results: ...
    @property
    def is_shared(self) -> bool: ...
    @property
    def planned_parameters(self) -> Iterable[torch.Tensor]: ...
    @property
    def reducer_of_gradients(self) -> Attached | None: ...
    def refuse_other_way(self, reducer: Any) -> None: ...
    def lacks_some(self) -> bool: ...
    def reduce(self) -> None: ...
    def compare(self) -> None: ...


def before(
    attached: Attached, optimizer: torch.optim.Optimizer, args: Arguments, kwargs: Options
) -> tuple[Arguments, Options] | None:
    """Complete a round for gradients that no backward has reduced: now, or after the closure, whose backward may do
    its own. Returns other arguments for the step where there is a closure."""
    if not attached.steps.enter(optimizer):
        return None
    reducer = attached.reducer_of_gradients
    if reducer is None:
        require_no_successor(attached)
        return None
    if reducer is not attached:
        attached.refuse_other_way(reducer)
    if not attached.round.paused:
        attached.steps.count()
        if reducer.steps.apart:
            reducer.steps.come_apart(False)
            reducer.compare()
    elif not attached.ranks.alone:
        warn(
            "step() inside no_sync() moves this rank's weights by this rank's gradients alone: they come apart from "
            "the others'. Call it outside, where it reduces what has been accumulated", RuntimeWarning,
        )  # fmt: skip
    attached.backward.forget()
    if (len(args) > 1 or kwargs) and has_closure(args, kwargs):
        wrap = partial(completing, attached)
        return (args[0], *map(wrap, args[1:])), {name: wrap(value) for name, value in kwargs.items()}
    if not attached.steps.skipping:
        complete(attached, reducer)
    close(attached, reducer)
    return None


def completing(attached: Attached, closure: Any) -> Any:
    """The closure, after which gradients are reduced; anything else as it is."""
    if not is_closure(closure):
        return closure

    @wraps(closure)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = closure(*args, **kwargs)
        if not attached.steps.skipping and (reducer := attached.reducer_of_gradients):
            complete(attached, reducer)
        return result

    return call


def after(attached: Attached, optimizer: torch.optim.Optimizer, args: Arguments, kwargs: Options) -> None:
    """What was reduced after a closure was for this step."""
    attached.steps.leave()
    if not ((len(args) > 1 or kwargs) and has_closure(args, kwargs)) or step_is_nested(optimizer):
        return
    if reducer := attached.reducer_of_gradients:
        close(attached, reducer)


def has_closure(args: Arguments, kwargs: Options) -> bool:
    """Whether step() was called with one. The first argument is the optimizer."""
    return any(map(is_closure, (*args[1:], *kwargs.values())))


def is_closure(given: Any) -> bool:
    """Whether what a step() was given computes a loss; a step of a user's own may want a module."""
    return callable(given) and not isinstance(given, torch.nn.Module)


def synchronize(attached: Attached) -> None:
    """Complete the round under way, if gradients are still unreduced: also by hand, since the last time. Waits for all
    ranks."""
    if reducer := attached.reducer_of_gradients:
        complete(attached, reducer, attached.steps.synchronized)
        averaged = not reducer.results.once
        attached.steps.note_synchronized({reducer.ranks.name: reducer.results.done} if averaged else {})


def complete(attached: Attached, reducer: Attached, synchronized: Mapping[str, int] = MappingProxyType({})) -> None:
    """Reduce what no backward has. synchronized: how many rounds the reducer, by name, had completed when the user last
    called `synchronize`."""
    if reducer.round.paused:
        return
    results, name = reducer.results, reducer.ranks.name
    done = results.done
    by_hand = done in (attached.steps.seen.get(name, 0), synchronized.get(name))
    if reducer.round.state is not IDLE or by_hand or reducer.lacks_some():
        reducer.reduce()
        if reducer.is_shared and not results.once:  # others with the same parameters may have set gradients, too
            results.uncount(done)


def close(attached: Attached, reducer: Attached) -> None:
    """What has been reduced so far is applied."""
    if not attached.round.paused:
        attached.steps.note_seen(reducer.ranks.name, reducer.results.done)
        reducer.results.step_taken()
        if reducer.results.once:  # of averages nobody asks
            reducer.results.note_applied(reducer.planned_parameters)
    attached.round.applied()
    attached.backward.begin_anew()  # of a backward under way, gradients that come yet begin another round


def require_no_successor(attached: Attached) -> None:
    """Raise where nobody reduces the gradients of an optimizer that is about to step, though there are others."""
    group = attached.ranks.group
    if group is not None and group.removed:
        raise RemovedError(group.ranks)
    runtime.require_attached(attached.alive, shared=not attached.ranks.alone)
