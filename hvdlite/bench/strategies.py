"""The strategies benchmark: how soon each strategy reaches a loss on this network, and with a slow rank.

All strategies train the same model from the same seeds, with the same batches on each rank and the same SGD with
momentum. The learning rate rises for a tenth of the updates, and then falls to zero. The ranks compute for `compute`
seconds per update: a sleep before forward, so that few cores can have many ranks. A slow rank sleeps longer.

    s to loss      until the held-out loss of the ranks' average model is the target: the loss of synchronous training
                   after 80 % of its time. Measured in the runs themselves; losses are means of the seeds
    ms/update      time of the run * ranks / updates of all ranks
    accuracy       of `average_parameters` at the end of the run, held out
    KB             per update, what the busiest host's interfaces sent, with headers and acknowledgements

All strategies make equally many updates, ranks taken together. Where no rank waits for another, fast ranks make more of
them, as `hvd.WorkQueue` would deal batches. During a run, each rank copies its weights now and then. Afterwards, losses
are computed from averages of the ranks' last copies.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TypeAlias, TypedDict

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import hvdlite.torch as hvd
from hvdlite.bench.compression import MOMENTUM, crossing, rate, tested
from hvdlite.bench.network import bytes_sent
from hvdlite.bench.problems import PROBLEMS, Problem
from hvdlite.bench.saved import content_of, rows_of
from hvdlite.bench.step import stepper
from hvdlite.bench.style import Band
from hvdlite.bench.timing import Floats, Progress, quartiles
from hvdlite.errors import HvdliteError
from hvdlite.strategies import Strategy

SYNCHRONOUS = "synchronous"
STRATEGIES: dict[str, tuple[str, Strategy | None]] = {
    "synchronous": ("synchronous", None),
    "local": ("local SGD, every 8", hvd.LocalSGD(sync_every=8)),
    "diloco": ("DiLoCo, every 8", hvd.DiLoCo(8, hvd.OuterSGD(0.7, 0.5))),  # 0.9 is for rarer outer steps: it overshoots
    "ring": ("D-PSGD, ring", hvd.Neighbors(hvd.RingGraph)),
    "one_peer": ("D-PSGD, one peer", hvd.Neighbors(hvd.OnePeerExponential())),
    "age": ("bounded staleness, age 4", hvd.BoundedStaleness(age=4)),
}
"""The title in tables, and the strategy, by name."""
WITHOUT_WAITING = ("age",)
"""The strategies in which a rank that stays slow does not slow the others."""
COPIES = 40  # of the weights in a run
NEAR = 2  # losses on each side: single ones scatter
TARGET = 0.8  # of synchronous training's time


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        seconds: When the loss was measured, from the start.
        losses: The held-out losses of the average model.
        accuracy: The held-out accuracy at the end.
        update: Seconds per update.
        wire: Bytes that the busiest host sent per update; 0 on one host.
    """

    seconds: list[float]
    losses: list[float]
    accuracy: float
    update: float
    wire: float


@dataclass(frozen=True)
class Row:
    """The results of one strategy under one condition.

    Attributes:
        condition: The network and the slow rank, in words.
        strategy: The strategy, by its name in STRATEGIES.
        runs: A training for each seed.
    """

    condition: str
    strategy: str
    runs: list[Run] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The strategy in tables."""
        return STRATEGIES[self.strategy][0]

    @property
    def accuracy(self) -> float:
        """The mean of the seeds."""
        return fmean(run.accuracy for run in self.runs)

    @property
    def update(self) -> float:
        """Median seconds per update."""
        return median(run.update for run in self.runs)

    @property
    def wire(self) -> float:
        """Median bytes per update."""
        return median(run.wire for run in self.runs)

    @property
    def seconds(self) -> list[float]:
        """The times of `losses`; each is the mean of the seeds."""
        return [fmean(each) for each in zip(*(run.seconds for run in self.runs), strict=True)]

    @property
    def losses(self) -> list[float]:
        """The mean losses of the seeds; each is the median of itself and its nearest NEAR on both sides."""
        return smooth([fmean(each) for each in zip(*(run.losses for run in self.runs), strict=True)])

    @property
    def band(self) -> Band:
        """The quartiles of the seeds' own losses, each of them smoothed like `losses`."""
        every = zip(*(smooth(run.losses) for run in self.runs), strict=True)
        low, high = zip(*map(quartiles, every), strict=True)
        return low, high

    @property
    def target(self) -> float:
        """The loss after TARGET of the time."""
        return float(np.interp(TARGET * self.seconds[-1], self.seconds, self.losses))

    def time_to(self, target: float) -> float | None:
        """The first time at which the loss is the target, by linear interpolation; None if it never is."""
        return crossing(self.seconds, self.losses, target)


