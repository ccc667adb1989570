"""With how many threads a rank computes: its share of the cores that the job may use on the rank's own host.

Each rank's keeper asks, since hosts differ, and the launching one may take no ranks at all. Whoever has started the
keeper, an MPI's daemon, may use all the host's cores that the job may. The keeper may use as many, or fewer where the
MPI has bound the rank to some: that is its share already, unless other ranks are bound to the same ones.
Imports the standard library only: it runs isolated from the user's Python settings.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping

_CGROUPS = "/sys/fs/cgroup"  # inside a container, its own
_RANKS_HERE = (
    "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE", "JSM_NAMESPACE_LOCAL_SIZE",
)  # fmt: skip
SLOTS = "HVDLITE_JOB_SLOTS"
"""The ranks on the job's fullest host, for where the MPI or scheduler says nothing."""


def threads(environ: Mapping[str, str]) -> int:
    """For the rank with this environment, in a child of the MPI's daemon; at least 1."""
    mine = len(os.sched_getaffinity(0))
    cores = max(mine, len(os.sched_getaffinity(os.getppid())))
    ranks = next((count for name in _RANKS_HERE if (count := _number(environ, name))), 0)
    if not ranks and (ranks := _tasks_here(environ)):  # Slurm's daemon may use more than the job
        cores = _number(environ, "SLURM_CPUS_ON_NODE") or mine
    ranks = ranks or _number(environ, SLOTS) or 1
    cores = math.ceil(min(cores, quota()))
    wanted = _number(environ, "SLURM_CPUS_PER_TASK") or cores
    return max(1, min(cores // ranks, mine, wanted))


def quota(root: str = _CGROUPS, own: str = "/proc/self/cgroup") -> float:
    """Cores' worth of time that this process' control groups may use, as Docker's --cpus, Kubernetes' limits and
    systemd's CPUQuota set it; infinity where nothing says so. own: the file that names the groups."""
    return min((_share(folder) for folder in _folders(root, own)), default=math.inf)


def _folders(root: str, own: str) -> Iterator[str]:
    """Those of this process' groups, and of all around them."""
    yield from (root, os.path.join(root, "cpu"))
    with contextlib.suppress(OSError), open(own, encoding="utf-8", errors="replace") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            top = root if not controllers else os.path.join(root, controllers)
            while path not in ("", "/"):
                yield top + path
                path = os.path.dirname(path)


def _share(folder: str) -> float:
    with contextlib.suppress(OSError, ValueError):  # version 2
        most, period = _read(folder, "cpu.max").split()
        return math.inf if most == "max" else int(most) / int(period)
    with contextlib.suppress(OSError, ValueError):
        most, period = _read(folder, "cpu.cfs_quota_us"), _read(folder, "cpu.cfs_period_us")
        return math.inf if int(most) < 0 else int(most) / int(period)
    return math.inf


def _read(folder: str, name: str) -> str:
    with open(os.path.join(folder, name), encoding="ascii") as file:
        return file.read()


def _tasks_here(environ: Mapping[str, str]) -> int:
    """The ranks that srun has started on this host: the item of this node in a list like `2(x3),1`. 0: none."""
    node = environ.get("SLURM_NODEID", "")
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    counts: list[int] = []
    with contextlib.suppress(ValueError):
        for item in filter(None, text.split(",")):
            count, _, times = item.rstrip(")").partition("(x")
            counts += [int(count)] * int(times or 1)
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else 0


def _number(environ: Mapping[str, str], name: str) -> int:
    """0: it says none."""
    return int(text) if (text := environ.get(name, "")).isdigit() else 0
