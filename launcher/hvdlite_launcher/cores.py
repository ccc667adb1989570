"""The number of threads of a rank: its share of the cores that the job may use on the rank's host.

Each rank's keeper divides the host's cores by the number of ranks there, because hosts differ. The host's cores are
those that the keeper's parent, a daemon of the MPI, may use, within the limits of control groups. Under Slurm the
number comes from SLURM_CPUS_ON_NODE. A rank never gets more threads than the cores to which the MPI has bound it.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping

_CGROUPS = "/sys/fs/cgroup"  # inside a container, its own
_RANKS_HERE = (
    "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE", "JSM_NAMESPACE_LOCAL_SIZE",
)  # fmt: skip
SLOTS = "HVDLITE_JOB_SLOTS"
"""The largest number of ranks on one host, used if neither the MPI nor the scheduler tells this host's number."""


def threads(environ: Mapping[str, str]) -> int:
    """The number of threads, at least 1, of the rank with this environment. Call it in a child of the MPI's daemon."""
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
    """How many cores' time the control groups of this process may use; infinity if there is no limit.

    Docker's --cpus, Kubernetes' limits and systemd's CPUQuota set it. own: the file that names the groups.
    """
    return min((_share(folder) for folder in _folders(root, own)), default=math.inf)


def _folders(root: str, own: str) -> Iterator[str]:
    """The folders of this process' groups and of the groups around them."""
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
    """The ranks that srun has started on this host, or 0."""
    node = environ.get("SLURM_NODEID", "")
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    with contextlib.suppress(ValueError, IndexError):
        return slurm_counts(text)[int(node)]
    return 0


def slurm_counts(text: str) -> list[int]:
    """Slurm's counts per host: `2(x3),1` are 2, 2, 2 and 1. Raises ValueError."""
    import re  # which costs a rank's keeper some milliseconds

    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"counts {text!r}")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _number(environ: Mapping[str, str], name: str) -> int:
    """The variable's number, or 0."""
    return int(text) if (text := environ.get(name, "")).isdigit() else 0
