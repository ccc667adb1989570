"""Going on after an error or a change of hosts: states that can be committed, restored and given to all ranks.

    @hvd.elastic.run
    def train(state):
        while state.epoch < 90:
            ...
            state.epoch += 1
            state.commit()

`run` calls the function with rank 0's state on every rank. After an `HvdliteError` (Horovod: HorovodInternalError) the
state is what it was at its last commit; after a `HostsUpdatedInterrupt` it stays as it is; either way communication
starts anew, attached optimizers are attached again, and the function is called again. This needs no new process: where
a rank is lost or communication is broken for good, the error ends the job. The names and their meaning are Horovod's,
but for `ObjectState.save`, which copies deeply: what the function changes in place is undone, too.
"""

from __future__ import annotations

import copy
import functools
import gc
import logging
import queue
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import IntFlag
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from hvdlite.errors import HostsUpdatedInterrupt, HvdliteError
from hvdlite.job import runtime
from hvdlite.job.registries import Renewable
from hvdlite.lanes.calls import calling
from hvdlite.ops.objects import allgather_object, broadcast_object

MOST_REPETITIONS, MOST_RESTARTS = 3, 100
"""The same error this often, or any errors, without a commit in between, are no accident."""


RETELLERS = ("tensorflow", "jax", "jaxlib")
"""Frameworks whose errors may be ours, retold."""


P = ParamSpec("P")
R = TypeVar("R")
StateT = TypeVar("StateT")


class HostUpdateResult(IntFlag):
    """How the hosts have changed."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class State:
    """What training must not lose. Subclasses say how to `save`, `restore` and `sync`.

    bcast_object: gives rank 0's object to all ranks. get_rank: accepted for Horovod's sake.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits = 0

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Have these called, in order, each time communication has started anew: to adapt to another size."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Communication has started anew."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Hosts have come or gone; the next `check_host_updates` acts on it. From any thread; only rank 0's counts."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save, and `check_host_updates`. Collective. Not too often: saving copies everything."""
        self.save()
        self._commits += 1
        with calling("state.commit()"):
            self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks where rank 0 has learned of a change. Collective."""
        before, last, change = self._last_updated, self._last_updated, HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > last:
                last, change = timestamp, change | update
        before, self._last_updated, change = self._bcast_object((before, last, change))
        if self._last_updated > before:
            raise HostsUpdatedInterrupt(skip_sync=change == HostUpdateResult.removed)

    def save(self) -> None:
        """Keep the present state for `restore`."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give rank 0's state to all ranks. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a new communicator. By default nothing."""


class ObjectState(State):
    """Attributes, given as keyword arguments, that can be pickled."""

    if TYPE_CHECKING:  # what has been given by name

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attributes()
        self._saved_state = copy.deepcopy(kwargs)

    def save(self) -> None:
        self._saved_state = copy.deepcopy({name: getattr(self, name) for name in self._saved_state})
        self._commits += 1  # also where a subclass commits in its own way

    def restore(self) -> None:
        self._set_attributes()
        self._saved_state = copy.deepcopy(self._saved_state)

    def sync(self) -> None:
        """Give rank 0's present attributes to all ranks, and save them; what it has not is lost. Collective."""
        self._saved_state = self._bcast_object({name: getattr(self, name) for name in self._saved_state})
        self._set_attributes()
        self._saved_state = copy.deepcopy(self._saved_state)

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


