"""The bytes that a reducer's rounds send to other hosts, and what lossy compression has not sent yet."""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite.gradients.reducer import Reducer


@dataclass(frozen=True)
class Traffic:
    """The bytes of one round that a driver of this host sends, on average, and the residuals of this host.

    Attributes:
        exact: The bytes of buckets that travel exactly, by the price of the all-reduce.
        lossy: The bytes of compressed buckets, counted.
        plain: The bytes that these buckets would have without compression, by the price of the all-reduce.
        how: The compressor; "" without one.
        unsent: The norm of the residuals, divided by that of the hosts' mean gradient in the last round: the largest
            of this rank's buckets. None without error feedback.
    """

    exact: float
    lossy: float
    plain: float
    how: str
    unsent: float | None


def traffic_of(reducer: Reducer) -> Traffic:
    """The traffic of a reducer's last rounds. Waits for nobody."""
    lossy, place, plan = reducer.lossy, reducer.lane.place, reducer.plan
    hosts = lossy.hosts if lossy and lossy.names else max(len(place.hosts), 1)
    drivers = lossy.levels.drivers if lossy and lossy.names else min(map(len, place.hosts), default=1)
    share = 2 * (hosts - 1) / hosts / drivers
    nbytes = [bucket.length * bucket.dtype.itemsize * share for bucket in plan.buckets]
    exact = sum(each for each, bucket in zip(nbytes, plan.buckets, strict=True) if not bucket.lossy)
    if not lossy or not lossy.names:
        return Traffic(exact, 0.0, 0.0, "", None)
    parts = [bucket.part for bucket in lossy.buckets.values() if bucket.part]
    unsent = max((part.unsent for part in parts if part.unsent is not None), default=None)
    counted = sum(part.column.sent_bytes / part.rounds for part in parts if part.rounds)
    return Traffic(exact, counted, sum(nbytes) - exact, str(lossy.store.compressor), unsent)
