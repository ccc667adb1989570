"""A lane runs one request after another on a private communicator.

It follows the order of the calls; in common rounds, rank 0's order. Each attached optimizer or tape has a lane, each
process set one for eager calls, and each pair of ranks one for messages. Requests run on the lane's thread. But to hand
a request to a thread takes some 50 us. So if the lane is idle and the caller waits for the result, the request runs in
the caller's thread.

Horovod matches calls by name, not by order. So if a roll call finds different requests, all ranks of the lane begin
common rounds (`common_rounds`), and end them together. If ranks call the same requests, this costs nothing.

`hvd.join()` is a request, too. It runs once all ranks have called it. Until then it differs from other ranks' requests,
so common rounds follow. In these, ranks that have joined receive the stand-ins by which they take part with zeros.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hvdlite.algorithms import Place
from hvdlite.errors import HvdliteError, broken_by, in_the_middle
from hvdlite.gpu_streams import GPUS_IN_MESSAGES, NOTHING_PENDING, adopt_gpu, in_mpi
from hvdlite.lanes.common_rounds import CommonRounds
from hvdlite.lanes.farewell import Farewell
from hvdlite.lanes.observer import Observer, Seat
from hvdlite.lanes.queue import Queue
from hvdlite.lanes.request import Handle, Request, StandIn, T
from hvdlite.lanes.roll_call import RollCall, Unanswered
from hvdlite.lanes.signature import LEAVE
from hvdlite.lanes.workplace import HostWorkplace, LaneThread
from hvdlite.system.float_environment import quiet_runner
from hvdlite.system.time_slices import promptly
from hvdlite.transports import Transport

SWITCH_SECONDS = 0.0005  # a lane's thread waits this long for the GIL after each MPI call while Python code runs
EAGER = "eager"  # the name of lanes that users' calls go through


class Turn:
    """The thread that works for a lane now: the lane's, a caller's, or none. Changes under the lane's lock.

    Attributes:
        thread: The lane's thread; None until a request needs it.
        busy: Whether a request is under way, in the lane's thread or in a caller's.
        lent: Whether a request is under way in a caller's thread.
        lender: The thread of the last such caller.
        disagreed: Whether a roll call has found that other ranks' requests differ from the first waiting one.
    """

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.busy, self.lent, self.disagreed = False, False, False
        self.lender = 0

    def lend(self) -> None:
        """The calling thread begins a request."""
        self.lender = threading.get_ident()  # first: `in_this_thread` looks without the lock
        self.busy = self.lent = True

    def take(self) -> None:
        """The lane's thread begins a request."""
        self.busy = True

    def end(self) -> None:
        """The request is over: no thread works for the lane."""
        self.busy = self.lent = False

    def in_this_thread(self) -> bool:
        """Whether the calling thread is inside `Lane.begin`, where it runs a request itself."""
        return self.lent and self.lender == threading.get_ident()

    def disagree(self) -> None:
        """A roll call has found that other ranks' requests differ from the first waiting one."""
        self.disagreed = True

    def take_disagreement(self) -> bool:
        """Return `disagreed`, and reset it."""
        disagreed, self.disagreed = self.disagreed, False
        return disagreed

    def start_thread(self, main: Callable[[], None]) -> None:
        """Start the lane's thread, which runs `main`."""
        thread = LaneThread(target=promptly, args=(main,), name="hvdlite-lane", daemon=True)
        thread.start()
        self.thread = thread


