"""An attached optimizer's step(): gradients that no backward() has reduced are reduced before it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, wraps
from types import MappingProxyType
from typing import Protocol, TypeAlias, TypeGuard

import torch
from torch.utils.hooks import RemovableHandle

from hvdlite.gradients import attaching
from hvdlite.system.user_warnings import warn
from hvdlite.torch.attach.backward import Backward
from hvdlite.torch.attach.ranks import Ranks
from hvdlite.torch.attach.results import Results
from hvdlite.torch.attach.round import IDLE, Round
from hvdlite.torch.attach.sharing import Sharer, refuse_other_way
from hvdlite.torch.private_api import step_is_nested

Arguments: TypeAlias = tuple[object, ...]
"""The positional arguments of step(), the optimizer first."""
Options: TypeAlias = dict[str, object]
"""The keyword arguments of step()."""


class Steps:
    """The steps of one optimizer, and how many rounds there had been at the last one.

    Attributes:
        depth: How many step() calls of the optimizer are under way, since a subclass's step() may call another. Too
            large after a step() that has raised.
        number: How many steps the optimizer has taken.
        seen: How many rounds had given results at the last step, by the name of the attachment that reduces.
        synchronized: The same at the user's last synchronize(); empty if results are no averages.
        skipping: Whether step() reduces nothing, as within skip_synchronize().
        apart: Whether this rank's own gradients may move its weights until the next step, as in SAM.
        handles: torch's handles of the hooks around step().
    """

    def __init__(self) -> None:
        self.depth = 0
        self.number = 0
        self.seen: dict[str, int] = {}
        self.synchronized: dict[str, int] = {}
        self.skipping = False
        self.apart = False
        self.handles: list[RemovableHandle] = []

    def hook(self, optimizer: torch.optim.Optimizer, attached: Attached) -> None:
        """Have `before` and `after` called around each step."""
        self.handles = [
            optimizer.register_step_pre_hook(partial(before, attached)),
            optimizer.register_step_post_hook(partial(after, attached)),
        ]

    def unhook(self) -> None:
        """Remove the hooks around step()."""
        for handle in self.handles:
            handle.remove()

    def enter(self, optimizer: torch.optim.Optimizer) -> bool:
        """A step() begins. Returns whether it is not part of another step()."""
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
        """The optimizer has applied the first `done` rounds of the attachment of this name."""
        self.seen[name] = done

    def note_synchronized(self, done: Mapping[str, int]) -> None:
        """The user has called synchronize(). done: how many rounds there had been, by the attachment's name."""
        self.synchronized = dict(done)

    def note_apart(self, apart: bool) -> None:
        """Note whether weights may differ between ranks from now on."""
        self.apart = apart

    def start_over(self, done: Mapping[str, int]) -> None:
        """Count steps from 0 again, as all ranks do. done: the new `seen`."""
        self.number, self.seen = 0, dict(done)

    @contextlib.contextmanager
    def skipping_rounds(self) -> Iterator[None]:
        """Within this context, step() reduces nothing."""
        before, self.skipping = self.skipping, True
        try:
            yield
        finally:
            self.skipping = before


class Attached(Sharer, Protocol):
    """An attachment, as its optimizer's steps see it."""

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
    def lacks_some(self) -> bool: ...
    def reduce(self) -> None: ...
    def compare(self) -> None: ...


