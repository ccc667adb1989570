"""Gradients handed over as arrays, for frameworks that compute them all and then apply them (TensorFlow, Keras).

    begin()           a new round
    put(i, array)     copies gradient i into its slot of the arena: the only copy; a full bucket may leave
    finish()          what is missing is zeros; waits for all ranks
    result(i)         where gradient i, reduced, lies until the next round

An exchange is the reducer seen from such a framework: who wants gradients is known when it is made. Embeddings'
sparse gradients are gathered, not reduced; a variable that is sparse on one rank is sparse on all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import finalize, ref

import numpy as np

from hvdlite import ops
from hvdlite.algorithms import allreduce
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array
from hvdlite.errors import HvdliteError
from hvdlite.gpu_streams import mark
from hvdlite.gradients.departure import Departure
from hvdlite.gradients.plan import Spec
from hvdlite.gradients.policy import planned
from hvdlite.gradients.reducer import Memory, Reducer
from hvdlite.gradients.replica_check import MODE, Alike, Values, checksum
from hvdlite.gradients.terms import Terms
from hvdlite.gradients.use import Use
from hvdlite.gradients.variables import is_one_of, name_in_layer
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.lanes.calls import calling
from hvdlite.lanes.gpu_side import Gpu
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import END, Round, Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.ops import Average, Sum
from hvdlite.system.weak_references import Crowd, weakly

CALLS = {"weights": "hvd.broadcast_variables(model, root_rank={root}) (in fit(), "
                    "callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback({root})])"}  # fmt: skip
CALLS_IN_SESSIONS = {"weights": "session.run(hvd.broadcast_global_variables({root})) (with MonitoredTrainingSession, "
                                "hvd.BroadcastGlobalVariablesHook({root}) as the last of the hooks)"}  # fmt: skip
CALLERS = {"tape": "hvd.DistributedGradientTape", "optimizer": "hvd.DistributedOptimizer"}
ROUND = "list {} of variables, step {}, attempt {}"
BEGIN = 100  # Horovod's scripts broadcast after the first batch, which may be several rounds
OWN, IN_SETS = Crowd(), Crowd()
"""Variables that users want to differ between ranks; those whose gradients are reduced within a process set."""
CARING = Crowd()
"""Callbacks under which their model trains, which compare its weights themselves. One whose fit has raised, of which it
is not told, stays among them until it is dropped, or comes to the end of another fit."""


class Exchange:
    """One list of variables' gradients, reduced once per round. Creating one is collective; not thread-safe.

    specs: every variable, in the same order on all ranks. mine: what this rank has for each. Raises MismatchError
    with a diff, on every rank, where the ranks' variables differ.
    """

    reductions = 0
    """How often any exchange has reduced gradients, to prove that a step did."""
    first: ref[Exchange] | None = None
    """The one of all ranks that first began a round since this was last set to None."""

    def __init__(
        self, lane: Lane, name: str, number: int, specs: Sequence[Spec], mine: Iterable[Use], terms: Terms,
        process_set: ProcessSet, gpu: Gpu | None, owner: Any, mode: str = "error",
    ) -> None:
        """lane: of process_set. name, number: of this exchange on its lane. Where ranks are at different numbers of
        one name, that is a mismatch, not a wait. gpu: where the specs' device is one. owner: who connects it anew, kept
        by a graph that keeps only the exchange. mode: see `Alike`."""
        self.number, self.specs, self.terms, self.process_set = number, tuple(specs), terms, process_set
        self.gpu, self.owner, self.mode = gpu, owner, mode
        self.held: list[Array] = []
        """Gradients on the GPU, kept while they may not have been copied."""
        self.variables: list[ref[Any]] = []
        self.lists = Crowd()
        """The first variable of each list that was seen: none is left when no list will be seen again."""
        self.alike: Alike | None = None
        self.in_session = False
        """Whether only a run of the graph can read the variables."""
        self.connect(lane, name, mine)

    def connect(self, lane: Lane, name: str, mine: Iterable[Use]) -> None:
        """Agree with the other ranks, and share memory with them: over this lane, which may be another than before."""
        self.lane, self.name, terms = lane, name, self.terms
        self.uses = agree(lane, name, self.specs, mine, terms, self.mode)
        """What any rank had for each variable when the exchange was made."""
        self.dense = [index for index, use in enumerate(self.uses) if use is not Use.SPARSE]
        self.sparse = [index for index, use in enumerate(self.uses) if use is Use.SPARSE]
        layout, overlap = planned((self.specs[i] for i in self.dense), runtime.current().config, lane.place)
        how, memory = terms.reduction(lane.transport.size), f"{name}.{self.number}"
        self.reducer = Reducer(lane, layout, how, name, Departure(overlap), Memory(self.gpu, memory))
        self.place = {index: place for place, index in enumerate(self.dense)}
        self.buckets = [[self.dense[place] for place in bucket.members] for bucket in layout.buckets]
        """The dense variables, in the order in which their gradients are sent."""
        self.rounds = self.retries = 0
        self.tag = Round(ROUND, (0, 0, 0))  # names the round under way on all ranks
        self.released = False
        if self.alike:
            self.alike.expect("0", ("weights",))
            self.alike.enter(lane, self.name)
        runtime.current().after_join.append(self)

    def give_up(self) -> None:
        """This rank is about to join: a round that was begun and not finished is void. Never waits."""
        if self.joins and self.reducer.half_sent:
            self.reducer.void_round(self.tag)

    def start_over(self) -> None:
        """All ranks have joined."""
        if self.joins:
            self.reducer.forget_round()
        self.rounds = self.retries = 0
        if self.alike:
            self.alike.expect()

    @property
    def joins(self) -> bool:
        """Whether ranks that join stand in for it."""
        return not self.released and self.process_set is global_process_set

    def watch(
        self, variables: Sequence[Any], values_of: Callable[[Sequence[Any]], Sequence[Any] | None],
        in_session: bool = False,
    ) -> None:
        """See to it that these variables are the same on all ranks, from the round BEGIN on, unless a callback sees to
        it. values_of: gives a checksum of each, None where they cannot be read. Two models with the same names share an
        exchange, and a rank may trace its step more often than others: once there are others, none are compared.
        in_session: the graph reads `watched()` when `finish` says so, and gives the values to `compare`."""
        self.lists.extend(variables[:1])
        if not self.alike:
            calls, kind = CALLS_IN_SESSIONS if in_session else CALLS, self.name.partition(".")[0]
            self.alike = Alike(lambda begins: self.values(values_of), calls, CALLERS[kind], self.mode, BEGIN)
            self.alike.enter(self.lane, self.name)
            self.in_session = in_session
            self.variables = [ref(variable) for variable in variables]
            if self.process_set is not global_process_set:
                IN_SETS.extend(variables)
        elif any(known() is not variable for known, variable in zip(self.variables, variables, strict=False)):
            self.variables = []

    def values(self, values_of: Callable[[Sequence[Any]], Sequence[Any] | None]) -> Values | None:
        """Checksums of the watched variables; None where there are none, or a session has them."""
        watched = {} if self.in_session or self.released else self.watched()
        if not watched or any(each.cares_for(watched[min(watched)]) for each in CARING):
            return None
        found = values_of(list(watched.values()))
        return None if found is None else self.named(dict(zip(watched, found, strict=True)))

    def watched(self) -> dict[int, Any]:
        """The variables that are to be the same on all ranks, by number; none where some are no more."""
        alive, own = [variable for known in self.variables if (variable := known()) is not None], list(OWN)
        if len(alive) < len(self.specs):
            return {}
        return {number: variable for number, variable in enumerate(alive) if not is_one_of(variable, own)}

    def named(self, found: Mapping[int, Any]) -> Values:
        """Checksums by the variables' names."""
        names = {number: f"{name_in_layer(self.specs[number].name)} (variable {number})" for number in found}
        return {("weights", names[number]): value for number, value in found.items()}

    def compare(self, values: Mapping[int, Array]) -> None:
        """Compare the ranks. values: the watched variables', by number. Collective, after a round of which `finish` has
        said so. Raises MismatchError on every rank as `Alike.look` does."""
        assert self.alike is not None
        self.alike.compare(self.named({number: checksum(value) for number, value in values.items()}) or None)

    @property
    def over(self) -> bool:
        """Whether the variables of every list that it served are no more."""
        return self.alike is not None and not list(self.lists)

    def end(self) -> None:
        """Nobody will ask for it any more: let go of the memory shared with other ranks when the variables are no more,
        without which no graph that is kept can run. (On a GPU it goes with the lane, since peers have it open.)"""
        for variable in self.lists:
            finalize(variable, weakly(self.release)).atexit = False
        self.release()

    def release(self) -> None:
        """Let go of the memory, if all lists of variables are over."""
        if self.over:
            self.let_go()

    def let_go(self) -> None:
        """Let go of the memory: no round may follow."""
        if self.gpu is None and not self.released:
            self.released = True
            del self.reducer

    def begin(self) -> None:
        """Start a round; one that was begun and not finished, because its step failed, is forgotten."""
        if self.released:
            raise HvdliteError(
                f"{self.lane.user or self.name}: this graph's variables are no more, or its optimizer has been "
                "attached anew since: call model.compile() after hvd.DistributedOptimizer, or trace your tf.function "
                "again"
            )
        if Exchange.first is None and self.process_set is global_process_set:
            Exchange.first = ref(self)
        self.retries += self.reducer.abandon_round(self.tag)
        if self.held:
            mark(self.held[-1]).wait()
            self.held.clear()
        self.tag = Round(ROUND, (self.number, self.rounds + 1, self.retries + 1))

    def put(self, index: int, gradient: Array) -> None:
        """Copy a dense gradient to where the peers can reach it. Never waits."""
        place = self.place[index]
        with self.there():
            self.reducer.views[place][...] = gradient
        if self.gpu is not None:
            self.held.append(gradient)
        self.reducer.mark_ready((place,), self.tag)

    def finish(self, absent: Use = Use.DENSE) -> bool:
        """Complete the round; waits for all ranks. Returns whether `compare` is to follow, in a session.

        absent: what a variable that nothing was put for counts as, of which `used` tells afterwards; DENSE (zeros)
        saves the ranks from telling each other.
        """

        def load(place: int) -> Use:
            with self.there():
                self.reducer.views[place][...] = 0
            return absent

        self.used = self.reducer.finish_round(load, self.tag)
        self.held.clear()  # every bucket's lane has waited for the copies into it
        self.rounds, self.retries = self.rounds + 1, 0
        Exchange.reductions += 1
        if self.alike and self.in_session:
            return self.alike.due()
        if self.alike:
            self.alike.look()
        return False

    def end_of(self, what: str) -> None:
        """Agree with all ranks that no round follows before `what`; waits for them. Named like a round's first bucket:
        where another rank begins a round instead, that is a MismatchError on every rank, not a wait."""
        if not self.released:
            self.lane.run(Request(Signature(END, f"{self.name} bucket 0", round=what), lambda lane: None))

    def there(self) -> AbstractContextManager[Any]:
        """Where gradients are copied: the GPU's kernels are issued inside."""
        return contextlib.nullcontext() if self.gpu is None else self.gpu.xp.cuda.Device(self.gpu.number)

    def result(self, index: int) -> Array:
        """A dense variable's reduced gradient, where it lies: the next round overwrites it. On a GPU it is there for
        the streams that CuPy and the frameworks then issue work on."""
        view: Array = self.reducer.views[self.place[index]][...]
        return view

    def gather(self, index: int, rows: Array, values: Array) -> tuple[Array, Array]:
        """A sparse variable's gradient: all ranks' row numbers and values. Waits for all ranks."""
        if self.terms.op not in (Average, Sum):
            raise NotImplementedError(f"sparse gradients with op={self.terms.op.name}: only Average and Sum")
        name = f"{self.name}.{self.number} {index} {name_in_layer(self.specs[index].name)}"
        with calling(f"sparse gradient of {self.specs[index].name}, {self.lane.user}"):
            all_rows = ops.allgather(np.ascontiguousarray(rows), f"{name} rows", self.process_set, addends=True)
            all_values = ops.allgather(np.ascontiguousarray(values), f"{name} values", self.process_set, addends=True)
        if self.terms.op is Average:
            sums: Any = all_values
            np.divide(sums, self.lane.transport.size, out=sums, casting="unsafe")
        Exchange.reductions += 1
        return all_rows, all_values


