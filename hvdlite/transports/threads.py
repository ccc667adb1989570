"""A transport between threads of one process, without MPI.

Unit tests run all algorithms and lanes over it in seconds, with any number of ranks. A job of one rank uses `alone()`,
and so never calls MPI.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from hvdlite.arrays import Array, as_bytes
from hvdlite.gpu_streams import NOTHING_PENDING, Mark
from hvdlite.transports import T
from hvdlite.transports.sent_bytes import SentBytes, Tally

PATIENCE = 60.0  # seconds until a receive without a sender fails: a test must not hang


Letter: TypeAlias = tuple[int, int, int, Array]
"""A message with a tag: sender, receiver, tag, data."""


class Board:
    """What the ranks of one communicator share: a mailbox for each pair, a barrier, and a slot for each rank."""

    def __init__(self, size: int) -> None:
        self.mail: dict[tuple[int, int], queue.SimpleQueue[Array]] = {
            (a, b): queue.SimpleQueue() for a in range(size) for b in range(size)
        }
        self.gate = threading.Barrier(size, timeout=PATIENCE)
        self.slots: list[Any] = [None] * size
        self.maxima: dict[int, list[Sequence[int]]] = {}
        self.lock = threading.Lock()
        self.letters: list[Letter] = []
        self.others: dict[object, Board] = {}

    def post(self, letter: Letter) -> None:
        """Send a message that has a tag."""
        with self.lock:
            self.letters.append(letter)

    def take(self, here: int, wanted_tag: int, wanted: int | None) -> tuple[int, Array] | None:
        """The first message to this rank with this tag, from `wanted` or any rank: its sender and data, or None."""
        with self.lock:
            for place, (source, dest, tag, data) in enumerate(self.letters):
                if (dest, tag) == (here, wanted_tag) and wanted in (None, source):
                    del self.letters[place]
                    return source, data
        return None

    def look(self, here: int, wanted_tag: int) -> tuple[int, int] | None:
        """The sender and the length in bytes of the first message to this rank with this tag, or None."""
        with self.lock:
            for source, dest, tag, data in self.letters:
                if (dest, tag) == (here, wanted_tag):
                    return source, data.nbytes
        return None

    def other(self, key: object, size: int) -> Board:
        """Another board of some of the ranks, `size` in number. The first of them that asks makes it."""
        with self.lock:
            return self.others.setdefault(key, Board(size))


class ThreadMaximum:
    """A Maximum that is complete once every rank has put its values on the board."""

    def __init__(self, transport: ThreadTransport) -> None:
        self.transport = transport
        self.values: Sequence[int] = ()

    def start(self, values: Sequence[int]) -> bool:
        self.given = self.transport.put_up(values)
        return self.test()

    def test(self) -> bool:
        board = self.transport.board
        with board.lock:
            if len(self.given) < self.transport.size:
                if board.gate.broken:  # another rank has raised an error, and will not come
                    raise threading.BrokenBarrierError
                return False
        self.values = list(map(max, zip(*self.given, strict=True)))
        return True


class ThreadExchange:
    """An outgoing message, which is sent, and an incoming one."""

    def __init__(self, mail: queue.SimpleQueue[Array], receive: Array) -> None:
        self.mail, self.receive = mail, receive

    def test(self) -> bool:
        try:
            message = self.mail.get_nowait()
        except queue.Empty:
            return False
        as_bytes(self.receive)[:] = message
        return True

    def wait(self) -> None:
        as_bytes(self.receive)[:] = self.mail.get(timeout=PATIENCE)


class ThreadTransport:
    """A Communicator between threads. A send copies into a mailbox and never blocks.

    Args:
        board: What the ranks share.
        rank: This rank.
        tally: Counts the bytes that this rank sends. None: apart from other transports, with all ranks on one host.
    """

    library = ""

    def __init__(self, board: Board, rank: int, tally: Tally | None = None) -> None:
        self.board, self.rank, self.size = board, rank, len(board.slots)
        self.tally = tally or Tally(SentBytes(), range(self.size))
        self.serial = 0

    def exchange(self, send: Array, dest: int, receive: Array, source: int) -> None:
        self.send(send, dest)
        self.receive(receive, source)

    def prepared_exchange(self, send: Array, dest: int, receive: Array, source: int) -> Callable[[], None]:
        return partial(self.exchange, send, dest, receive, source)

    def start_exchange(
        self, send: Array, dest: int, receive: Array, source: int, after: Mark = NOTHING_PENDING
    ) -> ThreadExchange:
        self.send(send, dest)
        return ThreadExchange(self.board.mail[source, self.rank], receive)

    def send(self, array: Array, dest: int) -> None:
        self.tally.to(dest, array.nbytes)
        self.board.mail[self.rank, dest].put(as_bytes(array).copy())

    def receive(self, array: Array, source: int) -> None:
        message = self.board.mail[source, self.rank].get(timeout=PATIENCE)
        assert message.size == array.nbytes, f"sent {message.size} bytes, expected {array.nbytes}"
        as_bytes(array)[:] = message

    def barrier(self) -> None:
        if self.size > 1:
            self.board.gate.wait()

    def maximum(self, count: int) -> ThreadMaximum:
        return ThreadMaximum(self)

    def share(self, flags: Sequence[Array]) -> None:
        return None

    def put_up(self, values: Sequence[int]) -> list[Sequence[int]]:
        """Publish values. Returns the list of all ranks' values of the same call; other ranks' calls extend it."""
        with self.board.lock:
            given = self.board.maxima.setdefault(self.serial, [])
            given.append(values)
            self.board.maxima.pop(self.serial - 8, None)
        self.serial += 1
        return given

    def native_allreduce(self, array: Array, op: str) -> None:
        raise NotImplementedError("threads have no native all-reduce")

    def allgather_object(self, value: T) -> list[T]:
        self.board.slots[self.rank] = value
        self.barrier()
        values = list(self.board.slots)
        self.barrier()
        return values

    def mail(self) -> ThreadMail:
        boxes: list[queue.SimpleQueue[tuple[int, Any]]] = self.allgather_object(queue.SimpleQueue())
        return ThreadMail(boxes, self.rank)

    def duplicate(self) -> ThreadTransport:
        boards = self.allgather_object(Board(self.size))
        return ThreadTransport(boards[0], self.rank, self.tally)

    def split(self, color: int | None) -> ThreadTransport | None:
        colors = self.allgather_object(color)
        members = [rank for rank, other in enumerate(colors) if other == color]
        boards = self.allgather_object(Board(len(members)))
        if color is None:
            return None
        return ThreadTransport(boards[members[0]], members.index(self.rank), self.tally.of(members))

    def some(self, ranks: Sequence[int], tag: int) -> ThreadTransport:
        board = self.board.other((*ranks, tag), len(ranks))
        return ThreadTransport(board, list(ranks).index(self.rank), self.tally.of(ranks))

    def aside(self) -> ThreadTransport:
        return ThreadTransport(self.board.other("aside", self.size), self.rank)

    def start_message(self, array: Array, dest: int, tag: int) -> ThreadMessage:
        self.tally.to(dest, array.nbytes)
        self.board.post((self.rank, dest, tag, as_bytes(array).copy()))
        return ThreadMessage(self, None, None, 0)

    def await_message(self, array: Array, source: int | None, tag: int) -> ThreadMessage:
        message = ThreadMessage(self, array, source, tag)
        message.test()  # a message that waits is this one's from now on, as over MPI
        return message

    def called_by(self, peer: int) -> bool:
        return not self.board.mail[peer, self.rank].empty()

    def probe(self, tag: int) -> tuple[int, int] | None:
        return self.board.look(self.rank, tag)

    def ranks_of(self, comm: object) -> list[int]:
        raise ValueError("threads have no MPI communicators")

    def close(self) -> None:
        pass


class ThreadMessage:
    """A Message between threads. array: None for a sent one, which is complete at once."""

    def __init__(self, transport: ThreadTransport, array: Array | None, source: int | None, tag: int) -> None:
        self.transport, self.array, self.wanted, self.tag = transport, array, source, tag
        self.source = self.nbytes = 0

    def test(self) -> bool:
        if self.array is None:
            return True
        found = self.transport.board.take(self.transport.rank, self.tag, self.wanted)
        if found is None:
            return False
        room = as_bytes(self.array)
        self.source, data = found
        self.nbytes = min(data.size, room.size + 1)
        room[: data.size] = data[: room.size]
        self.array = None
        return True

    def cancel(self) -> None:
        self.array = None


class ThreadMail:
    """A Mail between threads."""

    def __init__(self, boxes: list[queue.SimpleQueue[tuple[int, Any]]], rank: int) -> None:
        self.boxes, self.rank = boxes, rank

    def post(self, letter: object, dest: int) -> None:
        self.boxes[dest].put((self.rank, letter))

    def fetch(self) -> tuple[int, Any] | None:
        try:
            return self.boxes[self.rank].get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        pass


def alone() -> ThreadTransport:
    """The transport of a job of one process."""
    return ThreadTransport(Board(1), 0)


def run_ranks(size: int, function: Callable[[ThreadTransport], T]) -> list[T]:
    """Run function(transport) on `size` threads at once. Returns results in rank order, or raises the first error."""
    board = Board(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            results[rank] = function(ThreadTransport(board, rank))
        except BaseException as error:
            errors.append(error)
            board.gate.abort()

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results
