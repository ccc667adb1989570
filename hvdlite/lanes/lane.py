"""Lanes: a private communicator, and one request after another on it, in the order they were submitted.

Each attached optimizer has a lane; eager calls have one per process set. Requests run on the lane's thread, or, since
handing over to a thread costs ~50 us, in the caller's own when the lane is idle and the caller waits anyway.

Horovod matches calls by name, not by order. So when a roll call finds different requests, all ranks of the lane go
into common rounds (`rounds`), and leave them together. The ordinary path pays nothing for this.

Joining is a request, too, that runs when all ranks call it at once. Until then it differs from what others call, so
that rounds follow, which tell those who have joined how to take part with zeros: two small exchanges per request.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvdlite.algorithms import Place
from hvdlite.errors import HvdliteError, ShutdownError, broken_by, in_the_middle
from hvdlite.gpu_streams import GPUS_IN_MESSAGES, NOTHING_PENDING, adopt_gpu, in_mpi
from hvdlite.lanes.common_rounds import rounds
from hvdlite.lanes.request import Changed, Handle, Request
from hvdlite.lanes.roll_call import VALUES, agreed
from hvdlite.lanes.signature import LEAVE, digest
from hvdlite.memory.workspace import Workspace
from hvdlite.system.float_environment import quiet_runner
from hvdlite.system.time_slices import promptly
from hvdlite.transports import Transport

if TYPE_CHECKING:
    from hvdlite.lanes.gpu_side import Side
    from hvdlite.observers import Observer

SWITCH_SECONDS = 0.0005  # a lane's thread waits this long for the GIL after each MPI call while Python code runs
THREADS: dict[int, threading.Thread] = threading._active  # type: ignore[attr-defined]
"""Python's threads; current_thread() would take one that C code has started for one of them ever after."""
EAGER = "eager"  # the name of lanes that users' calls go through


