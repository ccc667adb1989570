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


def outermost_node() -> Any:
    """The node of the outermost run inside which this thread is in a nested one; None: the run is not nested."""
    frame, found = sys._getframe(1), None
    while frame is not None:
        if id(frame.f_code) in APPLY:
            found = frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
    return found


class Token(weakref.ref["partial[Any]"]):
    """Of what autograd is to call next, which nobody else holds, no frame of a traceback either, so that it dies with a
    backward that fails. Then C code alone calls `change`: in Python's a signal's handler could raise, in vain (Ctrl-C).
    """

    change: Callable[[Any], object] = id  # until it is set: nothing


class Ending:
    """What autograd is to call when the backward under way ends. Made in a hook of a parameter."""

    run: int
    """The number of the run under way when it was made."""
    hooks: Sequence[Any] = ()

    def follow(self, backward: Backward, run: int, node: Any) -> None:
        """Be called at the end of this run, which is under way. node: what it is nested in (`outermost_node`)."""
        self.backward, self.last, self.node = backward, run, node
        call = partial(self.at_end)
        queue_callback(call)
        token = Token(call, backward.died)
        token.change = backward.change
        del call  # before it counts
        self.token: weakref.ref[partial[Any]] = token

    def at_end(self) -> None:
        if self.node is None:
            self.backward.end()
        else:
            self.pass_on(self.node)

    def pass_on(self, node: Any) -> None:
        """Be called when the run around the nested one comes to what follows its node."""
        call = partial(self.go_on_outside)
        hooks = [following.register_prehook(call) for following, _ in node.next_functions if following is not None]
        token = weakref.ref(call)  # no hook is deaf where runs are nested
        del call
        self.node, self.hooks, self.token = None, hooks, token

    def go_on_outside(self, grads: Any) -> None:
        self.forget_outside()
        self.follow(self.backward, current_run(), outermost_node())

    def forget_outside(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks = ()


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
        if ending.hooks and run > ending.run and outermost_node() is None:
            ending.forget_outside()  # it waits for a node of a run that has failed, or came to its end without that
            self.forget()
            return False
        return True

    @property
    def under_way(self) -> bool:
        """Whether it has neither ended nor failed."""
        return self.ending() is not None

    def ending(self) -> Ending | None:
        latest = self.latest  # read once: in another thread a backward may begin or end
        ending = None if latest is None else latest()
        return None if ending is None or ending.token() is None else ending

    def ends_with(self, run: int) -> bool:
        """Whether it ends when this run does."""
        ending = self.ending()
        return ending is not None and ending.node is None and not ending.hooks and ending.last == run

    def begin(self, run: int, node: Any, deaf: bool = False) -> None:
        """node: what this run is nested in. deaf: see above. Not where it is nested: then the one around it may fail
        unseen."""
        ending = Ending()
        ending.run = run
        ending.follow(self, run, node)
        self.latest = weakref.ref(ending)
        self.run = run  # last: another thread looks at it without the lock
        if deaf and node is None:
            self.change(DEAF)

    def forget(self) -> None:
        """What comes next is of another one."""
        self.change(self.listening)
        self.latest = None
