"""Facts that must be the same on all hosts: the versions of Python, hvdlite and the MPI library.

Each agent starts a child process with the command's interpreter, and sends its answer to hvdliterun. `team` and
`checks` compare the answers. A command that is no Python must only exist. This module also checks network interfaces.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

NAMES = ("Python", "hvdlite", "MPI")
_QUESTIONS = """
import sys
sys.path = [path for path in sys.path if path]  # without the current folder, where other users may write
import json, os
facts = {"Python": ".".join(map(str, sys.version_info[:3])), "hvdlite": "missing", "MPI": "no mpi4py"}
try:
    import hvdlite
    facts["hvdlite"] = hvdlite.__version__
except ImportError as error:
    if "hvdlite" not in str(error):
        facts["hvdlite"] = str(error)
try:
    import mpi4py
    mpi4py.rc.initialize = False
    from mpi4py import MPI
    facts["MPI"] = " ".join(MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\\0 ").split())
except (ImportError, RuntimeError) as error:
    if "mpi4py" in sys.modules:
        facts["MPI"] = " ".join(str(error).split())
print(json.dumps(facts), flush=True)
os._exit(0)  # some MPI libraries fail at exit when they were not initialized
"""


def questions(command: Sequence[str], env: Mapping[str, str]) -> list[str] | None:
    """The child process that finds the facts for this command, or None if the command is no Python.

    Raises FileNotFoundError if this host has no such command.
    """
    program = shutil.which(command[0], path=env.get("PATH", os.defpath))
    if program is None:
        raise FileNotFoundError(f"no such command: {command[0]}: install it in the same place on all hosts [HVD015]")
    if not os.path.basename(program).startswith(("python", "pypy")):
        return None
    return [program, "-c", _QUESTIONS]


def check_interfaces(names: Sequence[str], several: bool = True) -> None:
    """Raise OSError if this host lacks one of these networks; some MPIs would wait for ever.

    several: also if a network is the loopback, which leads to no other host.
    """
    own = sorted(os.listdir("/sys/class/net"))
    for name in names:
        if "/" not in name and name not in own:  # Open MPI takes 10.0.0.0/24 too
            raise OSError(
                f"this host has no network interface {name} (it has {', '.join(own)}): name one that all hosts have"
            )
        if name == "lo" and several:
            others = ", ".join(each for each in own if each != "lo")
            raise OSError(f"the network interface lo leads to no other host: name one of {others}")


def answers(text: str) -> dict[str, str]:
    """The facts that the child has printed; {} if it has printed none."""
    return {name: str(value) for name, value in last_object(text).items()}


def last_object(text: str) -> dict[str, Any]:
    """The JSON object in the last line that begins like one; {} if there is none. A login shell may greet before."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    with contextlib.suppress(ValueError):
        return dict(json.loads(lines[-1])) if lines else {}
    return {}


def differences(facts: Mapping[str, Mapping[str, str]], names: Sequence[str] = NAMES) -> dict[str, str]:
    """By host: how it differs from most of the hosts, and the cure. Of two hosts, the second differs."""
    found: dict[str, list[str]] = {}
    for name in names:
        values = {host: those[name] for host, those in facts.items() if name in those}
        if len(set(values.values())) > 1:
            said = list(values.values())
            usual = max(said, key=said.count)  # the first of the most frequent
            for host, value in values.items():
                if value != usual:
                    found.setdefault(host, []).append(_tell(name, value, usual))
    cure = "install the same versions on all hosts"
    return {host: f"differs: {'; '.join(texts)}: {cure} [HVD016]" for host, texts in found.items()}


def same_names(names: Mapping[str, str]) -> dict[str, str]:
    """By host: that an earlier host has the same name up to the first dot. MPIs tell hosts apart by that name.

    names: by host, its own name; empty if it is unknown.
    """
    found, seen = {}, set[str]()
    for host, name in names.items():
        if (short := name.partition(".")[0]) in seen:
            found[host] = f"two hosts call themselves {short}: rename one, or name it once with all its slots [HVD017]"
        seen |= {short} - {""}
    return found


def _tell(name: str, value: str, usual: str) -> str:
    plain = value if value.startswith(("no ", "missing")) or name == "MPI" else f"{name} {value}"
    return f"{name} is missing, others have {usual}" if value == "missing" else f"{plain}, others have {usual}"
