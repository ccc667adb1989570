"""The ranks' side of `hvdlite.run`: `python -m hvdlite.task`, started by hvdliterun, runs a function that it is sent.

The function comes in a file of the job's folder and the result goes back in another; over ssh where the launcher is on
another host. Nothing of this needs MPI, so that the function meets the same untouched process as a script does.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import Any

from hvdlite.system.launcher_environment import JOB_FOLDER as FOLDER
from hvdlite.system.launcher_environment import JOB_RANK as RANK

_PATIENCE = 60.0  # seconds for the function to arrive on this host


def main() -> None:
    """Run the function; leave its result, or its exception, which is then raised here too and ends the job."""
    import cloudpickle

    if FOLDER is None or RANK is None:
        sys.exit("hvdlite.task is started by hvdlite.run(), not by hand")
    try:
        function, args, kwargs = cloudpickle.loads(_receive(os.path.join(FOLDER, "task")))
        _leave(FOLDER, RANK, (True, function(*args, **kwargs), ""))
    except (SystemExit, KeyboardInterrupt):  # end the job with their own codes
        raise
    except BaseException as error:
        _leave(FOLDER, RANK, (False, error, traceback.format_exc()))
        raise


def _receive(path: str) -> bytes:
    deadline = time.monotonic() + _PATIENCE
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.02)
    with open(path, "rb") as file:
        return file.read()


def _leave(folder: str, rank: str, result: tuple[bool, Any, str]) -> None:
    """Write the result; what cannot be pickled is an error that says so."""
    import cloudpickle

    try:
        data = cloudpickle.dumps(result)
        if not result[0]:
            cloudpickle.loads(data)  # an exception may be pickled and yet not come back
    except Exception as error:
        if result[0]:
            raise TypeError(f"rank {rank}: what the function returned cannot be pickled: {error}") from error
        data = cloudpickle.dumps((False, RuntimeError(f"{type(result[1]).__name__}: {result[1]}"), result[2]))
    with open(os.path.join(folder, f"result.{rank}"), "wb") as file:
        file.write(data)


if __name__ == "__main__":
    main()
