"""Gradients handed over as arrays, for frameworks that compute them all and then apply them (TensorFlow, Keras).

    begin()           starts a round
    put(i, array)     copies gradient i into its slot of the arena: the only copy; a full bucket may leave
    finish()          fills what is missing with zeros; waits for all ranks
    result(i)         gives the reduced gradient i, where it lies until the next round

An exchange is the reducer seen from such a framework. The ranks agree on which variables have gradients when the
exchange is made. Sparse gradients (embeddings) are gathered, not reduced; a variable that is sparse on one rank is
sparse on all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np

from hvdlite.algorithms import allreduce
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array
from hvdlite.errors import HvdliteError
from hvdlite.gpu_streams import mark
from hvdlite.gradients.departure import Departure
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
    "{}: this graph's variables are no more, or its optimizer has been attached anew since: call model.compile() after "
    "hvd.DistributedOptimizer, or trace your tf.function again"
)
TensorT = TypeVar("TensorT")


@dataclass(frozen=True)
class Contents:
    """What one exchange reduces, and how: equal on all ranks.

    Attributes:
        number: The exchange's, from 0, among those on its lane. Ranks at different numbers are a mismatch, not a wait.
        specs: Every variable, in the same order on all ranks.
        settings: What the user asked for.
        gpu: The GPU on which the gradients lie; None: host memory.
    """

    number: int
    specs: tuple[Spec, ...]
    settings: Settings
    gpu: Gpu | None


@dataclass(frozen=True)
class Division:
    """Which variables' gradients are reduced in buckets, and which are gathered.

    Attributes:
        uses: What any rank had for each variable when the exchange was made.
        dense: The variables whose gradients are reduced, by index.
        sparse: The variables whose gradients are gathered, by index.
        places: Where a dense variable stands among the reducer's parameters.
        buckets: The dense variables of each bucket, in the order in which their gradients are sent.
    """

    uses: tuple[Use, ...]
    dense: tuple[int, ...]
    sparse: tuple[int, ...]
    places: dict[int, int]
    buckets: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, uses: Sequence[Use], layout: BucketPlan) -> Division:
        """Divide variables by what ranks have for them. layout: the buckets of those that are not sparse."""
        dense = tuple(index for index, use in enumerate(uses) if use is not Use.SPARSE)
        sparse = tuple(index for index, use in enumerate(uses) if use is Use.SPARSE)
        buckets = tuple(tuple(dense[place] for place in bucket.members) for bucket in layout.buckets)
        return cls(tuple(uses), dense, sparse, {index: place for place, index in enumerate(dense)}, buckets)


class RoundCounter:
    """Names the rounds of one exchange, equally on all ranks.

    Attributes:
        number: The exchange's.
        done: The rounds that have ended.
        retries: The rounds that were begun and not finished, because their step failed.
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
        """A round begins. after_failure: whether all ranks have forgotten one that was begun and not finished."""
        self.retries += after_failure
        self.tag = Round(ROUND, (self.number, self.done + 1, self.retries + 1))

    def end(self) -> None:
        """The round has ended."""
        self.done += 1
        self.retries = 0


