"""Removes the names of the shared-memory files of an MPI, once all its processes have opened the files.

So no killed process, not even mpirun, leaves a file in /dev/shm. Open MPI 4 removes its files when it ends, and warns
if one is missing. So `give_names` makes empty files just before. Files in the job's folder keep their names: hvdliterun
removes the folder.
"""

from __future__ import annotations

import contextlib
import os

from hvdlite.system.launcher_environment import JOB_FOLDER, open_mpi_local_rank

NAMES = ("mpich_shm_", "sm_segment.", "vader_segment.")
missed: set[str] = set()
"""Removed files that Open MPI 4 will look for."""


def unlink() -> None:
    """Remove the names of the MPI's shared-memory files that this process has mapped. The memory stays."""
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        found = (line.split(maxsplit=5)[-1].rstrip("\n") for line in maps if "/dev/shm/" in line)
        paths = {path.removesuffix(" (deleted)") for path in found}
        for path in paths:
            folder, name = os.path.split(path)
            vader = name.startswith("vader_segment.")
            if name.startswith(NAMES) and not (vader and JOB_FOLDER and folder.endswith(os.path.basename(JOB_FOLDER))):
                with contextlib.suppress(OSError):
                    os.unlink(path)
                if vader and name.endswith(f".{open_mpi_local_rank()}"):
                    missed.add(path)


def give_names() -> None:
    """Just before MPI ends: make empty files, since Open MPI 4 prints long warnings if it finds none to remove.

    Files in the job's folder never lose their names, because hvdliterun removes the folder.
    """
    for path in missed:
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
