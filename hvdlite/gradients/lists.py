"""Lists of gradients on their way to all ranks and back: which are reduced, in which dtype, through which exchange.

One `Gradients` serves one optimizer, or all tapes that ask for the same. It makes an exchange for a list of variables
when it first sees them, and keeps it: a training loop sees the same list at every step. What differs between
frameworks is asked of a `Framework`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from weakref import finalize, ref

from hvdlite.errors import RemovedError
from hvdlite.gradients.accumulator import Accumulator
from hvdlite.gradients.exchange import Contents, Exchange
from hvdlite.gradients.framework import Framework
from hvdlite.gradients.plan import Spec
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

MANY = 4  # exchanges, from which on those that are over are looked for when another is made


@dataclass(frozen=True)
class Enrolment:
    """The place of a `Gradients` under one runtime.

    Attributes:
        runtime: The runtime.
        name: The name of the rounds on the lane: 'optimizer.0', say.
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
    """Reduces lists of gradients over all ranks, under the runtime that it was made or renewed under.

    Creating one is collective.

    Attributes:
        settings: What the user asked for.
        framework: What the gradients belong to.
        wire: How they travel.
        kind: 'optimizer' or 'tape'.
        title: The optimizer or tape in messages.
        sums: The gradients of earlier passes, which do not count after a renewal; None where there is one pass.
        enrolment: The place under the present runtime.
        exchanges: By what makes lists of variables different.
        made: How many exchanges there have been.
        renewed: Whether `elastic.run` has renewed this.
        user: Who needs this, held weakly.
    """

    def __init__(
        self, settings: Settings, framework: Framework, kind: str, title: str, sums: Accumulator | None = None,
        user: object = None,
    ) -> None:
        """
        Args:
            settings: What the user asked for.
            framework: What the gradients belong to.
            kind: 'optimizer' or 'tape'.
            title: The optimizer or tape in messages.
            sums: The gradients of earlier passes.
            user: Once this object and the variables are gone, the shared memory goes, though graphs that refer to it
                may be kept (Keras on TensorFlow keeps them all). None: it goes with this `Gradients`.
        """
        self.settings = settings
        self.framework = framework
        self.wire = Wire(settings.compression, framework)
        self.kind = kind
        self.title = title
        self.sums = sums
        self.exchanges: dict[Hashable, Exchange] = {}
        self.made = 0
        self.renewed = False
        self.user: ref[object] = ref(self if user is None else user)
        if user is not None:
            finalize(user, weakly(self.end)).atexit = False
        self.enrolment = self.enrolled()

    def replace(self) -> None:
        """The user has attached another: let go of the memory at once, though graphs made before are kept."""
        for exchange in self.exchanges.values():
            exchange.let_go()
        self.end()

    def end(self) -> None:
        """The user is gone."""
        self.enrolment.runtime.renewables.remove(self)
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
        """The name of the rounds under the present runtime, the same on all ranks."""
        return self.enrolment.name

    @property
    def alive(self) -> bool:
        """Whether gradients can be reduced now."""
        return self.enrolment.alive

    def enrolled(self) -> Enrolment:
        """A place under the present runtime. Collective over the process set."""
        current = runtime.current()
        current.renewables.append(self)
        if self.settings.size == 1 and not self.exchanges:
            return Enrolment(current, self.kind)
        group = runtime.group_of(self.settings.process_set)
        number = group.serial(self.kind)
        name = f"{self.kind}.{number}"
        return Enrolment(current, name, group, group.new_lane(name, self.user(), calls.numbered(self.title, number)))

    def renew(self) -> None:
        """Go on under the present runtime with the same exchanges, which graphs hold on to. Collective."""
        if self.settings.process_set.process_set_id is None or self.user() is None:  # removed, or about to end
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
        if self.alive and not self.renewed and self.settings.process_set.included():
            raise RuntimeError("this optimizer is attached already: call hvd.DistributedOptimizer once")

    def require_alive(self) -> None:
        """Raise RuntimeError when gradients would not be reduced, RemovedError when the process set was removed."""
        if self.group is not None and self.group.removed:
            raise RemovedError(self.group.ranks)
        runtime.require_attached(self.alive, self.group is not None)

    # Reducing

    def reduce(
        self, grads: Sequence[Gradient], variables: Sequence[Variable], local: Sequence[Variable] = (),
        borrow: bool = False,
    ) -> list[Gradient]:
        """The gradients reduced over all ranks, in the same order. Waits for all ranks, now or when the graph runs.

        Args:
            grads: This rank's gradients.
            variables: Their variables, the same on all ranks.
            local: Variables whose gradients remain this rank's, and are only divided.
            borrow: Whether the results may be gone when the next round begins.
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
        """The exchange for these variables. Collective when it makes one. grads: as they travel."""
        framework = self.framework
        gpu = framework.gpu_of(variables)
        specs = self.specs(grads, variables, "host" if gpu is None else "cuda")
        uses = [framework.use_of(g) for g in grads]
        # In a graph it is fixed who has a gradient; outside it may change at each call, and each round tells.
        key: tuple[Hashable, ...] = (specs, *(uses if framework.traced(grads) else ()))
        name = self.enrolment.name
        if not framework.in_order():
            key, name = (*key, self.made), f"{name}.{self.made}"
        if key not in self.exchanges:
            self.tidy()
            contents = Contents(self.made, specs, self.settings, gpu)
            self.exchanges[key] = Exchange(contents, self.working_lane(), name, uses, owner=self)
            self.made += 1  # not before: if that fails on one rank only, and is tried again, it has the same number
        exchange, in_session = self.exchanges[key], framework.in_session(variables)
        if in_session or framework.in_order():
            exchange.watched.watch(variables, framework.values_of, in_session, exchange.lane, exchange.name)
        return exchange

    def specs(self, grads: Sequence[Gradient], variables: Sequence[Variable], device: str) -> tuple[Spec, ...]:
        """The variables as a plan sees them."""
        groups = self.settings.groups.numbers([name_of(variable) for variable in variables])
        return tuple(
            Spec(common_name(v), fixed_shape(v), self.wire.dtype(g, v), device, group)
            for g, v, group in zip(grads, variables, groups, strict=True)
        )

    def tidy(self) -> None:
        """Once there are many, forget exchanges whose variables are gone on all ranks. Collective then."""
        if len(self.exchanges) < MANY:
            return

        def work(at: Workplace) -> set[int]:
            over = [exchange.contents.number for exchange in self.exchanges.values() if exchange.watched.gone]
            return set.intersection(*map(set, at.transport.allgather_object(over)))

        # Named like a round's first bucket: where other ranks begin a round instead, that is a mismatch, not a wait.
        facts = (("lists of variables", self.made),)
        request = Request(Signature("plan", f"{self.enrolment.name} bucket 0", facts), work)
        over = self.working_lane().run(request)
        for key, exchange in list(self.exchanges.items()):
            if exchange.contents.number in over:
                del self.exchanges[key]


@dataclass(frozen=True)
class LocalVariables:
    """Variables whose gradients remain a rank's own.

    Attributes:
        variables: The local variables.
        divisor: What their gradients are divided by.
        framework: What the gradients belong to.
    """

    variables: Sequence[Variable]
    divisor: int
    framework: Framework

    def around(
        self, reduce: Callable[[list[Gradient], list[Variable]], list[Gradient]], grads: Sequence[Gradient],
        variables: Sequence[Variable],
    ) -> list[Gradient]:
        """All gradients, in the same order: those of local variables divided, the others reduced.

        Args:
            reduce: Called as reduce(gradients, variables) with the others.
            grads: This rank's gradients.
            variables: Their variables.
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
    """Add a variable, or several, to those that stay this rank's own.

    Args:
        chosen: The list that they are added to, in place.
        variable: A variable; a layer, list or dict of variables.

    Raises:
        ValueError: It has no variables.
    """
    add_to(chosen, variable)
    registry.own.extend(chosen)


