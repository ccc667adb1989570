"""After a failure: was the Python that ran one that hvdlite is not installed for? The commonest wrong start of all."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

_ASKS = "import importlib.util, sys; sys.exit(9 if importlib.util.find_spec('hvdlite') is None else 0)"


def stranger(program: str) -> str | None:
    """What to tell the user where that is so; None where it is not, or cannot be found out. program: of the command."""
    path = shutil.which(program)
    if path is None or not re.fullmatch(r"python[\d.]*", os.path.basename(program)):
        return None
    if os.path.dirname(os.path.abspath(path)) == os.path.dirname(sys.executable):
        return None
    try:
        asked = subprocess.run([path, "-c", _ASKS], capture_output=True, stdin=subprocess.DEVNULL, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if asked.returncode != 9:
        return None
    return f"{path} has no hvdlite, which is installed for {sys.executable}: activate its environment, or name it"
