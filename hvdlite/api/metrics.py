"""Metrics over all ranks' samples: sums and counts are added over the ranks, and divided once.

An average of the ranks' averages would be wrong where ranks have different numbers of samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol, Self, SupportsFloat, cast

import numpy as np

from hvdlite.algorithms import allreduce as reduce_over_ranks
from hvdlite.arrays import Array
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet
from hvdlite.lanes.calls import calling
from hvdlite.lanes.workplace import Workplace
from hvdlite.ops.common import Operation, Sum, reduction
from hvdlite.ops.stand_in import Zeros


class Lazy(Protocol):
    """A torch tensor. Arithmetic with it does not wait for its GPU; `float` does."""

    @property
    def is_cpu(self) -> bool: ...
    def detach(self) -> Self: ...
    def double(self) -> Self: ...
    def bool(self) -> Self: ...
    def numel(self) -> int: ...
    def reshape(self, shape: tuple[()]) -> Self: ...
    def __float__(self) -> float: ...
    def __add__(self, other: object) -> Self: ...
    def __radd__(self, other: object) -> Self: ...
    def __mul__(self, other: object) -> Self: ...
    def where(self, condition: object, other: float) -> Self: ...
    def __rmul__(self, other: object) -> Self: ...


class Metric:
    """A mean over the samples of all batches, and at `compute` over those of all ranks.

        loss = hvd.Metric()
        for images, labels in loader:
            ...
            loss.update(batch_loss, len(labels))
        hvd.print(f"loss {loss.compute():.4f}")

    Sums are kept in float64. A torch tensor stays on its GPU until `compute`, so that `update` does not wait for the
    GPU. Tensors of other frameworks are read at once.
    """

    _sum: float | Lazy
    _count: float | Lazy

    def __init__(self) -> None:
        Metric.reset(self)

    def update(self, value: object, count: object = 1) -> None:
        """Add a batch. Not collective.

        Args:
            value: The mean over the batch: a number, or a tensor with one element. The tensor may change afterwards.
            count: The number of samples, of the same types. With 0, the call does nothing, even if the value is nan.

        Raises:
            TypeError: An argument is not a number.
            ValueError: A tensor has more elements than one, or the count is negative (on a GPU: not noticed).
        """
        mean, samples = number(value, "value"), number(count, "count")
        if isinstance(samples, float) or samples.is_cpu:
            samples = float(samples)
            if samples < 0:
                raise ValueError(f"Metric.update(count={count!r}): a number of samples is not negative")
            if samples == 0:
                return
            self._sum = self._sum + mean * samples
        else:
            self._sum = self._sum + (samples * mean).where(samples.bool(), 0.0)  # nan * 0 is nan
        self._count = self._count + samples

    def compute(self, process_set: ProcessSet | None = None) -> float:
        """Return the mean over all ranks' samples. Collective; waits for all ranks of the process set.

        It changes nothing: call `reset` before the next epoch.

        Args:
            process_set: The ranks that take part. Default: all ranks.

        Returns:
            The mean; nan if no rank has any sample.
        """
        with calling("hvd.Metric.compute"):
            return average_metrics({"metric": self}, process_set)["metric"]

    def reset(self) -> None:
        """Forget all batches."""
        self._sum = self._count = 0.0

    def totals(self) -> tuple[float, float]:
        """This rank's sum and count. Waits for the GPU.

        Returns:
            The sum over all samples, and their number.
        """
        return float(self._sum), float(self._count)


def average_metrics(metrics: Mapping[str, object], process_set: ProcessSet | None = None) -> dict[str, float]:
    """Average metrics over all ranks' samples, with one all-reduce. Collective; waits for all ranks.

        metrics = hvd.average_metrics({"loss": (total, count), "accuracy": (right, count)})

    Args:
        metrics: By name, the same names on every rank: a tuple of this rank's sum over its samples and their number; an
            `hvd.Metric`; or a plain number, which counts once for each rank. Tensors with one element are numbers.
        process_set: The ranks that take part. Default: all ranks.

    Returns:
        By name, in the given order: the sum of all ranks' sums by the sum of all counts, in float64. nan if all counts
        are 0.

    Raises:
        MismatchError: A rank lacks a name that others have. Every rank raises it.
        TypeError: A value is none of these.
        ValueError: A tensor has more elements than one.
    """
    names = tuple(sorted(metrics))
    array = np.array([totals_of(name, metrics[name]) for name in names], np.float64).reshape(-1)
    with calling("hvd.average_metrics"):
        sums = added(array, names, process_set).reshape(-1, 2)
    found = dict(zip(names, sums.tolist(), strict=True))
    return {name: quotient(*found[name]) for name in metrics}


def quotient(total: float, count: float) -> float:
    """Return the quotient; nan without samples."""
    return total / count if count else math.nan


def added(array: Array, names: tuple[str, ...], process_set: ProcessSet | None) -> Array:
    """Add an array over the ranks, in place. The ranks compare the metrics' names. Returns the array."""
    group = runtime.group_of(process_set)
    how = reduction(Sum, group.size)

    def work(at: Workplace) -> Array:
        reduce_over_ranks(at.transport, at.workspace, at.place, array, how)
        return array

    facts = (("metrics", names),)
    return Operation(group, "average_metrics", None, facts, work, array, lambda: Zeros.like([array], how)).run()


def totals_of(name: str, metric: object) -> tuple[float, float]:
    """Return this rank's sum and count of a metric."""
    if isinstance(metric, Metric):
        return metric.totals()
    total, count = metric if isinstance(metric, tuple) and len(metric) == 2 else (metric, 1.0)
    return float(number(total, name)), float(number(count, f"{name} (count)"))


def number(value: object, name: str) -> float | Lazy:
    """Return a number as a float, and a torch tensor as a tensor without dimensions, in float64.

    Raises:
        TypeError: It is neither.
        ValueError: It has more elements than one.
    """
    if isinstance(value, (int, float)):
        return float(value)
    if hasattr(value, "detach"):
        tensor = cast(Lazy, value)
        if tensor.numel() != 1:
            raise ValueError(f"metric {name}: a tensor of {tensor.numel()} elements is no number: take its mean or sum")
        return tensor.detach().double().reshape(())
    shape = tuple(getattr(value, "shape", ()))
    if (elements := math.prod(shape)) != 1:
        raise ValueError(f"metric {name}: an array of {elements} elements is no number: take its mean or sum")
    if not isinstance(value, SupportsFloat):
        raise TypeError(
            f"metric {name}: {value!r} is no number. Give a number, a tensor with one element, a tuple (sum, count), "
            "or an hvd.Metric"
        )
    return float(np.asarray(value).item() if shape else value)
