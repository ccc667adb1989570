"""When a backward() begins and ends, of which autograd tells nothing, and how runs of autograd are nested.

    run 1:  ... -> [checkpoint node: run 2 ... end] -> node -> [checkpoint node: run 3 ... end] -> ... end

A function may call backward() in its own backward: reentrant checkpointing runs one for each segment. All are one
backward to the user, who sees gradients when the outermost ends. Autograd calls back at the end of the run under way
only, so from a nested run the call is passed on: by a hook on what follows its node in the run around it.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import torch

APPLY = {
    id(code := vars(torch.autograd.function.BackwardCFunction)[name].__code__): code
    for name in ("apply", "apply_boxed") if name in vars(torch.autograd.function.BackwardCFunction)
}  # fmt: skip
"""By id(), since to hash code takes longer: what runs a Python function's backward; its `self` is the node."""

ROUND = "step {}, backward {}, attempt {}"
current_run = torch._C._current_graph_task_id
queue_callback = torch.autograd.Variable._execution_engine.queue_callback
DEAF: tuple[Any, ...] = deque[Any](maxlen=0).append, (), None, None
"""The state of a `partial` that does nothing, with any argument, in C."""


def remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()


def outermost_node() -> Any:
    """The node of the outermost run inside which this thread is in a nested one; None: the run is not nested."""
    frame, found = sys._getframe(1), None
    while frame is not None:
        if id(frame.f_code) in APPLY:
            found = frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
    return found


class Ending(partial[None]):
    """What autograd is to call when the backward under way ends, or goes on outside of a nested run. Made in a hook of
    a parameter. Nobody else holds it, no frame of a traceback either, so that it dies with a backward that fails."""

    run: int
    """The number of the run under way when the backward began."""
    last = -1
    """The number of the run at whose end the backward ends; -1: not known yet, since runs are nested."""
    hooks: Sequence[Any] = ()
    """Where it is not called by a run's end: by these."""


class Token(weakref.ref["Ending"]):
    """Of an Ending. When that dies, C code alone calls `change`: in Python's a signal's handler could raise, in vain
    (Ctrl-C)."""

    change: Callable[[Any], object] = id  # until it is set: nothing


class Backward:
    """Tells one backward from the next. end: called when one ends that `begin` was called for; it is to `forget` it in
    the end: until then it is under way, for other threads, too. tell: what `hook` calls.

    hook: to be one of the parameters. Where the first gradient of a backward is enough, it is `deaf` to others as long
    as that is under way: it comes back without a line of Python, each of which takes a microsecond between two
    operators of backward. (A CNN with 18 parameters: 0.03 ms less per step, of the 0.50 that it takes more than without
    hvdlite.)
    """

    def __init__(self, end: Callable[[], None], tell: Callable[[torch.Tensor], Any]) -> None:
        self.end = end
        self.hook = partial(tell)  # what it calls is changed in place, for autograd holds on to it
        self.listening = tell, (), None, None
        self.change: Callable[[Any], None] = self.hook.__setstate__  # type: ignore[attr-defined]
        self.died = methodcaller("change", self.listening)  # of a Token
        self.latest: weakref.ref[Ending] | None = None
        self.run = -1
        """The number of the run that had the last gradient, for the hooks of parameters: of the one that has begun last
        or, nested, goes on."""

    def goes_on(self, run: int) -> bool:
        """Whether this run belongs to the last one that began, which has neither ended nor failed."""
        ending = self.ending()
        if ending is None:
            return False
        hooks, began = ending.hooks, ending.run
        del ending  # else the frame of an error here would hold it
        if hooks and run > began and outermost_node() is None:
            remove(hooks)  # it waits for a node of a run that has failed, or came to its end without that
            self.forget()
            return False
        return True

    @property
    def under_way(self) -> bool:
        """Whether it has neither ended nor failed."""
        return self.ending() is not None

    def ending(self) -> Ending | None:
        latest = self.latest  # read once: in another thread a backward may begin or end
        return None if latest is None else latest()

    def ends_with(self, run: int) -> bool:
        """Whether it ends when this run does."""
        ending = self.ending()
        return ending is not None and ending.last == run

    def begin(self, run: int, node: Any, deaf: bool = False) -> None:
        """node: what this run is nested in. deaf: see above. Not where it is nested: then the one around it may fail
        unseen."""
        self.latest = self.follow(run, run, node)
        self.run = run  # last: another thread looks at it without the lock
        if deaf and node is None:
            self.change(DEAF)

    def follow(self, run: int, last: int, node: Any) -> Token:
        """Go on at the end of the run `last`, which is under way. run: the one in which the backward began. node: what
        the last is nested in (`outermost_node`)."""
        if node is None:
            ending = Ending(self.end)
            ending.last = last
        else:
            ending = Ending(self.pass_on, run, node)
        ending.run = run
        queue_callback(ending)
        token = Token(ending, self.died)
        token.change = self.change
        return token

    def pass_on(self, run: int, node: Any) -> None:
        """Go on when the run around the nested one, which has ended, comes to what follows its node."""
        hooks: list[Any] = []
        ending = Ending(self.go_on_outside, run, hooks)
        ending.run, ending.hooks = run, hooks
        for following, _ in node.next_functions:
            if following is not None:
                hooks.append(following.register_prehook(ending))
        latest = weakref.ref(ending)  # no hook is deaf where runs are nested
        del ending
        if self.latest is not None:
            self.latest = latest

    def go_on_outside(self, run: int, hooks: Sequence[Any], grads: Any) -> None:
        remove(hooks)
        token = self.follow(run, current_run(), outermost_node())
        if self.latest is not None:
            self.latest = token

    def forget(self) -> None:
        """What comes next is of another one."""
        self.change(self.listening)
        self.latest = None
