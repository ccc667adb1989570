"""`hvdlite.run`: a function on N ranks, from Python or a notebook, with the results as a list.

The function travels pickled by cloudpickle (so it may be defined in a notebook), by way of hvdliterun, whose flags the
parameters are: everything that is true of `hvdliterun` is true here.
"""

from __future__ import annotations

import errno
import os
import signal
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdlite.errors import HvdliteError


class RemoteTraceback(Exception):
    """The traceback of an exception on a rank; the cause of the exception that `run` raises."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


ELASTIC = ("min_num_proc", "max_num_proc", "min_np", "max_np", "slots", "reset_limit", "cooldown_range",
           "host_discovery_script")  # fmt: skip
"""Arguments of `horovod.run` that ask for something that is not there."""


def run(
    fn: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
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
    func: Callable[..., Any] | None = None,
    network_interface: str | None = None,
    **others: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `np` ranks and return what each returned, in rank order.

    np (or num_proc): ranks; by default all slots of `hosts`, or 2 on this machine. hosts, hostfile and all others: as
    hvdliterun's flags of the same names. env: variables for all ranks. prefix: whether the ranks' output carries their
    rank. executable: the ranks' interpreter. network_interfaces: names with commas between, or a list of them. func,
    network_interface: Horovod's names for fn, network_interfaces. The function, its arguments and results are pickled.
    It has no input: stdin is this process' own.
    Waits for all ranks. Raises the first failing rank's exception, with its traceback as the cause; HvdliteError when
    a rank was killed, a host is not ready, or no MPI or no room is there; ValueError for parameters that hvdliterun
    refuses. A signal that comes meanwhile ends the job, and then does to this process what it would have done (Ctrl-C:
    KeyboardInterrupt).
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
    if sys.stdout:  # as there is not in a program without a console
        sys.stdout.flush()
    outcome = _launched([*arguments, executable or sys.executable, "-P", "-m", "hvdlite.task"], task)
    return _results({rank: _loaded(rank, data) for rank, data in outcome.results.items()}, outcome)


def _check(
    fn: Callable[..., Any] | None, args: Sequence[Any], env: Mapping[str, str] | None, others: Mapping[str, Any]
) -> Callable[..., Any]:
    """The function. Raises TypeError for arguments of the wrong kind, ValueError for those that ask for what is not
    there."""
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
    """Networks' names as on a command line. Raises TypeError for what is none."""
    several = [names] if isinstance(names, str) else names or []
    if not isinstance(several, (list, tuple)) or not all(isinstance(name, str) for name in several):
        raise TypeError(f"run(network_interfaces=...) takes a name or a list of names, not {names!r}")
    return ",".join(several) or None


def _written(flags: Mapping[str, Any]) -> list[str]:
    """The flags as on a command line; without those whose value is None or False."""
    given = {flag: value for flag, value in flags.items() if value is not None and value is not False}
    return [flag if value is True else f"{flag}={value}" for flag, value in given.items()]


def _variables(env: Mapping[str, str]) -> list[str]:
    """Flags for these variables, and for a PYTHONPATH by which ranks find what this process finds."""
    own = _own_folders()
    folders = (folder or os.getcwd() for folder in sys.path if isinstance(folder, str))  # imports skip others, too
    path = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), *(each for each in folders if each not in own)]))
    return [f"--env={name}={value}" for name, value in {**env, "PYTHONPATH": path}.items()]


def _own_folders() -> set[str]:
    """Where an interpreter looks by itself. Programs in another Python's that ranks start (gsutil) must not."""
    library = sysconfig.get_path("platstdlib")
    packed = os.path.join(os.path.dirname(library), f"python{sys.version_info[0]}{sys.version_info[1]}.zip")
    users = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    compiled = os.path.join(library, "lib-dynload")
    return {library, sysconfig.get_path("stdlib"), compiled, packed, *site.getsitepackages(), *users}


def _launched(arguments: Sequence[str], task: bytes) -> Any:
    """How the job of this command line ended. Passes a signal that ended it on to this process."""
    from hvdlite_launcher import cli, options, readiness
    from hvdlite_launcher.usage import UsageError

    try:
        outcome = cli.launch(options.parse(arguments), task)
    except UsageError as error:
        raise (ValueError if error.code == 2 else HvdliteError)(f"run: {error}") from error
    except readiness.NotReadyError as error:
        states = "; ".join(f"{host}: {state}" for host, state in error.states.items() if state)
        raise HvdliteError(f"{error}: {states}") from error
    if outcome.signal == signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.signal == signal.SIGPIPE:  # which Python ignores, and tells of in this way
        raise BrokenPipeError(errno.EPIPE, "run: nobody reads the ranks' output any more")
    if outcome.signal:
        signal.raise_signal(outcome.signal)
    return outcome


def _loaded(rank: int, data: bytes) -> Any:
    import cloudpickle

    try:
        return cloudpickle.loads(data)
    except Exception as error:
        raise HvdliteError(
            f"run: what the function returned on rank {rank} was pickled, but cannot be unpickled here: "
            f"{type(error).__name__}: {error}"
        ) from error


def _results(found: Mapping[int, tuple[bool, Any, str]], outcome: Any) -> list[Any]:
    """The values by rank, or the failure's exception."""
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
