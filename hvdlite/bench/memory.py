"""The memory benchmark: what an optimizer and its gradients take on each rank, and how long its step() takes.

The model has the parameters of GPT-2's smallest. Its gradients are made up, so that there are no activations: only
parameters, gradients, state and communication take memory and time.

    round 1:  A B C      a turn builds one contender, makes some steps and frees it: it needs memory for one at a time
    round 2:  A C B      the order changes, equally on all ranks

Memory is measured at the end of a turn, above that at its beginning. Times are of a turn's last steps, and the slowest
rank's. Ratios are of turns in the same round. After the first round all contenders must have the same weights.
"""

from __future__ import annotations

import ctypes
import gc
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hvdlite.torch as hvd
from hvdlite.bench.contenders import start_gloo
from hvdlite.bench.step import Weights, same_weights
from hvdlite.bench.timing import LIBC, Floats, Progress, Quartiles, crowding, pin, quartiles, slowest_of
from hvdlite.system.process_memory import data_bytes, reset_peak, resident_bytes

WARM_UP = 2  # steps of a turn; the first makes the state
LEARNING_RATE = 0.001
SAMPLES = 4096
"""So many elements of each parameter are compared."""


@dataclass(frozen=True)
class Shapes:
    """The size of a model with GPT-2's parameters: its width, its layers, and the lengths of its embeddings."""

    width: int
    layers: int
    words: int
    places: int


GPT2 = Shapes(768, 12, 50257, 1024)
SMALL, TINY = Shapes(256, 4, 4096, 1024), Shapes(64, 2, 512, 64)


@dataclass(frozen=True)
class Course:
    """What is to be measured.

    Attributes:
        keys: The contenders, of CONTENDERS.
        turns: The turns of each.
        steps: The timed steps of a turn.
        small: Whether the model is SMALL instead of GPT2.
        fused: Whether Adam is torch's fused one.
    """

    keys: Sequence[str]
    turns: int
    steps: int
    small: bool
    fused: bool


@dataclass(frozen=True)
class Row:
    """One contender.

    Attributes:
        title: Its name.
        state: The bytes of the optimizer's state, by rank.
        memory: The bytes that the contender takes after a step, by rank; shared memory counts in equal parts.
        peak: The most that it takes during the steps of a turn, by rank; 0 if Linux does not say.
        backward: Median seconds of zero_grad(), forward and backward().
        step: Median seconds of optimizer.step().
        ratios: By "step()" and "both" (backward and step()), and the other's key: the time in units of another
            contender's in the same round; of all rounds the lowest, the median and the highest.
        spread: The quartiles of the seconds of "backward" and "step", over all timed steps.
    """

    title: str
    state: list[int]
    memory: list[int]
    peak: list[int]
    backward: float
    step: float
    ratios: dict[str, dict[str, tuple[float, float, float]]]
    spread: dict[str, Quartiles] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """All contenders.

    Attributes:
        parameters: The number of the model's parameters.
        tensors: The number of tensors that they form.
        turns: The turns of each contender.
        steps: The timed steps of a turn.
        optimizer: The optimizer's name.
        rows: The contenders, by key.
        crowded: As in `timing.Timing`.
    """

    parameters: int
    tensors: int
    turns: int
    steps: int
    optimizer: str
    rows: dict[str, Row]
    crowded: float


# The model


