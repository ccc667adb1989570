"""Continues training after an error or a change of hosts, from states that are committed, restored and broadcast.

    @hvd.elastic.run
    def train(state):
        while state.epoch < 90:
            ...
            state.epoch += 1
            state.commit()

`run` calls the function with rank 0's state on every rank. After an `HvdliteError` (Horovod: HorovodInternalError) it
restores the last commit. After a `HostsUpdatedInterrupt` it keeps the state. In both cases it restarts communication,
attaches the optimizers again, and calls the function again, in the same processes. If a rank is lost or communication
cannot be restarted, the error ends the job. Names and meanings are Horovod's, except that `ObjectState.save` copies
deeply, so that `restore` also undoes changes in place.
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
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from hvdlite.errors import HostsUpdatedInterrupt, HvdliteError
from hvdlite.job import runtime
from hvdlite.job.registries import Renewable
from hvdlite.lanes.calls import calling
from hvdlite.ops.objects import allgather_object, broadcast_object

MOST_REPETITIONS, MOST_RESTARTS = 3, 100
"""`run` gives up at this number of equal errors, or of any errors, without a commit between them."""
RETELLERS = ("tensorflow", "jax", "jaxlib")
"""Frameworks that report hvdlite's errors as errors of their own."""
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
StateT = TypeVar("StateT", bound="State")
VariableT = TypeVar("VariableT", bound="Assignable")
__all__ = ["HostUpdateResult", "ObjectState", "State", "run"]


class HostUpdateResult(IntFlag):
    """How the hosts have changed. The flags may be combined."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class Broadcast(Protocol):
    """A function that gives every rank rank 0's object, such as `broadcast_object`."""

    def __call__(self, obj: T, /) -> T: ...


class Assignable(Protocol):
    """A framework's variable."""

    @property
    def assign(self) -> Callable[..., object]:
        """A function that gives the variable another value."""
        ...


