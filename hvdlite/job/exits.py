"""The guard of each process: if one rank fails, the whole job ends with that rank's exit code.

Under MPI a rank that dies of an exception blocks in MPI_Finalize, and the other ranks wait in a collective for ever. So
from `install` to `uninstall`:

- An uncaught exception in any thread is printed once, with its rank, and the job ends with code 1. KeyboardInterrupt
  ends the job quietly with code 130.
- `sys.exit(n)` in the main thread ends the job with code n, unless n is 0 (see `exit_codes`).
- A file in the job's folder tells the keeper that the other ranks count on this process. So the keeper notices a
  process that ends with code 0 too early (`os._exit(0)`), see `folder`.
- If the main thread ends the job, exit functions run and buffered files are written first, for at most 0.7 s.
- If the parent (mpirun) dies, the kernel kills this process.
- The names of the MPI's shared-memory files are removed (see `mpi_segments`).

Before `install`, an exception ends the job if `mpi4py.MPI` has been imported (see `end_for_uncaught`).

mpirun itself notices signals and `os._exit(n)`. SystemExit is not covered outside of CPython, nor in other threads than
the main one, where Python ignores it. In interactive sessions an exception does not end the process. Under hvdliterun
the ranks agree on the first failure: on one host through the job's folder, on several hosts through hvdliterun. Only
the first failure is printed, and its code is the job's.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import io
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from hvdlite.errors import HvdliteError, ShutdownError
from hvdlite.job import exit_codes, mpi_segments
from hvdlite.job.folder import claim, job_is_ending, note_presence, stopped, write
from hvdlite.lanes import swallowed
from hvdlite.system import tracebacks
from hvdlite.system.launcher_environment import JOB_FOLDER, SEVERAL_HOSTS, UNDER_HYDRA_OR_PMI, UNDER_PRRTE

PATIENCE = 2.0  # seconds for the first failure to be printed, and for an abort to work
GOODBYE = 0.7  # seconds for exit functions and files, which an abort leaves out
NOTICE = 0.1  # seconds until the death of a killed rank is noted; other ranks may notice it sooner (gloo)
LET_GO = 0.5  # seconds for all ranks to leave after one has left
TOGETHER = 0.2  # seconds for other ranks to end by themselves, as when all call sys.exit(3)
PR_SET_PDEATHSIG = 1

_guard: Guard | None = None
_guarded = False
"""Whether this process has ever been guarded."""
_leaving = False
_ending = False


def install(abort: Callable[[int], object], rank: int, leave: Callable[[], object]) -> None:
    """Guard this process until `uninstall()`. Installing again replaces the guard.

    Call it in a job of more than one process, from any thread. After MPI's initialization the processes of this host
    must have met, for instance in a barrier or in `Dup()`.

    Args:
        abort: Ends all processes of the job with the given code, e.g. `MPI.COMM_WORLD.Abort`.
        rank: This process' rank in MPI.COMM_WORLD.
        leave: Leaves the job, as `hvd.shutdown()` does.
    """
    global _guard, _guarded, _leaving
    uninstall()
    _guard, _guarded, _leaving = Guard(abort, rank, leave), True, False
    _guard.attach()
    note_presence(rank, present=True)
    die_with_parent()
    mpi_segments.unlink()


def uninstall() -> None:
    """Put back what `install` replaced. The process still dies with its parent."""
    global _guard
    if _guard is not None:
        note_presence(_guard.rank, present=False)
        _guard.detach()
        _guard = None


def is_guarded() -> bool:
    """Whether other ranks count on this process."""
    return _guard is not None


def begin_leaving() -> None:
    """Note that this process shuts down. An HvdliteError in another thread is then no failure."""
    global _leaving
    _leaving = True


def begin_ending() -> None:
    """Note that this process ends the job, or that hvdliterun does."""
    global _ending
    _ending = True


def is_ending() -> bool:
    """Whether the job ends without an orderly shutdown, so that no rank may be waited for."""
    return _ending


def give_up(reason: str, at_exit: bool = False) -> NoReturn:
    """End the job with code 1, from any thread and whatever the other ranks do.

    Args:
        reason: Printed with the rank, unless another rank has failed before.
        at_exit: Python's exit functions are running already.
    """
    if _guard is None:
        print(f"hvdlite: {reason}", file=sys.stderr, flush=True)
        os._exit(1)
    _guard.fail(1, reason, lambda: None, not at_exit)


def end_for_uncaught() -> None:
    """At the process' exit: end the job if an exception has ended the script past our hook.

    The user may have replaced the hook after hvd.init(), as `rich.traceback.install()` does; then the exception has
    been printed. Or the exception came before hvd.init(), and `mpi4py.MPI` has been imported: MPI's end would wait for
    the other ranks. An exception from inside a frame is shown by a console, and does not end the script.
    """
    error, traceback = getattr(sys, "last_value", None), getattr(sys, "last_traceback", None)
    if error is None or traceback is None or traceback.tb_frame.f_back is not None:
        return
    guard = _guard or guard_before_init()
    if guard is None or sys.excepthook is guard.my_excepthook or not guard.applies():
        return
    guard.end_for(type(error), type(error).__name__, lambda: None, functions=False)


def guard_before_init() -> Guard | None:
    """A guard for a rank whose MPI somebody else has initialized; None if there is no such MPI, or only one rank."""
    mpi = sys.modules.get("mpi4py.MPI")
    if _guarded or mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    world = mpi.COMM_WORLD
    return Guard(world.Abort, world.Get_rank(), lambda: None) if world.Get_size() > 1 else None


atexit.register(end_for_uncaught)


def report_swallowed(error: str) -> None:
    """At the process' exit, after hvd.shutdown(): report an error that the script has caught, and then ended normally.

    Under hvdliterun this leaves a note, and hvdliterun acts on it when all ranks have ended. Otherwise it prints the
    error and ends this process with code 1. It does nothing if an exception ends the script.

    Args:
        error: The text of the error by which this rank learned that another rank has left.
    """
    if getattr(sys, "last_value", None) is not None or job_is_ending() or write("swallowed", error):
        return
    with contextlib.suppress(Exception):
        what = f"rank {swallowed.rank} ended with exit code 0 after communication had failed"
        print(f"hvdlite: {what}, and its script has caught the error: {error} [HVD908]", file=sys.stderr)
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.Finalize()  # otherwise the MPI takes this for a crash, and kills ranks that are still saving their work
    exit_codes.flush_files()
    os._exit(1)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies.

    Under hvdliterun a parent with threads is left out, since hvdliterun watches it. The kernel would act when the
    thread that started this process ends.
    """
    parent = os.getppid()
    with contextlib.suppress(OSError):
        if JOB_FOLDER and len(os.listdir(f"/proc/{parent}/task")) > 1:
            return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call
        os.kill(os.getpid(), signal.SIGKILL)


