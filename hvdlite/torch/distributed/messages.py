"""send and recv of a process group: MPI's own messages, with tags, in any order, and from any source.

They do not go through a lane: a message concerns two ranks, and MPI matches source, tag and order as c10d wants it. A
thread that waits polls its request. A rank that has waited for a second shows the stall watch what it waits for, on the
lane between the two ranks, which has no other use.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from hvdlite.errors import HvdliteError
from hvdlite.job.groups import Group
from hvdlite.lanes import roll_call
from hvdlite.lanes.lane import Lane
from hvdlite.torch.distributed.buffers import Buffer
from hvdlite.torch.distributed.work import NONE, threads
from hvdlite.transports import Message

SHOWN_AFTER = 1.0  # seconds


class Messages:
    """The messages of one process group on this rank."""

    def __init__(self, group: Group, seconds: Callable[[], float]) -> None:
        """
        Args:
            group: The ranks.
            seconds: Returns the longest wait.
        """
        self._group, self._seconds = group, seconds
        self._lock = threading.Lock()
        self._under_way: list[MessageWork] = []

    def send(self, tensor: torch.Tensor, dest: int, tag: int) -> MessageWork:
        """Begin to send a tensor to a rank of the group."""
        self._check(dest)
        buffer = Buffer(tensor.cpu() if tensor.is_cuda else tensor)
        message = self._group.transport.start_message(buffer.array, dest, tag)
        self._group.post.count_sent(dest)
        return self._begin(MessageWork(self._group, message, buffer, dest, f"send to rank {dest} with tag {tag}"))

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> MessageWork:
        """Begin to receive a tensor from a rank of the group, or from any (None)."""
        if source is not None:
            self._check(source)
        buffer = Buffer(torch.empty_like(tensor, device="cpu") if tensor.is_cuda else tensor)
        message = self._group.transport.await_message(buffer.array, source, tag)
        title = f"recv from {'any rank' if source is None else f'rank {source}'} with tag {tag}"
        return self._begin(ReceiveWork(self._group, message, buffer, source, title, tensor))

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self._group.size:
            raise ValueError(f"rank {rank} is none of the group's ranks 0-{self._group.size - 1}")

    def _begin(self, work: MessageWork) -> MessageWork:
        """Keep the message's memory until it is complete, even if the user drops the Work."""
        work.limit(self._seconds())
        with self._lock:
            self._under_way = [each for each in self._under_way if not each.is_completed()]
            self._under_way.append(work)
        return work

    def close(self) -> None:
        """Give up all receives."""
        for work in self._under_way:
            work.give_up()


class MessageWork(dist.Work):
    """One message that is sent."""

    def __init__(self, group: Group, message: Message, buffer: Buffer, peer: int | None, title: str) -> None:
        super().__init__()
        self._group, self._message, self._buffer, self._peer, self._title = group, message, buffer, peer, title
        self._lock = threading.Lock()
        self._done, self._limit = False, 0.0
        self._error: HvdliteError | None = None

    def limit(self, seconds: float) -> None:
        """Set the longest wait."""
        self._limit = seconds

    def wait(self, timeout: timedelta = NONE) -> bool:
        """Wait until the message is received, or until a sent tensor may be changed. Otherwise as `Work.wait`."""
        seconds = timeout.total_seconds() if timeout > NONE else self._limit
        if not self.is_completed():
            waiting = Waiting(self._group, self._peer, f"torch.distributed.{self._title}", seconds)
            try:
                roll_call.wait(self, waiting.check, lambda: True)
            finally:
                waiting.end()
        if self._error is not None:
            raise self._error
        return True

    def test(self) -> bool:
        """As `is_completed`."""
        return self.is_completed()

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        with self._lock:
            if not self._done and self._message.test():
                self._done = True
                self._finish()
            return self._done

    def _finish(self) -> None:
        """The message is complete."""

    def give_up(self) -> None:
        """Stop waiting: the group is destroyed."""

    def is_success(self) -> bool:
        """Whether the message is complete without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """The error; None if there is none."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensor."""
        return [self._buffer.tensor]

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """As `wait`."""
        self.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of `result()`."""
        first: torch.futures.Future[None] = torch.futures.Future()

        def look(done: torch.futures.Future[None]) -> list[torch.Tensor]:
            self.wait()
            return self.result()

        found = first.then(look)
        threads.run(lambda: first.set_result(None))
        return found


class ReceiveWork(MessageWork):
    """One message that is received."""

    def __init__(
        self, group: Group, message: Message, buffer: Buffer, peer: int | None, title: str, tensor: torch.Tensor
    ) -> None:
        super().__init__(group, message, buffer, peer, title)
        self._tensor = tensor

    def _finish(self) -> None:
        self._group.post.count_received(self._message.source)
        expected = self._buffer.array.nbytes
        if (sent := self._message.nbytes) != expected:
            self._error = HvdliteError(
                f"torch.distributed.{self._title}: rank {self._message.source} of the group has sent "
                f"{sent if sent < expected else f'more than {expected}'} bytes, and the tensor to be overwritten has "
                f"{expected}: both must be equal"
            )
            return
        self._buffer.put_back()
        if self._buffer.tensor is not self._tensor:
            self._tensor.copy_(self._buffer.tensor)

    def give_up(self) -> None:
        if not self.is_completed():
            with self._lock:
                self._message.cancel()
                self._done, self._error = True, HvdliteError("the process group was destroyed")

    def result(self) -> list[torch.Tensor]:
        return [self._tensor]

    def source_rank(self) -> int:
        """The rank of the group that has sent the message. Call `wait` first."""
        return self._message.source

    def _source_rank(self) -> int:
        return self.source_rank()


class Waiting:
    """A wait for a message: its time limit, and what the stall watch sees of it."""

    def __init__(self, group: Group, peer: int | None, title: str, seconds: float) -> None:
        self._group, self._peer, self._title, self._seconds = group, peer, title, seconds
        self._begun = time.monotonic()
        self._lane: Lane | None = None
        self._end: Callable[[], object] | None = None

    def check(self) -> None:
        """Raise HvdliteError if the time is over, or communication has broken."""
        waited = time.monotonic() - self._begun
        if self._lane is None and waited > SHOWN_AFTER and self._peer not in (None, self._group.rank):
            self._show()
        for lane in (self._group.eager, self._lane):
            if lane is not None and lane.closed:
                raise lane.closed.with_traceback(None)
        if waited > self._seconds:
            whom = "any rank" if self._peer is None else f"rank {self._group.ranks[self._peer]}"
            raise HvdliteError(f"{self._title}: this rank has waited {self._seconds:g} s for {whom} [HVD502]")

    def _show(self) -> None:
        peer = self._peer or 0
        self._lane = self._group.post.lane(peer)
        self._end = self._group.post.show_wait(peer, self._title)

    def end(self) -> None:
        """The wait is over."""
        if self._end is not None:
            self._end()
