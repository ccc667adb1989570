"""The overlap benchmark: how much of the communication hides behind a long backward.

    local      gradients are copied to their buckets, and no bucket leaves
    end        all buckets leave at the end of backward
    hvdlite    as users have it, after it has tried which is faster

Copies of each model take turns. `end - local` is the communication, `end - hvdlite` the hidden part. `schedule` tells
how much could hide, from the times at which backward has each gradient; that does not depend on buckets. The batch is
enlarged until backward takes a multiple of the communication.

If all cores compute, the communication's CPU time cannot hide. So it is measured as well (`end - local`, without the
kernel's time for arriving packets). One machine with several hosts has few cores. So each model has two more rows: in
one only rank 0 computes and the other ranks' backward sleeps (`elsewhere`), in the other all sleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import hvdlite.torch as hvd
from hvdlite.bench.elsewhere import elsewhere
from hvdlite.bench.schedule import least_exposed
from hvdlite.bench.step import LEARNING_RATE, stepper
from hvdlite.bench.tasks import TASKS, Task, copy_of
from hvdlite.bench.timing import Timing, interleaved, slowest_of
from hvdlite.errors import HvdliteError
from hvdlite.gradients.reducer import Reducer
from hvdlite.job import runtime

WARM_UP, TRIAL = 2, 3  # steps
TRIALS, NEAR = 3, 1.25
COPIES = ("local", "end", "hvdlite")


@dataclass(frozen=True)
class Result:
    """Seconds: the medians of forward passes and of steps, the communication's CPU time on one rank, what could hide,
    and what does, in quartiles over the rounds. batch: samples per rank; crowded: see Timing."""

    name: str
    parameters: int
    batch: int
    seconds: dict[str, float]
    cpu: float
    could: float
    quartiles: tuple[float, float, float]
    crowded: float

    @property
    def backward(self) -> float:
        return self.seconds["local"] - self.seconds["forward"]

    @property
    def communication(self) -> float:
        return self.seconds["end"] - self.seconds["local"]

    @property
    def hidden(self) -> float:
        """What was hidden, in units of what could be."""
        return (self.seconds["end"] - self.seconds["hvdlite"]) / self.could


class Subject:
    """A model's copies, their optimizers, and what takes turns. Making one is collective."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.copies = {key: copy_of(task) for key in COPIES}
        rates = dict.fromkeys(COPIES, LEARNING_RATE) | {"local": 0.0}  # ranks' weights are compared now and then
        self.optimizers = {key: torch.optim.SGD(self.copies[key].parameters(), rates[key]) for key in COPIES}
        self.cpu = dict.fromkeys(COPIES, 0.0)
        hvd.DistributedOptimizer(self.optimizers["hvdlite"])
        with without_overlap():
            hvd.DistributedOptimizer(self.optimizers["end"])
            hvd.DistributedOptimizer(self.optimizers["local"])
        vars(self.reducer("local"))["send_rest"] = lambda *_: None
        if not self.reducer().overlap:
            raise HvdliteError("on one host no bucket leaves during backward: run on several, or set HVDLITE_OVERLAP=1")

    def timed(self, comm: MPI.Comm, batch: Sequence[torch.Tensor], steps: int) -> Timing:
        """Steps and forward passes in turns, after some that do not count. Collective."""
        actions: dict[str, Callable[[], Any]] = {"forward": lambda: self.copies["local"](batch[0])}
        for key in COPIES:
            actions[key] = self.metered(key, stepper(self.copies[key], self.optimizers[key], batch))
        interleaved(actions, comm, WARM_UP, warm=False)
        self.cpu = dict.fromkeys(COPIES, 0.0)
        return interleaved(actions, comm, steps, warm=False)

    def settle(self, batch: Sequence[torch.Tensor]) -> None:
        """Steps until it is decided, by trying, whether buckets leave during backward. Collective."""
        step = stepper(self.copies["hvdlite"], self.optimizers["hvdlite"], batch)
        step()  # learns the order of gradients, for another reducer
        while self.reducer().departure.trial:
            step()

    def reducer(self, key: str = "hvdlite") -> Reducer:
        return self.optimizers[key]._hvdlite.reducer  # type: ignore[attr-defined, no-any-return]

    def metered(self, key: str, step: Callable[[], None]) -> Callable[[], None]:
        """The step, whose CPU time, of all threads, is added up."""

        def metered() -> None:
            before = time.process_time()
            step()
            self.cpu[key] += time.process_time() - before

        return metered


