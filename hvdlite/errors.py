"""The exceptions users see, in one small tree.

Everything that reaches a user from the core is an `HvdliteError` (a `RuntimeError`, as Horovod's
`HorovodInternalError` was) or a plain `ValueError` for what the caller alone did wrong. The message is a letter:
which rank, which tensor, what each side said, what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

IN_A_CHILD = (
    "hvdlite cannot communicate in a process that a rank has started (a DataLoader's worker?): MPI cannot be used "
    "there. Communicate in the main process; hvd.rank(), hvd.size() and the like work here."
)
NOT_INITIALIZED = "hvdlite was used before hvd.init() or after hvd.shutdown(): call hvd.init() first."


class HvdliteError(RuntimeError):
    """Something went wrong between the ranks. `HorovodInternalError`, Horovod's name for it, is the same class."""


class MismatchError(HvdliteError):
    """Ranks disagree about one operation or plan. Raised on every rank of the set; the job stays usable."""


class VoidError(HvdliteError):
    """A backward of another rank has failed after some of its gradients had left: no rank has results of this one."""


class ScalarError(HvdliteError, IndexError, ValueError):
    """A gather was given a tensor without dimensions. Where all ranks did, on all of them; else it is a mismatch.

    Of Horovod's classes: an IndexError in `hvd.allgather` of torch, a HorovodInternalError in its other forms.
    """


class ShutdownError(HvdliteError):
    """Another rank has shut down, so this operation can never complete."""

    by_another = False
    """Whether another rank left while this one went on; else this one has shut down itself."""


class RemovedError(ShutdownError, ValueError):
    """A process set was used after `hvd.remove_process_set()`, by an optimizer made for it. A ValueError too, which in
    Horovod the use of a removed set is."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(
            f"the process set of the ranks {list(ranks)} has been removed (hvd.remove_process_set). Register it again "
            "with hvd.add_process_set(), and call hvd.DistributedOptimizer(optimizer, process_set=...) again."
        )
        self.ranks = ranks

    def __reduce__(self) -> Any:
        return RemovedError, (self.ranks,)


class StallError(HvdliteError):
    """Ranks have waited for others for longer than HVDLITE_STALL_SHUTDOWN_TIME_SECONDS, or none can go on, since each
    waits for what others have not called. Communication is over."""


class ForkedError(HvdliteError):
    """A child process of a rank, forked after `hvd.init()` or started anew, was to communicate."""

    def __init__(self, message: str = IN_A_CHILD) -> None:  # exceptions are unpickled with what they say
        super().__init__(message)


class NotInitializedError(HvdliteError, ValueError):
    """`hvd.init()` was not called, or `hvd.shutdown()` was. A ValueError too, as in Horovod."""

    def __init__(self, message: str = NOT_INITIALIZED) -> None:
        super().__init__(message)


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts have come or gone: `elastic.run` starts communication anew. skip_sync: all states are equal already."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the job's hosts have changed")
        self.skip_sync = skip_sync


HorovodInternalError = HvdliteError

ON_ALL = (HvdliteError, NotImplementedError)
"""What an operation raises on all ranks, before any has sent or after all have received."""


def broken_by(error: BaseException, operation: str) -> HvdliteError | None:
    """Why no operation can follow on a lane one of whose operations raised this; None: others can. Anything that is
    not raised on all ranks (no memory, the MPI) may have come to this rank alone, in the middle."""
    if isinstance(error, ON_ALL):
        return None
    return HvdliteError(
        f"an earlier operation, {operation}, failed in the middle on this rank ({type(error).__name__}: {error}), and "
        "nobody knows what the others have sent: this process can no longer communicate"
    )


def in_the_middle(operation: str) -> HvdliteError:
    """Why a thread cannot wait for this one: it is inside another already."""
    return HvdliteError(
        f"{operation} was called by a signal's handler or a destructor, in the middle of another call, which cannot go "
        "on before it returns. Set a flag there, and act on it between steps."
    )
