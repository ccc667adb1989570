"""Advice for users of other launchers: how to write for hvdliterun what they have written.

Rejected: to start what the user probably means. A wrong guess would train something else for hours.
"""

import difflib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Collection, Sequence

from hvdlite_launcher.environment import is_secret

_PER_HOST = "name the hosts with their ranks, -H server1:N,server2:N"
_ONE_PLACE = f"leave it out, hvdliterun starts the ranks of all hosts from one place: {_PER_HOST}"
_SEEN_TO = "leave it out, hvdliterun sees to that"
_LOGS = "--output-filename FOLDER also writes each rank's output into files"
_ONCE = "leave it out, hvdliterun starts a job once: a scheduler can queue it again (hvdliterun --template slurm)"
_FLAGS = {
    "-np": ("--np", "--nproc", "--nprocs", "--nproc-per-node", "--num-procs", "--num-processes", "--num-ranks",
            "--ranks", "--ntasks", "--num-gpus", "--num-workers", "--nranks", "-N", "-nproc", "-nprocs"),
    "-H": ("-host", "--host", "-hosts", "--hostlist", "--include"),
    "--hostfile": ("--machinefile", "-machinefile", "-f", "--host-file"),
    "-x": ("-genv", "-env", "--export"),
    "--output-filename": ("--log-dir", "--outfile", "-outfile-pattern"),
}  # fmt: skip
"""hvdliterun's flags, and their names in torchrun, accelerate, DeepSpeed, srun, Open MPI and MPICH."""
_CURES = {
    _ONE_PLACE: ("--nnodes", "--node-rank", "--master-addr", "--master-port", "--standalone", "--rdzv-backend",
                 "--rdzv-endpoint", "--rdzv-id", "--num-machines", "--machine-rank", "--main-process-ip",
                 "--main-process-port", "--multi-gpu", "--rdzv-conf", "--local-addr"),
    _PER_HOST: ("-ppn", "--ppn", "--npernode", "-npernode", "--ntasks-per-node", "--nodes"),
    _SEEN_TO: ("--oversubscribe", "--allow-run-as-root", "--no-python", "--start-method", "--monitor-interval"),
    _LOGS: ("--tee", "-t", "--redirects", "-r"),
    _ONCE: ("--max-restarts",),
}  # fmt: skip
_MPIS = (
    "--bind-to", "--map-by", "--rank-by", "--mca", "-mca", "--report-bindings", "--display", "--tag-output",
    "--use-hwthread-cpus", "--prtemca", "--pmixmca", "-bind-to", "-map-by", "-genvall", "-genvlist",
    "-iface", "-launcher", "--tune",
)  # fmt: skip
_PYTHON, _SHELL = re.compile(r"(python|pypy)[\d.]*"), re.compile(r"(ba|da|k|z)?sh")
_STDIN = ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")


def unknown_flag(word: str, known: Collection[str]) -> tuple[str, list[str]]:
    """Advice about a flag that hvdliterun does not have, perhaps empty, and the words that replace it, if any.

    word: as the user wrote it, perhaps with `=VALUE`. known: all flags that hvdliterun's help shows.
    """
    flag, equals, value = word.partition("=")
    values = [value] if equals else []
    spelled = flag if flag.count("-") == 1 else flag.lower().replace("_", "-")
    if spelled in ("-m", "--module"):
        return "", [_python(), "-m", *values]
    for ours, theirs in _FLAGS.items():
        if spelled in theirs:
            of_all = "-np counts the ranks of all hosts" if spelled == "--nproc-per-node" else ""
            return of_all, [ours, *values]
    for cure, theirs in _CURES.items():
        if spelled in theirs:
            return cure, []
    if spelled in _MPIS:
        return f'give options of the MPI\'s launcher as --mpi-args="{flag} ..."', []
    long = [each for each in known if each.startswith("--")]
    begun = [each for each in long if each.startswith(spelled)] if spelled.startswith("--") else []
    near = begun or difflib.get_close_matches(spelled, long, n=1, cutoff=0.7)
    if len(near) == 1:
        return "", [near[0] + equals + value]
    return f"did you mean {' or '.join(near)}?" if near else "", []


