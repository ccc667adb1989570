"""The overlap benchmark: the part of the communication that overlaps with a long backward.

    local      gradients are copied to their buckets, and no bucket leaves
    end        all buckets leave at the end of backward
    hvdlite    the defaults, after hvdlite's trial of early buckets

Copies of each model take turns. `end - local` is the time of the communication, and `end - hvdlite` the hidden part:
the part that overlaps with backward. `schedule` computes the part that could be hidden with buckets of any size, from
the times at which backward has each gradient. The batch is enlarged until backward takes a multiple of the
communication.

If all cores compute, the communication's CPU time cannot be hidden. So the CPU time is measured too (`end - local`,
without the kernel's time for arriving packets). A machine that simulates several hosts has few cores. So each model has
two more rows: in the first only rank 0 computes, and the other ranks sleep in backward (`elsewhere`). In the second all
ranks sleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import hvdlite.torch as hvd
from hvdlite.bench.elsewhere import elsewhere
from hvdlite.bench.schedule import least_exposed
from hvdlite.bench.step import LEARNING_RATE, stepper
from hvdlite.bench.tasks import TASKS, Task, copy_of
from hvdlite.bench.timing import Action, Progress, Timing, interleaved, slowest_of
from hvdlite.errors import HvdliteError
from hvdlite.gradients.reducer import Reducer
from hvdlite.job import runtime

WARM_UP, TRIAL = 2, 3  # steps
TRIALS, NEAR = 3, 1.25
COPIES = ("local", "end", "hvdlite")


@dataclass(frozen=True)
class Result:
    """The results for one model.

    Attributes:
        name: The task.
        parameters: The number of the model's parameters.
        batch: Samples per rank.
        seconds: Median seconds of a forward pass ('forward') and of each copy's step.
        cpu: The communication's CPU time on one rank, in seconds per step.
        could: The communication that could be hidden, in seconds per step.
        quartiles: The hidden part in units of `could`: quartiles over the rounds.
        crowded: As in `timing.Timing`.
    """

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
        """The hidden part of the communication, in units of `could`."""
        return (self.seconds["end"] - self.seconds["hvdlite"]) / self.could


class Subject:
    """The copies of a model and their optimizers. Making one is collective.

    Attributes:
        task: The task.
        copies: The models, by copy.
        optimizers: The attached optimizers, by copy.
        cpu: The CPU time of all threads in the copies' steps, in seconds, by copy.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.copies = {key: copy_of(task) for key in COPIES}
        rates = dict.fromkeys(COPIES, LEARNING_RATE) | {"local": 0.0}  # the replica check compares ranks' weights
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
        """Time steps and forward passes in turns, after some that do not count. Collective."""
        actions: dict[str, Action] = {"forward": lambda: self.copies["local"](batch[0])}
        for key in COPIES:
            actions[key] = self.metered(key, stepper(self.copies[key], self.optimizers[key], batch))
        interleaved(actions, comm, WARM_UP, warm=False)
        self.cpu = dict.fromkeys(COPIES, 0.0)
        return interleaved(actions, comm, steps, warm=False)

    def settle(self, batch: Sequence[torch.Tensor]) -> None:
        """Make steps until the trial of early buckets is over. Collective."""
        step = stepper(self.copies["hvdlite"], self.optimizers["hvdlite"], batch)
        step()  # the reducer learns the order of gradients, and another reducer follows
        while self.reducer().departure.trial:
            step()

    def reducer(self, key: str = "hvdlite") -> Reducer:
        return self.optimizers[key]._hvdlite.reducer  # type: ignore[attr-defined, no-any-return]

    def metered(self, key: str, step: Callable[[], None]) -> Callable[[], None]:
        """The step, with its CPU time added to `cpu`."""

        def metered() -> None:
            before = time.process_time()
            step()
            self.cpu[key] += time.process_time() - before

        return metered


def arrivals(model: nn.Module, comm: MPI.Comm, batch: Sequence[torch.Tensor], steps: int) -> list[float]:
    """The time at which backward has each parameter's gradient. Collective.

    Returns:
        Seconds since backward began, by parameter: the slowest rank's, medians over steps.
    """
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
    """A context in which optimizers are attached as with HVDLITE_OVERLAP=0."""
    live = runtime.current()
    with live.configured(replace(live.config, overlap="0")):
        yield


@contextmanager
def clocked(model: nn.Module) -> Iterator[dict[torch.Tensor, float]]:
    """A context in which the time of each parameter's gradient is noted, by `time.perf_counter`."""
    clock: dict[torch.Tensor, float] = {}

    def note(p: torch.Tensor) -> None:
        clock[p] = time.perf_counter()

    hooks = [p.register_post_accumulate_grad_hook(note) for p in model.parameters()]  # type: ignore[no-untyped-call]
    yield clock
    for hook in hooks:
        hook.remove()


def measure(task: Task, comm: MPI.Comm, steps: int, multiple: float) -> Result:
    """Measure one model, with a batch for which backward takes about `multiple` times the communication. Collective."""
    subject = Subject(task)
    torch.manual_seed(1 + comm.Get_rank())
    batch = long_enough(subject, comm, multiple)
    subject = Subject(task)  # again, since the other one's trial had another batch
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
    """Enlarge the batch until backward takes about `multiple` times the communication. Collective.

    Several attempts are needed, because small batches take longer per sample.
    """
    count, longer = subject.task.count, 2 * NEAR
    for _ in range(TRIALS):
        if longer < NEAR:
            break
        trial = subject.timed(comm, subject.task.batch(count), TRIAL).seconds
        longer = multiple * (trial["end"] - trial["local"]) / (trial["local"] - trial["forward"])
        count = ceil(count * max(1.0, longer))
    return subject.task.batch(count)


def compare(comm: MPI.Comm, names: Sequence[str], steps: int, multiple: float, progress: Progress) -> list[Result]:
    """Measure the named tasks, each with three kinds of backward (see above). Collective; waits for all ranks.

    Ranks are not pinned, because that would pin the lanes' threads too.

    Args:
        comm: All ranks.
        names: The tasks, of `tasks.TASKS`.
        steps: Timed steps per copy.
        multiple: The batch is enlarged until backward takes so many times the communication.
        progress: Called before each row.

    Returns:
        Three results for each task, equal on all ranks.

    Raises:
        HvdliteError: No bucket leaves during backward.
    """
    torch.set_num_threads(1)
    results = []
    for done, name in enumerate(names):
        task = TASKS[name]
        progress(3 * done, 3 * len(names), task.name)
        results.append(measure(task, comm, steps, multiple))
        asleep = elsewhere(task, arrivals(copy_of(task), comm, task.batch(task.count), TRIAL))
        alone = replace(task if comm.Get_rank() == 0 else asleep, name=f"{task.name}, rank 0 alone")
        for part, each in enumerate((alone, asleep), 1):
            progress(3 * done + part, 3 * len(names), each.name)
            results.append(measure(each, comm, steps, multiple))
    return results