class VariablesState(ObjectState):
    """A framework's variables, and attributes.

    variables: those there are, the same objects each time; more may come. read: a variable's value as an array, a copy.
    broadcast: gives rank 0's values to all ranks, collectively.
    """

    def __init__(
        self, variables: Callable[[], list[Any]], read: Callable[[Any], Any], broadcast: Callable[[list[Any]], Any],
        **kwargs: Any,
    ) -> None:
        self._variables, self._read, self._broadcast = variables, read, broadcast
        super().__init__(broadcast_object, runtime.rank, **kwargs)
        self._saved = self._read_all()

    def save(self) -> None:
        self._saved = self._read_all()
        super().save()

    def restore(self) -> None:
        """Return to what was saved last. Variables that are new since then stay as they are, unless all are (a model
        built anew), which get the old ones' values in their order."""
        now, values = self._variables(), {id(variable): value for variable, value in self._saved}
        same = [(variable, values[id(variable)]) for variable in now if id(variable) in values]
        for variable, value in same or zip(now, [value for _, value in self._saved], strict=False):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        self._broadcast(self._variables())
        self._saved = self._read_all()
        super().sync()

    def _read_all(self) -> list[tuple[Any, Any]]:
        """Each variable, kept so that no other takes its place in memory, and its value."""
        return [(variable, self._read(variable)) for variable in self._variables()]


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """`run`, for another way to start anew."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        skip_sync, before, repetitions, restarts = False, "", 0, 0
        while True:
            commits = getattr(state, "_commits", 0)
            try:
                if not skip_sync:
                    with calling("state.sync() of hvd.elastic.run"):
                        state.sync()
                result = func(state, *args, **kwargs)
                if runtime.is_initialized():  # else a rank whose function fails at its very end would go back alone
                    with calling("the end of hvd.elastic.run"):
                        allgather_object(None, name="the end of elastic.run")
                return result
            except HostsUpdatedInterrupt as interrupt:
                skip_sync, before = interrupt.skip_sync, ""
            except Exception as error:
                if (origin := origin_of(error)) is None:
                    raise
                stuck = getattr(state, "_commits", 0) == commits
                repetitions = repetitions + 1 if stuck and str(origin) == before else 1
                restarts = restarts + 1 if stuck else 1
                if repetitions >= MOST_REPETITIONS or restarts >= MOST_RESTARTS or beyond_repair():
                    raise
                logging.getLogger("hvdlite").warning("back to the last commit, after: %s", origin)
                before, skip_sync = str(origin), False
                del origin  # and with it what its traceback holds: models, batches
                state.restore()
            reset()
            if runtime.is_initialized():  # an interrupt on some ranks was an error on the others, who wait in sync
                with calling("the restart of hvd.elastic.run"):
                    skip_sync = all(allgather_object(skip_sync, name="the restart of elastic.run"))
            state.on_reset()

    return wrapper


def beyond_repair() -> bool:
    """Whether communication is broken for good."""
    return runtime.is_initialized() and runtime.known().broken is not None


def run(func: Callable[Concatenate[StateT, P], R]) -> Callable[Concatenate[StateT, P], R]:
    """Decorate the training function; its first argument is a `State`. Collective, and at its end waits for all ranks,
    whom one that fails there takes back; see help(hvdlite.elastic).

    Nothing may communicate before its first call but what every rank does. Raises what the function raises, but for
    HvdliteError (back to the last commit) and HostsUpdatedInterrupt (on from here), which it handles; an HvdliteError
    is raised, too, where communication is broken for good, and without a commit in between the same one the third time,
    and any the hundredth.
    """
    return run_fn(func, start_anew)


def start_anew() -> None:
    """Shut down, initialize as before, with the same process sets, and attach again what was attached. Collective.
    Raises HvdliteError where communication is broken for good."""
    if not runtime.is_initialized():
        runtime.init()
        return
    _retold.clear()
    before = runtime.current()
    sets = sorted(before.groups.ranks.items())
    named = [process_set for same in before.groups.registered.values() for process_set in same]
    runtime.stop()
    runtime.init(before.comm, "dynamic" if before.dynamic else None)
    now = runtime.current()
    for _, ranks in sets[1:]:  # also those that have no object here; the first one is everyone
        now.groups.open(ranks, now.world)
    now.groups.find_again(named)
    gc.collect()
    for each in everywhere(before.registries.renewables()):
        each.renew()


def everywhere(renewables: Iterable[Renewable]) -> list[Renewable]:
    """Those of which no member of their group lacks its own: what some ranks have let go of is not attached again, for
    they would be waited for. Collective."""
    mine = list(renewables)
    names = [(each.group.ranks, each.name) if each.group else None for each in mine]
    with calling("the restart of hvd.elastic.run"):
        everyones = [set(theirs) for theirs in allgather_object(names)]
    return [each for name, each in zip(names, mine, strict=True)
            if name is None or all(name in everyones[rank] for rank in name[0])]  # fmt: skip


_retold: deque[str] = deque(maxlen=64)
"""The texts of the last ones: several nodes of a graph may fail at once, and one of them is told."""


def retell(error: HvdliteError) -> None:
    """Note an error that a framework is about to tell as one of its own, as graphs do: `run` wants to know it."""
    _retold.append(str(error))


def origin_of(error: BaseException) -> HvdliteError | None:
    """The HvdliteError that an error is, or comes from; None for what is somebody else's."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, HvdliteError):
        found = found.__cause__
    if found is None and type(error).__module__.partition(".")[0] in RETELLERS:
        told = str(error)  # a graph's quotes an error's beginning as it is
        quoted = (text for text in reversed([*_retold]) if text.partition("/")[0][:80] in told)
        found = next((HvdliteError(text) for text in quoted), None)
    return found
