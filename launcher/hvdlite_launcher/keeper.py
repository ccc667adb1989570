"""The keeper: the parent process of one rank's command. The MPI starts `python keeper.py COMMAND...` for each rank.

MPIs forward output in different ways, and report the death of a process in different ways (killed by SIGKILL: Open MPI
137, MPICH 9). The keeper is the command's parent, so it knows how the command ended. It connects the command's output
to named pipes in the job's folder, where the host's agent reads. If its host has no agent, it leaves the output to the
scheduler. It notes in the folder that the command has started, has ended, or has failed first on this host. It exits
with the command's exit code, or 128 + n for a signal n, under every MPI.

It sets OMP_NUM_THREADS to the rank's share of its host's cores (`cores`), and torchrun's RANK, WORLD_SIZE, LOCAL_RANK
and LOCAL_WORLD_SIZE, which many scripts read. Rank 0's keeper fetches hvdliterun's stdin for the command (`lending`),
and tells rich of hvdliterun's terminal (`terminal`). A keeper forwards signals to the command, and dies with the MPI's
process that started it. After a signal to hvdliterun, it outlives the command: if it left, the MPI would kill ranks
that still save their work.

A keeper takes about 20 ms at the start of a rank, and 10 MB of memory. Rejected: to read the MPIs' error messages. They
change with every version, and say nothing about lost output.
A keeper runs as a script, isolated from the user's Python settings, and imports little.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

if __name__ == "__main__":  # isolated, Python does not know where this file lies
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from hvdlite_torch_plugin.places import place_in, variables

from hvdlite_launcher.cores import threads
from hvdlite_launcher.job_folder import path_of, watched_part
from hvdlite_launcher.terminal import JOB_TERMINAL
from hvdlite_launcher.times import KEEPER_STAYS, LEAVER_FIRST

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1
_DESERTED = -1  # in place of a signal: exit code 0 between hvd.init() and hvd.shutdown()


def main(command: Sequence[str]) -> int:
    """Run the command as this rank; returns its exit code, 128 + n for a signal n."""
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0")
    folder = os.environ["HVDLITE_JOB_DIR"] = watched_part(os.environ["HVDLITE_JOB_DIR"])
    prctl = ctypes.CDLL(None).prctl
    _die_with_parent(prctl, os.getppid())
    _connect(folder, rank)
    keeper, number_of_threads = os.getpid(), str(threads(os.environ))
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # none may be lost between fork and handlers
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        _die_with_parent(prctl, keeper)
        os.setpgid(0, 0)  # the MPI kills our group, which must not contain the command's helpers (resource tracker)
        os.environ["HVDLITE_JOB_RANK"] = rank
        os.environ.setdefault("OMP_NUM_THREADS", number_of_threads)
        if rank == "0" and JOB_TERMINAL in os.environ:
            os.environ.setdefault("TTY_COMPATIBLE", "1")
        if place := place_in(os.environ):
            os.environ.update(variables(place))
        _become(_read(command))
    _forward_signals(child)
    _note(folder, "pid", rank, str(child))
    _close_stdio()
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # until it is reaped, its number is nobody else's
    for forwarded in _FORWARDED:
        signal.signal(forwarded, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.unlink(path_of(folder, "pid", rank))
    _, status = os.waitpid(child, 0)
    _note(folder, "ended", rank)
    code = os.waitstatus_to_exitcode(status)
    number = -code if code < 0 else 0
    result = 128 + number if number else code
    if not result and os.path.exists(path_of(folder, "present", rank)):  # between hvd.init() and hvd.shutdown()
        result, number = 1, _DESERTED
    if result:
        if os.path.exists(path_of(folder, "stopped", rank)):
            time.sleep(LEAVER_FIRST)  # that rank's failure is the one to report
        _note(folder, "failed", None, f"{rank} {result} {number} {time.time()}\n")
    elif not os.path.exists(path_of(folder, "entered", rank)):
        _note(folder, "absent", rank)  # a mistake only if others call hvd.init()
    if os.path.exists(path_of(folder, "ending")):
        _stay()
    return result


def _stay() -> None:
    """Stay while a signal ends the job. If this keeper ended now, the MPI would kill the other ranks, which may be
    saving their work."""
    for number in _FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    time.sleep(KEEPER_STAYS)


def _die_with_parent(prctl: ctypes._NamedFuncPointer, parent: int) -> None:
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def _connect(folder: str, rank: str) -> None:
    """Replace stdout and stderr by named pipes to this host's agent. If the host has no agent, under a scheduler, both
    stay connected to the MPI.

    Only rank 0 has a stdin, as with MPI. Under MPICH other ranks would wait for an end of input that never comes.
    """
    if rank == "0":
        _borrow_stdin(folder)
    else:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    for number, name in ((1, "out"), (2, "err")) if os.path.isdir(folder) else ():
        path = path_of(folder, name, rank)
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        pipe = os.open(path, os.O_WRONLY)
        os.dup2(pipe, number)
        os.close(pipe)


def _borrow_stdin(folder: str) -> None:
    """Replace stdin by hvdliterun's own, if hvdliterun lends it (`lending`)."""
    if os.path.exists(path_of(folder, "stdin")):
        import socket

        directory = os.open(folder, os.O_RDONLY)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as lender:
            lender.connect(f"/proc/self/fd/{directory}/stdin")
            for stdin in socket.recv_fds(lender, 1, 1)[1]:
                os.dup2(stdin, 0)
                os.close(stdin)
        os.close(directory)


def _read(command: Sequence[str]) -> list[str]:
    """The command's words as the user wrote them (`command._spelled` has changed some)."""
    return [word[1:] if word.startswith("\\") and word.lstrip("\\") == ":" else word for word in command]


def _become(command: Sequence[str]) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
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
    """Close the command's stdin and output here, so that they end with the command."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.close(null)


def _note(folder: str, name: str, rank: str | None, text: str = "") -> None:
    """Write a note, unless there is one: the first failure of a host is the one that counts."""
    with contextlib.suppress(OSError), open(path_of(folder, name, rank), "x", encoding="ascii") as file:
        file.write(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
