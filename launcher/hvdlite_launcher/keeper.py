"""Stands between the MPI's launcher and the command, one per rank: `python keeper.py COMMAND...`.

MPIs differ in how they forward output and in what they tell of a death (Open MPI: 137, MPICH: 9). The
keeper is the parent of the command, so it knows exactly; it connects the command's output to the pipes
of `hvdliterun`, notes the first failure in the job's folder, and exits with 128 + signal, the same
under every MPI. The price is some 20 ms at the start and 10 MB per rank. Rejected: reading MPIs' banners,
which change with every version and cannot tell about output lost on the way.

It also sets OMP_NUM_THREADS, of which each host has its own (`cores`).

Runs as a script, isolated from the user's Python settings; of this package it imports `cores` only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

if __name__ == "__main__":  # isolated, Python does not know where this file lies
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from hvdlite_launcher.cores import threads

WATCHED = "watched"  # a file in the job's folder, made by hvdliterun or its agent
FILES = "HVDLITE_JOB_FILES"
"""How many files hvdliterun might open before it allowed itself more, and how many then; ranks would inherit that."""
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1
_STAY = 8.0  # seconds, more than ranks ever have after a signal
_COURTESY = 0.5  # seconds in which the rank ends that has stopped this one, since it is the one to be told of
_DESERTED = -1  # in place of a signal: it ended as if all were well, but without hvd.shutdown()


def main(command: Sequence[str]) -> int:
    """Run the command as this rank; returns its exit code, 128 + n for a signal n."""
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0")
    folder = os.environ["HVDLITE_JOB_DIR"] = _own(os.environ["HVDLITE_JOB_DIR"])
    prctl = ctypes.CDLL(None).prctl
    _die_with_parent(prctl, os.getppid())
    _connect(folder, rank)
    keeper, number_of_threads = os.getpid(), str(threads(os.environ))
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # none may be lost between fork and handlers
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        _die_with_parent(prctl, keeper)
        os.setpgid(0, 0)  # the MPI kills our group, but not what tidies up behind the command (its resource tracker)
        os.environ["HVDLITE_JOB_RANK"] = rank
        _allow_files(os.environ.pop(FILES, ""))
        os.environ.setdefault("OMP_NUM_THREADS", number_of_threads)
        _become(_read(command))
    _forward_signals(child)
    _note(os.path.join(folder, f"pid.{rank}"), str(child))
    _close_stdio()
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # until it is reaped, its number is nobody else's
    for forwarded in _FORWARDED:
        signal.signal(forwarded, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(folder, f"pid.{rank}"))
    _, status = os.waitpid(child, 0)
    _note(os.path.join(folder, f"ended.{rank}"), "")
    code = os.waitstatus_to_exitcode(status)
    number = -code if code < 0 else 0
    result = 128 + number if number else code
    if not result and os.path.exists(os.path.join(folder, f"present.{rank}")):  # between hvd.init() and hvd.shutdown()
        result, number = 1, _DESERTED
    if result:
        if os.path.exists(os.path.join(folder, f"stopped.{rank}")):
            time.sleep(_COURTESY)  # at its end the MPI may have waited for all
        _note(os.path.join(folder, "failed"), f"{rank} {result} {number} {time.time()}\n")
    elif not os.path.exists(os.path.join(folder, f"entered.{rank}")):
        _note(os.path.join(folder, f"absent.{rank}"), "")  # a mistake only if others call hvd.init()
    if os.path.exists(os.path.join(folder, "ending")):
        _stay()
    return result


def _own(folder: str) -> str:
    """The job's folder, or where nothing can be found or made: under a scheduler only the first host has one, on the
    others anybody may have made one of that name; and where the command that hvdliterun shows is started by hand, Open
    MPI makes one, in which nobody reads."""
    part = os.path.join(folder, f"at-{os.uname().nodename}")  # of several hosts, which may share the folder
    for each in (part, folder):
        if _is_own(folder) and _is_own(each) and os.path.exists(os.path.join(each, WATCHED)):
            return each
    return os.devnull


def _is_own(folder: str) -> bool:
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _stay() -> None:
    """The job is being ended by a signal, and our rank has ended: the MPI would kill the others, who may be saving
    their work. So it learns of it when hvdliterun has it end all."""
    for number in _FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    time.sleep(_STAY)


def _die_with_parent(prctl: ctypes._NamedFuncPointer, parent: int) -> None:
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def _connect(folder: str, rank: str) -> None:
    """Replace stdout and stderr by the pipes to hvdliterun, or to its agent on another host, which reads those
    that appear. Where there is neither, under a scheduler, they stay the MPI's.

    stdin is for rank 0, as MPI has it: under MPICH the others would wait for an end that never comes.
    """
    if rank == "0":
        _borrow_stdin(folder)
    else:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    for number, name in ((1, "out"), (2, "err")) if os.path.isdir(folder) else ():
        path = os.path.join(folder, f"{name}.{rank}")
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        pipe = os.open(path, os.O_WRONLY)
        os.dup2(pipe, number)
        os.close(pipe)


def _borrow_stdin(folder: str) -> None:
    """Replace stdin by hvdliterun's own, where it lends that (`lending`)."""
    if os.path.exists(os.path.join(folder, "stdin")):
        import socket

        directory = os.open(folder, os.O_RDONLY)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as lender:
            lender.connect(f"/proc/self/fd/{directory}/stdin")
            for stdin in socket.recv_fds(lender, 1, 1)[1]:
                os.dup2(stdin, 0)
                os.close(stdin)
        os.close(directory)


def _read(command: Sequence[str]) -> list[str]:
    """The words as the user gave them: see `command`."""
    return [word[1:] if word.startswith("\\") and word.lstrip("\\") == ":" else word for word in command]


def _allow_files(change: str) -> None:
    """Undo what hvdliterun has allowed itself, where we have inherited it."""
    if change:
        import resource

        before, now = map(int, change.split())
        soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == now:
            resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def _become(command: Sequence[str]) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; the command need not
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _forward_signals(child: int) -> None:
    def forward(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)


def _close_stdio() -> None:
    """Let go of the command's stdin and output: only the command itself keeps them open."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.close(null)


def _note(path: str, text: str) -> None:
    """Write a note unless there is one: of several ranks that fail, the first is the one that is told."""
    with contextlib.suppress(OSError), open(path, "x", encoding="ascii") as file:
        file.write(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
