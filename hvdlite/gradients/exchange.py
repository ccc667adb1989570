"""The exchange: the rounds of one list of variables, for frameworks that compute all gradients and then apply them.

    begin()           start a round
    put(i, array)     copy gradient i into its slot of the arena: the only copy; a full bucket may leave
    finish()          fill missing gradients with zeros; wait for all ranks
    result(i)         the reduced gradient i, valid until the next round

In the walk of a gradient of Keras or TensorFlow, the exchange takes the place of PyTorch's hooks. `lists.Gradients`
makes an exchange when it first sees a list of variables. The exchange has a plan and a `reducer`, and numbers its
rounds equally on all ranks.

When an exchange is made, the ranks agree on the kind of each gradient: none, dense or sparse. Sparse ones (embeddings)
are gathered, not reduced. A gradient that is sparse on one rank is sparse on all. In eager mode each round also agrees
on which dense gradients exist; a graph fixes this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np

from hvdlite.algorithms import allreduce
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array
from hvdlite.compression.store import Store
from hvdlite.errors import HvdliteError
from hvdlite.gpu_streams import mark
from hvdlite.gradients.departure import Departure
from hvdlite.gradients.lossy import marked
from hvdlite.gradients.plan import BucketPlan, Spec
from hvdlite.gradients.policy import planned
from hvdlite.gradients.reducer import Memory, Reducer
from hvdlite.gradients.registry import registry
from hvdlite.gradients.replica_check import MODE, Alike
from hvdlite.gradients.settings import Settings
from hvdlite.gradients.sparse import SparseReduction, require_sum
from hvdlite.gradients.use import Use
from hvdlite.gradients.variables import name_in_layer
from hvdlite.gradients.watched import WatchedVariables
from hvdlite.job import runtime
from hvdlite.job.process_sets import global_process_set
from hvdlite.lanes.calls import calling
from hvdlite.lanes.gpu_side import Gpu
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import END, Round, Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.ops import Average

ROUND = "list {} of variables, step {}, attempt {}"
GONE = (
    "{}: this graph's variables no longer exist, or its optimizer has been attached again since: call model.compile() "
    "after hvd.DistributedOptimizer, or trace your tf.function again"
)
TensorT = TypeVar("TensorT")


@dataclass(frozen=True)
class Contents:
    """The variables and settings of one exchange: equal on all ranks.

    Attributes:
        number: The exchange's number on its lane, from 0. If ranks are at different numbers, all ranks raise.
        specs: Every variable, in the same order on all ranks.
        settings: The user's settings.
        gpu: The GPU on which the gradients lie; None: host memory.
        store: What a lossy compressor keeps from round to round; None without one.
        names: For each variable the name under which it is kept there.
    """

    number: int
    specs: tuple[Spec, ...]
    settings: Settings
    gpu: Gpu | None
    store: Store | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Division:
    """The division of variables: gradients that are reduced in buckets, and gradients that are gathered.

    Attributes:
        uses: For each variable the largest use over all ranks when the exchange was made.
        dense: The variables with reduced gradients, by index.
        sparse: The variables with gathered gradients, by index.
        places: The index of each dense variable among the reducer's parameters.
        buckets: The dense variables of each bucket, in the order in which their gradients are sent.
    """

    uses: tuple[Use, ...]
    dense: tuple[int, ...]
    sparse: tuple[int, ...]
    places: dict[int, int]
    buckets: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, uses: Sequence[Use], layout: BucketPlan) -> Division:
        """Divide variables by their uses. layout: the plan for all variables that are not sparse."""
        dense = tuple(index for index, use in enumerate(uses) if use is not Use.SPARSE)
        sparse = tuple(index for index, use in enumerate(uses) if use is Use.SPARSE)
        buckets = tuple(tuple(dense[place] for place in bucket.members) for bucket in layout.buckets)
        return cls(tuple(uses), dense, sparse, {index: place for place, index in enumerate(dense)}, buckets)


class RoundCounter:
    """The names of one exchange's rounds, equal on all ranks.

    Attributes:
        number: The exchange's number on its lane.
        done: The rounds that have ended.
        retries: The failed rounds since then, which were begun and not finished.
        tag: The name of the round under way.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.start_over()

    def start_over(self) -> None:
        """Count from 0 again."""
        self.done = 0
        self.retries = 0
        self.tag = Round(ROUND, (0, 0, 0))

    def begin(self, after_failure: bool) -> None:
        """A round begins. after_failure: whether all ranks have forgotten a failed round before it."""
        self.retries += after_failure
        self.tag = Round(ROUND, (self.number, self.done + 1, self.retries + 1))

    def end(self) -> None:
        """The round has ended."""
        self.done += 1
        self.retries = 0