class Exchange:
    """One list of variables' gradients, reduced once per round. Creating one is collective; not thread-safe.

    Attributes:
        contents: What is reduced, and how.
        owner: Connects the exchange anew after a restart. A graph keeps only the exchange, and so its owner.
        watched: The variables, compared between ranks.
        lane: The lane of the process set.
        name: The name of the rounds on that lane.
        division: Which gradients are reduced, and which gathered.
        reducer: The memory shared with other ranks, and its reduction; None once it was let go.
        rounds: Names of rounds.
        used: What any rank had for each dense variable in the last round, in the order of `division.dense`.
        held: Gradients on the GPU, kept while they may not have been copied.
    """

    def __init__(self, contents: Contents, lane: Lane, name: str, mine: Iterable[Use], owner: object) -> None:
        """
        Args:
            contents: What is reduced, and how.
            lane: Of the process set.
            name: Of the rounds on that lane.
            mine: What this rank has for each variable.
            owner: See `owner`.

        Raises:
            MismatchError: On every rank, with a diff, when the ranks' variables differ.
        """
        self.contents = contents
        self.owner = owner
        self.watched = WatchedVariables(contents.specs, contents.settings)
        self.held: list[Array] = []
        self.used: Sequence[Use] = ()
        self.connect(lane, name, mine)

    def connect(self, lane: Lane, name: str, mine: Iterable[Use]) -> None:
        """Agree with the other ranks, and share memory with them, over this lane. Collective; again after a restart."""
        self.lane = lane
        self.name = name
        config = runtime.current().config
        specs, number = self.contents.specs, self.contents.number
        uses = agree(lane, name, self.contents, mine)
        layout, overlap = planned(
            (spec for spec, use in zip(specs, uses, strict=True) if use is not Use.SPARSE), config, lane.place
        )
        self.division = Division.of(uses, layout)
        how, memory = self.contents.settings.terms.reduction(lane.transport.size), f"{name}.{number}"
        self.reducer: Reducer | None = Reducer(
            lane, layout, how, name, Departure(overlap), Memory(self.contents.gpu, memory)
        )
        self.rounds = RoundCounter(number)
        self.watched.enter(lane, name)
        runtime.current().after_join.append(self)

    # What the job asks for when a rank joins

    def give_up(self) -> None:
        """This rank is about to join: a round that was begun and not finished is void. Never waits."""
        if self.reducer is not None and self.joins and self.reducer.half_sent:
            self.reducer.void_round(self.rounds.tag)

    def start_over(self) -> None:
        """All ranks have joined."""
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
        """The comparison of variables between ranks, which a checkpoint begins anew."""
        return self.watched.alike

    # Memory

    def end(self) -> None:
        """Nobody will ask for this exchange any more: let go of its memory once the variables are gone, without which
        no graph that is kept can run. On a GPU it goes with the lane, since peers have it open."""
        self.watched.when_gone(self.release)
        self.release()

    def release(self) -> None:
        """Let go of the memory, if the variables of all lists are gone."""
        if self.watched.gone:
            self.let_go()

    def let_go(self) -> None:
        """Let go of the memory: no round may follow."""
        if self.contents.gpu is None:
            self.reducer = None
            self.watched.forget()

    @property
    def working(self) -> Reducer:
        """The reducer. Raises HvdliteError once the memory was let go."""
        if self.reducer is None:
            raise HvdliteError(GONE.format(self.lane.user or self.name))
        return self.reducer

    # A round

    def begin(self) -> None:
        """Start a round; forget one that was begun and not finished, because its step failed.

        Raises:
            HvdliteError: The memory was let go.
        """
        reducer = self.working
        if self.joins:
            registry.round_begins(self)
        failed = reducer.abandon_round(self.rounds.tag)
        if self.held:
            mark(self.held[-1]).wait()
            self.held.clear()
        self.rounds.begin(failed)

    def put(self, index: int, gradient: Array) -> None:
        """Copy a dense gradient to where other ranks can read it. Never waits."""
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
            absent: What a variable counts as that nothing was put for; `used` holds the result. DENSE (zeros) saves
                the ranks from telling each other.

        Returns:
            Whether the graph is to call `watched.compare`, in a session.

        Raises:
            MismatchError: On every rank, when variables differ as training begins.
        """
        reducer = self.working

        def load(place: int) -> Use:
            with self.there():
                reducer.views[place][...] = 0
            return absent

        self.used = reducer.finish_round(load, self.rounds.tag)
        self.held.clear()  # every bucket's lane has waited for the copies into it
        self.rounds.end()
        registry.round_ends()
        return self.watched.round_ends()

    def result(self, index: int) -> Array:
        """A dense variable's reduced gradient, where it lies: the next round overwrites it. On a GPU it is ready for
        the streams that CuPy and the frameworks use next."""
        view: Array = self.working.views[self.division.places[index]][...]
        return view

    def gather(self, index: int, rows: Array, values: Array) -> tuple[Array, Array]:
        """A sparse variable's gradient: the row numbers and values of all ranks. Waits for all ranks.

        Args:
            index: The variable.
            rows: This rank's row numbers, of shape (nnz,).
            values: This rank's rows, of shape (nnz, ...).

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
            sums: Any = all_values
            np.divide(sums, self.lane.transport.size, out=sums, casting="unsafe")
        registry.round_ends()
        return all_rows, all_values

    def end_of(self, what: str) -> None:
        """Agree with all ranks that no round follows before `what`. Waits for them.

        Named like a round's first bucket: where another rank begins a round instead, every rank raises MismatchError.
        """
        if self.reducer is not None:
            self.lane.run(Request(Signature(END, f"{self.name} bucket 0", round=what), lambda lane: None))

    def there(self) -> AbstractContextManager[object]:
        """The context in which gradients are copied: that of the GPU, whose kernels are issued inside."""
        gpu = self.contents.gpu
        if gpu is None:
            return contextlib.nullcontext()
        return cast("AbstractContextManager[object]", gpu.xp.cuda.Device(gpu.number))


def agree(lane: Lane, name: str, contents: Contents, mine: Iterable[Use]) -> list[Use]:
    """The largest use over ranks for each variable. Collective; compares the ranks' variables first."""
    uses = np.array([int(use) for use in mine], np.uint8)

    def work(at: Workplace) -> None:
        allreduce(at.transport, at.workspace, at.place, uses, Reduction("max"))

    # Named as the reducer names a plan and a round's first bucket, whichever the other ranks are about to ask for.
    settings = contents.settings
    facts = (
        ("parameters", tuple(spec.line for spec in contents.specs)),
        ("terms", settings.terms),
        (MODE, settings.replica_check),
    )
    lane.run(Request(Signature("plan", f"{name} bucket 0", facts), work))
    return [Use(int(use)) for use in uses]


def reduce_now(
    exchange: Exchange, gradients: Sequence[TensorT | None], to_array: Callable[[TensorT], Array],
    to_tensors: Callable[[Sequence[Array]], Sequence[TensorT]], absent: Use = Use.UNUSED,
) -> list[TensorT | None]:
    """Reduce dense gradients at once. Waits for all ranks.

    Args:
        exchange: The exchange of these gradients' variables.
        gradients: This rank's; those of sparse variables are returned as they are.
        to_array: Converts a tensor; need not copy.
        to_tensors: Converts results, which the next round overwrites.
        absent: See `Exchange.finish`.

    Returns:
        The gradients, in the same order; None for variables that no rank has a gradient for.
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
