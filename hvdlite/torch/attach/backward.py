"""When a backward() begins and ends, which autograd does not report, and how runs of autograd's engine are nested.

    run 1:  ... -> [checkpoint node: run 2 ... end] -> node -> [checkpoint node: run 3 ... end] -> ... end

A function may call backward() in its own backward: reentrant checkpointing does so for each segment. To the user all
these runs are one backward(), and the gradients are complete when the outermost run ends. But autograd calls back only
at the end of the present run. So when a nested run ends, hvdlite hooks the next node of the run around it. That hook
asks autograd for a callback at the end of that run, and so on outwards.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from hvdlite.torch.private_api import current_run, outermost_node, queue_callback


def remove(hooks: Sequence[RemovableHandle]) -> None:
    """Remove these hooks from their nodes."""
    for hook in hooks:
        hook.remove()


class Ending:
    """The end of the backward() under way.

    Only autograd's callback keeps an `Ending`, and so must no frame in the traceback of an error. A backward() that
    fails drops its callback, and the `Ending` with it.

    Attributes:
        run: The run in which the backward() began.
        last: The run that ends with the backward(); -1 while runs are nested, and the last one is not known.
        hooks: The hooks that continue, if the end of no run does.
    """

    def __init__(self, run: int, last: int, hooks: Sequence[RemovableHandle] = ()) -> None:
        self.run, self.last = run, last
        self.hooks = hooks


class Backward:
    """Finds out where one backward() ends and the next begins.

    Attributes:
        end: Called when a backward() ends for which `begin` was called. It must call `forget` last. Until then the
            backward() is under way, for other threads as well.
        lock: Protects the state from autograd's threads, one for each GPU.
        latest: The end of the last backward() that began; None or dead if there is none under way.
        run: The run of the last gradient; -1 if the next gradient begins another backward(). Read without the lock.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end
        self.lock = threading.RLock()
        self.latest: weakref.ref[Ending] | None = None
        self.run = -1

    def goes_on(self, run: int) -> bool:
        """Whether a gradient in this run belongs to the backward() under way. If so, `run` becomes the present run."""
        if self.latest is None or (ending := self.ending()) is None:
            return False
        hooks, began = ending.hooks, ending.run
        del ending  # else the frame of an error here would keep it
        if hooks and run > began and outermost_node() is None:
            remove(hooks)  # their node belongs to a run that has failed, or that ended without it
            self.forget()
            return False
        self.run = run
        return True

    @property
    def under_way(self) -> bool:
        """Whether a backward() has begun, and has neither ended nor failed."""
        return self.ending() is not None

    def ending(self) -> Ending | None:
        """Return the end of the backward() under way; None if there is none."""
        latest = self.latest  # read once: in another thread a backward() may begin or end
        return None if latest is None else latest()

    def ends_with(self, run: int) -> bool:
        """Whether the backward() under way ends when this run ends."""
        ending = self.ending()
        return ending is not None and ending.last == run

    def begin(self, run: int) -> None:
        """A backward() has begun: its first gradient has come in this run."""
        self.latest = self.follow(run, run, outermost_node())
        self.run = run  # set last: another thread reads it without the lock

    def follow(self, run: int, last: int, node: Node | None) -> weakref.ref[Ending]:
        """Continue at the end of the run under way.

        Args:
            run: The run in which the backward() began.
            last: The run under way.
            node: The node around the run under way (`outermost_node`); None if the run is not nested.
        """
        if node is None:
            ending = Ending(run, last)
            queue_callback(partial(self.call_end, ending))
        else:
            ending = Ending(run, -1)
            queue_callback(partial(self.pass_on, ending, run, node))
        return weakref.ref(ending)

    def call_end(self, ending: Ending) -> None:
        """The outermost run has ended, and the backward() with it."""
        del ending  # the frame of an error here would keep it
        self.end()

    def pass_on(self, ending: Ending, run: int, node: Node) -> None:
        """A nested run has ended: continue when the run around it comes to one of the next nodes."""
        del ending
        hooks: list[RemovableHandle] = []
        following = Ending(run, -1, hooks)
        call = partial(self.go_on_outside, following, run, hooks)
        latest = weakref.ref(following)
        del following
        for each, _ in node.next_functions:
            if each is not None:
                hooks.append(each.register_prehook(call))
        if self.latest is not None:
            self.latest = latest

    def go_on_outside(self, ending: Ending, run: int, hooks: Sequence[RemovableHandle], grads: object) -> None:
        """The run around a nested one has come to a next node: continue at the end of that run."""
        del ending
        remove(hooks)
        latest = self.follow(run, current_run(), outermost_node())
        if self.latest is not None:
            self.latest = latest

    def forget(self) -> None:
        """The next gradient belongs to another backward()."""
        self.latest = None

    def expect_another(self) -> None:
        """The next gradient begins another backward(), even if it comes in the run under way."""
        self.run = -1
