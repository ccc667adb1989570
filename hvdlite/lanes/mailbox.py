"""A mailbox carries letters between ranks without a roll call: a rank sends one whenever it likes, and nobody waits.

Each rank has a thread that looks for letters, naps while there are none, and gives each letter to a function. Letters
travel on a communicator of their own. This is the second exception, after the stall watch, to the rule that MPI is
called on lanes only.

    post        any thread sends a letter
    wait        a user's thread waits for an answer. It notices that communication broke, and the stall watch sees it
    LEAVE       a rank asks nothing more. Its thread goes on answering until all ranks have sent this letter
    FAILED      a rank's thread has raised an error, and this is its text. All lanes of all ranks break
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from struct import Struct
from typing import NamedTuple, Protocol

import numpy as np

from hvdlite.arrays import Array, as_bytes
from hvdlite.errors import HvdliteError, ShutdownError
from hvdlite.gpu_streams import adopt_gpu
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.pair_lanes import Post
from hvdlite.transports import Communicator, Message

LEAVE, FAILED, FIRST_KIND = 0, 1, 2
"""The kinds of letters that every mailbox has, and the first kind that its user may choose."""
SHORTEST_NAP, LONGEST_NAP = 0.0002, 0.0003
SHOWN_AFTER = 1.0  # seconds until the stall watch sees a wait
TICK = 0.1  # seconds between two looks of a waiting thread at the lanes
LAST_WORDS = 1.0  # seconds in which FAILED may leave
PIECE = 1 << 30  # bytes; counts are C ints in many MPIs
TAG = 0
HEADER = Struct("<7q8x")  # the body begins at a multiple of 64 bytes
NOTHING = np.empty(0, np.uint8)


class Letter(NamedTuple):
    """A few numbers, which its user gives a meaning, and an array's bytes.

    Attributes:
        kind: LEAVE, FAILED, or a number from FIRST_KIND on.
        plan: A digest of the arrays' layout.
        era: The number of the sender's era.
        clock: The sender's clock.
        note: Another number.
        width: The bytes of an element of the body.
        body: Bytes.
        source: The sender's rank.
    """

    kind: int
    plan: int = 0
    era: int = 0
    clock: int = 0
    note: int = 0
    width: int = 1
    body: Array = NOTHING
    source: int = -1

    def packed(self) -> Array:
        """The letter as one array of bytes."""
        body = as_bytes(self.body)
        found = np.empty(HEADER.size + body.size, np.uint8)
        found[: HEADER.size] = np.frombuffer(HEADER.pack(*self[:6], body.size), np.uint8)
        found[HEADER.size :] = body
        return found


class Inbox:
    """Letters that arrive over a transport, and letters of this rank to itself.

    Attributes:
        local: The letters of this rank to itself.
        arriving: For each sender, the pieces under way, in order.
        parts: For each sender, the pieces of a letter that has not arrived completely.
    """

    def __init__(self, transport: Communicator) -> None:
        self.local: deque[Letter] = deque()
        self.arriving: list[deque[tuple[Array, Message]]] = [deque() for _ in range(transport.size)]
        self.parts: list[list[Array]] = [[] for _ in range(transport.size)]

    def take(self, transport: Communicator) -> list[Letter]:
        """The letters that have arrived since the last call. Never waits."""
        while (seen := transport.probe(TAG)) is not None:
            source, nbytes = seen
            piece = np.empty(nbytes, np.uint8)
            self.arriving[source].append((piece, transport.await_message(piece, source, TAG)))
        letters = [self.local.popleft() for _ in range(len(self.local))]
        for source, pieces in enumerate(self.arriving):
            while pieces and pieces[0][1].test():
                self.parts[source].append(pieces.popleft()[0])
                letters += self.complete(source)
        return letters

    def complete(self, source: int) -> list[Letter]:
        """The letter whose last piece has just come from this sender, if one is complete."""
        parts = self.parts[source]
        kind, plan, era, clock, note, width, nbytes = HEADER.unpack(parts[0][: HEADER.size].tobytes())
        if sum(part.size for part in parts) < HEADER.size + nbytes:
            return []
        self.parts[source] = []
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return [Letter(kind, plan, era, clock, note, width, whole[HEADER.size :], source)]


class Reader(Protocol):
    """The object that a mailbox belongs to."""

    def receive(self, mailbox: Mailbox, letter: Letter) -> None:
        """Read a letter, in the mailbox's thread. Waits for nobody. An error that this raises breaks the job."""
        ...

    def before_waiting(self) -> None:
        """A thread of this rank is about to wait in a collective of the group. Waits for nobody."""
        ...


