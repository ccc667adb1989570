"""Who waits in hvd.init(), and who will not come: a rank that has ended is waited for in vain, and no MPI tells."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from hvdlite_launcher.failures import ABSENT, Failure

SETTLED = 2.5  # seconds in which all hosts' news have come


@dataclass(frozen=True)
class Entry:
    """Of one host's ranks: those that have ended and come to no hvd.init(), and how long others have waited there, in
    seconds."""

    absent: tuple[int, ...] = ()
    waiting: float = 0.0


def entry(folder: str, settled: float = 0.0) -> Entry:
    """What keepers and ranks have noted in the job's folder. settled: for how many seconds ranks must have ended."""
    absent, waiting, now = [], 0.0, time.time()
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            kind, _, rank = name.partition(".")
            if kind in ("absent", "entering"):
                since = now - os.path.getmtime(os.path.join(folder, name))
                if kind == "entering":
                    waiting = max(waiting, since)
                elif since >= settled:
                    absent.append(int(rank))
    return Entry(tuple(absent), waiting)


def inside(folder: str, rank: int) -> bool:
    """Whether this rank of ours has come no further than hvd.init()."""
    return os.path.exists(os.path.join(folder, f"entering.{rank}"))


def deserter(entries: Mapping[str, Entry], patience: float) -> Failure | None:
    """The rank that others have waited for in vain for `patience` seconds. entries: by host, "" for ours."""
    absent = min(((rank, host) for host, each in entries.items() for rank in each.absent), default=None)
    if absent is None or max(each.waiting for each in entries.values()) <= patience:
        return None
    rank, host = absent
    return Failure(rank, 1, ABSENT, time.time(), host)
