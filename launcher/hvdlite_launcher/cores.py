"""How many cores this process may use: those it is bound to, or fewer where a container has a share of their time."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")  # inside a container, its own


def cores() -> int:
    """At least 1; rounded up."""
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), share(_CGROUPS))))


def share(folder: Path) -> float:
    """Cores' worth of time that a control group may use, as Docker's --cpus and Kubernetes' limits set it; infinity
    where nothing says so."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()  # version 2
        return math.inf if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota, period = ((folder / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return math.inf if int(quota) < 0 else int(quota) / int(period)
    return math.inf
