"""The bytes that a reducer's rounds send to other hosts, and what lossy compression has not sent yet."""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite.gradients.reducer import Reducer


@dataclass(frozen=True)
class Traffic:
    """The bytes that this rank sends to other hosts in a round, and what its compressed parts have not sent.

    Attributes:
        exact: The bytes of buckets that travel exactly, by the price of the all-reduce.
        lossy: The bytes of compressed buckets, counted in the last round.
        plain: The bytes that these buckets would have without compression, by the price of the all-reduce.
        how: The compressor; "" without one.
        unsent: The norm of the residuals, divided by that of the host's sum of gradients in the last round: the largest
            of this rank's buckets. None without error feedback.
        dtypes: The dtypes in which gradients travel, such as "float32", or "bfloat16" with `hvd.Compression.bf16`.
    """

    exact: float
    lossy: float
    plain: float
    how: str
    unsent: float | None
    dtypes: str = ""


def traffic_of(reducer: Reducer) -> Traffic:
    """The traffic of a reducer's last rounds. Waits for nobody."""
    plan, place = reducer.plan, reducer.lane.place
    lossy = reducer.lossy if reducer.lossy and reducer.lossy.names else None
    hosts, drivers, sends = max(len(place.hosts), 1), min(map(len, place.hosts), default=1), True
    if lossy:
        hosts, drivers, sends = lossy.hosts, lossy.levels.drivers, lossy.levels.cross is not None
    share = 2 * (hosts - 1) / hosts / drivers if sends else 0.0
    nbytes = [bucket.length * bucket.dtype.itemsize * share for bucket in plan.buckets]
    exact = sum(each for each, bucket in zip(nbytes, plan.buckets, strict=True) if not bucket.lossy)
    dtypes = ", ".join(sorted({str(bucket.dtype) for bucket in plan.buckets}))
    if lossy is None:
        return Traffic(exact, 0.0, 0.0, "", None, dtypes)
    parts = [bucket.part for bucket in lossy.buckets.values() if bucket.part]
    unsent = max((part.unsent for part in parts if part.unsent is not None), default=None)
    counted = float(sum(part.sent_bytes for part in parts))
    return Traffic(exact, counted, sum(nbytes) - exact, str(lossy.store.compressor), unsent, dtypes)