class Guard:
    """The hooks of one installation.

    Attributes:
        abort, rank, leave: See `install`.
        process: The guarded process. Its forked children are not guarded.
        at_prompt: Whether the process was an interactive session at the beginning; a debugger may look like one later.
        lock: Held by the thread that ends the job.
        excepthook, threadhook: The hooks of `sys` and `threading` that were replaced.
        my_excepthook, my_threadhook: The hooks in their place. Each access to a method makes a new object, and `detach`
            compares objects.
        codes: Notices exit codes.
    """

    def __init__(self, abort: Callable[[int], object], rank: int, leave: Callable[[], object]) -> None:
        self.abort = abort
        self.rank = rank
        self.leave = leave
        self.process = os.getpid()
        self.at_prompt = hasattr(sys, "ps1")
        self.lock = threading.Lock()
        self.excepthook = sys.excepthook
        self.threadhook = threading.excepthook
        self.my_excepthook = self.on_exception
        self.my_threadhook = self.on_thread
        self.codes = exit_codes.ExitCodes(self.on_exit)

    def attach(self) -> None:
        """Install the hooks."""
        sys.excepthook, threading.excepthook = self.my_excepthook, self.my_threadhook
        self.codes.watch()

    def detach(self) -> None:
        """Put back the hooks of before, unless somebody else has replaced ours."""
        self.codes.forget()
        if threading.excepthook is self.my_threadhook:
            threading.excepthook = self.threadhook
        if sys.excepthook is self.my_excepthook:
            sys.excepthook = self.excepthook

    def applies(self) -> bool:
        """Whether an uncaught exception ends a rank: not in a forked child, and not at a prompt."""
        return os.getpid() == self.process and not (self.at_prompt or sys.flags.interactive)

    def on_exception(self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        """`sys.excepthook`."""
        if not self.applies():
            self.excepthook(kind, value, traceback)
            return

        def tell() -> None:
            tracebacks.show(value, lambda: self.excepthook(kind, value, value.__traceback__))

        if issubclass(kind, ShutdownError) and leave_as_others(self.leave):
            tell()
        else:
            self.end_for(kind, kind.__name__, tell)

    def on_thread(self, args: threading.ExceptHookArgs) -> None:
        """`threading.excepthook`."""
        abandoned = issubclass(args.exc_type, ShutdownError) and args.thread is not None and args.thread.daemon
        over = abandoned or (_leaving and issubclass(args.exc_type, HvdliteError))
        if over or not self.applies() or issubclass(args.exc_type, SystemExit):
            self.threadhook(args)
        else:
            where = f"{args.exc_type.__name__} in thread {args.thread.name if args.thread else '?'}"
            self.end_for(args.exc_type, where, lambda: self.show_thread(args))

    def show_thread(self, args: threading.ExceptHookArgs) -> None:
        """Print an exception of a thread."""
        error = args.exc_value
        if error is None:
            self.threadhook(args)
            return

        def hook() -> None:
            given = (args.exc_type, error, error.__traceback__, args.thread)
            self.threadhook(threading.ExceptHookArgs(given))

        tracebacks.show(error, hook)

    def on_exit(self, code: object) -> None:
        """The main thread ends with SystemExit(code)."""
        number = exit_codes.number_of(code)
        if number == 0:
            return
        tell = (lambda: None) if isinstance(code, int) else (lambda: print(code, file=sys.stderr))
        self.fail(number, f"exit code {number}", tell)

    def end_for(
        self, kind: type[BaseException], what: str, tell: Callable[[], object], functions: bool = True
    ) -> NoReturn:
        """End the job for an exception; for Ctrl-C quietly. The arguments are those of `fail`."""
        if issubclass(kind, KeyboardInterrupt):
            self.end(128 + signal.SIGINT, functions=functions)
        self.fail(1, what, tell, functions)

    def fail(self, code: int, what: str, tell: Callable[[], object], functions: bool = True) -> NoReturn:
        """End the job, and print why, unless another rank has failed before.

        Args:
            code: The exit code.
            what: What has failed, in a few words.
            tell: Prints the details.
            functions: Whether to call Python's exit functions.
        """
        time.sleep(NOTICE)
        with self.lock:  # a second thread that fails waits here until the process ends
            if not claim(self.rank, code):
                self.end(code, PATIENCE / 2, functions)  # another rank prints its failure, and its abort ends us
            if isinstance(sys.stderr, io.StringIO) or getattr(sys.stderr, "name", "") == os.devnull:
                sys.stderr = sys.__stderr__  # torch.distributed's hook around ours captures stderr until we return
            with contextlib.suppress(Exception):
                host = f" on {socket.gethostname()}" if SEVERAL_HOSTS else ""
                print(f"hvdlite: rank {self.rank}{host} failed: {what} [HVD903]", file=sys.stderr)
                tell()
            self.end(code, functions=functions)

    def end(self, code: int, least: float = TOGETHER, functions: bool = True) -> NoReturn:
        """End the job. In the main thread call exit functions and write files first, for at most GOODBYE seconds.

        Args:
            code: The exit code.
            least: The job ends after this many seconds at the earliest.
            functions: Whether to call Python's exit functions.
        """
        begin_ending()
        begun = time.monotonic()
        try:
            if threading.current_thread() is threading.main_thread():
                self.say_goodbye(code, functions)
            time.sleep(max(0.0, begun + least - time.monotonic()))
        finally:
            self.abort_now(code)

    def say_goodbye(self, code: int, functions: bool) -> None:
        """Call exit functions and write files; abort in the middle of it if it takes too long."""
        late = threading.Timer(GOODBYE, self.abort_now, (code,))
        late.daemon = True
        with contextlib.suppress(RuntimeError):  # Python starts no threads at its very end
            late.start()
        if functions:
            exit_codes.run_exit_functions()
        exit_codes.flush_files()
        late.cancel()

    def abort_now(self, code: int) -> NoReturn:
        """Abort the job, and end this process.

        In three cases there is no abort, because the end of this process ends the job as well:

        - hvdliterun ends the job by a signal. Other ranks may be saving their work.
        - Open MPI's mpirun, from version 5 on, started the rank. It crashes or hangs in some of the jobs in which a
          thread aborts while the main thread communicates (3 % with Open MPI 5.0.11 on busy cores).
        - Hydra or Slurm's PMI-2 started the rank, under hvdliterun. An abort leaves a file in /tmp under Hydra, and
          kills this process before its code is seen under PMI-2. Without an abort Hydra ends the job with any rank's
          code; hvdliterun knows the right one.
        """
        with contextlib.suppress(Exception):  # an abort or a flush that blocks must not keep the job alive
            last_resort = threading.Timer(PATIENCE, os._exit, (code,))
            last_resort.daemon = True
            last_resort.start()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if not UNDER_PRRTE and not (UNDER_HYDRA_OR_PMI and JOB_FOLDER) and not job_is_ending():
            with contextlib.suppress(Exception):
                self.abort(code)
        os._exit(code)


def leave_as_others(leave: Callable[[], object]) -> bool:
    """Leave the job after another rank has left. Returns whether all ranks have left, so that none waits for this one.

    The other rank may end with an exception or a sys.exit(), and wait for this one in hvd.shutdown(). Then the other
    rank's error is the one to print.
    """
    leaver = threading.Thread(target=leave, daemon=True)
    with contextlib.suppress(RuntimeError):  # Python starts no threads at its very end
        leaver.start()
        leaver.join(LET_GO)
        if not leaver.is_alive() and not is_guarded():
            stopped()
            return True
    return False
