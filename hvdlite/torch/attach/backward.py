"""When a backward() begins and ends, which autograd does not tell, and how runs of autograd's engine are nested.

    run 1:  ... -> [checkpoint node: run 2 ... end] -> node -> [checkpoint node: run 3 ... end] -> ... end

A function may call backward() in its own backward: reentrant checkpointing runs one for each segment. All are one
backward() to the user, who sees gradients when the outermost run ends. autograd calls back at the end of the run under
way only. So from a nested run the call is passed on, by a hook on the node that follows in the run around it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hvdlite.torch.private_api import current_run, outermost_node, queue_callback


def remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()


class Ending:
    """The end of the backward() under way. Only what autograd is to call keeps one, and no frame of a traceback: so it
    dies with a backward() that fails.

    run: the run under way when the backward() began. last: the run at whose end the backward() ends; -1: not known yet,
    since runs are nested. hooks: where no run's end calls it, the hooks that do.
    """

    def __init__(self, run: int, last: int, hooks: Sequence[Any] = ()) -> None:
        self.run, self.last = run, last
        self.hooks = hooks


class Backward:
    """Tells one backward() from the next. end: called when a backward() ends for which `begin` was called. `end` has to
    call `forget` in the end: until then the backward() is under way, also for other threads."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end
        self.lock = threading.RLock()
        """For autograd's threads, of which each GPU has one."""
        self.latest: weakref.ref[Ending] | None = None
        self.run = -1
        """The run that had the last gradient: the run that began last or, where runs are nested, one that goes on."""

    def goes_on(self, run: int) -> bool:
        """Whether a run, in which a gradient has come, belongs to the last backward() that began and that has neither
        ended nor failed. If so, `run` is the run from now on."""
        if self.latest is None or (ending := self.ending()) is None:
            return False
        hooks, began = ending.hooks, ending.run
        del ending  # else the frame of an error here would keep it
        if hooks and run > began and outermost_node() is None:
            remove(hooks)  # they wait for a node of a run that has failed, or that ended without it
            self.forget()
            return False
        self.run = run
        return True

    @property
    def under_way(self) -> bool:
        """Whether a backward() has neither ended nor failed."""
        return self.ending() is not None

    def ending(self) -> Ending | None:
        latest = self.latest  # read once: in another thread a backward() may begin or end
        return None if latest is None else latest()

    def ends_with(self, run: int) -> bool:
        """Whether the backward() ends when this run does."""
        ending = self.ending()
        return ending is not None and ending.last == run

    def begin(self, run: int) -> None:
        """A backward() has begun: the first gradient has come in this run."""
        self.latest = self.follow(run, run, outermost_node())
        self.run = run  # last: another thread looks at it without the lock

    def follow(self, run: int, last: int, node: Any) -> weakref.ref[Ending]:
        """Go on at the end of the run `last`, which is under way. run: the one in which the backward() began. node: the
        node that the last is nested in (`outermost_node`)."""
        if node is None:
            ending = Ending(run, last)
            queue_callback(partial(self.call_end, ending))
        else:
            ending = Ending(run, -1)
            queue_callback(partial(self.pass_on, ending, run, node))
        return weakref.ref(ending)

    def call_end(self, ending: Ending) -> None:
        del ending  # the frame of an error here would keep it
        self.end()

    def pass_on(self, ending: Ending, run: int, node: Any) -> None:
        """Go on when the run around the nested one, which has ended, comes to the nodes that follow."""
        del ending
        hooks: list[Any] = []
        following = Ending(run, -1, hooks)
        call = partial(self.go_on_outside, following, run, hooks)
        latest = weakref.ref(following)
        del following
        for each, _ in node.next_functions:
            if each is not None:
                hooks.append(each.register_prehook(call))
        if self.latest is not None:
            self.latest = latest

    def go_on_outside(self, ending: Ending, run: int, hooks: Sequence[Any], grads: Any) -> None:
        del ending
        remove(hooks)
        latest = self.follow(run, current_run(), outermost_node())
        if self.latest is not None:
            self.latest = latest

    def forget(self) -> None:
        """What comes next belongs to another backward()."""
        self.latest = None

    def begin_anew(self) -> None:
        """Gradients that come next begin another backward(), also those of a run under way."""
        self.run = -1
