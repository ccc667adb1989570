"""Lists of gradients: the entrance to `gradients/` for frameworks that compute all gradients and then apply them.

In the walk of a gradient, an optimizer of Keras or TensorFlow, or a gradient tape, calls `Gradients.reduce` with all
gradients. `Gradients` sets aside local variables, whose gradients stay a rank's own. It compresses the other gradients
(`wire`), and finds their `exchange`. The framework then moves them through the exchange's rounds, and `Gradients`
restores the results.

One `Gradients` serves one optimizer, or all tapes with the same settings. It makes an exchange when it first sees a
list of variables, and keeps it: a training loop gives the same list at every step. `Framework` has the differences
between frameworks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from weakref import finalize, ref

from hvdlite.compression.saved import Saved
from hvdlite.compression.store import Store
from hvdlite.gradients import attaching
from hvdlite.gradients.accumulator import Accumulator
from hvdlite.gradients.compression import lossy_of
from hvdlite.gradients.exchange import Contents, Exchange
from hvdlite.gradients.framework import Framework
from hvdlite.gradients.lossy import OPTIMIZER, Stores
from hvdlite.gradients.plan import Spec
from hvdlite.gradients.reducer import Reducer
from hvdlite.gradients.registry import registry
from hvdlite.gradients.settings import Settings
from hvdlite.gradients.tensors import Gradient, Tensor, Variable
from hvdlite.gradients.use import Use
from hvdlite.gradients.variables import add_to, common_name, fixed_shape, inside, name_of
from hvdlite.gradients.wire import Wire
from hvdlite.job import runtime
from hvdlite.job.groups import Group
from hvdlite.job.runtime import Runtime
from hvdlite.lanes import calls
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.system.weak_references import weakly

MANY = 4  # if there are so many exchanges, the next one makes the ranks look for finished ones


@dataclass(frozen=True)
class Enrolment:
    """The place of a `Gradients` under one runtime.

    Attributes:
        runtime: The runtime.
        name: The name of rounds on the lane, such as 'optimizer.0'.
        group: The ranks that reduce together; None where there is nothing to reduce.
        lane: The group's lane for these gradients; None with the group.
    """

    runtime: Runtime
    name: str
    group: Group | None = None
    lane: Lane | None = None

    @property
    def alive(self) -> bool:
        """Whether the runtime is the present one, and the process set has not been removed."""
        return self.runtime.live and (self.group is None or not self.group.removed)


class Gradients:
    """Reduces lists of gradients over all ranks of a process set. `elastic.run` renews them.

    Attributes:
        settings: The user's settings.
        framework: The gradients' framework.
        wire: The compression.
        kind: 'optimizer' or 'tape'.
        title: The optimizer or tape in messages.
        sums: The sums of earlier passes, which a renewal drops; None if each step has one pass.
        enrolment: The place under the present runtime.
        stores: What lossy compression keeps from round to round.
        exchanges: The exchanges, by specs, uses and number.
        made: The number of exchanges that have been made.
        renewed: Whether `elastic.run` has renewed this object.
        user: The object that needs this one, held weakly.
    """

    def __init__(
        self,
        settings: Settings,
        framework: Framework,
        kind: str,
        title: str,
        sums: Accumulator | None = None,
        user: object = None,
    ) -> None:
        """Open a lane under the present runtime. Collective over the process set.

        Args:
            settings: The user's settings.
            framework: The gradients' framework.
            kind: 'optimizer' or 'tape'.
            title: The optimizer or tape in messages.
            sums: The sums of earlier passes.
            user: The optimizer. Once it and the variables are gone, the shared memory is freed, even if graphs still
                refer to it (Keras on TensorFlow keeps all graphs). None: the memory lives as long as this object.
        """
        self.settings = settings
        self.framework = framework
        self.wire = Wire(settings.compression, framework)
        self.kind = kind
        self.title = title
        self.sums = sums
        self.stores = Stores(lossy_of(settings.compression))
        self.exchanges: dict[Hashable, Exchange] = {}
        self.made = 0
        self.renewed = False
        self.user: ref[object] = ref(self if user is None else user)
        if user is not None:
            finalize(user, weakly(self.end)).atexit = False
        self.enrolment = self.enrolled()

    def replace(self) -> None:
        """Free the memory at once, for graphs too: the user has attached the optimizer again."""
        for exchange in self.exchanges.values():
            exchange.let_go()
        self.end()

    def end(self) -> None:
        """End all exchanges: the user is gone."""
        self.enrolment.runtime.registries.forget(self)
        for exchange in self.exchanges.values():
            exchange.end()
        self.exchanges.clear()

    # The place under a runtime

    @property
    def group(self) -> Group | None:
        """The ranks that reduce together; None where there is nothing to reduce."""
        return self.enrolment.group

    @property
    def name(self) -> str:
        """The name of rounds under the present runtime, the same on all ranks."""
        return self.enrolment.name

    @property
    def alive(self) -> bool:
        """Whether gradients can be reduced now."""
        return self.enrolment.alive

    def enrolled(self) -> Enrolment:
        """Take a place under the present runtime. Collective over the process set."""
        current = runtime.current()
        current.registries.renew_later(self)
        if self.settings.size == 1 and not self.exchanges:
            return Enrolment(current, self.kind)
        group = runtime.group_of(self.settings.process_set)
        number = group.serial(self.kind)
        name = f"{self.kind}.{number}"
        return Enrolment(current, name, group, group.new_lane(name, self.user(), calls.numbered(self.title, number)))

    def renew(self) -> None:
        """Go on under the present runtime with the same exchanges, to which graphs refer. Collective."""
        if not attaching.can_renew(self.settings.process_set) or self.user() is None:  # without a user, `end` follows
            return
        if self.sums:
            self.sums.clear()
        before, self.renewed = self.enrolment.name, True
        self.enrolment = self.enrolled()
        for exchange in self.exchanges.values():
            name = self.enrolment.name + exchange.name.removeprefix(before)
            exchange.connect(self.working_lane(), name, exchange.division.uses)

    def working_lane(self) -> Lane:
        """The lane, where there is something to reduce."""
        assert self.enrolment.lane is not None
        return self.enrolment.lane

    def require_replaceable(self) -> None:
        """Raise RuntimeError unless another may take this one's place.

        Where `elastic.run` has renewed this one, the function that it calls again may attach another.
        """
        attaching.require_replaceable(self.alive, self.renewed, self.settings.process_set)

    def require_alive(self) -> None:
        """Raise RuntimeError when gradients would not be reduced, RemovedError when the process set was removed."""
        attaching.require_alive(self.alive, self.group, shared=self.group is not None)

    # Reducing

    def unsent(self) -> Saved | None:
        """The sum over hosts of what an optimizer's lossy compression has not sent; None without it. Collective."""
        store = self.stores.known.get(OPTIMIZER)
        if store is None or not store.entries:
            return None
        return next(iter(self.reducers)).unsent()

    @property
    def reducers(self) -> Iterable[Reducer]:
        """The reducers of all exchanges that have memory."""
        return [exchange.reducer for exchange in self.exchanges.values() if exchange.reducer]

    def reduce(
        self,
        grads: Sequence[Gradient],
        variables: Sequence[Variable],
        local: Sequence[Variable] = (),
        borrow: bool = False,
    ) -> list[Gradient]:
        """Reduce gradients over all ranks. Waits for all ranks, now or when the graph runs.

        Args:
            grads: This rank's gradients.
            variables: Their variables, the same on all ranks.
            local: Variables with gradients that stay this rank's own, and are only divided.
            borrow: Whether the results may become invalid when the next round begins.

        Returns:
            The reduced gradients, in the same order. None for a variable without a gradient on any rank.
        """
        if self.group is None:
            return list(grads)

        def reduce_common(grads: list[Gradient], variables: list[Variable]) -> list[Gradient]:
            dense_where_asked = map(self.framework.densified, grads) if self.settings.sparse_as_dense else grads
            packed = self.wire.pack(list(dense_where_asked))
            results = self.framework.reduce(self.exchange(packed.gradients, variables), packed.gradients, borrow)
            return [packed.restore(result, i, variables[i]) for i, result in enumerate(results)]

        divisor = self.settings.size if self.settings.scale_local else 1
        return LocalVariables(local, divisor, self.framework).around(reduce_common, grads, variables)

    def exchange(self, grads: Sequence[Gradient], variables: Sequence[Variable]) -> Exchange:
        """Find or make the exchange for these variables. Collective if it makes one. grads: after `Wire.pack`."""
        framework = self.framework
        gpu = framework.gpu_of(variables)
        specs = self.specs(grads, variables, "host" if gpu is None else "cuda")
        uses = [framework.use_of(g) for g in grads]
        # A graph fixes which variables have gradients. Outside a graph that may change, and each round agrees on it.
        names = self.stores.names(variables)
        key: tuple[Hashable, ...] = (specs, names, *(uses if framework.traced(grads) else ()))
        name = self.enrolment.name
        if not framework.in_order():
            key, name = (*key, self.made), f"{name}.{self.made}"
        if key not in self.exchanges:
            self.tidy()
            contents = Contents(self.made, specs, self.settings, gpu, self.store(names), names)
            self.exchanges[key] = Exchange(contents, self.working_lane(), name, uses, owner=self)
            self.made += 1  # last: if making it fails on one rank and is tried again, the number is the same
        exchange, in_session = self.exchanges[key], framework.in_session(variables)
        if in_session or framework.in_order():
            exchange.watched.watch(variables, framework.values_of, in_session, exchange.lane, exchange.name)
        return exchange

    def store(self, names: tuple[str, ...]) -> Store | None:
        """What lossy compression keeps for a new exchange; None without it. names: of the exchange's variables."""
        if not self.framework.in_order():  # rounds of several exchanges mix, so each counts its own
            return self.stores.get(self.made)
        return self.stores.holding(names) if self.kind == "tape" else self.stores.get(OPTIMIZER)

    def specs(self, grads: Sequence[Gradient], variables: Sequence[Variable], device: str) -> tuple[Spec, ...]:
        """Describe the variables for a plan."""
        groups = self.settings.groups.numbers([name_of(variable) for variable in variables])
        return tuple(
            Spec(common_name(v), fixed_shape(v), self.wire.dtype(g, v), device, group)
            for g, v, group in zip(grads, variables, groups, strict=True)
        )

    def tidy(self) -> None:
        """If there are many exchanges, drop those with variables that are gone on all ranks. Collective then."""
        if len(self.exchanges) < MANY:
            return

        def work(at: Workplace) -> set[int]:
            over = [exchange.contents.number for exchange in self.exchanges.values() if exchange.watched.gone]
            return set.intersection(*map(set, at.transport.allgather_object(over)))

        # The name is that of a round's first bucket. If other ranks begin a round instead, all ranks raise, none hangs.
        facts = (("lists of variables", self.made),)
        request = Request(Signature("plan", f"{self.enrolment.name} bucket 0", facts), work)
        over = self.working_lane().run(request)
        for key, exchange in list(self.exchanges.items()):
            if exchange.contents.number in over:
                del self.exchanges[key]
        if self.kind == "tape":
            self.stores.drop([exchange.contents.store for exchange in self.exchanges.values()])


