"""Lanes: a private communicator each, and one request after another on it, in the order of the calls.

Each attached optimizer has a lane; eager calls have one per process set. Requests run on the lane's thread. Since a
hand-over to a thread costs some 50 us, they run in the caller's thread where the lane is idle and the caller waits.

Horovod matches calls by name, not by order. So when a roll call finds different requests, all ranks of the lane go into
common rounds (`common_rounds`), and leave them together. The ordinary path pays nothing for this.

Joining is a request, too, which runs when all ranks call it at once. Until then it differs from what other ranks call,
so that common rounds follow, in which the ranks that have joined learn how to take part with zeros.
"""

from __future__ import annotations

import contextlib
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
from hvdlite.lanes.roll_call import RollCall
from hvdlite.lanes.signature import LEAVE
from hvdlite.lanes.workplace import HostWorkplace, LaneThread
from hvdlite.system.float_environment import quiet_runner
from hvdlite.system.time_slices import promptly
from hvdlite.transports import Transport

SWITCH_SECONDS = 0.0005  # a lane's thread waits this long for the GIL after each MPI call while Python code runs
EAGER = "eager"  # the name of lanes that users' calls go through


class Turn:
    """Which thread works for a lane now. Changes under the lane's lock.

    Attributes:
        thread: The lane's own, once it is needed.
        busy: Whether a request is under way, in either thread.
        lent: Whether it is under way in a caller's thread.
        lender: The thread of the last such caller.
        disagreed: Whether the first waiting request has been called, and other ranks had different ones.
    """

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.busy, self.lent, self.disagreed = False, False, False
        self.lender = 0

    def lend(self) -> None:
        """The calling thread works for the lane."""
        self.lender = threading.get_ident()  # first: `in_this_thread` looks without the lock
        self.busy = self.lent = True

    def in_this_thread(self) -> bool:
        """Whether the calling thread is in the middle of a request that it runs itself."""
        return self.lent and self.lender == threading.get_ident()

    def take_back(self) -> None:
        self.busy = self.lent = False


