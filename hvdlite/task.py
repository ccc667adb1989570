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

from hvdlite.launched import Job

_PATIENCE = 60.0  # seconds for the function to arrive on this host


def main() -> None:
    """Run the function; leave its result, or its exception, which is then raised here too and ends the job."""
    import cloudpickle

    job = Job.from_env()
    if job is None:
        sys.exit("hvdlite.task is started by hvdlite.run(), not by hand")
    try:
        function, args, kwargs = cloudpickle.loads(_receive(os.path.join(job.folder, "task")))
        _leave(job, (True, function(*args, **kwargs), ""))
    except Exception as error:
        _leave(job, (False, error, traceback.format_exc()))
        raise


def _receive(path: str) -> bytes:
    deadline = time.monotonic() + _PATIENCE
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.02)
    with open(path, "rb") as file:
        return file.read()


def _leave(job: Job, result: tuple[bool, Any, str]) -> None:
    """Write the result; what cannot be pickled is an error that says so."""
    import cloudpickle

    try:
        data = cloudpickle.dumps(result)
        if not result[0]:
            cloudpickle.loads(data)  # an exception may be pickled and yet not come back
    except Exception as error:
        if result[0]:
            raise TypeError(f"rank {job.rank}: what the function returned cannot be pickled: {error}") from error
        data = cloudpickle.dumps((False, RuntimeError(f"{type(result[1]).__name__}: {result[1]}"), result[2]))
    with open(os.path.join(job.folder, f"result.{job.rank}"), "wb") as file:
        file.write(data)


if __name__ == "__main__":
    main()
