"""One rank's record of its job, from which the summary of all ranks is made."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hvdlite.job.runtime import Runtime
from hvdlite.observers.meter import Stretch
from hvdlite.system.launcher_environment import launched_at
from hvdlite.system.process_age import seconds_since_start
from hvdlite.system.process_memory import resident_bytes


@dataclass(frozen=True)
class Beginning:
    """Where the time before the first step went, in seconds.

    Attributes:
        launch: From the start of hvdliterun to that of this process; 0.0 without hvdliterun.
        imports: From there to `hvd.init()`: Python starts, imports libraries, and may run an earlier job.
        init: `hvd.init()`, which waits for all ranks.
        first_step: From there to the end of the first step: data, models, compilation.
    """

    launch: float
    imports: float
    init: float
    first_step: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.launch + self.imports + self.init + self.first_step


@dataclass(frozen=True)
class Record:
    """One rank's record of its job. Times are in seconds, memory in bytes.

    Attributes:
        began: When `hvd.init()` began, by the process' monotonic clock. It tells jobs of one process apart.
        wall: The time since hvdliterun, or this process, has begun.
        beginning: The time before the first step.
        number: The number of training steps.
        samples: The samples that the user has counted.
        steps: The time from the first step on, without pauses.
        pauses: The pauses.
        peak: The largest amount of memory that the process has used.
        peak_on_gpu: The same for PyTorch's memory on the GPU; 0 without one.
    """

    began: float
    wall: float
    beginning: Beginning
    number: int
    samples: int
    steps: Stretch
    pauses: Stretch
    peak: int
    peak_on_gpu: int

    def since(self, earlier: Record) -> Record:
        """The record of the time after an earlier record. Peaks are those of the whole job."""
        return Record(
            self.began, self.wall - earlier.wall, self.beginning, self.number - earlier.number,
            self.samples - earlier.samples, self.steps - earlier.steps, self.pauses - earlier.pauses, self.peak,
            self.peak_on_gpu,
        )  # fmt: skip


def record(live: Runtime, peak_on_gpu: int) -> Record:
    """This rank's record up to now. Waits for nobody.

    Args:
        live: The job, which may be ending.
        peak_on_gpu: See `Record`.
    """
    steps, now, age = live.observers.steps, time.monotonic(), seconds_since_start()
    began = time.time() - age
    launch = max(began - launched_at(), 0.0) if launched_at() else 0.0
    first = now if steps.first is None else steps.first
    beginning = Beginning(launch, age - (now - steps.began), steps.ready - steps.began, first - steps.ready)
    return Record(
        steps.began, launch + age, beginning, steps.number, steps.samples, steps.steps, steps.pauses,
        resident_bytes()[1], peak_on_gpu,
    )  # fmt: skip
