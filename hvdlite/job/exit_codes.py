"""`ExitCodes`: tells the guard (`exits`) a program's exit code before Python's exit functions run.

Python calls no hook for SystemExit. But when `sys.exit(n)` or `raise SystemExit(n)` ends the main thread, CPython reads
the exception's attribute `code`. At that moment there is no Python frame. So `watch` replaces `SystemExit.code` by a
property that looks for frames. On Python 3.11, `sys.exit` stores a plain number instead of an exception, so nobody
reads `code`. So there this module also replaces `sys.exit` when it is imported.

hvdlite needs the code this early because MPI's end waits for all ranks: the process would wait before its code is
known. hvdliterun does not help, since its keeper sees the code only when the process has ended.

Rejected:

- `atexit`: the code is not known there.
- Wrapping `sys.exit` alone: it misses `raise SystemExit`.
- Tracing: it slows everything.
- Running the script as `mpi4py.run` does: hvdliterun starts any program, also one that starts Python.
- Not finalizing MPI: Open MPI then reports an exit code of 0 as a failure.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

LONG = 1 << 63


class ExitCodes:
    """Calls a function with the code of each SystemExit that ends the main thread of this process.

    Attributes:
        on_code: The function. It gets the argument of `sys.exit`, also None and 0.
        process: The process that is watched. Its forked children are not.
        original: `SystemExit.code` as Python made it.
    """

    def __init__(self, on_code: Callable[[object], object]) -> None:
        self.on_code = on_code
        self.process = os.getpid()
        self.original = SystemExit.__dict__["code"]

    def watch(self) -> None:
        """Begin."""
        set_code(property(self.read, self.original.__set__, self.original.__delete__))

    def forget(self) -> None:
        """End, and put back what `watch` replaced."""
        set_code(self.original)

    def read(self, error: SystemExit) -> Any:
        """The exception's code. Calls `on_code` first if Python itself asks, and not a frame of a program."""
        code = self.original.__get__(error)
        try:
            sys._getframe(1)
        except ValueError:  # there is no frame: the interpreter ends
            here = threading.current_thread() is threading.main_thread() and os.getpid() == self.process
            if here and not sys.flags.interactive:  # a prompt of `python` itself ends with the code as well
                self.on_code(code)
        return code


def number_of(code: object) -> int:
    """The exit status that CPython makes of a SystemExit's code: 0 for None, 1 for a message."""
    if isinstance(code, int):
        return code & 0xFF if -LONG <= code < LONG else 0xFF
    return 0 if code is None else 1


def run_exit_functions() -> None:
    """Call the functions registered with `atexit`: loggers, temporary folders."""
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()


def flush_files() -> None:
    """Write out all buffered files, as Python does when a process ends."""
    for each in gc.get_objects():
        if type(each) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            with contextlib.suppress(BaseException):
                each.flush()


def set_code(descriptor: object) -> None:
    """Set `SystemExit.code` in the type's own dictionary, since the type refuses assignments."""
    found = gc.get_referents(SystemExit.__dict__)
    if found and isinstance(found[0], dict) and "code" in found[0]:
        found[0]["code"] = descriptor
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))


def exit_by_raising(status: object = None, /) -> NoReturn:
    """`sys.exit` in Python, which raises an exception with a code."""
    raise SystemExit(status)


if sys.version_info < (3, 12):  # at import, because `sys.exit(main())` looks it up before main() calls hvd.init()
    _script = vars(sys.modules.get("__main__", sys))
    _script.update({_name: exit_by_raising for _name, _value in _script.items() if _value is sys.exit})
    sys.exit = exit_by_raising
