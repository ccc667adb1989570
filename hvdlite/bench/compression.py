"""The compression benchmark: what lossy compression of gradients costs in accuracy, and saves in time.

Each compressor trains the same models (`problems`) from the same seeds: equal first weights, equal batches, and one
schedule for all. That is SGD with momentum; the learning rate rises for a tenth of the steps, and then falls to zero.

    steps to target      where the held-out loss first is the target; the target is the loss of the same seed without
                         compression after 80 % of its steps
    seconds per step     the median of a few steps of the slowest rank; compressors take turns
    seconds to target    steps to target * seconds per step: a product, and not the time of a run

The speed of the network does not change the weights. So each curve is trained once, on any network, and only the
seconds per step are measured on each network. `earlier` results give the curves, and the times on other networks. Bytes
are those that the busiest host's interfaces sent, with headers and acknowledgements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean
from typing import NotRequired, TypeAlias, TypedDict

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import hvdlite.torch as hvd
from hvdlite.bench.network import most_sent
from hvdlite.bench.problems import PROBLEMS, Batch, Problem
from hvdlite.bench.saved import content_of, rows_of
from hvdlite.bench.step import stepper
from hvdlite.bench.style import Band
from hvdlite.bench.timing import Action, Progress, Quartiles, interleaved, quartiles
from hvdlite.compression.powersgd import PowerSGD
from hvdlite.gradients.compression import Compressor, Lossy, lossy_of
from hvdlite.gradients.reducer import Reducer
from hvdlite.gradients.traffic import traffic_of
from hvdlite.torch import Compression as Given

PLAIN = "none"
MOMENTUM, WARM_UP = 0.9, 0.1
LOOKS = 10  # at the held-out loss in a training
TARGET = 0.8  # of the steps without compression
SETTLING = 12  # steps
COUNTED = 3  # steps whose bytes are counted
COMPRESSORS: dict[str, tuple[str, type[Compressor] | Lossy]] = {
    "none": ("none", Given.none),
    "fp16": ("fp16", Given.fp16),
    "bf16": ("bf16", Given.bf16),
    "int8": ("int8", Given.int8()),
    "int4": ("int8, 4 bits", Given.int8(bits=4)),
    "onebit": ("1 bit", Given.onebit()),
    "topk": ("Top-K 1 %", Given.topk(ratio=0.01)),
    "dgc": ("Top-K 1 %, momentum", Given.topk(ratio=0.01, momentum=MOMENTUM)),
    "randomk": ("random-K 1 %", Given.randomk(ratio=0.01)),
    "powersgd": ("PowerSGD, rank 2", Given.powersgd(rank=2)),
    "powersgd4": ("PowerSGD, rank 4", Given.powersgd(rank=4)),
    "auto": ("auto", Given.auto()),
}
"""The title in tables, and the compressor, by name."""


@dataclass(frozen=True)
class Curve:
    """One training.

    Attributes:
        steps: The steps after which the held-out loss was measured.
        losses: The losses.
        accuracy: The held-out accuracy at the end.
    """

    steps: list[int]
    losses: list[float]
    accuracy: float

    @property
    def target(self) -> float:
        """The loss after TARGET of the steps."""
        return next(loss for step, loss in zip(self.steps, self.losses, strict=True) if step >= TARGET * self.steps[-1])

    def reaches(self, target: float) -> float | None:
        """The first step at which the loss is the target, by linear interpolation; None if it never is."""
        return crossing(self.steps, self.losses, target)


@dataclass(frozen=True)
class Speed:
    """The steps of one compressor on one network.

    Attributes:
        seconds: Median seconds per step of the slowest rank.
        wire: Bytes that the busiest host sent per step; 0 on one host.
        gradients: Bytes of gradients that the busiest rank sends to other hosts per step, without headers.
        spread: The quartiles of the seconds per step; None: an older version has measured them.
    """

    seconds: float
    wire: float
    gradients: float
    spread: Quartiles | None = None


@dataclass(frozen=True)
class Row:
    """The results of one compressor for one problem.

    Attributes:
        problem: The problem, by its name in `problems.PROBLEMS`.
        compressor: The compressor, by its name in COMPRESSORS.
        curves: A training for each seed.
        speeds: The steps, by network.
    """

    problem: str
    compressor: str
    curves: list[Curve]
    speeds: dict[str, Speed] = field(default_factory=dict)

    @property
    def accuracy(self) -> float:
        """The mean of the seeds."""
        return mean(curve.accuracy for curve in self.curves)

    @property
    def title(self) -> str:
        """The compressor in tables."""
        return COMPRESSORS[self.compressor][0]

    @property
    def curve(self) -> tuple[list[int], list[float], Band]:
        """The steps, the mean losses of the seeds, and their quartiles."""
        losses = list(zip(*(curve.losses for curve in self.curves), strict=True))
        low, high = zip(*map(quartiles, losses), strict=True)
        return self.curves[0].steps, [mean(each) for each in losses], (low, high)

    def steps_to_target(self, plain: Row) -> list[float]:
        """For each seed that reaches the loss of the same seed without compression, the steps until there."""
        found = (mine.reaches(theirs.target) for mine, theirs in zip(self.curves, plain.curves, strict=True))
        return [steps for steps in found if steps is not None]

    def seconds_to_target(self, plain: Row, link: str) -> float | None:
        """The mean of the seeds on one network; None if a seed does not reach its target."""
        seconds = self.seconds_of_seeds(plain, link)
        return mean(seconds) if len(seconds) == len(self.curves) else None

    def seconds_of_seeds(self, plain: Row, link: str) -> list[float]:
        """For each seed that reaches its target, the seconds until there on one network.

        The first steps of PowerSGD are exact, and take as long as those without compression.
        """
        how = lossy_of(COMPRESSORS[self.compressor][1])
        first, slow, fast = how.start_step if isinstance(how, PowerSGD) else 0, plain.speeds[link], self.speeds[link]
        exact = [min(steps, first) for steps in self.steps_to_target(plain)]
        every = zip(self.steps_to_target(plain), exact, strict=True)
        return [its * slow.seconds + (steps - its) * fast.seconds for steps, its in every]

    def faster(self, plain: Row, link: str) -> tuple[float, Quartiles] | None:
        """How many times as fast as without compression the target is reached on one network.

        Returns:
            The ratio of the seeds' means, and the quartiles of the seeds' own ratios. None: a seed does not reach its
            target, or there are no times on this network.
        """
        if link not in self.speeds or len(self.steps_to_target(plain)) < len(self.curves):
            return None
        theirs, mine = plain.seconds_of_seeds(plain, link), self.seconds_of_seeds(plain, link)
        return mean(theirs) / mean(mine), quartiles(np.divide(theirs, mine))


class CurveJson(TypedDict):
    """A `Curve` in a JSON file."""

    steps: list[int]
    losses: list[float]
    accuracy: float


class SpeedJson(TypedDict):
    """A `Speed` in a JSON file."""

    seconds: float
    wire: float
    gradients: float
    spread: NotRequired[Quartiles]


Rows: TypeAlias = dict[tuple[str, str], Row]
"""The results, by problem and compressor."""


@dataclass(frozen=True)
class Course:
    """What is to be measured.

    Attributes:
        problems: The problems' names.
        compressors: The compressors' names. `none` is among them.
        seeds: Trainings of each compressor.
        steps: Steps of a training; None: each problem's own number.
        timed: Timed steps.
        link: The name of this network.
        earlier: The results of an earlier run: curves that need no training, and times on other networks.
    """

    problems: Sequence[str]
    compressors: Sequence[str]
    seeds: int
    steps: int | None
    timed: int
    link: str
    earlier: Rows = field(default_factory=dict)


def compare(comm: MPI.Comm, course: Course, progress: Progress) -> Rows:
    """Train all models that have no curves yet, and time steps on this network. Collective; waits for all ranks.

    Ranks are not pinned, because that would pin the lanes' threads too.

    Args:
        comm: All ranks.
        course: What is to be measured.
        progress: Called before each training, and before each problem's timing.

    Returns:
        The results, equal on all ranks, with those of `course.earlier`.

    Raises:
        HvdliteError: The data of a problem is missing.
    """
    torch.set_num_threads(1)
    rows, done = dict(course.earlier), 0
    keys = list(dict.fromkeys((PLAIN, *course.compressors)))
    missing = [(name, key) for name in course.problems for key in keys if (name, key) not in rows]
    every = len(missing) * course.seeds + len(course.problems)
    for name in course.problems:
        problem = PROBLEMS[name]()
        for key in keys:
            if (name, key) in missing:
                curves = []
                for seed in range(course.seeds):
                    progress(done, every, f"{problem.name}: {COMPRESSORS[key][0]}, seed {seed}")
                    curves.append(trained(problem, key, seed, comm, course.steps or problem.steps))
                    done += 1
                rows[name, key] = Row(name, key, curves)
        progress(done, every, f"{problem.name}: seconds per step, {course.link}")
        for key, speed in speeds(problem, keys, comm, course.timed).items():
            rows[name, key].speeds[course.link] = speed
        done += 1
    return rows


def crossing(places: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """The first place at which a loss is the target, by linear interpolation; None if it never is."""
    for (before, high), (after, low) in pairwise(zip(places, losses, strict=True)):
        if high <= target:
            return float(before)
        if low <= target:
            return before + (after - before) * (high - target) / (high - low)
    return None


def trained(problem: Problem, key: str, seed: int, comm: MPI.Comm, steps: int) -> Curve:
    """Train one model with one compressor. Collective.

    Args:
        problem: The problem.
        key: The compressor, of COMPRESSORS.
        seed: Decides the first weights and the batches.
        comm: All ranks.
        steps: The number of steps.
    """
    torch.manual_seed(seed)
    model = problem.build()
    optimizer = attached(model, key, problem.rate)
    generator = torch.Generator().manual_seed((1 + seed) * comm.Get_size() + comm.Get_rank())
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    looks = {max(1, steps * look // LOOKS) for look in range(1, LOOKS + 1)}
    curve = Curve([], [], 0.0)
    for step in range(1, steps + 1):
        stepper(model, optimizer, problem.draw(generator))()
        rates.step()
        if step in looks:
            loss, accuracy = tested(model, problem.held_out, comm)
            curve = Curve([*curve.steps, step], [*curve.losses, loss], accuracy)
    return curve


def attached(model: nn.Module, key: str, rate: float) -> torch.optim.Optimizer:
    """SGD with momentum, attached with a compressor of COMPRESSORS. Collective.

    If the compressor has the momentum of the gradients that it compresses, the optimizer has that of the others.
    """
    compressor = COMPRESSORS[key][1]
    how = lossy_of(compressor)
    inside = dict.fromkeys(p for p in model.parameters() if how and how.momentum and how.fits(tuple(p.shape)))
    outside = [p for p in model.parameters() if p not in inside]
    optimizer = torch.optim.SGD(outside, rate, momentum=MOMENTUM)
    if inside:
        optimizer.add_param_group({"params": [*inside], "momentum": 0.0})
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compressor)


def rate(step: int, steps: int) -> float:
    """The part of the learning rate in a step, counted from 0: it rises in a line, and falls in a line to zero."""
    rising = max(1, round(WARM_UP * steps))
    return min((step + 1) / rising, (steps - step) / (steps - rising + 1))


def tested(model: nn.Module, held_out: Batch, comm: MPI.Comm) -> tuple[float, float]:
    """The held-out loss and accuracy. Each rank tests a part of the samples. Collective."""
    inputs, labels = held_out
    rows = torch.arange(comm.Get_rank(), len(inputs), comm.Get_size())
    answers = labels.view(len(inputs), -1)[rows].flatten()  # one label per sample, or one per character
    with torch.no_grad():
        scores = model(inputs[rows])
        loss = nn.functional.cross_entropy(scores, answers, reduction="sum").item()
        right = int((scores.argmax(1) == answers).sum())
    return comm.allreduce(loss) / labels.numel(), comm.allreduce(right) / labels.numel()


def speeds(problem: Problem, keys: Iterable[str], comm: MPI.Comm, timed: int) -> dict[str, Speed]:
    """Time steps of all compressors in turns, and count their bytes. Collective.

    Args:
        problem: The problem.
        keys: The compressors, of COMPRESSORS.
        comm: All ranks.
        timed: Timed steps of each compressor.
    """
    actions: dict[str, Action] = {}
    reducers: dict[str, Callable[[], Reducer]] = {}
    for key in keys:
        torch.manual_seed(0)
        model = problem.build()
        optimizer = attached(model, key, problem.rate * WARM_UP)
        batch = problem.draw(torch.Generator().manual_seed(comm.Get_rank()))
        actions[key], reducers[key] = stepper(model, optimizer, batch), reducer_of(optimizer)
        settle(actions[key], reducers[key])
    timing = interleaved(actions, comm, timed, warm=False)
    found = {}
    for key, action in actions.items():
        reducer = reducers[key]()
        before = compressed_bytes(reducer)
        wire = most_sent(comm, action, COUNTED)
        gradients = traffic_of(reducer).exact + (compressed_bytes(reducer) - before) / COUNTED
        found[key] = Speed(timing.seconds[key], wire, comm.allreduce(gradients, MPI.MAX), timing.spread[key])
    return found


def reducer_of(optimizer: torch.optim.Optimizer) -> Callable[[], Reducer]:
    """A function that returns an attached optimizer's reducer; it changes after the first round."""
    return lambda: optimizer._hvdlite.reducer  # type: ignore[attr-defined]


def settle(step: Action, reducer: Callable[[], Reducer]) -> None:
    """Make steps until the trial of early buckets and PowerSGD's exact steps are over. Collective."""
    for _ in range(SETTLING):
        step()
    while reducer().departure.trial:
        step()


def compressed_bytes(reducer: Reducer) -> int:
    """The bytes that this rank has sent in compressed buckets so far."""
    parts = (bucket.part for bucket in reducer.lossy.buckets.values()) if reducer.lossy else ()
    return sum(part.column.sent_bytes for part in parts if part)


def load(path: str) -> Rows:
    """Read the results of an earlier run.

    Args:
        path: The file that `--json` has written.

    Returns:
        The results.

    Raises:
        HvdliteError: The file has no such results.
    """
    return {(row.problem, row.compressor): row for row in rows_of(content_of(path), "compression", read)}


def read(problem: str, compressor: str, curves: list[CurveJson], speeds: dict[str, SpeedJson]) -> Row:
    """Make a row from its content in a JSON file."""
    return Row(problem, compressor, [Curve(**each) for each in curves], {at: Speed(**speeds[at]) for at in speeds})