class Made(torch.autograd.Function):
    """The identity of its first argument. The gradient of the second argument p is p plus a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: torch.Tensor, number: float) -> torch.Tensor:
        ctx.save_for_backward(p)
        ctx.number = number
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (p,) = ctx.saved_tensors
        return grads[0], p + ctx.number, None


class Part(nn.Module):
    """A part of the model: parameters of some shapes. number: the difference between gradients and parameters."""

    def __init__(self, shapes: Sequence[Sequence[int]], number: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.empty(*shape).uniform_(-0.1, 0.1) for shape in shapes)
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for p in self.weights:
            x = Made.apply(x, p, self.number)  # type: ignore[no-untyped-call]
        return x


def model_of(shapes: Shapes, number: float) -> nn.Sequential:
    """Make a model, with the same weights on every rank and in every turn: embeddings, layers, and the last norm."""
    torch.manual_seed(0)
    w = shapes.width
    norm, attention = [[w], [w]], [[w, 3 * w], [3 * w], [w, w], [w]]
    layer = [*norm, *attention, *norm, [w, 4 * w], [4 * w], [4 * w, w], [w]]
    layers = (Part(layer, number) for _ in range(shapes.layers))
    return nn.Sequential(Part([[shapes.words, w], [shapes.places, w]], number), *layers, Part(norm, number))


# The contenders


Adam: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Trainee: TypeAlias = tuple[nn.Module, torch.optim.Optimizer]
"""The model to call, and the optimizer."""


@dataclass(frozen=True)
class Contender:
    """A way to train. build: makes it of a model; collective."""

    title: str
    build: Callable[[nn.Sequential, Adam], Trainee]


def attached(sharded: bool | Literal["gradients"], model: nn.Sequential, adam: Adam) -> Trainee:
    return model, hvd.DistributedOptimizer(adam(model.parameters()), model.named_parameters(), sharded=sharded)


def in_ddp(model: nn.Sequential, adam: Adam) -> Trainee:
    return DistributedDataParallel(model, gradient_as_bucket_view=True), adam(model.parameters())


def in_zero(model: nn.Sequential, adam: Adam) -> Trainee:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, ZeroRedundancyOptimizer(model.parameters(), adam)  # type: ignore[arg-type]


def in_fsdp(model: nn.Sequential, adam: Adam) -> Trainee:
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")  # type: ignore[arg-type]
    for layer in [*model][1:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, adam(model.parameters())


CONTENDERS = {
    "unsharded": Contender("hvdlite, unsharded", partial(attached, False)),
    "sharded": Contender("hvdlite, sharded", partial(attached, True)),
    "gradients": Contender("hvdlite, gradients too", partial(attached, "gradients")),
    "ddp": Contender("DDP, gloo", in_ddp),
    "zero": Contender("torch's ZeRO, gloo", in_zero),
    "fsdp": Contender("FSDP2, gloo", in_fsdp),
}
AGAINST = ("unsharded", "sharded")
"""The contenders in whose units others are reported."""


# Turns


@dataclass(frozen=True)
class Turn:
    """What a rank has measured in one turn.

    Attributes:
        state: As in `Row`, of this rank.
        memory: The same.
        peak: The same.
        times: Seconds of backward and step(), by timed step.
        weights: Some elements of each parameter.
    """

    state: int
    memory: int
    peak: int
    times: Floats
    weights: Weights


def compare(comm: MPI.Comm, course: Course, pinned: bool, progress: Progress) -> Result:
    """Train all contenders in turns. Collective; waits for all ranks.

    Args:
        comm: All ranks.
        course: What is to be measured.
        pinned: Whether no two ranks share a core.
        progress: Called before each turn.

    Returns:
        The result, equal on all ranks.

    Raises:
        HvdliteError: The weights of two contenders differ.
    """
    torch.set_num_threads(1)
    start_gloo()
    if pinned:
        pin(comm)
    shapes, number = SMALL if course.small else GPT2, 0.05 * comm.Get_rank()
    adam = partial(torch.optim.Adam, lr=LEARNING_RATE, fused=course.fused or None)
    gc.freeze()  # the libraries' objects: collections are shorter without them
    order, shuffled, total = list(course.keys), random.Random(0), len(course.keys) * (course.turns + 1)
    for done, key in enumerate(order):  # libraries, threads and communicators that stay: not a contender's memory
        progress(done, total, f"{CONTENDERS[key].title}: warm-up")
        turn(CONTENDERS[key], partial(model_of, TINY, number), adam, comm, 1)
    turns: dict[str, list[Turn]] = {key: [] for key in course.keys}
    cores = []
    for _ in range(course.turns):
        shuffled.shuffle(order)  # the same seed, and so the same order, on every rank
        for key in order:
            progress(sum(map(len, turns.values())) + len(order), total, CONTENDERS[key].title)
            turns[key].append(turn(CONTENDERS[key], partial(model_of, shapes, number), adam, comm, course.steps))
            cores.append(LIBC.sched_getcpu())
    first, *others = course.keys
    for key in others:
        whose, who = f"that of {CONTENDERS[first].title}", CONTENDERS[key].title
        same_weights("GPT-2", turns[key][0].weights, turns[first][0].weights, whose, who)
    with torch.device("meta"):
        lengths = [p.numel() for p in model_of(shapes, number).parameters()]
    return Result(
        sum(lengths), len(lengths), course.turns, course.steps, "fused Adam" if course.fused else "Adam",
        rows(comm, turns), crowding(comm, np.array(cores)),
    )  # fmt: skip


def turn(contender: Contender, build: Callable[[], nn.Sequential], adam: Adam, comm: MPI.Comm, steps: int) -> Turn:
    """Build a contender, train it, and free it. Collective."""
    gc.collect()
    trim()
    comm.Barrier()  # until all ranks have freed what they shared
    before = data_bytes()
    comm.Barrier()
    inner = build()
    model, optimizer = contender.build(inner, adam)
    knows_peak, times, x = reset_peak(), np.empty((steps, 2)), torch.zeros((), requires_grad=True)
    for step in range(-WARM_UP, steps):
        comm.Barrier()
        began = time.perf_counter()
        optimizer.zero_grad()
        model(x).backward()
        ended = time.perf_counter()
        comm.Barrier()
        stepped = time.perf_counter()
        optimizer.step()
        if step >= 0:
            times[step] = ended - began, time.perf_counter() - stepped
    comm.Barrier()
    now, most = resident_bytes()
    peak = data_bytes() - before + most - now if knows_peak else 0  # what comes and goes is not shared
    trim()
    comm.Barrier()
    found = Turn(
        state_bytes(optimizer), data_bytes() - before, peak, slowest_of(comm, times),
        {name: some_of(p.detach()) for name, p in inner.named_parameters()},
    )  # fmt: skip
    comm.Barrier()  # before a rank frees what it shares, which makes the others' parts larger
    return found


def trim() -> None:
    """Give memory that is not in use back to Linux, if the C library is glibc."""
    if give_back := getattr(LIBC, "malloc_trim", None):
        give_back(ctypes.c_size_t(0))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all tensors of an optimizer's state on this rank."""
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    values = (value for its in inner.state.values() for value in its.values() if isinstance(value, torch.Tensor))
    return sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in values)