class Lane:
    """Runs requests over a transport, which it owns. `submit`, `run` and `begin` may be called from any thread.

    Attributes:
        name: Equal on all ranks of the lane.
        user: The optimizer or tape that the lane belongs to, in messages.
        host: What the work of a request sees.
        queue: Requests that wait or are under way.
        turn: Which thread works for the lane now.
        family: All lanes of this process. They end where one breaks, for other ranks may wait in them for ever.
        farewell: How this rank leaves.
    """

    def __init__(
        self, transport: Transport, place: Place, members: Sequence[int] | None = None, name: str = EAGER,
        observers: Sequence[Observer] = (), family: Callable[[], Iterable[Lane]] = tuple,
    ) -> None:
        """Make a lane.

        Args:
            members: The global ranks, in the transport's order, for messages to users. Default: 0, 1, 2, ...
            observers: Learn of each request. The list may change while the lane lives.
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
        """The lane belongs to another optimizer from now on. name, user: as above."""
        self.name, self.user = name, user

    @property
    def closed(self) -> HvdliteError | None:
        """Why no request can follow; None while requests can."""
        return self.queue.closed

    # Calls

    def submit(self, request: Request[T]) -> Handle[T]:
        """Queue a request and return at once.

        Raises:
            ValueError: A request of this name is in flight.
        """
        with self.queue.changed.lock:
            self.refuse(request)
            self.wake()  # before the call counts: where no thread can be started, nothing has happened
            self.queue.admit(request)
            self.queue.requests.append(request)
        return request.handle

    def run(self, request: Request[T]) -> T:
        """Queue a request and wait for its result."""
        return self.begin(request).wait()

    def begin(self, request: Request[T]) -> Handle[T]:
        """Queue a request that the caller waits for next: where the lane is idle, it runs before this returns."""
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
                self.run_here(request)
        except BaseException:
            if inline:
                self.take_back(request)
            raise
        return request.handle

    def refuse(self, request: Request[Any]) -> None:
        """Raise the error of a request that cannot be queued: see `Queue.refuse`."""
        self.queue.refuse(request.key, request.title(self.user))

    def require_no_lender(self, title: str) -> None:
        """Raise HvdliteError where a call is about to wait in the middle of another call of its thread."""
        if self.turn.in_this_thread():
            raise in_the_middle(title)

    # The caller's thread, and the lane's

    def run_here(self, request: Request[Any]) -> None:
        """Run a request in the caller's thread; where other ranks have different ones, leave it to the lane's."""
        common = True
        try:
            common = self.attempt(request)
        except BaseException as error:  # Ctrl-C while waiting; a rank that is alone goes on
            self.interrupted(request, error) if self.transport.size > 1 else self.settle(request, error=error)
            raise
        finally:
            with self.queue.changed.lock:
                if not common:
                    self.queue.requests.appendleft(request)
                    self.turn.disagreed = True
                self.take_back(request)

    def take_back(self, request: Request[Any]) -> None:
        """Take the lane back from this thread. A request that has not begun, since a signal's handler has raised
        (Ctrl-C), was not called."""
        with self.queue.changed.lock:
            self.queue.dismiss(request)
            if self.turn.in_this_thread():
                self.turn.take_back()
                if self.queue.requests:
                    self.wake()

    def wake(self) -> None:
        """Have the lane's thread look for requests; start it first where there is none."""
        if self.turn.thread is None:
            sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
            thread = LaneThread(target=promptly, args=(self.main,), name="hvdlite-lane", daemon=True)
            thread.start()
            self.turn.thread = thread
        self.queue.changed.called.notify()

    def main(self) -> None:
        """The lane's thread."""
        while (request := self.next()) is not None:
            request.ready.adopt()
            try:
                if self.take_disagreement() or not self.attempt(request):
                    with self.queue.changed.lock:
                        self.queue.requests.appendleft(request)
                    self.rounds.run()
            except BaseException as error:
                self.interrupted(request, error)
                if error is not self.closed:  # which it was while it waited
                    raise
            finally:
                with self.queue.changed.lock:
                    self.turn.busy = False
            del request  # and what it holds, before the next one comes

    def next(self) -> Request[Any] | None:
        """Wait for the next request and begin it; None where the lane is closed."""
        with self.queue.changed.lock:
            self.queue.changed.called.wait_for(lambda: self.closed or (self.queue.requests and not self.turn.busy))
            if self.closed:
                return None
            self.turn.busy = True
            return self.queue.requests.popleft()

    def take_disagreement(self) -> bool:
        """Whether the request just begun has already been called, and differed."""
        disagreed, self.turn.disagreed = self.turn.disagreed, False
        return disagreed

    # One request

    def attempt(self, request: Request[Any]) -> bool:
        """Call the roll and run the request. Returns False where the ranks differ: common rounds must follow."""
        request.begun = True
        if request.ready is not NOTHING_PENDING or GPUS_IN_MESSAGES:
            request.ready.wait()
            adopt_gpu()
        if self.transport.size > 1 and not self.roll_call.agrees(request):
            return False
        self.execute(request)
        return True

    def execute(self, request: Request[T]) -> None:
        """Do the work of a request that all ranks have agreed on. What it raises becomes its handle's error."""
        result: T | None = None
        error: Exception | None = None
        self.host.equal_counts, request.agreed = request.equal_counts, time.monotonic()
        for observer in self.queue.observers:
            observer.agreed(self.queue.seat, request)
        try:
            result = in_mpi(self.quietly, request.work, self.host)
        except Exception as raised:
            error = raised
        self.host.equal_counts = False
        self.settle(request, result, error)
        if error is not None and (reason := broken_by(error, request.title(self.user))):
            self.break_off(reason)

    def settle(self, request: Request[T], result: T | None = None, error: BaseException | None = None) -> None:
        """Finish a request. After LEAVE nothing can follow."""
        with self.queue.changed.lock:
            if not self.queue.settle(request, result, error):
                return  # the lane was closed meanwhile
            if request.is_a(LEAVE) and error is None:  # before anyone learns of it: leaving twice is leaving once
                self.close(self.farewell.error)
        for observer in self.queue.observers:
            observer.done(self.queue.seat, request)

    def stand_in(self, work: StandIn) -> None:
        """Take part in an operation that this rank, which has joined, has not called."""
        with contextlib.suppress(HvdliteError):  # the other ranks have it, too, and report it
            self.quietly(work, self.host)

    # Waiting

    def stuck(self) -> bool:
        """Whether nothing else will be called before what is queued is done: all threads that have ever called wait.

        An optimizer's lane always counts as stuck: its names are unique, so waiting longer cannot help.
        """
        return self.name != EAGER or self.queue.all_wait()

    def hurried(self) -> bool:
        """Whether a thread of the user's waits for the lane meanwhile, rather than computes."""
        return self.turn.lent or bool(self.queue.changed.waiting)

    def check(self) -> None:
        """Raise the reason for which the lane was closed, if it was. Called while waiting for other ranks."""
        adopt_gpu()
        if self.closed:
            raise self.closed.with_traceback(None)

    # The end

    def interrupted(self, request: Request[Any], error: BaseException) -> None:
        """Close all lanes: an exception left the ranks in the middle of an agreement."""
        what = ": ".join(filter(None, (type(error).__name__, str(error))))
        title = request.title(self.user)
        self.break_off(HvdliteError(f"{title} was interrupted ({what}); this process can no longer communicate"))

    def close(self, reason: HvdliteError) -> None:
        """Fail all pending requests, now and later, with `reason` (that of the first call). From any thread."""
        with self.queue.changed.lock:
            failed = self.queue.close(reason)
        for request in failed:
            self.settle(request, error=self.closed)

    def break_off(self, reason: HvdliteError) -> None:
        """Close this lane and all others. Not under a lock: two lanes may break at the same time."""
        for lane in (self, *self.family()):
            lane.close(reason)

    def start_leaving(self) -> Handle[None]:
        """Begin `leave` and return at once. A rank that leaves several lanes begins with all of them."""
        self.require_no_lender("hvd.shutdown()")
        with self.queue.changed.lock:
            if self.farewell.departure is None:
                request = Request(LEAVE, self.farewell.part, count=self.farewell.digest())
                self.refuse(request)
                self.queue.admit(request)
                self.queue.requests.append(request)
                with contextlib.suppress(RuntimeError):  # Python may start no thread at its end: see `serve`
                    self.wake()
                self.farewell.departure = request.handle
            return self.farewell.departure

    def serve(self) -> None:
        """Where no thread could be started for it, leave in this one. Waits for all ranks."""
        if self.turn.thread is None:
            self.main()

    def leave(self) -> None:
        """Agree with all ranks that no request follows, and release the communicator. Collective; waits for all."""
        if self.farewell.released or (self.closed and self.farewell.departure is None):
            return
        departure = self.start_leaving()
        self.serve()
        departure.wait()
        self.farewell.released = True
        self.roll_call.close()
        self.host.close()

    # A forked child

    def orphan(self, reason: HvdliteError) -> None:
        """Close a lane over MPI, which a forked child may not touch; observers write no more."""
        self.queue.changed.renew()
        self.queue.observers = ()
        self.close(reason)

    def go_on(self, reason: HvdliteError) -> None:
        """Go on in a forked child, without MPI. What was under way fails with `reason`.

        The lane makes a thread of its own once it needs one: the parent's does not exist here.
        """
        self.queue.changed.renew()
        self.turn = Turn()
        self.quietly = quiet_runner()  # the other one may be in use for ever
        for request in list(self.queue.pending.values()):
            if request not in self.queue.requests:
                self.settle(request, error=reason)
        if self.queue.requests:
            with self.queue.changed.lock:
                self.wake()
