"""The results of a process group's calls, as c10d's Work: waiting with time limits, and futures.

C++ (DistributedDataParallel) waits for the future, Python mostly for the Work. A future is completed by a thread that
has nothing else to do: a callback may wait for the next collective (PowerSGD does), so the lane's thread must not run
it, and one thread for all is not enough.

In a communication hook in Python, `get_future` waits. Otherwise calls that the future's callbacks make (PowerSGD's)
would mix with those of later buckets, in another order on each rank. The price: such a hook's communication does not
overlap with the backward pass.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import WorkResult  # type: ignore[attr-defined]

from hvdlite.errors import HvdliteError
from hvdlite.lanes.request import Handle
from hvdlite.torch.private_api import current_run, python_in_backward, queue_callback

NONE = timedelta(0)
"""The timeout that c10d passes for none."""


class Threads:
    """Runs functions at once, each in a thread of its own, and keeps the threads for later ones."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle = 0
        self.queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    def run(self, function: Callable[[], object]) -> None:
        """Have a thread call the function. Returns at once."""
        with self.lock:
            if self.idle:
                self.idle -= 1
            else:
                threading.Thread(target=self.main, name="hvdlite-futures", daemon=True).start()
        self.queue.put(function)

    def main(self) -> None:
        """A thread."""
        while True:
            self.queue.get()()
            with self.lock:
                self.idle += 1


threads = Threads()


class Work(dist.Work):
    """One call of a process group."""

    def __init__(
        self, handle: Handle[None], tensors: Sequence[torch.Tensor], seconds: float, late: Callable[[float], str]
    ) -> None:
        """
        Args:
            handle: The promise that the operation is done.
            tensors: The results, which the operation overwrites.
            seconds: The longest wait.
            late: Returns the error's text after so many seconds.
        """
        super().__init__()
        self._handle, self._tensors, self._seconds, self._late = handle, list(tensors), seconds, late

    def wait(self, timeout: timedelta = NONE) -> bool:
        """Wait until the operation is done on this rank.

        On a GPU this returns when all work is issued. Later work of the current stream runs after that work.

        Args:
            timeout: The longest wait. 0: that of the call, or of the process group.

        Returns:
            True.

        Raises:
            MismatchError: The ranks' calls differ. Every rank raises it.
            HvdliteError: The time is over, or communication is broken.
        """
        seconds = timeout.total_seconds() if timeout > NONE else self._seconds
        try:
            self._handle.wait(seconds)
        except TimeoutError:
            raise HvdliteError(self._late(seconds)) from None
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Have later work of the current stream run after the operation. Waits until its work is issued."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._handle.done

    def is_success(self) -> bool:
        """Whether the operation is done without an error."""
        return self._handle.done and self._handle.error is None

    def exception(self) -> BaseException | None:
        """The operation's error; None if there is none, or the operation is not done."""
        return self._handle.error

    def result(self) -> list[torch.Tensor]:
        """The tensors that the operation overwrites."""
        return self._tensors

    def source_rank(self) -> int:
        """Raise HvdliteError: only a receive has a source."""
        raise HvdliteError("only the work of recv has a source_rank")

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of `result()`. An error of the operation is the future's."""
        devices: list[int | str | torch.device] = sorted(
            {tensor.device for tensor in self._tensors if tensor.is_cuda}, key=str
        )
        first: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)

        def complete() -> None:
            if self._handle.error is None:
                self._handle.wait()  # the work of this thread's streams, which the future notes, follows the operation
            first.set_result(self._tensors)

        def look(done: torch.futures.Future[list[torch.Tensor]]) -> list[torch.Tensor]:
            if self._handle.error is not None:  # C++ sees it only if a callback raises it
                raise self._handle.error.with_traceback(None)
            return self._tensors

        found = first.then(look)
        if python_in_backward():
            self.wait()
        elif current_run() >= 0:
            queue_callback(self.wait_quietly)
        if self._handle.done:
            complete()
        else:
            self._handle.then(lambda: threads.run(complete))
        return found

    def wait_quietly(self) -> None:
        """Wait until the operation is done. An error is raised by the future alone.

        DistributedDataParallel waits in C++ when backward ends. This wait comes before, so that observers see it.
        """
        with contextlib.suppress(HvdliteError, TimeoutError):
            self._handle.wait(self._seconds)

    def get_future_result(self) -> torch.futures.Future[object]:
        """A future of the outcome: WorkResult.SUCCESS, or COMM_ERROR."""
        future: torch.futures.Future[object] = torch.futures.Future()
        self._handle.then(
            lambda: threads.run(
                lambda: future.set_result(WorkResult.SUCCESS if self._handle.error is None else WorkResult.COMM_ERROR)
            )
        )
        return future
