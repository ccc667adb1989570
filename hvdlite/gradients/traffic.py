"""The bytes that a reducer's rounds send to other hosts, and what lossy compression has not sent yet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdlite.gradients.reducer import Reducer


@dataclass(frozen=True)
class Traffic:
    """The bytes of one round that a driver of this host sends, on average, and the residuals of this host.

    Attributes:
        exact: The bytes of buckets that travel exactly, by the price of the all-reduce.
        lossy: The bytes of compressed buckets, counted.
        plain: The bytes that these buckets would have without compression, by the price of the all-reduce.
        how: The compressor; "" without one.
        unsent: The norm of the residuals, divided by the norm of this round's mean gradient of a host; None without
            compressed rounds.
    """

    exact: float
    lossy: float
    plain: float
    how: str
    unsent: float | None


def traffic_of(reducer: Reducer) -> Traffic:
    """The traffic of a reducer's last rounds. Waits for nobody."""
    lossy, place, plan = reducer.lossy, reducer.lane.place, reducer.plan
    hosts = lossy.store.hosts[1] if lossy and lossy.names else max(len(place.hosts), 1)
    drivers = lossy.levels.drivers if lossy and lossy.names else min(map(len, place.hosts), default=1)
    share = 2 * (hosts - 1) / hosts / drivers
    nbytes = [bucket.length * bucket.dtype.itemsize * share for bucket in plan.buckets]
    exact = sum(each for each, bucket in zip(nbytes, plan.buckets, strict=True) if not bucket.lossy)
    if not lossy or not lossy.names:
        return Traffic(exact, 0.0, 0.0, "", None)
    parts = [bucket.part for bucket in lossy.buckets.values() if bucket.part]
    counted = sum(part.column.sent_bytes / part.rounds for part in parts if part.rounds)
    return Traffic(exact, counted, sum(nbytes) - exact, str(lossy.store.compressor), unsent(reducer))


def unsent(reducer: Reducer) -> float | None:
    """The norm of this host's residuals, divided by that of a host's mean gradient in the last round."""
    lossy, how = reducer.lossy, reducer.how
    assert lossy
    residual = sum(square(lossy.store.before(name).residual) for name in lossy.names)
    result = sum(square(np.asarray(reducer.buckets[number].buffer)) for number in lossy.buckets)
    mean = result**0.5 / lossy.store.scale() / (how.before * how.after / how.divisor) / lossy.store.hosts[1]
    return residual**0.5 / mean if mean else None


def square(values: np.ndarray) -> float:
    """The sum of squares."""
    wide = values.astype(np.float64)
    return float(wide @ wide)
