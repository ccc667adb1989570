"""What must be alike on all hosts, asked of each before the start: the interpreter, hvdlite, and the MPI library.

A child of the command's own interpreter answers, with the environment that the ranks will have. A command that is no
Python is only looked for.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence

NAMES = ("Python", "hvdlite", "MPI")
NOT_FROM_HERE = "import sys; sys.path = [path for path in sys.path if path]\n"
"""For the head of what `python -c` runs: no module is taken from the current folder, in which others may write. (As
with -P, which the user's Python may not know.)"""
_QUESTIONS = """
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
    """The child that answers for this command; None where there is nothing to ask.

    Raises FileNotFoundError when there is no such command on this host.
    """
    program = shutil.which(command[0], path=env.get("PATH", os.defpath))
    if program is None:
        raise FileNotFoundError(f"no such command: {command[0]}")
    if not os.path.basename(program).startswith(("python", "pypy")):
        return None
    return [program, "-c", NOT_FROM_HERE + _QUESTIONS]


def check_interfaces(names: Sequence[str], several: bool = True) -> None:
    """Raises OSError when this host lacks one of these networks, or none leads to other hosts (`several`): some MPIs
    wait for ever then."""
    own = sorted(os.listdir("/sys/class/net"))
    for name in names:
        if "/" not in name and name not in own:  # Open MPI takes 10.0.0.0/24 too
            raise OSError(f"no network interface {name}, but {', '.join(own)}")
        if name == "lo" and several:
            others = ", ".join(each for each in own if each != "lo")
            raise OSError(f"the network interface lo leads to no other host: name one of {others}")


def answers(text: str) -> dict[str, str]:
    """The facts that the child has printed; {} where it has not."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    try:
        return {str(name): str(value) for name, value in json.loads(lines[-1]).items()} if lines else {}
    except ValueError:
        return {}


def differences(facts: Mapping[str, Mapping[str, str]], names: Sequence[str] = NAMES) -> dict[str, str]:
    """By host: in which of these facts it differs from most of the hosts (of two, from the first)."""
    found: dict[str, list[str]] = {}
    for name in names:
        values = {host: those[name] for host, those in facts.items() if name in those}
        if len(set(values.values())) > 1:
            said = list(values.values())
            usual = max(said, key=said.count)  # the first of the most frequent
            for host, value in values.items():
                if value != usual:
                    found.setdefault(host, []).append(_tell(name, value, usual))
    return {host: "; ".join(texts) for host, texts in found.items()}


def _tell(name: str, value: str, usual: str) -> str:
    plain = value if value.startswith(("no ", "missing")) or name == "MPI" else f"{name} {value}"
    return f"{name} is missing, others have {usual}" if value == "missing" else f"{plain}, others have {usual}"