def arrivals(model: nn.Module, comm: MPI.Comm, batch: Sequence[torch.Tensor], steps: int) -> list[float]:
    """When backward has each parameter's gradient: seconds since its beginning, medians over steps of the slowest
    rank. Collective."""
    times = []
    for _ in range(steps):
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        with clocked(model) as clock:
            began = time.perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
        times.append([clock[p] - began for p in model.parameters()])
    model.zero_grad()
    return list(np.median(slowest_of(comm, times), axis=0).tolist())


@contextmanager
def without_overlap() -> Iterator[None]:
    """Optimizers attached inside are so as if HVDLITE_OVERLAP=0 were set."""
    live = runtime.current()
    before, live.config = live.config, replace(live.config, overlap="0")
    yield
    live.config = before


@contextmanager
def clocked(model: nn.Module) -> Iterator[dict[torch.Tensor, float]]:
    """When each parameter's gradient was there (time.perf_counter)."""
    clock: dict[torch.Tensor, float] = {}

    def note(p: torch.Tensor) -> None:
        clock[p] = time.perf_counter()

    hooks = [p.register_post_accumulate_grad_hook(note) for p in model.parameters()]  # type: ignore[no-untyped-call]
    yield clock
    for hook in hooks:
        hook.remove()


def measure(task: Task, comm: MPI.Comm, steps: int, multiple: float) -> Result:
    """One model, with a batch for which backward takes about `multiple` times the communication. Collective."""
    subject = Subject(task)
    torch.manual_seed(1 + comm.Get_rank())
    batch = long_enough(subject, comm, multiple)
    subject = Subject(task)  # whose trial was at another batch
    subject.settle(batch)
    timing = subject.timed(comm, batch, steps)
    communication = timing.seconds["end"] - timing.seconds["local"]
    model = copy_of(task)
    nbytes = [p.numel() * p.element_size() for p in model.parameters()]
    could = communication - least_exposed(nbytes, arrivals(model, comm, batch, TRIAL), communication)
    hidden = (timing.rounds["end"] - timing.rounds["hvdlite"]) / could
    low, middle, high = np.percentile(hidden, (25, 50, 75)).tolist()
    cpu = (subject.cpu["end"] - subject.cpu["local"]) / steps
    parameters = sum(p.numel() for p in model.parameters())
    return Result(task.name, parameters, len(batch[0]), timing.seconds, cpu, could, (low, middle, high), timing.crowded)


def long_enough(subject: Subject, comm: MPI.Comm, multiple: float) -> Sequence[torch.Tensor]:
    """A batch, enlarged until that is near, for short ones take longer per sample. Collective."""
    count, longer = subject.task.count, 2 * NEAR
    for _ in range(TRIALS):
        if longer < NEAR:
            break
        trial = subject.timed(comm, subject.task.batch(count), TRIAL).seconds
        longer = multiple * (trial["end"] - trial["local"]) / (trial["local"] - trial["forward"])
        count = ceil(count * max(1.0, longer))
    return subject.task.batch(count)


def compare(comm: MPI.Comm, names: Sequence[str], steps: int, multiple: float, progress: Any) -> list[Result]:
    """Measure the named tasks, each also with its backward elsewhere for all ranks but 0, and for all. Collective.
    Ranks are not pinned: lanes' threads would be, too.

    progress: called with (done, total, text). Raises HvdliteError where nothing leaves during backward.
    """
    torch.set_num_threads(1)
    results = []
    for done, name in enumerate(names):
        progress(done, len(names), name)
        task = TASKS[name]
        results.append(measure(task, comm, steps, multiple))
        batch = task.batch(task.count)
        asleep = elsewhere(task, arrivals(copy_of(task), comm, batch, TRIAL))
        alone = replace(task if comm.Get_rank() == 0 else asleep, name=f"{task.name}, rank 0 alone")
        results += [measure(each, comm, steps, multiple) for each in (alone, asleep)]
    return results