def wrong_command(command: Sequence[str], flags: Sequence[str]) -> str | None:
    """Why the user's command cannot be started, and what to write; None if it can be started.

    flags: the words before the command on hvdliterun's command line.
    """
    name, there = command[0], os.path.isfile(command[0])
    named = with_interpreter([f"./{name}" if there and "/" not in name else name])
    if shutil.which(name) and len(named) == 1:
        return None
    if there and len(named) == 1 and os.access(name, os.X_OK):
        return f"{name} is not on PATH: did you mean: {line([*flags, *named, *command[1:]])}"
    if name.endswith(".py"):
        missing = "" if os.path.isfile(name) else f" (there is no file {name} here, though)"
        meant = line([*flags, _python(), *command])
        return f"{name} is a script, which an interpreter has to run: did you mean: {meant}{missing}"
    if there:
        shell = f"did you mean: {line([*flags, 'bash', *command])}" if name.endswith(".sh") else f"chmod +x {name}"
        return f"{name} is not executable: {shell}"
    hosts = re.fullmatch(r"[\w.-]+:\d+", name) is not None
    return f"{name}: command not found" + (": hosts are listed with commas, -H hosta:2,hostb:2" if hosts else "")


def with_interpreter(command: Sequence[str]) -> list[str]:
    """The command, with Python before it if it is a Python script that cannot be started by itself."""
    path = shutil.which(command[0]) if command else None
    bare = bool(command) and command[0].endswith(".py") and (not path or _lacks_interpreter(path))
    return [_python(), *command] if bare else list(command)


def script_on_stdin(command: Sequence[str]) -> list[str]:
    """The command to write, with the name of a file, if Python or a shell reads the script of this one from stdin.
    Otherwise empty."""
    before = next((at for at, word in enumerate(command) if not _is_env(word)), 0)
    name, arguments, program = os.path.basename(command[before]), command[before + 1 :], command[: before + 1]
    if _PYTHON.fullmatch(name) and _finds_stdin(arguments, no_script="cmhV?", with_value="WX"):
        return [*program, "train.py"]
    if _SHELL.fullmatch(name) and _finds_stdin(arguments, no_script="c", with_value="oO", stdin="s"):
        return [*program, "script.sh"]
    return []


def _is_env(word: str) -> bool:
    """Whether the word is part of `env NAME=VALUE`."""
    return os.path.basename(word) == "env" or re.match(r"\w+=", word) is not None


def _finds_stdin(words: Sequence[str], no_script: str, with_value: str, stdin: str = "") -> bool:
    """Whether an interpreter with these arguments reads its script from stdin.

    The other parameters are letters of options. no_script: with these no script is read. with_value: these have a
    value, which may be the next word. stdin: these mean stdin.
    """
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if word in _STDIN:
            return True
        if word in ("--help", "--version") or word[0] not in "-+":
            return False
        if word in ("--check-hash-based-pycs", "--rcfile", "--init-file"):
            del waiting[:1]
        elif not word.startswith("--"):
            found = re.search(f"[{no_script}{with_value}{stdin}]", word[1:])
            if found and found[0] in no_script + stdin:
                return found[0] in stdin
            if found and word.endswith(found[0]):
                del waiting[:1]
    return True


def line(words: Sequence[str]) -> str:
    """The command line of hvdliterun with these words; values of secrets are left out."""
    return f"hvdliterun {shlex.join(map(_shown, words))}"


def _shown(word: str) -> str:
    found = re.match(r"(?:--env=|-x)?(\w+)=", word)
    return f"{found[0]}..." if found and is_secret(found[1]) else word


def _python() -> str:
    return next(filter(shutil.which, ("python", "python3")), sys.executable)


def _lacks_interpreter(path: str) -> bool:
    """Whether the file does not begin with `#!`, so that the kernel cannot start it."""
    try:
        with open(path, "rb") as file:
            return file.read(2) != b"#!"
    except OSError:
        return False