class Lane:
    """Runs requests over a transport, which the lane owns. `submit`, `run` and `begin` may be called from any thread.

    Attributes:
        name: The lane's name; equal on all its ranks.
        user: The optimizer or tape that the lane belongs to, in messages.
        host: The workplace that a request's work gets.
        queue: The requests that wait or are under way.
        turn: The thread that works for the lane now.
        family: Returns all lanes of this process. If one breaks, all end, because other ranks may wait in any of them.
        farewell: The state of this rank's leaving.
    """

    def __init__(
        self,
        transport: Transport,
        place: Place,
        members: Sequence[int] | None = None,
        name: str = EAGER,
        observers: Sequence[Observer] = (),
        family: Callable[[], Iterable[Lane]] = tuple,
    ) -> None:
        """Make a lane. Not collective; its first request is.

        Args:
            transport: The lane's communicator.
            place: The facts about the lane's ranks.
            members: The global ranks, in the transport's order, for messages to users. Default: 0, 1, 2, ...
            name: See the class.
            observers: Notified of each request. The list may change while the lane lives.
            family: See the class.
        """
        members = tuple(range(transport.size) if members is None else members)
        self.name, self.user, self.family = name, "", family
        self.host = HostWorkplace(transport, place, members)
        self.queue = Queue(Seat(members, transport.rank), observers)
        self.turn = Turn()
        self.roll_call = RollCall(self.host, self.check, self.hurried)
        self.rounds = CommonRounds(self.queue, self.host, self)
        self.quietly = quiet_runner()
        self.farewell = Farewell()

    @property
    def transport(self) -> Transport:
        return self.host.transport

    @property
    def place(self) -> Place:
        return self.host.place

    @property
    def members(self) -> Sequence[int]:
        return self.host.members

    def serve_another(self, name: str, user: str) -> None:
        """The lane belongs to another optimizer from now on. name, user: see the class."""
        self.name, self.user = name, user

    @property
    def closed(self) -> HvdliteError | None:
        """The error of all later calls; None while the lane takes requests."""
        return self.queue.closed

    # Calls

    def submit(self, request: Request[T]) -> Handle[T]:
        """Queue a request and return at once.

        Raises:
            ValueError: A request of this name is in flight.
        """
        with self.queue.changed.lock:
            self.refuse(request)
            self.wake()  # first: if no thread can be started, the call fails without a trace
            self.queue.admit(request)
            self.queue.requests.append(request)
        return request.handle

    def run(self, request: Request[T]) -> T:
        """Queue a request and wait for its result."""
        return self.begin(request).wait()

    def begin(self, request: Request[T], seconds: float = math.inf) -> Handle[T]:
        """Queue a request, whose result the caller needs next. If the lane is idle, run it before this returns.

        If other ranks have not called it after so many seconds, the request stays queued, and this returns.
        """
        if self.turn.lent:
            self.require_no_lender(request.title(self.user))
        inline = False
        try:
            with self.queue.changed.lock:
                inline = not (self.turn.busy or self.queue.requests)
                if inline:
                    self.refuse(request)
                    self.queue.admit(request)
                    self.turn.lend()
                else:
                    self.submit(request)
            if inline:
                self.run_here(request, time.monotonic() + seconds)
        except BaseException:
            if inline:
                self.take_back(request)
            raise
        return request.handle

    def refuse(self, request: Request[T]) -> None:
        """Raise an error if the request cannot be queued, as `Queue.refuse` does."""
        self.queue.refuse(request, self.user)

    def require_no_lender(self, title: str) -> None:
        """Raise HvdliteError if the calling thread would wait for a request inside another request that it runs."""
        if self.turn.in_this_thread():
            raise in_the_middle(title)

    # The caller's thread, and the lane's

    def run_here(self, request: Request[T], until: float) -> None:
        """Run a request in the caller's thread. If other ranks have different ones, leave it to the lane's thread.

        until: When to leave it to that thread because other ranks have none, as a time of `time.monotonic()`.
        """
        common, answered = True, True
        self.queue.changed.wait_begins()
        try:
            common = self.attempt(request, until)
        except Unanswered:
            answered = False
        except BaseException as error:  # Ctrl-C while waiting; in a job of one rank the lane stays usable
            self.interrupted(request, error) if self.transport.size > 1 else self.settle(request, error=error)
            raise
        finally:
            self.queue.changed.wait_ends()
            with self.queue.changed.lock:
                if not (common and answered):
                    self.queue.requests.appendleft(request)
                if not common:
                    self.turn.disagree()
                self.take_back(request)

    def take_back(self, request: Request[T]) -> None:
        """End this thread's turn. If the request has not begun, because a signal handler raised, undo the call."""
        with self.queue.changed.lock:
            self.queue.dismiss(request)
            if self.turn.in_this_thread():
                self.turn.end()
                if self.queue.requests:
                    self.wake()

    def wake(self) -> None:
        """Notify the lane's thread of a request. Start the thread if there is none."""
        if self.turn.thread is None:
            sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
            self.turn.start_thread(self.main)
        self.queue.changed.called.notify()

    def main(self) -> None:
        """The lane's thread."""
        while (request := self.next()) is not None:
            request.ready.adopt()
            try:
                if self.turn.take_disagreement() or not self.attempt(request):
                    with self.queue.changed.lock:
                        self.queue.requests.appendleft(request)
                    self.rounds.run()
            except BaseException as error:
                self.interrupted(request, error)
                if error is not self.closed:  # else `check` raised it, because the lane was closed while it waited
                    raise
            finally:
                with self.queue.changed.lock:
                    self.turn.end()
            del request  # else its arrays would live until the next request

    def next(self) -> Request[Any] | None:
        """Wait for the next request, and take the turn. Returns None once the lane is closed."""
        with self.queue.changed.lock:
            self.queue.changed.called.wait_for(lambda: self.closed or (self.queue.requests and not self.turn.busy))
            if self.closed:
                return None
            self.turn.take()
            return self.queue.requests.popleft()

    # One request

    def attempt(self, request: Request[T], until: float = math.inf) -> bool:
        """Call the roll and run the request. Returns False if the ranks differ: then common rounds must follow.

        until: As for `RollCall.agrees`.
        """
        request.begin()
        if request.ready is not NOTHING_PENDING or GPUS_IN_MESSAGES:
            request.ready.wait()
            adopt_gpu()
        if self.transport.size == 1:
            request.agree(request.flag)
        elif not self.roll_call.agrees(request, until):
            return False
        self.execute(request)
        return True

    def execute(self, request: Request[T]) -> None:
        """Do the work of a request that all ranks have called. An exception of the work becomes the handle's error."""
        result: T | None = None
        error: Exception | None = None
        for observer in self.queue.observers:
            observer.agreed(self.queue.seat, request)
        try:
            result = in_mpi(self.quietly, request.work, self.host)
        except Exception as raised:
            error = raised
        self.settle(request, result, error)
        if error is not None and (reason := broken_by(error, request.title(self.user))):
            self.break_off(reason)

    def settle(self, request: Request[T], result: T | None = None, error: BaseException | None = None) -> None:
        """Finish a request with a result or an error. After LEAVE close the lane."""
        with self.queue.changed.lock:
            if not self.queue.settle(request, result, error):
                return  # `close` has finished it
            if request.is_a(LEAVE) and error is None:  # under the lock, before the caller of `leave` wakes
                self.close(self.farewell.error)
        for observer in self.queue.observers:
            observer.done(self.queue.seat, request)

    def stand_in(self, work: StandIn) -> None:
        """Take part in an operation of other ranks, after this rank has joined."""
        self.host.agree(equal_counts=False)
        with contextlib.suppress(HvdliteError):  # the other ranks raise the same error to their callers
            self.quietly(work, self.host)

    # Waiting

    def stuck(self) -> bool:
        """Whether no thread of this rank will call another request before one of the queued requests is done.

        An optimizer's lane always counts as stuck. Its names are unique, so no other call can match them.
        """
        return self.name != EAGER or self.queue.all_wait()

    def hurried(self) -> bool:
        """Whether a thread of the user waits for the lane, and does not compute."""
        return self.turn.lent or bool(self.queue.changed.waiting)

    def check(self) -> None:
        """Raise the error that closed the lane, if it is closed. Called while waiting for other ranks."""
        adopt_gpu()
        if self.closed:
            raise self.closed.with_traceback(None)

    # The end

    def interrupted(self, request: Request[T], error: BaseException) -> None:
        """Close all lanes, because an exception has stopped this rank in the middle of an agreement."""
        what = ": ".join(filter(None, (type(error).__name__, str(error))))
        title = request.title(self.user)
        self.break_off(
            HvdliteError(f"{title} was interrupted ({what}); this process can no longer communicate [HVD209]")
        )

    def close(self, reason: HvdliteError) -> None:
        """Fail all pending and later requests with `reason`; the first call's reason counts. For any thread."""
        with self.queue.changed.lock:
            failed = self.queue.close(reason)
        for request in failed:
            self.settle(request, error=self.closed)

    def break_off(self, reason: HvdliteError) -> None:
        """Close this lane and all others. The caller holds no lane's lock, because two lanes may break at once."""
        for lane in (self, *self.family()):
            lane.close(reason)

    def start_leaving(self) -> Handle[None]:
        """Queue the request to leave, and return at once. A rank that leaves several lanes first calls this on all."""
        self.require_no_lender("hvd.shutdown()")
        with self.queue.changed.lock:
            departure = self.farewell.departure
            if departure is None:
                request = Request(LEAVE, self.farewell.part, count=self.farewell.digest())
                self.refuse(request)
                self.queue.admit(request)
                self.queue.requests.append(request)
                with contextlib.suppress(RuntimeError):  # when Python ends, it starts no threads: see `serve`
                    self.wake()
                departure = request.handle
                self.farewell.begin(departure)
            return departure

    def serve(self) -> None:
        """If no thread could be started for the lane, run its requests in this one. Waits for all ranks."""
        if self.turn.thread is None:
            self.main()

    def leave(self) -> None:
        """Agree with all ranks that no request follows, and release the communicator. Collective; waits for all."""
        if self.farewell.released or (self.closed and self.farewell.departure is None):
            return
        departure = self.start_leaving()
        self.serve()
        departure.wait()
        self.farewell.end()
        self.roll_call.close()
        self.host.close()

    # A forked child

    def orphan(self, reason: HvdliteError) -> None:
        """Close a lane over MPI in a forked child, which must not call MPI or its parent's observers."""
        self.queue.orphan()
        self.close(reason)

    def go_on(self, reason: HvdliteError) -> None:
        """Continue a lane without MPI in a forked child. Requests under way fail with `reason`, and waiting ones run.

        The parent's threads do not exist in the child. The lane starts a new one if it needs one.
        """
        self.queue.changed.renew()
        self.turn = Turn()
        self.quietly = quiet_runner()  # a thread that the child lacks may have been inside the old one
        for request in list(self.queue.pending.values()):
            if request not in self.queue.requests:
                self.settle(request, error=reason)
        if self.queue.requests:
            with self.queue.changed.lock:
                self.wake()
