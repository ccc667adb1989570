"""Lists of gradients on their way to all ranks and back: which are reduced, in which dtype, through which exchange.

One `Gradients` serves one optimizer, or all tapes that ask for the same. It makes an exchange for a list of variables
when it first sees them, and keeps it: a training loop sees the same list at every step. What frameworks do
differently is behind a `Border`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import finalize, ref

from hvdlite.errors import RemovedError
from hvdlite.gradients.accumulator import Accumulator
from hvdlite.gradients.compression import compressor, unknown
from hvdlite.gradients.exchange import OWN, Exchange
from hvdlite.gradients.framework import Border
from hvdlite.gradients.plan import Spec
from hvdlite.gradients.terms import Terms
from hvdlite.gradients.use import Use
from hvdlite.gradients.variables import add_to, common_name, fixed_shape, inside, name_of
from hvdlite.job import runtime
from hvdlite.job.groups import Group
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.lanes import calls
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.ops import Adasum, Op, op_of
from hvdlite.system.user_warnings import deprecated
from hvdlite.system.weak_references import weakly

MANY = 4  # exchanges, from which on those that are over are looked for when another is made


@dataclass(frozen=True)
class Settings:
    """What the user asked for. Hashable, if the compressor is."""

    terms: Terms
    compression: Any
    sparse_as_dense: bool = False
    groups: int | tuple[tuple[str, ...], ...] | None = None
    """The number of groups of variables that travel together, or their members' names."""
    scale_local: bool = True
    """Local variables' gradients are divided by the number of ranks, as averaged ones are."""
    process_set: ProcessSet = global_process_set
    replica_check: str = "error"
    """One of `config.REPLICA_CHECKS`."""

    @property
    def size(self) -> int:
        """How many ranks reduce gradients together with this one; 1 where it is no member of the set."""
        return runtime.group_of(self.process_set).size if self.process_set.included() else 1