class Exchange:
    """Reduces the gradients of one list of variables, once per round. Not thread-safe.

    Attributes:
        contents: The variables and settings.
        list_number: Tells the lists of variables of one owner apart, for the count of steps. It is equal for all graphs
            of one list.
        owner: The `Gradients` that connects the exchange again after a restart. A graph keeps the exchange alive, and
            the exchange keeps its owner alive.
        watched: The variables, compared between ranks.
        lane: The lane of the process set.
        name: The name of rounds on that lane.
        division: The variables with reduced and with gathered gradients.
        reducer: The buckets and their reduction; None once the memory has been freed.
        rounds: The names of rounds.
        used: For each dense variable the largest use over all ranks in the last round, in the order of
            `division.dense`.
        held: Gradients on the GPU, kept until they have been copied.
    """

    def __init__(self, contents: Contents, lane: Lane, name: str, mine: Iterable[Use], owner: object) -> None:
        """Agree with all ranks, and allocate the buckets. Collective; waits for all ranks.

        Args:
            contents: The variables and settings.
            lane: The lane of the process set.
            name: The name of rounds on that lane.
            mine: This rank's use of each variable.
            owner: The attribute of that name.

        Raises:
            MismatchError: The ranks' variables differ. Every rank raises it, with a diff.
        """
        self.contents = contents
        self.owner = owner
        self.list_number = hash((id(owner), contents.specs))
        self.watched = WatchedVariables(contents.specs, contents.settings)
        self.held: list[Array] = []
        self.used: Sequence[Use] = ()
        self.connect(lane, name, mine)

    def connect(self, lane: Lane, name: str, mine: Iterable[Use]) -> None:
        """Agree with all ranks of a lane, and allocate the buckets. Collective; called again after a restart."""
        self.lane = lane
        self.name = name
        config = runtime.current().config
        number, store, within_host = self.contents.number, self.contents.store, config.compress_within_host
        uses = agree(lane, name, self.contents, mine)
        dense = [i for i, use in enumerate(uses) if use is not Use.SPARSE]
        specs = tuple(self.contents.specs[i] for i in dense)
        if store:
            names = (self.contents.names[i] for i in dense)
            specs = marked(dict(zip(names, specs, strict=True)), store, lane.place, within_host)
        layout, overlap = planned(specs, config, lane.place)
        self.division = Division.of(uses, layout)
        how, memory = self.contents.settings.terms.reduction(lane.transport.size), f"{name}.{number}"
        place = Memory(self.contents.gpu, memory, store, within_host)
        self.reducer: Reducer | None = Reducer(lane, layout, how, name, Departure(overlap), place)
        self.rounds = RoundCounter(number)
        self.watched.enter(lane, name)
        runtime.current().registries.count_in_join(self)

    # Calls from the job when a rank joins

    def give_up(self) -> None:
        """Make an unfinished round void: this rank is about to join. Never waits."""
        if self.reducer is not None and self.joins and self.reducer.half_sent:
            self.reducer.void_round(self.rounds.tag)

    def start_over(self) -> None:
        """Forget an unfinished round, and count rounds from 0: all ranks have joined."""
        if self.reducer is not None and self.joins:
            self.reducer.forget_round()
        self.rounds.start_over()
        self.watched.start_over()

    @property
    def joins(self) -> bool:
        """Whether ranks that have joined stand in for this exchange."""
        return self.contents.settings.process_set is global_process_set

    @property
    def alike(self) -> Alike | None:
        """The comparison of variables between ranks, which starts over when a checkpoint is loaded."""
        return self.watched.alike

    # Memory

    def end(self) -> None:
        """Free the memory once all variables are gone: no new step will use this exchange.

        A graph that somebody keeps may still run while its variables exist. On a GPU the memory lives as long as the
        lane, because other ranks have opened it.
        """
        self.watched.when_gone(self.release)
        self.release()

    def release(self) -> None:
        """Free the memory if the variables of all lists are gone."""
        if self.watched.gone:
            self.let_go()

    def let_go(self) -> None:
        """Free the memory. No round may follow."""
        if self.contents.gpu is None:
            self.reducer = None
            self.watched.forget()

    @property
    def working(self) -> Reducer:
        """The reducer. Raises HvdliteError if the memory has been freed."""
        if self.reducer is None:
            raise HvdliteError(GONE.format(self.lane.user or self.name))
        return self.reducer

    # A round

    def begin(self) -> None:
        """Start a round. If the last step failed in its round, forget that round, which waits for all ranks.

        Raises:
            HvdliteError: The memory has been freed.
        """
        reducer, store = self.working, self.contents.store
        if store and store.loaded:  # on all ranks
            reducer.take_loaded()
        if self.joins:
            registry.round_begins(self)
        failed = reducer.abandon_round(self.rounds.tag)
        if self.held:
            mark(self.held[-1]).wait()
            self.held.clear()
        self.rounds.begin(failed)

    def put(self, index: int, gradient: Array) -> None:
        """Copy a dense gradient into its bucket, and send full buckets. Never waits."""
        place = self.division.places[index]
        reducer = self.working
        with self.there():
            reducer.views[place][...] = gradient
        if self.contents.gpu is not None:
            self.held.append(gradient)
        reducer.mark_ready((place,), self.rounds.tag)

    def finish(self, absent: Use = Use.DENSE) -> bool:
        """Complete the round. Waits for all ranks.

        Args:
            absent: The use of a variable for which no gradient was put. `used` holds the ranks' result. With DENSE
                (zeros) the ranks need not agree on uses.

        Returns:
            Whether the graph is to call `watched.compare`; True in a session only.

        Raises:
            MismatchError: Variables differ when training begins. Every rank raises it.
        """
        reducer = self.working

        def load(place: int) -> Use:
            with self.there():
                reducer.views[place][...] = 0
            return absent

        self.used = reducer.finish_round(load, self.rounds.tag)
        self.held.clear()  # the lane has waited for the copies into every bucket
        self.rounds.end()
        runtime.end_step(self.list_number)
        registry.round_ends()
        return self.watched.round_ends()

    def result(self, index: int) -> Array:
        """A dense variable's reduced gradient: a view of the bucket, which the next round overwrites.

        On a GPU, work that CuPy or the framework issues from now on runs after the reduction.
        """
        view: Array = self.working.views[self.division.places[index]][...]
        return view

    def gather(self, index: int, rows: Array, values: Array) -> tuple[Array, Array]:
        """Gather the row numbers and values of a sparse gradient from all ranks. Waits for all ranks.

        Args:
            index: The variable.
            rows: This rank's row numbers, of shape (nnz,).
            values: This rank's rows, of shape (nnz, ...).

        Returns:
            All ranks' row numbers and values. With Average, the values are divided by the number of ranks, in place.

        Raises:
            NotImplementedError: The operation is neither Average nor Sum.
        """
        terms, spec = self.contents.settings.terms, self.contents.specs[index]
        require_sum(terms.op, "sparse gradients")
        name = f"{self.name}.{self.contents.number} {index} {name_in_layer(spec.name)}"
        how = SparseReduction(terms.op, self.contents.settings.process_set)
        with calling(f"sparse gradient of {spec.name}, {self.lane.user}"):
            all_rows, all_values = how.gather(rows, values, (f"{name} rows", f"{name} values"))
        if terms.op is Average:
            sums = cast(np.ndarray, all_values)  # or CuPy's, to which np.divide dispatches
            np.divide(sums, self.lane.transport.size, out=sums, casting="unsafe")
        registry.round_ends()
        return all_rows, all_values

    def end_of(self, what: str) -> None:
        """Agree with all ranks that no round follows before `what`. Waits for them.

        The name is that of a round's first bucket. If another rank begins a round instead, every rank raises
        MismatchError.
        """
        if self.reducer is not None:
            self.lane.run(Request(Signature(END, f"{self.name} bucket 0", round=what), lambda lane: None))

    def there(self) -> AbstractContextManager[object]:
        """The context in which gradients are copied: that of their GPU."""
        gpu = self.contents.gpu
        if gpu is None:
            return contextlib.nullcontext()
        return cast("AbstractContextManager[object]", gpu.xp.cuda.Device(gpu.number))


