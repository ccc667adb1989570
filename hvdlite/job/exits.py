"""The guard in each process: one rank that fails ends the whole job, with that rank's exit code.

Under MPI a rank that dies of an exception leaves the others waiting in a collective for ever: it
blocks in MPI_Finalize, and nobody is told. So, while installed,

- an uncaught exception, in the main thread or any other, is reported once, named by rank, and aborts
  the job with code 1; KeyboardInterrupt aborts quietly with 130;
- `sys.exit(n)` and `raise SystemExit(n)` that reach the top of the main thread abort with n, if n is
  not 0 (a message counts as 1). Nothing in Python's exit path calls out for SystemExit, but CPython
  reads the exception's `code` there, with no Python frame left: `SystemExit.code` is replaced by a
  property that notices. (On Python 3.11 `sys.exit` is replaced, too, from the import on.) Tried:
  `atexit` (the code is no longer known), wrapping `sys.exit` (misses `raise`), tracing (slows
  everything), not finalizing MPI (Open MPI then fails codes of 0 too);
- a file in the job's folder, there from `install` to `uninstall`, shows the keeper of a process that
  ends with code 0 in between (`os._exit(0)`) that the others still count on it (see `notes`);
- before the abort, Python's exit functions run and buffered files are written, for 0.7 s at most;
- the kernel kills this process when its parent (mpirun) dies, however it dies;
- the names of the MPI's shared-memory files go (see `segments`).

Signals and `os._exit(n)` are noticed by mpirun itself. Not covered: a SystemExit in a thread other
than the main one, which Python ignores by design; interactive sessions, where an exception is no end;
and SystemExit outside CPython. Under `hvdliterun` the ranks agree through the job's folder, and on
several hosts through hvdliterun itself, whose failure came first: only that one is told, and its code
is the job's.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from hvdlite.errors import HvdliteError, ShutdownError
from hvdlite.job import mpi_segments
from hvdlite.job.folder import FOLDER, SEVERAL_HOSTS, claim, job_is_ending, note_presence, stopped, write
from hvdlite.lanes import swallowed
from hvdlite.system import tracebacks

_PATIENCE = 2.0  # seconds for the first failure to be told, and for an abort to work
_GOODBYE = 0.7  # seconds for what Python does at a process' end, which an abort leaves out
_NOTICE = 0.1  # seconds until a rank that was killed is noted; others may know at once (gloo: the connection is closed)
_LET_GO = 0.5  # seconds for all to leave, where one has
_TOGETHER = 0.2  # seconds in which the others may end by themselves, too, as where all call sys.exit(3)
_PR_SET_PDEATHSIG = 1
_LONG = 1 << 63
ENVIRONMENT = frozenset(os.environ)  # which a script may clear

_guard: _Guard | None = None
leaving = False
"""Whether this process shuts down: what its threads that still communicate are told then is no failure."""
ending = False
"""Whether this process is ending the job: nobody is there any more to shut down with."""


def install(abort: Callable[[int], object], rank: int, leave: Callable[[], object]) -> None:
    """Guard this process, from its main thread or another, until `uninstall()`.

    abort: ends all processes of the job with the given code, e.g. `MPI.COMM_WORLD.Abort`. rank: in MPI.COMM_WORLD.
    leave: leaves the job, as `hvd.shutdown()` does.
    Call it when the processes of this host have met after MPI's initialization (a barrier or
    `Dup()` is enough), with more than one process. Installing again replaces the guard.
    """
    global _guard, leaving
    uninstall()
    _guard, leaving = _Guard(abort, rank, leave), False
    _guard.attach()
    note_presence(rank, present=True)
    die_with_parent()
    mpi_segments.unlink()


def uninstall() -> None:
    """Put back what `install` replaced. The process goes on dying with its parent."""
    global _guard
    if _guard is not None:
        note_presence(_guard._rank, present=False)
        _guard.detach()
        _guard = None


def give_up(reason: str, at_exit: bool = False) -> NoReturn:
    """End the job with code 1 from any thread, whatever the others are at, and say why (unless another rank has).
    at_exit: Python's exit functions are running already."""
    if _guard is None:
        print(f"hvdlite: {reason}", file=sys.stderr, flush=True)
        os._exit(1)
    _guard._fail(1, reason, lambda: None, not at_exit)


def tell_of_uncaught() -> None:
    """At the process' exit: end the job where an exception has ended the script without our hook, which another has
    replaced (`rich.traceback.install()` after hvd.init()): it is shown already. (Not one that came from inside a frame,
    as a console shows them.)"""
    error, traceback = getattr(sys, "last_value", None), getattr(sys, "last_traceback", None)
    if _guard is None or sys.excepthook is _guard._my_excepthook or not _guard._applies():
        return
    if error is None or traceback is None or traceback.tb_frame.f_back is not None:
        return
    _guard._uncaught(type(error), type(error).__name__, lambda: None, functions=False)


