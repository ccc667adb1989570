"""`hvdlite.run`: calls a function on several ranks, from Python or a notebook, and returns the results as a list.

cloudpickle pickles the function, so that it may be defined in a notebook. The ranks are started as hvdliterun starts
them, and most parameters are hvdliterun's flags.
"""

from __future__ import annotations

import errno
import os
import signal
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from hvdlite.errors import HvdliteError

if TYPE_CHECKING:
    from hvdlite_launcher.run import Outcome

R = TypeVar("R")


class RemoteTraceback(Exception):
    """The traceback of an exception on a rank; the cause of the exception that `run` raises."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


ELASTIC = ("min_num_proc", "max_num_proc", "min_np", "max_np", "slots", "reset_limit", "cooldown_range",
           "host_discovery_script")  # fmt: skip
"""Arguments of `horovod.run` for ranks that come and go, which hvdlite does not support."""


def run(
    fn: Callable[..., R] | None = None,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    np: int | None = None,
    hosts: str | None = None,
    *,
    num_proc: int | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    output_filename: str | None = None,
    env: Mapping[str, str] | None = None,
    mpi_args: str | None = None,
    verbose: bool = False,
    prefix: bool = True,
    executable: str | None = None,
    disable_cache: bool | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    func: Callable[..., R] | None = None,
    network_interface: str | None = None,
    **others: object,
) -> list[R]:
    """Call `fn(*args, **kwargs)` on several ranks. Waits until all ranks have ended.

    The function, its arguments and its results are pickled. The ranks have no input: stdin stays this process' own. A
    signal to this process ends the job, and then has its usual effect here (Ctrl-C: KeyboardInterrupt).

    Args:
        fn: The function.
        args: Its positional arguments, a tuple or list.
        kwargs: Its keyword arguments.
        np: The number of ranks. Default: all slots of `hosts` or `hostfile`; without these, 2 ranks on this host.
        hosts: As hvdliterun's --hosts: "hosta:4,hostb:4".
        num_proc: The same as `np`.
        hostfile: As hvdliterun's --hostfile: the path of a file that names hosts.
        start_timeout: Seconds within which all hosts must be ready.
        ssh_port: As hvdliterun's --ssh-port.
        ssh_identity_file: As hvdliterun's --ssh-identity-file.
        network_interfaces: Networks to use between hosts: names separated by commas, or a list of names.
        output_filename: A folder, where each rank's output is written too.
        env: Variables for all ranks.
        mpi_args: As hvdliterun's --mpi-args: further options for the MPI's launcher.
        verbose: As hvdliterun's --verbose.
        prefix: Whether each line of the ranks' output begins with the rank.
        executable: The ranks' Python interpreter. Default: this process' interpreter.
        disable_cache: Accepted for Horovod's scripts, and ignored.
        use_mpi: Accepted for Horovod's scripts, and ignored.
        use_gloo: Must be false: hvdlite communicates over MPI only.
        func: Horovod's other name for `fn`.
        network_interface: Horovod's other name for `network_interfaces`.
        **others: Horovod's arguments for ranks that come and go. They must be None.

    Returns:
        What the function returned on each rank, in rank order.

    Raises:
        Exception: The first failing rank's exception, with that rank's traceback as its cause.
        HvdliteError: A rank was killed, a host is not ready, or MPI or free memory is missing.
        ValueError: hvdliterun refuses an argument.
        TypeError: An argument is of the wrong type.
    """
    import cloudpickle

    fn = _check(fn if func is None else func, args, env, others)
    if use_gloo:
        raise ValueError("run(use_gloo=True): hvdlite communicates over MPI only; leave it out")
    ranks, networks = num_proc if np is None else np, _listed(network_interfaces or network_interface)
    if ranks is None and hosts is None and hostfile is None:
        ranks = 2
    flags = {
        "--num-proc": ranks, "--hosts": hosts, "--hostfile": hostfile, "--start-timeout": start_timeout,
        "--ssh-port": ssh_port, "--ssh-identity-file": ssh_identity_file,
        "--network-interfaces": networks, "--output-filename": output_filename,
        "--mpi-args": mpi_args or None, "--verbose": bool(verbose), "--no-prefix": not prefix,
    }  # fmt: skip
    arguments = [*_written(flags), *_variables(env or {})]
    task = cloudpickle.dumps((fn, tuple(args), dict(kwargs or {})))
    if sys.stdout:  # None in a program without a console
        sys.stdout.flush()
    outcome = _launched([*arguments, executable or sys.executable, "-P", "-m", "hvdlite.task"], task)
    return _results({rank: _loaded(rank, data) for rank, data in outcome.results.items()}, outcome)


def _check(
    fn: Callable[..., R] | None, args: object, env: Mapping[str, str] | None, others: Mapping[str, object]
) -> Callable[..., R]:
    """Return the function. Raises TypeError or ValueError for arguments that `run` does not take."""
    if not callable(fn):
        raise TypeError(f"run takes a function first, not {fn!r}")
    if not isinstance(args, (list, tuple)):
        raise TypeError(f"run(args=...) takes a tuple or list of the function's arguments, not {args!r}: args=(x,)")
    for name, value in others.items():
        if name not in ELASTIC:
            raise TypeError(f"run() got an unexpected keyword argument {name!r}")
        if value is not None:
            raise ValueError(f"run({name}=...): ranks cannot come and go yet; start again from a checkpoint")
    for name, value in (env or {}).items():
        if not isinstance(value, str):
            raise TypeError(f"run(env=...): the value of {name} must be a text, not {value!r}")
    return fn


def _listed(names: str | Sequence[str] | None) -> str | None:
    """Return interfaces' names as hvdliterun's flag takes them. Raises TypeError for anything but names."""
    several = [names] if isinstance(names, str) else names or []
    if not isinstance(several, (list, tuple)) or not all(isinstance(name, str) for name in several):
        raise TypeError(f"run(network_interfaces=...) takes a name or a list of names, not {names!r}")
    return ",".join(several) or None


def _written(flags: Mapping[str, object]) -> list[str]:
    """Return the flags as on a command line, without those that are None or False."""
    given = {flag: value for flag, value in flags.items() if value is not None and value is not False}
    return [flag if value is True else f"{flag}={value}" for flag, value in given.items()]


def _variables(env: Mapping[str, str]) -> list[str]:
    """Return flags for these variables, and for a PYTHONPATH with which ranks find the modules of this process."""
    own = _own_folders()
    folders = (folder or os.getcwd() for folder in sys.path if isinstance(folder, str))  # as imports do
    path = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), *(each for each in folders if each not in own)]))
    return [f"--env={name}={value}" for name, value in {**env, "PYTHONPATH": path}.items()]


def _own_folders() -> set[str]:
    """Return the folders that belong to this interpreter.

    They stay out of PYTHONPATH, because ranks may start programs that use another Python (gsutil).
    """
    libraries = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}  # in a venv, the second is the venv's
    archive = f"python{sys.version_info[0]}{sys.version_info[1]}.zip"
    packed = {os.path.join(os.path.dirname(library), archive) for library in libraries}
    compiled = {os.path.join(library, "lib-dynload") for library in libraries}
    users = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return {*libraries, *packed, *compiled, *site.getsitepackages(), *users}


def _launched(arguments: Sequence[str], task: bytes) -> Outcome:
    """Run the job of this command line, and return how it ended. A signal that ended the job is raised here, too."""
    from hvdlite_launcher import UsageError, cli, options, readiness

    try:
        outcome = cli.launch(options.parse(arguments), task)
    except UsageError as error:
        raise (ValueError if error.code == 2 else HvdliteError)(f"run: {error}") from error
    except readiness.NotReadyError as error:
        states = "; ".join(f"{host}: {state}" for host, state in error.states.items() if state)
        raise HvdliteError(f"{error}: {states}") from error
    if outcome.signal == signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.signal == signal.SIGPIPE:  # Python ignores this signal and raises this error instead
        raise BrokenPipeError(errno.EPIPE, "run: nobody reads the ranks' output any more")
    if outcome.signal:
        signal.raise_signal(outcome.signal)
    return outcome


def _loaded(rank: int, data: bytes) -> tuple[bool, Any, str]:
    """Unpickle what a rank left: True and the value, or False, the exception and its traceback's text."""
    import cloudpickle

    try:
        found: tuple[bool, Any, str] = cloudpickle.loads(data)
        return found
    except Exception as error:
        raise HvdliteError(
            f"run: what the function returned on rank {rank} was pickled, but cannot be unpickled here: "
            f"{type(error).__name__}: {error}"
        ) from error


def _results(found: Mapping[int, tuple[bool, Any, str]], outcome: Outcome) -> list[Any]:
    """Return the values in rank order, or raise the first failing rank's exception."""
    failed = {rank: (error, text) for rank, (well, error, text) in found.items() if not well}
    if outcome.code:
        first = outcome.rank if outcome.rank in failed else min(failed, default=None)
        if first is not None:
            error, text = failed[first]
            raise error from RemoteTraceback(f"rank {first}:\n{text}")
        raise HvdliteError(outcome.message or f"the job ended with exit code {outcome.code}")
    missing = [rank for rank in range(outcome.ranks) if rank not in found]
    if missing:
        raise HvdliteError(f"ranks {missing} ended without an error, but did not return from the function")
    return [found[rank][1] for rank in range(outcome.ranks)]