def smooth(losses: Sequence[float]) -> list[float]:
    """Each loss becomes the median of itself and its nearest NEAR on both sides."""
    return [median(losses[max(0, place - NEAR) : place + NEAR + 1]) for place in range(len(losses))]


Rows: TypeAlias = dict[tuple[str, str], Row]
"""The results, by condition and strategy."""


class RunJson(TypedDict):
    """A `Run` in a JSON file."""

    seconds: list[float]
    losses: list[float]
    accuracy: float
    update: float
    wire: float


@dataclass(frozen=True)
class Course:
    """What is to be measured.

    Attributes:
        problem: The problem's name.
        strategies: The strategies' names.
        seeds: Trainings of each strategy.
        steps: Updates of each rank.
        compute: Seconds of sleep per update.
        slow: The slow rank, and how many times as long it sleeps; None: there is none.
        link: The name of this network.
        earlier: The results under other conditions.
    """

    problem: str
    strategies: Sequence[str]
    seeds: int
    steps: int
    compute: float
    slow: tuple[int, float] | None
    link: str
    earlier: Rows = field(default_factory=dict)

    @property
    def condition(self) -> str:
        """The network and the slow rank, in words."""
        return f"{self.link}, rank {self.slow[0]} computes {self.slow[1]:g} times as long" if self.slow else self.link

    def slowness(self, rank: int) -> float:
        """How many times as long as the others a rank computes."""
        return self.slow[1] if self.slow and rank == self.slow[0] else 1.0

    def require_slow_rank(self, size: int) -> None:
        """Raise HvdliteError unless the slow rank is one of `size` ranks."""
        if self.slow and self.slow[0] not in range(size):
            raise HvdliteError(f"--slow {self.slow[0]}:{self.slow[1]:g}: there are ranks 0 to {size - 1}")

    def updates(self, key: str, rank: int, size: int) -> int:
        """The updates of a rank.

        Args:
            key: The strategy.
            rank: The rank.
            size: The number of ranks.
        """
        if key not in WITHOUT_WAITING:
            return self.steps
        speeds = [1 / self.slowness(other) for other in range(size)]
        return round(self.steps * size * speeds[rank] / sum(speeds))


def compare(comm: MPI.Comm, course: Course, progress: Progress) -> Rows:
    """Train with all strategies in turns. Collective; waits for all ranks.

    Args:
        comm: All ranks.
        course: What is to be measured.
        progress: Called before each training.

    Returns:
        The results, equal on all ranks, with those of `course.earlier`.

    Raises:
        HvdliteError: The data of the problem is missing, or there is no such slow rank.
    """
    course.require_slow_rank(comm.Get_size())
    torch.set_num_threads(1)
    problem = PROBLEMS[course.problem]()
    keys = list(dict.fromkeys((SYNCHRONOUS, *course.strategies)))
    rows = {key: Row(course.condition, key) for key in keys}
    for seed in range(course.seeds):
        order = keys[seed % len(keys) :] + keys[: seed % len(keys)]
        for place, key in enumerate(order):
            progress(seed * len(keys) + place, len(keys) * course.seeds, f"{course.condition}: {key}, seed {seed}")
            rows[key].runs.append(trained(problem, key, seed, comm, course))
    return {**course.earlier, **{(course.condition, key): row for key, row in rows.items()}}