def tell_of_swallowed(error: str) -> None:
    """At the process' exit, after hvd.shutdown(): the script has caught `error`, and ends as if all were well.

    hvdliterun gets a note, and acts on it when all ranks have ended. Without hvdliterun, print it and end this process
    with code 1. An exception that ends the script says enough.
    """
    if getattr(sys, "last_value", None) is not None or (job_is_ending() or write("swallowed", error)):
        return
    with contextlib.suppress(Exception):
        what = f"rank {swallowed.rank} ended with exit code 0 after communication had failed"
        print(f"hvdlite: {what}, and its script has caught the error: {error}", file=sys.stderr)
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.Finalize()  # else the MPI takes this for a crash, and kills those that are still saving their work
    say_goodbye(functions=False)
    os._exit(1)


def guarded() -> bool:
    """Whether others count on this process."""
    return _guard is not None


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies; or, where that has threads (a wrapper of the user's), of
    which the end of one may be meant, leave that to hvdliterun."""
    parent = os.getppid()
    with contextlib.suppress(OSError):
        if FOLDER and len(os.listdir(f"/proc/{parent}/task")) > 1:
            return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel knew our wish
        os.kill(os.getpid(), signal.SIGKILL)


class _Guard:
    """The hooks of one installation, and what they replaced."""

    def __init__(self, abort: Callable[[int], object], rank: int, leave: Callable[[], object]) -> None:
        self._abort, self._leave = abort, leave
        self._rank = rank
        self._pid = os.getpid()
        self._prompt = hasattr(sys, "ps1")  # later also where a debugger has been (ipdb, IPython.embed())
        self._lock = threading.Lock()
        self._excepthook = sys.excepthook
        self._threadhook = threading.excepthook
        self._code = SystemExit.__dict__["code"]

    def attach(self) -> None:
        # Kept in variables: each access to a method makes a new object, and detach compares.
        self._my_excepthook, self._my_threadhook = self._on_exception, self._on_thread
        sys.excepthook, threading.excepthook = self._my_excepthook, self._my_threadhook
        _set_code(property(self._read_code, self._code.__set__, self._code.__delete__))

    def detach(self) -> None:
        _set_code(self._code)
        if threading.excepthook is self._my_threadhook:
            threading.excepthook = self._threadhook
        if sys.excepthook is self._my_excepthook:
            sys.excepthook = self._excepthook

    def _applies(self) -> bool:
        """Whether the end of this code is the end of a rank: not in a forked child, not at a prompt."""
        return os.getpid() == self._pid and not (self._prompt or sys.flags.interactive)

    def _on_exception(
        self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        if not self._applies():
            self._excepthook(kind, value, traceback)
            return

        def tell() -> None:
            tracebacks.show(value, lambda: self._excepthook(kind, value, value.__traceback__))

        if issubclass(kind, ShutdownError) and _let_go(self._leave):
            tell()
        else:
            self._uncaught(kind, kind.__name__, tell)

    def _on_thread(self, args: threading.ExceptHookArgs) -> None:
        abandoned = issubclass(args.exc_type, ShutdownError) and args.thread is not None and args.thread.daemon
        over = abandoned or (leaving and issubclass(args.exc_type, HvdliteError))
        if over or not self._applies() or issubclass(args.exc_type, SystemExit):
            self._threadhook(args)
        else:
            where = f"{args.exc_type.__name__} in thread {args.thread.name if args.thread else '?'}"
            self._uncaught(args.exc_type, where, lambda: self._tell_of_thread(args))

    def _tell_of_thread(self, args: threading.ExceptHookArgs) -> None:
        error = args.exc_value
        if error is None:
            self._threadhook(args)
            return

        def hook() -> None:
            given = (args.exc_type, error, error.__traceback__, args.thread)
            self._threadhook(threading.ExceptHookArgs(given))

        tracebacks.show(error, hook)

    def _uncaught(
        self, kind: type[BaseException], what: str, tell: Callable[[], object], functions: bool = True
    ) -> NoReturn:
        """End the job for an exception: quietly for Ctrl-C."""
        if issubclass(kind, KeyboardInterrupt):
            self._end(128 + signal.SIGINT, functions=functions)
        self._fail(1, what, tell, functions)

    def _read_code(self, error: SystemExit) -> Any:
        code = self._code.__get__(error)
        try:
            sys._getframe(1)
        except ValueError:  # no Python frame reads it: the interpreter is on its way out
            here = threading.current_thread() is threading.main_thread() and os.getpid() == self._pid
            if here and not sys.flags.interactive:  # at a prompt it ends the process, too
                self._on_exit(code)
        return code

    def _on_exit(self, code: object) -> None:
        number = 0 if code is None else 1
        if isinstance(code, int):
            number = code & 0xFF if -_LONG <= code < _LONG else 0xFF  # as CPython makes C's of it
        if number == 0:
            return
        tell = (lambda: None) if isinstance(code, int) else (lambda: print(code, file=sys.stderr))
        self._fail(number, f"exit code {number}", tell)

    def _fail(self, code: int, what: str, tell: Callable[[], object], functions: bool = True) -> NoReturn:
        time.sleep(_NOTICE)
        with self._lock:  # a second thread that fails waits here until the process ends
            if not claim(self._rank, code):
                self._end(code, _PATIENCE / 2, functions)  # another rank's failure is being told; its abort ends us
            if isinstance(sys.stderr, io.StringIO) or getattr(sys.stderr, "name", "") == os.devnull:
                sys.stderr = sys.__stderr__  # a hook around ours (torch.distributed's) would read that: once we return
            with contextlib.suppress(Exception):
                host = f" on {socket.gethostname()}" if SEVERAL_HOSTS else ""
                print(f"hvdlite: rank {self._rank}{host} failed: {what}", file=sys.stderr)
                tell()
            self._end(code, functions=functions)

    def _end(self, code: int, least: float = _TOGETHER, functions: bool = True) -> NoReturn:
        """End the job, `least` seconds from now. In the main thread, do before what Python does at a process' end, but
        abort in the middle of it if it takes too long. functions: those of atexit, too."""
        global ending
        ending, begun = True, time.monotonic()
        try:
            if threading.current_thread() is threading.main_thread():
                late = threading.Timer(_GOODBYE, self._abort_now, (code,))
                late.daemon = True
                with contextlib.suppress(RuntimeError):  # Python starts no threads at its very end
                    late.start()
                say_goodbye(functions)
                late.cancel()
            time.sleep(max(0.0, begun + least - time.monotonic()))
        finally:
            self._abort_now(code)

    def _abort_now(self, code: int) -> NoReturn:
        with contextlib.suppress(Exception):  # an abort (or a flush) that blocks must not keep the job alive
            last_resort = threading.Timer(_PATIENCE, os._exit, (code,))
            last_resort.daemon = True
            last_resort.start()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        # An abort leaves a file in /tmp for good under MPICH's Hydra, and under Slurm's PMI-2 it kills this process
        # before its code is seen. Just going ends the job as well there, but with Hydra with anybody's exit code, so
        # only hvdliterun, which knows the code, and has told srun to end all, allows it.
        # Nor while hvdliterun ends the job by a signal, when others may be saving their work.
        going = {"HYDI_CONTROL_FD", "PMI_FD"} & ENVIRONMENT
        if not (going and FOLDER) and not job_is_ending():
            with contextlib.suppress(Exception):
                self._abort(code)
        os._exit(code)


def say_goodbye(functions: bool) -> None:
    """What Python does at a process' end: functions given to `atexit` (loggers, temporary folders), buffered files."""
    if functions:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
    for each in gc.get_objects():
        if type(each) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            with contextlib.suppress(BaseException):
                each.flush()


def _let_go(leave: Callable[[], object]) -> bool:
    """Leave, as the rank has that is gone: it may wait in hvd.shutdown() for us, on its way out with an exception or to
    sys.exit(), and is the one to be told of. Whether all have left: then nobody waits for us."""
    leaver = threading.Thread(target=leave, daemon=True)
    with contextlib.suppress(RuntimeError):  # Python starts no threads at its very end
        leaver.start()
        leaver.join(_LET_GO)
        if not leaver.is_alive() and not guarded():
            stopped()
            return True
    return False


def _exit(status: object = None, /) -> NoReturn:
    """`sys.exit`, but raising from Python: until 3.11 the C one leaves a bare code, which nobody reads."""
    raise SystemExit(status)


def _set_code(descriptor: object) -> None:
    """Set `SystemExit.code`, which the type itself refuses, through the dictionary behind it."""
    behind = gc.get_referents(SystemExit.__dict__)
    if behind and isinstance(behind[0], dict) and "code" in behind[0]:
        behind[0]["code"] = descriptor
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))


if sys.version_info < (3, 12):  # now: `sys.exit(main())` looks it up before main() calls hvd.init()
    _script = vars(sys.modules.get("__main__", sys))
    _script.update({_name: _exit for _name, _value in _script.items() if _value is sys.exit})  # from sys import exit
    sys.exit = _exit