def agree(lane: Lane, name: str, contents: Contents, mine: Iterable[Use]) -> list[Use]:
    """Compare the ranks' variables, and return the largest use of each variable over all ranks. Collective."""
    uses = np.array([int(use) for use in mine], np.uint8)

    def work(at: Workplace) -> None:
        allreduce(at.transport, at.workspace, at.place, uses, Reduction("max"))

    # The name is that of a plan and of a round's first bucket, so that other ranks' requests of either kind match it.
    settings = contents.settings
    facts = (
        ("parameters", tuple(spec.line for spec in contents.specs)),
        ("terms", settings.terms),
        (MODE, settings.replica_check),
    )
    lane.run(Request(Signature("plan", f"{name} bucket 0", facts), work))
    return [Use(int(use)) for use in uses]


def reduce_now(
    exchange: Exchange,
    gradients: Sequence[TensorT | None],
    to_array: Callable[[TensorT], Array],
    to_tensors: Callable[[Sequence[Array]], Sequence[TensorT]],
    absent: Use = Use.UNUSED,
) -> list[TensorT | None]:
    """Reduce dense gradients in one round. Collective; waits for all ranks.

    Args:
        exchange: The exchange of these gradients' variables.
        gradients: This rank's gradients.
        to_array: Converts a tensor to an array; need not copy.
        to_tensors: Converts results, which the next round overwrites.
        absent: As for `Exchange.finish`.

    Returns:
        The gradients, in the same order. A variable without a gradient on any rank has None. Gradients of sparse
        variables are returned unchanged.
    """
    division = exchange.division
    exchange.begin()
    for index in (index for bucket in division.buckets for index in bucket):
        gradient = gradients[index]
        if gradient is not None:
            exchange.put(index, to_array(gradient))
    exchange.finish(absent)
    used = [index for place, index in enumerate(division.dense) if exchange.used[place]]
    found = dict(zip(used, to_tensors([exchange.result(index) for index in used]), strict=True))
    return [found.get(index) if index in division.places else given for index, given in enumerate(gradients)]