@dataclass(frozen=True)
class LocalVariables:
    """Local variables: their gradients stay a rank's own.

    Attributes:
        variables: The local variables.
        divisor: The number by which their gradients are divided.
        framework: The gradients' framework.
    """

    variables: Sequence[Variable]
    divisor: int
    framework: Framework

    def around(
        self,
        reduce: Callable[[list[Gradient], list[Variable]], list[Gradient]],
        grads: Sequence[Gradient],
        variables: Sequence[Variable],
    ) -> list[Gradient]:
        """Divide the gradients of local variables, and reduce all others.

        Args:
            reduce: Called as reduce(gradients, variables) without the local variables.
            grads: This rank's gradients.
            variables: Their variables.

        Returns:
            All gradients, in the same order.
        """
        results = list(grads)
        own = {id(inside(variable)) for variable in self.variables}
        common = [i for i, variable in enumerate(variables) if id(inside(variable)) not in own]
        for i in set(range(len(results))) - set(common):
            gradient = results[i]
            if gradient is not None and self.divisor != 1:
                results[i] = self.framework.divided(gradient, self.divisor)
        reduced = reduce([grads[i] for i in common], [variables[i] for i in common])
        for i, grad in zip(common, reduced, strict=True):
            results[i] = grad
        return results


def keep_own(chosen: list[Variable], variable: object) -> None:
    """Add local variables to a list, in place: their gradients, and so their values, stay this rank's own.

    Args:
        chosen: The list of local variables.
        variable: A variable; or a layer, list or dict of variables.

    Raises:
        ValueError: `variable` has no variables.
    """
    add_to(chosen, variable)
    registry.own.extend(chosen)