def agree(
    lane: Lane, name: str, specs: Sequence[Spec], mine: Iterable[Use], terms: Terms, mode: str = "error"
) -> list[Use]:
    """The largest use over ranks for each variable. Collective; compares the ranks' variables first."""
    uses = np.array([int(use) for use in mine], np.uint8)

    def work(at: Workplace) -> None:
        allreduce(at.transport, at.workspace, at.place, uses, Reduction("max"))

    # Named as the reducer names a plan and a round's first bucket, whichever the other ranks are about to ask for.
    facts = (("parameters", tuple(spec.line for spec in specs)), ("terms", terms), (MODE, mode))
    lane.run(Request(Signature("plan", f"{name} bucket 0", facts), work))
    return [Use(int(use)) for use in uses]


def reduce_now(
    exchange: Exchange, gradients: Sequence[Any], to_array: Callable[[Any], Array],
    to_tensors: Callable[[Sequence[Array]], Sequence[Any]], absent: Use = Use.UNUSED,
) -> list[Any]:
    """Reduce dense gradients at once; those that no rank has stay None. Waits for all ranks.

    to_array, to_tensors: the framework's conversions, which need not copy. absent: see `Exchange.finish`.
    """
    exchange.begin()
    for index in (index for bucket in exchange.buckets for index in bucket):
        if gradients[index] is not None:
            exchange.put(index, to_array(gradients[index]))
    exchange.finish(absent)
    used = [index for place, index in enumerate(exchange.dense) if exchange.used[place]]
    found = dict(zip(used, to_tensors([exchange.result(index) for index in used]), strict=True))
    return [found.get(index) if index in exchange.place else given for index, given in enumerate(gradients)]