def dense(sparse_as_dense: bool, framework: Framework, gradient: Tensor, variable: Variable) -> Tensor:
    """The gradient as a dense tensor. Raises ValueError for a sparse one, without sparse_as_dense."""
    if framework.use_of(gradient) is Use.SPARSE and not sparse_as_dense:
        raise ValueError(
            f"{name_of(variable)} has a sparse gradient: backward_passes_per_step needs sparse_as_dense=True"
        )
    found = framework.densified(gradient)
    assert found is not None
    return found


class SharedGradients:
    """Keeps one `Gradients` for all tapes that ask for the same: a training loop makes a new tape at each step.

    Attributes:
        known: By settings and kind. Entries of an ended job, or of a removed process set, are dropped when another is
            made.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[Settings, str], Gradients] = {}

    def get(self, settings: Settings, framework: Framework, kind: str, title: str) -> Gradients:
        """The `Gradients` for these settings. Collective when it is new, also after a restart."""
        found = self.known.get((settings, kind))
        if found is None or not found.alive:
            for key in [key for key, each in self.known.items() if not each.alive]:
                del self.known[key]
            found = self.known[settings, kind] = Gradients(settings, framework, kind, title)
        return found


shared = SharedGradients()
"""Those of this process. Tapes come and go, so no tape can own them."""
