"""The exceptions that users see.

A fault between ranks is an `HvdliteError`, which is a `RuntimeError` like Horovod's `HorovodInternalError`. A fault of
one caller alone is a plain `ValueError`. Each message names the rank, the tensor, what each rank passed, and the cure.
"""

from __future__ import annotations

from collections.abc import Sequence

IN_A_CHILD = (
    "hvdlite cannot communicate in a process that a rank has started (a DataLoader's worker?): MPI cannot be used "
    "there. Communicate in the main process; hvd.rank(), hvd.size() and the like work here. [HVD107]"
)
NOT_INITIALIZED = "hvdlite was used before hvd.init() or after hvd.shutdown(): call hvd.init() first. [HVD108]"


class HvdliteError(RuntimeError):
    """Something went wrong between the ranks. `HorovodInternalError`, Horovod's name for it, is the same class."""


class MismatchError(HvdliteError):
    """Ranks disagree about one operation or plan. Every rank of the process set raises it; the job stays usable."""


class VoidError(HvdliteError):
    """Another rank's backward failed after it had sent some gradients: no rank has results of this backward."""


class ScalarError(HvdliteError, IndexError, ValueError):
    """All ranks gave a gather a tensor without dimensions. (If only some ranks do, all raise MismatchError.)

    Its base classes are those of Horovod's errors: IndexError in torch's `hvd.allgather`, HorovodInternalError
    elsewhere.
    """


class ShutdownError(HvdliteError):
    """Another rank has shut down, so this operation can never complete."""

    def __init__(self, *message: str, by_another: bool = False) -> None:
        super().__init__(*message)
        self.by_another = by_another
        """True if another rank left while this one went on; False if this rank shut down itself."""


class RemovedError(ShutdownError, ValueError):
    """An optimizer used its process set after `hvd.remove_process_set()`. A ValueError, as in Horovod."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(
            f"the process set of the ranks {list(ranks)} has been removed (hvd.remove_process_set). Register it again "
            "with hvd.add_process_set(), and call hvd.DistributedOptimizer(optimizer, process_set=...) again. [HVD207]"
        )
        self.ranks = ranks

    def __reduce__(self) -> tuple[type[RemovedError], tuple[Sequence[int]]]:
        return RemovedError, (self.ranks,)


class StallError(HvdliteError):
    """Ranks waited longer than HVDLITE_STALL_SHUTDOWN_TIME_SECONDS, or wait for each other forever.

    This process can no longer communicate.
    """


class ForkedError(HvdliteError):
    """A child process of a rank tried to communicate."""

    def __init__(self, message: str = IN_A_CHILD) -> None:  # unpickling passes the message
        super().__init__(message)


class NotInitializedError(HvdliteError, ValueError):
    """`hvd.init()` was not called, or `hvd.shutdown()` was. A ValueError too, as in Horovod."""

    def __init__(self, message: str = NOT_INITIALIZED) -> None:
        super().__init__(message)


class HostsUpdatedInterrupt(RuntimeError):
    """The job's hosts have changed: `elastic.run` starts communication again. skip_sync: all states are equal."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the job's hosts have changed")
        self.skip_sync = skip_sync


HorovodInternalError = HvdliteError

ON_ALL = (HvdliteError, NotImplementedError)
"""Errors that an operation raises on all ranks, before any rank has sent or after all ranks have received."""


def broken_by(error: BaseException, operation: str) -> HvdliteError | None:
    """The error for all later operations on a lane after one raised `error`; None if the lane stays usable.

    An error of this rank alone (no memory, an MPI error) may have stopped the operation after some messages.
    """
    if isinstance(error, ON_ALL):
        return None
    return HvdliteError(
        f"an earlier operation, {operation}, failed in the middle on this rank ({type(error).__name__}: {error}), and "
        "the other ranks may have sent messages that this rank has not received. This process can no longer "
        "communicate: restart the job [HVD209]"
    )


def in_the_middle(operation: str) -> HvdliteError:
    """The error for a call from a signal handler or destructor that interrupts another call of the same thread."""
    return HvdliteError(
        f"{operation} was called from a signal handler or a destructor, in the middle of another call of its "
        "thread. Each call would wait for the other. Set a flag in the handler, and act on it between steps."
    )