def before(
    attached: Attached, optimizer: torch.optim.Optimizer, args: Arguments, kwargs: Options
) -> tuple[Arguments, Options] | None:
    """A step() begins: reduce gradients that no backward() has reduced. Waits for all ranks if there are any.

    If step() has a closure, this happens after the closure, since the closure's backward() may reduce gradients.

    Returns:
        Other arguments for step(), if there is a closure.
    """
    if not attached.steps.enter(optimizer):
        return None
    reducer = attached.reducer_of_gradients
    if reducer is None:
        attaching.require_alive(attached.alive, attached.ranks.group, shared=not attached.ranks.alone)
        return None
    if reducer is not attached:
        refuse_other_way(attached, reducer)
    if not attached.round.paused:
        attached.steps.count()
        if reducer.steps.apart:
            reducer.steps.note_apart(False)
            reducer.compare()
    elif not attached.ranks.alone:
        warn(
            "step() inside no_sync() moves this rank's weights by this rank's gradients alone, so that they differ "
            "from other ranks' weights. Call step() outside, where it reduces the accumulated gradients [HVD306]",
            RuntimeWarning,
        )
    attached.backward.forget()
    if (len(args) > 1 or kwargs) and has_closure(args, kwargs):
        wrap = partial(completing, attached)
        return (args[0], *map(wrap, args[1:])), {name: wrap(value) for name, value in kwargs.items()}
    if not attached.steps.skipping:
        complete(attached, reducer)
    close(attached, reducer)
    return None


def completing(attached: Attached, closure: object) -> object:
    """Return a closure that also reduces gradients after its call; an argument that is no closure as it is."""
    if not is_closure(closure):
        return closure

    @wraps(closure)
    def call(*args: object, **kwargs: object) -> object:
        result = closure(*args, **kwargs)
        if not attached.steps.skipping and (reducer := attached.reducer_of_gradients):
            complete(attached, reducer)
        return result

    return call


def after(attached: Attached, optimizer: torch.optim.Optimizer, args: Arguments, kwargs: Options) -> None:
    """A step() has ended: if it had a closure, the step has applied the results of the closure's gradients."""
    attached.steps.leave()
    if not ((len(args) > 1 or kwargs) and has_closure(args, kwargs)) or step_is_nested(optimizer):
        return
    if reducer := attached.reducer_of_gradients:
        close(attached, reducer)


def has_closure(args: Arguments, kwargs: Options) -> bool:
    """Whether step() was called with a closure. The first argument is the optimizer."""
    return any(map(is_closure, (*args[1:], *kwargs.values())))


def is_closure(given: object) -> TypeGuard[Callable[..., object]]:
    """Whether an argument of step() computes a loss. A module does not: a user's own step() may take one."""
    return callable(given) and not isinstance(given, torch.nn.Module)


def synchronize(attached: Attached) -> None:
    """Reduce gradients that were not reduced since the last synchronize(). Waits for all ranks."""
    if reducer := attached.reducer_of_gradients:
        complete(attached, reducer, attached.steps.synchronized)
        averaged = not reducer.results.once
        attached.steps.note_synchronized({reducer.ranks.name: reducer.results.done} if averaged else {})


def complete(attached: Attached, reducer: Attached, synchronized: Mapping[str, int] = MappingProxyType({})) -> None:
    """Reduce the gradients that no backward() has reduced. Waits for all ranks if there are any.

    Args:
        attached: The attachment of the optimizer that steps.
        reducer: The attachment that reduces its gradients.
        synchronized: How many rounds had given results at the user's last synchronize(), by the reducer's name.
    """
    if reducer.round.paused:
        return
    results, name = reducer.results, reducer.ranks.name
    done = results.done
    by_hand = done in (attached.steps.seen.get(name, 0), synchronized.get(name))
    if reducer.round.state is not IDLE or by_hand or reducer.lacks_some():
        reducer.reduce()
        if reducer.is_shared and not results.once:  # other optimizers of these parameters may have set gradients, too
            results.uncount(done)


def close(attached: Attached, reducer: Attached) -> None:
    """The step applies the results of all rounds so far."""
    if not attached.round.paused:
        attached.steps.note_seen(reducer.ranks.name, reducer.results.done)
        reducer.results.step_taken()
        if reducer.results.once:  # averages may be reduced again
            reducer.results.note_applied(reducer.planned_parameters)
    attached.round.applied()
    attached.backward.expect_another()  # if a backward() is under way, its further gradients begin another round