def some_of(p: torch.Tensor) -> torch.Tensor:
    """Return some elements of a whole parameter. Collective if it is sharded."""
    whole = p.full_tensor() if isinstance(p, DTensor) else p
    return whole.flatten()[:: max(1, whole.numel() // SAMPLES)].clone()


def rows(comm: MPI.Comm, turns: dict[str, list[Turn]]) -> dict[str, Row]:
    """Put all ranks' turns together. Collective."""
    found = {}
    for key, its in turns.items():
        mine = [int(np.median([getattr(each, what) for each in its])) for what in ("state", "memory", "peak")]
        state, memory, peak = (list(each) for each in zip(*comm.allgather(mine), strict=True))
        times = np.concatenate([each.times for each in its])
        backward, step = np.median(times, axis=0).tolist()
        spread = {"backward": quartiles(times[:, 0]), "step": quartiles(times[:, 1])}
        others = {other: turns[other] for other in AGAINST if other in turns and other != key}
        ratios = {
            what: {other: compared(its, theirs, parts) for other, theirs in others.items()}
            for what, parts in (("step()", [1]), ("both", [0, 1]))
        }
        found[key] = Row(CONTENDERS[key].title, state, memory, peak, backward, step, ratios, spread)
    return found


def compared(ours: Sequence[Turn], theirs: Sequence[Turn], parts: Sequence[int]) -> tuple[float, float, float]:
    """Return the lowest, median and highest ratio of times in one round. parts: the columns of `Turn.times`."""
    one, other = ([np.median(turn.times[:, parts].sum(axis=1)) for turn in turns] for turns in (ours, theirs))
    ratios = np.array(one) / np.array(other)
    return float(ratios.min()), float(np.median(ratios)), float(ratios.max())