class State:
    """The state of a training. Subclasses implement `save`, `restore` and `sync`.

    Args:
        bcast_object: Gives every rank rank 0's object.
        get_rank: Accepted for Horovod's scripts, and ignored.
    """

    def __init__(self, bcast_object: Broadcast, get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits = 0

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Register functions that are called after each restart of communication, to adapt to another size.

        Args:
            callbacks: Called in their order, without arguments.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Communication has restarted: call `reset` and the registered functions."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Note that hosts have changed, for the next `check_host_updates`. Any thread of rank 0 may call this.

        Args:
            timestamp: When they changed. Changes that are not later than the last one are ignored.
            update_res: A `HostUpdateResult`.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, and call `check_host_updates`. Collective; waits for all ranks. Each call copies the state.

        Raises:
            HostsUpdatedInterrupt: As `check_host_updates`.
        """
        self.save()
        self._commits += 1
        with calling("state.commit()"):
            self.check_host_updates()

    def check_host_updates(self) -> None:
        """Ask rank 0 whether hosts have changed. Collective; waits for all ranks.

        Raises:
            HostsUpdatedInterrupt: Hosts have changed since the last call. Every rank raises it.
        """
        before, last, change = self._last_updated, self._last_updated, HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > last:
                last, change = timestamp, change | update
        before, self._last_updated, change = self._bcast_object((before, last, change))
        if self._last_updated > before:
            raise HostsUpdatedInterrupt(skip_sync=change == HostUpdateResult.removed)

    def save(self) -> None:
        """Copy the present state for `restore`."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the last saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank rank 0's state. Collective; waits for all ranks."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to the new communicator. Does nothing unless a subclass overrides it."""


class ObjectState(State):
    """A state of attributes that can be pickled: `ObjectState(bcast_object, get_rank, epoch=0)` has `epoch`.

    Args:
        bcast_object: As for `State`.
        get_rank: As for `State`.
        **kwargs: The attributes' first values, by name.
    """

    if TYPE_CHECKING:  # attributes that are given by name

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, bcast_object: Broadcast, get_rank: Callable[[], int], **kwargs: object) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attributes()
        self._saved_state = copy.deepcopy(kwargs)

    def save(self) -> None:
        """Copy the attributes."""
        self._saved_state = copy.deepcopy({name: getattr(self, name) for name in self._saved_state})
        self._commits += 1  # here too, because a subclass may override `commit`

    def restore(self) -> None:
        """Set the attributes to their saved values."""
        self._set_attributes()
        self._saved_state = copy.deepcopy(self._saved_state)

    def sync(self) -> None:
        """Give every rank rank 0's attributes, and save them. Other ranks' values are lost. Collective."""
        self._saved_state = self._bcast_object({name: getattr(self, name) for name in self._saved_state})
        self._set_attributes()
        self._saved_state = copy.deepcopy(self._saved_state)

    def _set_attributes(self) -> None:
        """Set the attributes to their saved values, which are not copied."""
        for name, value in self._saved_state.items():
            setattr(self, name, value)


class VariablesState(ObjectState):
    """A state of a framework's variables, and of attributes.

    Args:
        variables: Returns the variables that exist now. The same variable is the same object in each call.
        read: Returns a copy of a variable's value, as an array.
        broadcast: Overwrites variables with rank 0's values. Collective.
        **kwargs: The attributes' first values, by name.
    """

    def __init__(
        self,
        variables: Callable[[], list[VariableT]],
        read: Callable[[VariableT], object],
        broadcast: Callable[[list[VariableT]], object],
        **kwargs: object,
    ) -> None:
        self._variables = cast("Callable[[], list[Assignable]]", variables)
        self._read = cast("Callable[[Assignable], object]", read)
        self._broadcast = cast("Callable[[list[Assignable]], object]", broadcast)
        super().__init__(broadcast_object, runtime.rank, **kwargs)
        self._saved = self._read_all()

    def save(self) -> None:
        """Copy the variables' values and the attributes."""
        self._saved = self._read_all()
        super().save()

    def restore(self) -> None:
        """Set variables and attributes to their saved values.

        Variables that were made after the last save keep their values. If all variables are new, as those of a rebuilt
        model are, they get the saved values in order.
        """
        now, values = self._variables(), {id(variable): value for variable, value in self._saved}
        same = [(variable, values[id(variable)]) for variable in now if id(variable) in values]
        for variable, value in same or zip(now, [value for _, value in self._saved], strict=False):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Give every rank rank 0's variables and attributes, and save them. Collective; waits for all ranks."""
        self._broadcast(self._variables())
        self._saved = self._read_all()
        super().sync()

    def _read_all(self) -> list[tuple[Assignable, object]]:
        """Return each variable and its value. Keeping the variable keeps its `id` from being used again."""
        return [(variable, self._read(variable)) for variable in self._variables()]


def run_fn(func: Callable[Concatenate[StateT, P], R], reset: Callable[[], None]) -> Callable[Concatenate[StateT, P], R]:
    """As `run`, with another way to restart communication.

    Args:
        func: The training function.
        reset: Restarts communication. Collective.

    Returns:
        The function that `run` would return.
    """

    @functools.wraps(func)
    def wrapper(state: StateT, *args: P.args, **kwargs: P.kwargs) -> R:
        skip_sync, before, repetitions, restarts = False, "", 0, 0
        while True:
            commits = getattr(state, "_commits", 0)
            try:
                if not skip_sync:
                    with calling("state.sync() of hvd.elastic.run"):
                        state.sync()
                result = func(state, *args, **kwargs)
                if runtime.is_initialized():  # wait for all ranks, because one may still fail and restart all
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
                del origin  # its traceback keeps models and batches
                state.restore()
            reset()
            if runtime.is_initialized():  # if one rank had an error, all must sync, even if others were interrupted
                with calling("the restart of hvd.elastic.run"):
                    skip_sync = all(allgather_object(skip_sync, name="the restart of elastic.run"))
            state.on_reset()

    return wrapper  # type: ignore[return-value]  # callers may also name `state`


def beyond_repair() -> bool:
    """Return whether communication cannot be restarted."""
    return runtime.is_initialized() and runtime.known().broken is not None


def run(func: Callable[Concatenate[StateT, P], R]) -> Callable[Concatenate[StateT, P], R]:
    """Decorate a training function, so that it continues after errors and changes of hosts; see help(hvdlite.elastic).

    A call is collective. At its end it waits for all ranks, because a rank that fails there takes all ranks back to the
    last commit. Before the first call, every rank must make the same collective calls.

    Args:
        func: The training function. Its first argument is a `State`.

    Returns:
        A function with the same arguments. It handles HvdliteError (restores the last commit) and HostsUpdatedInterrupt
        (keeps the state), and raises all other exceptions of `func`. It raises an HvdliteError if communication cannot
        be restarted, and, without a commit in between, at the third equal or the hundredth error.
    """
    return run_fn(func, start_again)


def start_again() -> None:
    """Shut down, initialize with the same process sets, and attach the same optimizers. Collective.

    Raises:
        HvdliteError: Communication cannot be restarted.
    """
    if not runtime.is_initialized():
        runtime.init()
        return
    _retold.clear()
    before = runtime.current()
    sets = sorted(before.groups.ranks.items())
    named = [process_set for same in before.groups.registered.values() for process_set in same]
    runtime.stop()
    runtime.init(before.comm)
    now = runtime.current()
    for _, ranks in sets[1:]:  # without the first set, which is everyone; with sets that have no object here
        now.groups.open(ranks, now.world)
    now.groups.find_again(named)
    gc.collect()
    for each in everywhere(before.registries.renewables()):
        each.renew()


def everywhere(renewables: Iterable[Renewable]) -> list[Renewable]:
    """Return those that every rank of their group still has. The others would wait for ranks that dropped theirs.

    Collective; waits for all ranks.
    """
    mine = list(renewables)
    names = [None if each.group is None else (each.group.ranks, each.name) for each in mine]
    with calling("the restart of hvd.elastic.run"):
        everyones = [set(theirs) for theirs in allgather_object(names)]
    return [each for name, each in zip(names, mine, strict=True)
            if name is None or all(name in everyones[rank] for rank in name[0])]  # fmt: skip


_retold: deque[str] = deque(maxlen=64)
"""The texts of the last errors that `retell` noted. Several nodes of a graph may fail, and one of them is reported."""


def retell(error: HvdliteError) -> None:
    """Note an error that a framework will report as an error of its own, so that `run` recognizes it."""
    _retold.append(str(error))


def origin_of(error: BaseException) -> HvdliteError | None:
    """Return the HvdliteError that an error is or was caused by; None for any other error."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, HvdliteError):
        found = found.__cause__
    if found is None and type(error).__module__.partition(".")[0] in RETELLERS:
        report = str(error)  # quotes the beginning of the node's error
        quoted = (text for text in reversed([*_retold]) if text.partition("/")[0][:80] in report)
        found = next((HvdliteError(text) for text in quoted), None)
    return found
