"""The ranks' side of `hvdlite.run`: hvdliterun starts `python -m hvdlite.task`, which runs the function.

The function arrives in a file of the job's folder, and the result leaves in another file. If the launcher is on another
host, it moves both over ssh. This needs no MPI, so that the function starts in the same process state as a script.
"""

from __future__ import annotations

import os
import sys
import time
import traceback

from hvdlite.job.folder import path_of
from hvdlite.system.launcher_environment import JOB_FOLDER as FOLDER
from hvdlite.system.launcher_environment import JOB_RANK as RANK

_PATIENCE = 60.0  # seconds for the function to arrive on this host


def main() -> None:
    """Run the function, and leave its result or its exception. An exception is also raised here, and ends the job."""
    import cloudpickle

    if FOLDER is None or RANK is None:
        sys.exit("hvdlite.task: only hvdlite.run() can start this module")
    try:
        function, args, kwargs = cloudpickle.loads(_receive(path_of(FOLDER, "task")))
        _leave(FOLDER, RANK, (True, function(*args, **kwargs), ""))
    except (SystemExit, KeyboardInterrupt):  # these end the job with exit codes of their own
        raise
    except BaseException as error:
        _leave(FOLDER, RANK, (False, error, traceback.format_exc()))
        raise


def _receive(path: str) -> bytes:
    """Wait for the file, and read it."""
    deadline = time.monotonic() + _PATIENCE
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.02)
    with open(path, "rb") as file:
        return file.read()


def _leave(folder: str, rank: str, result: tuple[bool, object, str]) -> None:
    """Write whether the function returned, its value or exception, and the traceback's text.

    Raises:
        TypeError: The value cannot be pickled. An exception that cannot be pickled is replaced by its text.
    """
    import cloudpickle

    try:
        data = cloudpickle.dumps(result)
        if not result[0]:
            cloudpickle.loads(data)  # some exceptions can be pickled but not unpickled
    except Exception as error:
        if result[0]:
            raise TypeError(f"rank {rank}: what the function returned cannot be pickled: {error}") from error
        data = cloudpickle.dumps((False, RuntimeError(f"{type(result[1]).__name__}: {result[1]}"), result[2]))
    with open(path_of(folder, "result", rank), "wb") as file:
        file.write(data)


if __name__ == "__main__":
    main()