class Lane:
    """Runs requests over `transport`, which it owns. `submit` and `run` may be called from any thread.

    members: the global ranks, in the transport's order, by which messages name them; None: 0, 1, 2, ...
    name: equal on all its ranks. user: the optimizer or tape that it belongs to, in messages. observers: told of each
    request; the list may change while the lane lives.
    family: all lanes of this process, which end where one breaks, for others may wait in it for ever.
    """

    def __init__(
        self, transport: Transport, place: Place, members: Sequence[int] | None = None, name: str = EAGER,
        observers: Sequence[Observer] = (), family: Callable[[], Iterable[Lane]] = tuple,
    ) -> None:
        self.transport, self.place, self.user = transport, place, ""
        self.name, self.observers, self.family = name, observers, family
        self.members = tuple(range(transport.size) if members is None else members)
        self.workspace = Workspace()
        self.maximum = transport.maximum(VALUES)
        self.may_agree_in_memory = place.in_memory and place.one_host  # behind the first call that all make alike
        self.quietly = quiet_runner()
        self.gpu: Side | None = None  # instead of transport, place and workspace for device arrays; `gpu` makes it
        self.changed = Changed()
        self.queue: deque[Request] = deque()
        self.pending: dict[str, Request] = {}  # by key: queued or under way
        self.busy = False  # a request is under way, in the lane's thread or a caller's
        self.lent = False  # in a caller's
        self.lender = 0  # whose it was last
        self.callers: dict[int, threading.Thread | None] = {}  # who has ever called; None: no thread of Python's
        self.calls = 0  # requests admitted since all ranks last joined
        self.alike = False  # all ranks gave the same count with the request under way
        self.without_all = False  # the request under way runs while ranks have joined, who lend no memory
        self.disagreed = False  # the first request in the queue has been called and differed
        self.closed: HvdliteError | None = None
        self.farewell = ShutdownError("hvdlite has been shut down: call hvd.init() again first.")  # found after `leave`
        self.partings: dict[str, tuple[Mapping[Any, Any], Callable[[Sequence[Any]], None]]] = {}
        """By name: what this rank brings when all leave, and who gets all ranks' where they differ."""
        self.departure: Handle | None = None
        self.released = False
        self.thread: threading.Thread | None = None

    def submit(self, request: Request) -> Handle:
        """Queue a request; returns at once. Raises ValueError when its name is in flight already."""
        with self.changed.lock:
            self.admit(request)
            self.queue.append(request)
        return request.handle

    def run(self, request: Request) -> Any:
        """Queue a request and wait for its result."""
        return self.begin(request).wait()

    def begin(self, request: Request) -> Handle:
        """Queue a request that is waited for next: where the lane is idle, it runs before this returns."""
        if self.lent:
            self.require_no_lender(request.title(self.user))
        inline = False
        try:
            with self.changed.lock:
                inline = not self.busy and not self.queue
                self.admit(request, waking=not inline)
                if inline:
                    self.lender = threading.get_ident()  # first: `require_no_lender` looks without the lock
                    self.busy = self.lent = True
                else:
                    self.queue.append(request)
            if inline:
                self.run_here(request)
        except BaseException:
            if inline:
                self.take_back(request)
            raise
        return request.handle

    def take_back(self, request: Request) -> None:
        """The lane, from this thread and its request: where that has not begun, since a signal's handler (Ctrl-C) has
        raised in `begin`, it was not called."""
        with self.changed.lock:
            if not request.begun and self.pending.get(request.key) is request:
                del self.pending[request.key]
                self.calls -= 1
            if self.lent and self.lender == threading.get_ident():
                self.busy = self.lent = False
                if self.queue:
                    self.wake()

    def require_no_lender(self, title: str) -> None:
        """Raise HvdliteError where a call is about to wait in the middle of another of its thread's."""
        if self.lent and self.lender == threading.get_ident():
            raise in_the_middle(title)

    def admit(self, request: Request, waking: bool = True) -> None:
        """Make a request pending. waking: the lane's thread, which goes on once it can have the lock."""
        if self.closed:
            raise self.closed.with_traceback(None)  # that of an earlier call keeps all that was in its frames
        caller, key = threading.get_ident(), request.key
        if key in self.pending:
            title = request.title(self.user)
            raise ValueError(f"{title} is in flight already: wait for it (synchronize), or give this one another name.")
        if waking:  # first: where no thread can be started, nothing has happened
            self.wake()
        request.handle = Handle(self.changed)
        request.queued = time.monotonic()
        self.callers[caller] = THREADS.get(caller)
        self.calls += 1
        self.pending[key] = request
        for observer in self.observers:
            observer.queued(self, request)

    def wake(self) -> None:
        if self.thread is None:
            sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
            thread = threading.Thread(target=promptly, args=(self.main,), name="hvdlite-lane", daemon=True)
            thread.start()
            self.thread = thread
        self.changed.called.notify()

    def run_here(self, request: Request) -> None:
        """Run a request in the caller's thread; where it cannot run yet, leave it to the lane's."""
        common = True
        try:
            common = self.attempt(request)
        except BaseException as error:  # Ctrl-C while waiting; a rank that is alone goes on
            self.interrupted(request, error) if self.transport.size > 1 else self.settle(request, error=error)
            raise
        finally:
            with self.changed.lock:
                if not common:
                    self.queue.appendleft(request)
                    self.disagreed = True
                self.take_back(request)

    def main(self) -> None:
        """The lane's thread."""
        while True:
            with self.changed.lock:
                self.changed.called.wait_for(lambda: self.closed or (self.queue and not self.busy))
                if self.closed:
                    return
                self.busy = True
                request, disagreed, self.disagreed = self.queue.popleft(), self.disagreed, False
            request.ready.adopt()
            try:
                if disagreed or not self.attempt(request):
                    with self.changed.lock:
                        self.queue.appendleft(request)
                    rounds(self)
            except BaseException as error:
                self.interrupted(request, error)
                if error is not self.closed:  # which it was while it waited
                    raise
            finally:
                with self.changed.lock:
                    self.busy = False
            del request  # and what it holds, before the next one comes

    def interrupted(self, request: Request, error: BaseException) -> None:
        """Something was raised while ranks agreed on a request: nothing can follow on this communicator."""
        what = ": ".join(filter(None, (type(error).__name__, str(error))))
        title = request.title(self.user)
        self.break_off(HvdliteError(f"{title} was interrupted ({what}); this process can no longer communicate"))

    def attempt(self, request: Request) -> bool:
        """Call the roll and run the request; False when the ranks differ, so that rounds must follow."""
        request.begun = True
        if request.ready is not NOTHING_PENDING or GPUS_IN_MESSAGES:
            request.ready.wait()
            adopt_gpu()
        if self.transport.size > 1 and not agreed(self, request):
            return False
        self.execute(request)
        return True

    def execute(self, request: Request) -> None:
        """Do the work of a request that all ranks have agreed on; what it raises is its handle's error."""
        result = error = None
        self.alike, request.agreed = request.alike, time.monotonic()
        for observer in self.observers:
            observer.agreed(self, request)
        try:
            result = in_mpi(self.quietly, request.work, self)
        except Exception as raised:
            error = raised
        self.alike = False
        self.settle(request, result, error)
        if error is not None and (reason := broken_by(error, request.title(self.user))):
            self.break_off(reason)

    def settle(self, request: Request, result: Any = None, error: BaseException | None = None) -> None:
        with self.changed.lock:
            if self.pending.pop(request.key, None) is None:
                return  # the lane was closed meanwhile
            request.handle.finish(result, error)
            if request.first is LEAVE and error is None:  # before anyone learns of it: leaving twice is leaving once
                self.close(self.farewell)
        for observer in self.observers:
            observer.done(self, request)

    @property
    def stuck(self) -> bool:
        """Whether nothing else will be called before what is queued is done: all threads that have ever called wait.
        An optimizer's lane always counts as such: names are unique on it, so waiting longer cannot help."""
        return self.name != EAGER or self.living_callers() == self.changed.waiters()

    def living_callers(self) -> set[int]:
        """The threads that have ever called, without those of Python's that have ended; of others nobody knows."""
        return {ident for ident, thread in list(self.callers.items()) if thread is None or thread.is_alive()}

    def hurried(self) -> bool:
        """Whether a thread of the user's waits for the lane meanwhile, rather than computes."""
        return self.lent or bool(self.changed.waiting)

    def check(self) -> None:
        """Raise the reason for which the lane was closed, if it was: called while waiting for other ranks."""
        adopt_gpu()
        if self.closed:
            raise self.closed.with_traceback(None)

    def close(self, reason: HvdliteError) -> None:
        """Fail all that is pending, now and later, with `reason` (that of the first call). From any thread."""
        with self.changed.lock:
            self.closed = self.closed or reason
            waiting, self.queue = list(self.pending.values()), deque()
            self.changed.called.notify()
        for request in waiting:
            self.settle(request, error=self.closed)

    def break_off(self, reason: HvdliteError) -> None:
        """`close` this lane and with it the others. Not under a lock, for they may break at the same time."""
        for lane in (self, *self.family()):
            lane.close(reason)

    def start_leaving(self) -> Handle:
        """Begin `leave`, and return at once: who leaves several lanes begins with all of them."""
        self.require_no_lender("hvd.shutdown()")
        with self.changed.lock:
            if self.departure is None:
                brought = [(name, sorted(values.items())) for name, (values, _) in sorted(self.partings.items())]
                request = Request(LEAVE, Lane.part, count=digest(str(brought)))
                self.admit(request, waking=False)
                self.queue.append(request)
                with contextlib.suppress(RuntimeError):  # Python may start no thread at its end: see `serve`
                    self.wake()
                self.departure = request.handle
        return self.departure

    def part(self) -> None:
        """What all ranks do together when they leave: hand out what they bring, where it differs. A name that some rank
        lacks (its optimizer is no more, it ends with an error) is passed over."""
        if self.transport.size == 1 or self.alike:
            return
        everyone = self.transport.allgather_object({name: values for name, (values, _) in self.partings.items()})
        for name, (_, tell) in self.partings.items():
            if all(name in theirs for theirs in everyone):
                tell([theirs[name] for theirs in everyone])

    def serve(self) -> None:
        """Where no thread could be started for it, leave in this one; waits for all."""
        if self.thread is None:
            self.main()

    def leave(self) -> None:
        """Agree with all ranks that no request follows, and release the communicator. Collective; waits for all."""
        if self.released or (self.closed and self.departure is None):
            return
        departure = self.start_leaving()
        self.serve()
        departure.wait()
        self.released = True
        if self.gpu is not None:
            self.gpu.close()
        del self.maximum  # and the memory that it may be in, while graphs of before keep the lane
        self.workspace.close()
        self.transport.close()
