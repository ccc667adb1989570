"""Reads a scheduler's allocation: the hosts, the number of ranks on each, and the program that starts ranks.

Slurm, Flux and LSF's JSM start processes themselves (srun, flux run, jsrun), if they have a protocol by which this
MPI's processes find each other. PBS, and LSF without JSM, only list the hosts. hvdliterun reaches these like any other
hosts, but with the scheduler's remote shell if it has one.
"""

import enum
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hvdlite_launcher import UsageError
from hvdlite_launcher.cores import slurm_counts
from hvdlite_launcher.hosts import Host
from hvdlite_launcher.probe import Family, Mpi
from hvdlite_launcher.times import SRUN_ANSWERS

Which = Callable[[str], str | None]
_ITEM = re.compile(r"([^,\[\]]*)(?:\[([^\]]*)\])?([^,\[\]]*)(?:,|$)")


class Starter(enum.Enum):
    """Programs with which schedulers start ranks."""

    SRUN = "srun"
    JSRUN = "jsrun"
    FLUX = "flux"


@dataclass(frozen=True)
class Allocation:
    """What a scheduler has given to a job.

    name: of the scheduler. hosts: with the number of ranks on each; empty if only the scheduler knows them. starter:
    its program that starts ranks, or None. path: of that program. shell: its remote shell, or None for ssh.
    """

    name: str
    hosts: tuple[Host, ...]
    starter: Starter | None = None
    path: str = ""
    shell: str | None = None


def allocation(environ: Mapping[str, str], which: Which = shutil.which) -> Allocation | None:
    """The allocation that the environment describes, or None. Raises UsageError if it cannot be read."""
    for name, sign, read in (
        ("Slurm", "SLURM_JOB_ID", _slurm),
        ("LSF", "LSB_JOBID", _lsf),
        ("PBS", "PBS_NODEFILE", _pbs),
        ("Flux", "FLUX_URI", _flux),
    ):
        if environ.get(sign):
            try:
                found = read(environ, which)
                if odd := [host.name for host in found.hosts if host.name.startswith("-")]:
                    raise ValueError(f"{odd[0]!r} is no host's name")  # ssh would read it as an option
                return found
            except (KeyError, ValueError, OSError) as error:
                why = f"{error.args[0]} is not set" if isinstance(error, KeyError) else error
                text = (
                    f"inside a job of {name} ({sign}), but its hosts cannot be read: {why}. Name them with -H [HVD004]"
                )
                raise UsageError(text) from error
    return None


def pmi(starter: Starter, path: str, mpi: Mpi) -> str | None:
    """The protocol by which this MPI's processes find each other under this starter. None: use the MPI's own launcher.

    Slurm may be built without PMIx, so `srun --mpi=list` is asked. Raises UsageError if srun does not answer.
    """
    if starter is not Starter.SRUN:
        return "pmix" if mpi.family is Family.OPEN_MPI else ""
    wanted = ("pmix",) if mpi.family is Family.OPEN_MPI else ("pmi2", "cray_shasta")
    try:
        null = subprocess.DEVNULL
        answer = subprocess.run([path, "--mpi=list"], capture_output=True, text=True, stdin=null, timeout=SRUN_ANSWERS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"Slurm does not tell which MPIs it starts: {error}. Try --mpi") from error
    offered = set(re.findall(r"[\w.]+", answer.stdout + answer.stderr))
    return next((name for name in wanted if name in offered), None)


def expand(text: str) -> Iterator[str]:
    """The hosts of a Slurm host list: `node[01-03,7],login` means node01, node02, node03, node7, login.

    Raises ValueError.
    """
    position = 0
    while position < len(text):
        item = _ITEM.match(text, position)
        if item is None or item.end() == position:
            raise ValueError(f"host list {text!r}")
        position = item.end()
        head, ranges, tail = item.groups()
        numbers = [""] if ranges is None else [number for part in ranges.split(",") for number in _numbers(part)]
        yield from (f"{head}{number}{tail}" for number in numbers)


def _numbers(part: str) -> Iterator[str]:
    first, dash, last = part.partition("-")
    if not dash:
        yield first
        return
    yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def _slurm(environ: Mapping[str, str], which: Which) -> Allocation:
    names = list(expand(environ.get("SLURM_JOB_NODELIST") or environ["SLURM_NODELIST"]))
    slots = slurm_counts(environ.get("SLURM_TASKS_PER_NODE") or f"1(x{len(names)})")
    if len(slots) != len(names):
        raise ValueError(f"{len(names)} hosts, but counts for {len(slots)}")
    srun = which("srun")
    return Allocation("Slurm", tuple(map(Host, names, slots)), Starter.SRUN if srun else None, srun or "")


def _lsf(environ: Mapping[str, str], which: Which) -> Allocation:
    words = environ["LSB_MCPU_HOSTS"].split()
    slots = Counter[str]()
    for name, count in zip(words[::2], words[1::2], strict=True):
        slots[name] += int(count)
    jsrun = which("jsrun")
    if jsrun and len(slots) > 1:
        slots.pop(words[0])  # the node of the batch script takes no ranks
    hosts = tuple(Host(name, count) for name, count in slots.items())
    return Allocation("LSF", hosts, Starter.JSRUN if jsrun else None, jsrun or "", which("blaunch"))


def _pbs(environ: Mapping[str, str], which: Which) -> Allocation:
    with open(environ["PBS_NODEFILE"], encoding="utf-8") as file:
        slots = Counter(file.read().split())
    if not slots:
        raise ValueError("the file is empty")
    hosts = tuple(Host(name, count) for name, count in slots.items())
    return Allocation("PBS", hosts, shell=which("pbs_tmrsh"))


def _flux(environ: Mapping[str, str], which: Which) -> Allocation:
    flux = which("flux")
    return Allocation("Flux", (), Starter.FLUX if flux else None, flux or "")