def dense(sparse_as_dense: bool, framework: Framework, gradient: Tensor, variable: Variable) -> Tensor:
    """Return the gradient as a dense tensor. Raises ValueError if it is sparse and sparse_as_dense is not set."""
    if framework.use_of(gradient) is Use.SPARSE and not sparse_as_dense:
        raise ValueError(
            f"{name_of(variable)} has a sparse gradient: backward_passes_per_step needs sparse_as_dense=True"
        )
    found = framework.densified(gradient)
    assert found is not None
    return found


class SharedGradients:
    """One `Gradients` for all tapes with the same settings: a training loop makes a new tape at each step.

    Attributes:
        known: The `Gradients`, by settings and kind. An entry of an ended job, or of a removed process set, is dropped
            when another entry is made.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[Settings, str], Gradients] = {}

    def get(self, settings: Settings, framework: Framework, kind: str, title: str) -> Gradients:
        """Find or make the `Gradients` for these settings. Collective if it makes one, also after a restart."""
        found = self.known.get((settings, kind))
        if found is None or not found.alive:
            for key in [key for key, each in self.known.items() if not each.alive]:
                del self.known[key]
            found = self.known[settings, kind] = Gradients(settings, framework, kind, title)
        return found


shared = SharedGradients()
"""The shared `Gradients` of this process. Tapes come and go, so no tape can own them."""