class State(Enum):
    """What a mailbox does."""

    OPEN = auto()
    LEAVING = auto()
    CLOSED = auto()


class Told(HvdliteError):
    """Another rank's mailbox has failed."""


class Mailbox:
    """One rank's end of a mailbox. `post` and `wait` may be called in any thread.

    In a job of one rank there is no thread: `post` gives the letter to the reader at once.

    Attributes:
        transport: The mailbox's communicator, which it owns.
        lane: The lane that breaks, with all others, if the mailbox fails.
        post_office: The lanes on which the stall watch sees waits.
        title: The mailbox in messages.
        reader: Gets each letter, LEAVE too.
        changed: Notified after each letter.
        wake: Set when the thread has something to do.
        sending: The messages that are being sent.
        inbox: The letters that arrive.
        left: The ranks that have sent LEAVE.
        state: See `State`.
        thread: The thread; None in a job of one rank.
    """

    def __init__(self, transport: Communicator, lane: Lane, post_office: Post, title: str, reader: Reader) -> None:
        """Begin to receive. See the class."""
        self.transport, self.lane, self.post_office = transport, lane, post_office
        self.title, self.reader = title, reader
        self.changed, self.wake = threading.Condition(), threading.Event()
        self.sending: list[Message] = []
        self.inbox = Inbox(transport)
        self.left: set[int] = set()
        self.state = State.OPEN
        self.thread: threading.Thread | None = None
        if transport.size > 1:
            self.thread = threading.Thread(target=self.main, name="hvdlite-mailbox", daemon=True)
            self.thread.start()

    # Any thread

    def post(self, dest: int, letter: Letter) -> None:
        """Send a letter, and return at once.

        A body to this rank itself is not copied, and must not change.

        Raises:
            HvdliteError: Communication has broken, or this is a forked child.
        """
        self.check()
        if dest != self.transport.rank:
            self.send(dest, letter)
        elif self.thread is None:
            self.deliver(letter._replace(source=dest))
        else:
            self.inbox.local.append(letter._replace(source=dest))
            self.wake.set()

    def send(self, dest: int, letter: Letter) -> None:
        """Begin to send a letter to another rank."""
        message = letter.packed()
        adopt_gpu()
        with self.changed:  # the pieces of two letters to one rank must not mix
            for start in range(0, message.size, PIECE):
                self.sending.append(self.transport.start_message(message[start : start + PIECE], dest, TAG))

    def wait(self, done: Callable[[], bool], title: str, whom: Callable[[], int]) -> None:
        """Wait for letters.

        Args:
            done: Returns whether they have come. It is called after each letter, and only reads.
            title: What this rank waits for, in messages.
            whom: Returns the rank that it waits for, for the stall watch.

        Raises:
            HvdliteError: Communication has broken.
        """
        began, watched = time.monotonic(), self.lane.queue.changed
        with contextlib.ExitStack() as stack:
            watched.wait_begins()
            stack.callback(watched.wait_ends)
            shown = False
            while not self.woken(done):
                self.check()
                if not shown and time.monotonic() - began > SHOWN_AFTER:
                    shown = self.show(title, whom(), stack)

    def woken(self, done: Callable[[], bool]) -> bool:
        """Wait for a short while. Returns `done()`."""
        with self.changed:
            return self.changed.wait_for(done, TICK)

    def show(self, title: str, whom: int, stack: contextlib.ExitStack) -> bool:
        """Let the stall watch see a wait for rank `whom`, until `stack` ends. Returns whether it does."""
        end = None if whom == self.transport.rank else self.post_office.show_wait(whom, title)
        if end is not None:
            stack.callback(end)
        return end is not None

    @property
    def broken(self) -> bool:
        """Whether communication has broken. (After `hvd.shutdown()` on all ranks it has not.)"""
        return self.lane.closed is not None and not isinstance(self.lane.closed, ShutdownError)

    def check(self) -> None:
        """Raise the error that has closed the lane, if it is closed and this rank is not leaving in order."""
        if self.lane.closed and (self.broken or self.state is not State.LEAVING):
            raise self.lane.closed.with_traceback(None)

    # The thread

    def main(self) -> None:
        """The thread."""
        nap = SHORTEST_NAP
        try:
            while not (self.over or self.broken):
                adopt_gpu()
                if self.work():
                    nap = SHORTEST_NAP
                else:
                    self.wake.wait(nap)
                    nap = min(1.1 * nap, LONGEST_NAP)
                self.wake.clear()
        except Told as error:
            self.lane.break_off(HvdliteError(str(error)))
        except BaseException as error:
            self.fail(error)
        with self.changed:
            self.changed.notify_all()

    def work(self) -> bool:
        """Deliver what has arrived, and go on with what is being sent. Returns whether a letter came."""
        letters = self.inbox.take(self.transport)
        for letter in letters:
            self.deliver(letter)
        if self.sending:
            with self.changed:
                self.sending = [message for message in self.sending if not message.test()]
        return bool(letters)

    def deliver(self, letter: Letter) -> None:
        """Do what a letter asks for."""
        if letter.kind == FAILED:
            raise Told(letter.body.tobytes().decode())
        self.reader.receive(self, letter)
        with self.changed:
            if letter.kind == LEAVE:
                self.left.add(letter.source)
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Tell all ranks of an error in this thread, and break all lanes."""
        rank = self.lane.members[self.transport.rank]
        text = f"{self.title} failed on rank {rank} ({type(error).__name__}: {error}): restart the job [HVD209]"
        reason = error if isinstance(error, HvdliteError) else HvdliteError(text)
        with contextlib.suppress(Exception):
            for dest in range(self.transport.size):
                if dest != self.transport.rank:
                    self.send(dest, Letter(FAILED, body=np.frombuffer(str(reason).encode(), np.uint8)))
            until = time.monotonic() + LAST_WORDS
            while not all(message.test() for message in self.sending) and time.monotonic() < until:
                time.sleep(SHORTEST_NAP)
        self.lane.break_off(reason)

    # The end

    @property
    def over(self) -> bool:
        """Whether all ranks have left, so that no letter is under way.

        A rank leaves when all its questions are answered. A letter that comes after its LEAVE answers another rank's
        question, and that rank leaves later.
        """
        return len(self.left) == self.transport.size and not self.sending

    def start_leaving(self) -> None:
        """Tell all ranks that this one asks nothing more. Returns at once, and this rank goes on answering."""
        if self.state is State.OPEN and not self.lane.closed:
            self.state = State.LEAVING
            me = self.transport.rank
            for dest in (*(rank for rank in range(self.transport.size) if rank != me), me):
                self.post(dest, Letter(LEAVE))  # this rank's own comes last: when it is read, the thread may end

    def close(self) -> None:
        """Leave, and release thread and communicator. Collective; waits for all ranks."""
        self.start_leaving()
        if self.state is State.LEAVING:
            self.wait(lambda: self.over, f"{self.title}: the end", self.laggard)
            if self.thread is not None:
                self.thread.join()
            self.transport.close()
            self.state = State.CLOSED

    def laggard(self) -> int:
        """The first rank that has not left; this one if there is none."""
        return next((rank for rank in range(self.transport.size) if rank not in self.left), self.transport.rank)
