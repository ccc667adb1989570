"""The shared-memory files through which an MPI's processes have found each other.

They are unlinked once all are attached: then no death whatsoever, nor one of mpirun, leaves a file behind. (Open MPI 4,
which wants to unlink its own, has empty ones while ranks wait for each other at their end.)
"""

from __future__ import annotations

import contextlib
import os

from hvdlite.job.folder import FOLDER

NAMES = ("mpich_shm_", "sm_segment.", "vader_segment.")
missed: set[str] = set()
"""Files that are unlinked, which Open MPI 4 will look for."""


def unlink() -> None:
    """Remove the names of the MPI's shared-memory files that this process has mapped; the memory stays."""
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        found = (line.split(maxsplit=5)[-1].rstrip("\n") for line in maps if "/dev/shm/" in line)
        paths = {path.removesuffix(" (deleted)") for path in found}
        for path in paths:
            folder, name = os.path.split(path)
            vader = name.startswith("vader_segment.")
            if name.startswith(NAMES) and not (vader and FOLDER and folder.endswith(os.path.basename(FOLDER))):
                with contextlib.suppress(OSError):
                    os.unlink(path)
                if vader and name.endswith(f".{os.environ.get('OMPI_COMM_WORLD_LOCAL_RANK')}"):
                    missed.add(path)


def give_names() -> None:
    """Just before MPI's end: Open MPI 4 complains at length where it finds no file to remove. (In a folder of
    hvdliterun's, which removes that, its files keep their names.)"""
    for path in missed:
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