class Gradients:
    """Reduces lists of gradients over all ranks, under the runtime that it was made or renewed under. Creating one is
    collective. title: the optimizer or tape in messages. sums: of the passes before, which do not count after a
    renewal. user: when it and the variables are no more, shared memory goes, though graphs may be kept that refer to
    this (Keras on TensorFlow keeps them all)."""

    def __init__(
        self, settings: Settings, border: Border, name: str, title: str, sums: Accumulator | None = None,
        user: Any = None,
    ) -> None:
        self.settings, self.border, self.kind, self.title, self.sums = settings, border, name, title, sums
        self.name = name
        self.exchanges: dict[Any, Exchange] = {}
        self.made = 0  # exchanges, so far
        self.renewed = False
        self.user = ref(self if user is None else user)
        if user is not None:
            finalize(user, weakly(self.end)).atexit = False
        self.enter()

    def replace(self) -> None:
        """Its user has another: let go of the memory at once, though graphs of before are kept."""
        for exchange in self.exchanges.values():
            exchange.let_go()
        self.end()

    def end(self) -> None:
        """Its user is no more."""
        self.runtime.renewables.remove(self)
        for exchange in self.exchanges.values():
            exchange.end()
        self.exchanges.clear()

    def enter(self) -> None:
        """Take a place under the present runtime. Collective over the process set."""
        self.runtime = runtime.current()
        self.runtime.renewables.append(self)
        self.group: Group | None = None  # there is nothing to reduce
        if self.settings.size > 1 or self.exchanges:
            self.group = runtime.group_of(self.settings.process_set)
            number = self.group.serial(self.kind)
            self.name = f"{self.kind}.{number}"
            self.lane = self.group.new_lane(self.name, self.user(), calls.numbered(self.title, number))

    def renew(self) -> None:
        """Go on under the present runtime with the same exchanges, which graphs hold on to. Collective."""
        if self.settings.process_set.process_set_id is None or self.user() is None:  # removed, or about to end
            return
        if self.sums:
            self.sums.clear()
        before, self.renewed = self.name, True
        self.enter()
        for exchange in self.exchanges.values():
            exchange.connect(self.lane, self.name + exchange.name.removeprefix(before), exchange.uses)

    def require_replaceable(self) -> None:
        """Raises RuntimeError while no other may take its place. Where `elastic.run` has renewed it, what that calls
        may attach again."""
        if self.alive and not self.renewed and self.settings.process_set.included():
            raise RuntimeError("this optimizer is attached already: call hvd.DistributedOptimizer once")

    @property
    def alive(self) -> bool:
        return self.runtime.live and (self.group is None or not self.group.removed)

    def require_alive(self) -> None:
        """Raises RuntimeError where gradients would not be reduced, of a removed process set RemovedError."""
        if self.group is not None and self.group.removed:
            raise RemovedError(self.group.ranks)
        runtime.require_attached(self.alive, self.group is not None)

    def reduce(
        self, grads: Sequence[Any], variables: Sequence[Any], local: Sequence[Any] = (), borrow: bool = False
    ) -> list[Any]:
        """The gradients of all ranks, in the same order. local: variables whose gradients remain this rank's.

        borrow: the results last until the next round. Collective.
        """
        if self.group is None:
            return list(grads)

        def reduce_common(grads: list[Any], variables: list[Any]) -> list[Any]:
            chosen = [self.border.densified(g) for g in grads] if self.settings.sparse_as_dense else grads
            packed = [compression.compress(g) if self.border.use_of(g) is Use.DENSE else (g, None) for g in chosen]
            small = [g for g, _ in packed]
            reduced = self.border.reduce(self.exchange(small, variables), small, borrow)
            return [self.restored(*each) for each in zip(reduced, packed, variables, strict=True)]

        compression, divisor = self.settings.compression, self.settings.size if self.settings.scale_local else 1
        return around_local(reduce_common, grads, variables, local, divisor, self.border)

    def exchange(self, grads: Sequence[Any], variables: Sequence[Any]) -> Exchange:
        """The exchange for these variables, made at the first call. Collective when it makes one."""
        groups = self.groups_of([name_of(variable) for variable in variables])
        gpu = self.border.gpu_of(variables)
        device = "host" if gpu is None else "cuda"
        specs = [
            Spec(common_name(v), fixed_shape(v), self.wire_dtype(g, v), device, group)
            for g, v, group in zip(grads, variables, groups, strict=True)
        ]
        uses = [self.border.use_of(g) for g in grads]
        # In a graph it is fixed who has a gradient; outside it may change at each call, and each round tells.
        key: tuple[Any, ...] = (tuple(specs), *(uses if self.border.traced(grads) else ()))
        number, name = self.made, self.name
        if not self.border.in_order():
            key, name = (*key, number), f"{name}.{number}"
        if key not in self.exchanges:
            self.tidy()
            terms, process_set = self.settings.terms, self.settings.process_set
            self.exchanges[key] = Exchange(
                self.lane, name, number, specs, uses, terms, process_set, gpu, owner=self,
                mode=self.settings.replica_check,
            )  # fmt: skip
            self.made += 1  # not before: where that fails on one rank only, and is tried again, it has the same number
        in_session = self.border.in_session(variables)
        if in_session or self.border.in_order():
            self.exchanges[key].watch(variables, self.border.values_of, in_session)
        return self.exchanges[key]

    def tidy(self) -> None:
        """Once there are many, forget exchanges whose variables are no more on any rank. Collective then."""
        if len(self.exchanges) < MANY:
            return

        def work(at: Workplace) -> set[int]:
            over = [exchange.number for exchange in self.exchanges.values() if exchange.over]
            return set.intersection(*map(set, at.transport.allgather_object(over)))

        # Named like a round's first bucket: where other ranks begin a round instead, that is a mismatch, not a wait.
        facts = (("lists of variables", self.made),)
        over = self.lane.run(Request(Signature("plan", f"{self.name} bucket 0", facts), work))
        for key, exchange in list(self.exchanges.items()):
            if exchange.number in over:
                del self.exchanges[key]

    def groups_of(self, names: Sequence[str]) -> list[int | None]:
        """The number of each variable's group."""
        groups = self.settings.groups
        if isinstance(groups, int):
            return [index * groups // len(names) for index in range(len(names))]
        numbers = {name: number for number, group in enumerate(groups or ()) for name in group}
        return [numbers.get(name) for name in names]

    def restored(self, result: Any, sent: tuple[Any, Any], variable: Any) -> Any:
        """A result as the variable's gradient. sent: what this rank has given for it, and the compressor's context."""
        if self.border.use_of(result) is not Use.DENSE:
            return result
        gradient, context = sent
        if gradient is None:  # other ranks have one
            shape, compress = tuple(map(int, variable.shape)), self.settings.compression.compress
            _, context = compress(self.border.zeros(shape, dtype_name(variable)))
        return self.settings.compression.decompress(result, context)

    def wire_dtype(self, gradient: Any, variable: Any) -> str:
        """That of what is sent, or would be."""
        if gradient is not None:
            return self.border.dtype_of(gradient)
        compression, dtype = self.settings.compression, dtype_name(variable)
        if unknown(compression):
            return self.border.dtype_of(compression.compress(self.border.zeros((1,), dtype))[0])
        wire = getattr(compression, "wire", None)
        return wire if wire is not None and "float" in dtype else dtype


def dtype_name(variable: Any) -> str:
    dtype = getattr(variable.dtype, "base_dtype", variable.dtype)  # TF1's reference variables have one of their own
    return str(getattr(dtype, "name", dtype))


def around_local(
    reduce: Callable[[list[Any], list[Any]], list[Any]], grads: Sequence[Any], variables: Sequence[Any],
    local: Sequence[Any], divisor: int, border: Border,
) -> list[Any]:
    """reduce(gradients, variables), but for local variables, whose gradients are only divided."""
    results = list(grads)
    own = {id(inside(variable)) for variable in local}
    common = [i for i, variable in enumerate(variables) if id(inside(variable)) not in own]
    for i in set(range(len(results))) - set(common):
        if results[i] is not None and divisor != 1:
            results[i] = border.divided(results[i], divisor)
    reduced = reduce([grads[i] for i in common], [variables[i] for i in common])
    for i, grad in zip(common, reduced, strict=True):
        results[i] = grad
    return results


def keep_own(chosen: list[Any], variable: Any) -> None:
    """Put a variable, or several, among those that stay this rank's own. Raises ValueError for what is none."""
    add_to(chosen, variable)
    OWN.extend(chosen)


def dense(sparse_as_dense: bool, border: Border, gradient: Any, variable: Any) -> Any:
    """The gradient as an ordinary tensor. Raises ValueError for a sparse one, without sparse_as_dense."""
    if border.use_of(gradient) is Use.SPARSE and not sparse_as_dense:
        raise ValueError(
            f"{name_of(variable)} has a sparse gradient: backward_passes_per_step needs sparse_as_dense=True"
        )
    return border.densified(gradient)


def settings_of(
    *, op: Op | int, predivide: float, compression: Any, sparse_as_dense: bool, num_groups: int, groups: Any,
    scale_local: bool, process_set: ProcessSet, replica_check: str | None = None,
) -> Settings:
    """Horovod's arguments, and replica_check=, checked. Raises ValueError for what cannot be right, NotImplementedError
    for Adasum."""
    terms = Terms(op_of(op), predivide)
    if terms.op is Adasum:
        raise NotImplementedError("op=Adasum is not supported yet; use op=Average")
    runtime.current().groups.find(process_set)  # raises where it is not registered
    if num_groups:
        deprecated("num_groups is deprecated: use groups")
    names = group_names(num_groups or None if groups is None else groups)
    mode = runtime.replica_check(replica_check)
    return Settings(terms, compressor(compression), sparse_as_dense, names, scale_local, process_set, mode)


def check_name(name: Any) -> None:
    """Raises TypeError for what Horovod's scripts give in the wrong place."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name={name!r} is no text: the second argument is a name; give others with their own, such as "
                        "compression=")


_shared: dict[Hashable, Gradients] = {}


def shared_gradients(settings: Settings, border: Border, name: str, title: str) -> Gradients:
    """The one `Gradients` for all that ask for the same. Collective when it is new: also where the runtime, or the
    process set, is another than before."""
    found = _shared.get((settings, name))
    if found is None or not found.alive:
        for key in [key for key, each in _shared.items() if not each.alive]:
            del _shared[key]
        found = _shared[settings, name] = Gradients(settings, border, name, title)
    return found


def group_names(groups: Any) -> int | tuple[tuple[str, ...], ...] | None:
    """The user's groups (a number, or lists of variables) as `Settings` keeps them. Raises ValueError for numbers below
    1 and for what is neither."""
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 1:
            raise ValueError(f"groups must be at least 1, not {groups}")
        return groups
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise ValueError("groups must be a number or lists of variables")
    return tuple(tuple(name_of(variable) for variable in group) for group in groups)