def trained(problem: Problem, key: str, seed: int, comm: MPI.Comm, course: Course) -> Run:
    """Train one model with one strategy. Collective.

    Args:
        problem: The problem.
        key: The strategy, of STRATEGIES.
        seed: Decides the first weights and the batches.
        comm: All ranks.
        course: What is to be measured.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    torch.manual_seed(seed)
    model = problem.build()
    optimizer = torch.optim.SGD(model.parameters(), problem.rate, momentum=MOMENTUM)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), strategy=STRATEGIES[key][1], replica_check="off"
    )  # learning rates of ranks that make different numbers of updates differ
    generator = torch.Generator().manual_seed((1 + seed) * size + rank)
    every = [course.updates(key, each, size) for each in range(size)]
    updates, sleep = every[rank], course.compute * course.slowness(rank)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, updates))
    album = Album(model)
    comm.Barrier()
    sent = bytes_sent()
    album.begin()
    for done in range(1, updates + 1):
        batch = problem.draw(generator)
        time.sleep(sleep)
        stepper(model, optimizer, batch)()
        rates.step()
        if done * COPIES // updates > (done - 1) * COPIES // updates:
            album.add()
    hvd.average_parameters(model)
    wire = comm.allreduce(bytes_sent() - sent, MPI.MAX) * size / sum(every)
    _, accuracy = tested(model, problem.held_out, comm)
    optimizer._hvdlite.detach()  # type: ignore[attr-defined]
    seconds = comm.allreduce(album.seconds[-1], MPI.MAX)
    moments = np.linspace(0, seconds, COPIES + 1)
    losses = [tested(album.average(moment, comm), problem.held_out, comm)[0] for moment in moments]
    return Run(moments.tolist(), losses, accuracy, seconds * size / sum(every), wire)


class Album:
    """Copies of a model's weights, made during a run.

    Attributes:
        model: The model.
        began: When the run began.
        seconds: When each copy was made, since then.
        copies: The weights, each as one vector.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.began = model, 0.0
        self.seconds: list[float] = []
        self.copies: list[torch.Tensor] = []

    def begin(self) -> None:
        """The run begins. Makes the first copy."""
        self.began = time.perf_counter()
        self.add(0.0)

    def add(self, second: float | None = None) -> None:
        """Make a copy. second: the time; None: now."""
        self.seconds.append(time.perf_counter() - self.began if second is None else second)
        self.copies.append(nn.utils.parameters_to_vector(self.model.parameters()).detach())

    def average(self, moment: float, comm: MPI.Comm) -> nn.Module:
        """The model with the average weights of all ranks at a moment of the run. Collective; overwrites the model."""
        last = int(np.searchsorted(self.seconds, moment, side="right")) - 1
        flat: Floats = self.copies[last].double().numpy()
        comm.Allreduce(MPI.IN_PLACE, flat, MPI.SUM)
        average = torch.from_numpy(flat / comm.Get_size()).float()
        nn.utils.vector_to_parameters(average, self.model.parameters())
        return self.model


def load(path: str) -> Rows:
    """Read the results of an earlier run.

    Args:
        path: The file that `--json` has written.

    Returns:
        The results.

    Raises:
        HvdliteError: The file has no such results.
    """
    return {(row.condition, row.strategy): row for row in rows_of(content_of(path), "strategies", read)}


def read(condition: str, strategy: str, runs: list[RunJson]) -> Row:
    """Make a row from its content in a JSON file."""
    return Row(condition, strategy, [Run(**each) for each in runs])


def conditions(rows: Sequence[Row]) -> dict[str, tuple[Row, list[Row]]]:
    """For each condition the results of synchronous training, and all results."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.condition, []).append(row)
    return {name: (next(row for row in its if row.strategy == SYNCHRONOUS), its) for name, its in found.items()}
