"""The training-step benchmark under Keras' `fit` on TensorFlow, beside PyTorch with the same number of bytes.

Two copies of each model take turns of a few steps: one without communication, and one with a distributed optimizer. The
overhead is the difference of their times. `bench.step` measures PyTorch's overhead in the same job. Each rank has one
thread, random data and plain SGD. Afterwards the ranks' weights must be equal.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import keras
import numpy as np
import tensorflow as tf
from mpi4py import MPI

import hvdlite.keras as hvd
from hvdlite.bench import step
from hvdlite.bench.timing import Floats, Progress, Quartiles, pin, quartiles, slowest_of
from hvdlite.errors import HvdliteError

TURN = 6  # steps per turn; the first does not count, since fit prepares its data
LEARNING_RATE = 0.001


@dataclass(frozen=True)
class Task:
    """A model, and the shapes of a batch for it."""

    name: str
    build: Callable[[], keras.Model]
    batch: tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """The times of one model.

    Attributes:
        name: The model.
        parameters: The number of its parameters.
        seconds: Median seconds per step under fit, by copy: 'none', 'hvdlite'.
        torch_overhead: hvdlite's overhead in PyTorch, in seconds per step, for a model with as many parameters.
        spread: The quartiles of the seconds, by copy.
    """

    name: str
    parameters: int
    seconds: dict[str, float]
    torch_overhead: float
    spread: dict[str, Quartiles] = field(default_factory=dict)

    @property
    def overhead(self) -> float:
        """hvdlite's overhead, in seconds per step."""
        return self.seconds["hvdlite"] - self.seconds["none"]


def mlp() -> keras.Model:
    """The model of `bench.tasks.mlp`: 10.5 million parameters in few large tensors."""
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((1024,)), *(dense(2048, "relu") for _ in range(3)), dense(10)])


def cnn() -> keras.Model:
    """The model of `bench.tasks.cnn`: 8 convolutions, few parameters, much arithmetic."""
    layers: list[keras.Layer] = [keras.Input((48, 48, 3))]
    for index, outputs in enumerate([16, 16, 32, 32, 64, 64, 64]):
        layers.append(keras.layers.Conv2D(outputs, 3, strides=1 + index % 2, padding="same", activation="relu"))
    layers += [keras.layers.Conv2D(64, 3, padding="same", activation="relu"), keras.layers.GlobalAveragePooling2D()]
    return keras.Sequential([*layers, keras.layers.Dense(10)])


TASKS = {"mlp": Task("MLP", mlp, (32, 1024)), "cnn": Task("CNN, 8 layers", cnn, (16, 48, 48, 3))}


class Clock(keras.callbacks.Callback):  # type: ignore[misc]
    """Measures the seconds of each step of fit, except the first."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if batch:
            self.seconds.append(time.perf_counter() - self.began)


def compare(comm: MPI.Comm, names: Sequence[str], steps: int, pinned: bool, progress: Progress) -> list[Result]:
    """Run the named tasks. Collective; waits for all ranks.

    Args:
        comm: All ranks.
        names: The tasks, of TASKS.
        steps: Timed steps per copy.
        pinned: Whether no two ranks share a core.
        progress: Called before each task.

    Returns:
        The results, equal on all ranks.

    Raises:
        HvdliteError: The ranks' weights differ afterwards.
    """
    if pinned:
        pin(comm)  # TensorFlow starts its threads later, so they stay on that core
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    found = {}
    for done, name in enumerate(names):
        progress(done, 2 * len(names), f"{name} under fit")
        found[name] = run(TASKS[name], comm, steps)
    beside = step.compare(
        comm, names, steps, pinned, lambda done, total, text: progress(total + done, 2 * total, f"{text} in PyTorch")
    )
    results = []
    for name, torch in zip(names, beside, strict=True):
        parameters, times = found[name]
        seconds = {key: float(np.median(its)) for key, its in times.items()}
        spread = {key: quartiles(its) for key, its in times.items()}
        results.append(Result(TASKS[name].name, parameters, seconds, torch.overhead["hvdlite"], spread))
    return results


def run(task: Task, comm: MPI.Comm, steps: int) -> tuple[int, dict[str, Floats]]:
    """Train the two copies in turns. Returns the number of parameters, and the seconds of all steps by copy."""
    rng = np.random.default_rng(hvd.rank())
    x = rng.normal(size=(TURN * task.batch[0], *task.batch[1:])).astype("float32")
    y = rng.integers(0, 10, len(x))
    models = {}
    for key in ("none", "hvdlite"):
        keras.utils.set_random_seed(0)
        models[key], optimizer = task.build(), keras.optimizers.SGD(LEARNING_RATE)
        optimizer = hvd.DistributedOptimizer(optimizer) if key == "hvdlite" else optimizer
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        models[key].compile(optimizer, loss, jit_compile=False)
    clocks = {key: Clock() for key in models}
    order, shuffled = list(models), random.Random(0)  # the same seed, and so the same order, on every rank
    for turn in range(1 + -(-steps // (TURN - 1))):
        shuffled.shuffle(order)
        for key in order:
            comm.Barrier()
            clock = clocks[key] if turn else Clock()  # the first turn warms up
            models[key].fit(x, y, batch_size=task.batch[0], shuffle=False, verbose=0, callbacks=[clock])
    same_weights(task.name, models["hvdlite"], comm)
    return models["none"].count_params(), {key: slowest_of(comm, clock.seconds) for key, clock in clocks.items()}


def same_weights(name: str, model: keras.Model, comm: MPI.Comm) -> None:
    """Raise HvdliteError if the ranks' weights differ: then the times mean nothing."""
    mine = [np.asarray(variable).tobytes() for variable in model.trainable_variables]
    if any(theirs != mine for theirs in comm.allgather(mine)):
        raise HvdliteError(f"{name}: the ranks' weights differ after the same steps. This is a bug.")
