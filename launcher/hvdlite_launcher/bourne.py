"""Runs ssh for Open MPI, so that a Bourne shell executes the command: `python bourne.py OPTIONS... HOST COMMAND...`.

Open MPI writes the command of its daemon for the login shell of hvdliterun's host, or for bash if it does not know that
shell. On another host a login shell of another kind, or a .bashrc with `set -u`, fails with that command, or hangs.
This script is isolated from the user's Python settings, and imports nothing of this package.
"""

from __future__ import annotations

import getopt
import os
import shlex
import sys

OPTIONS = "1246AaB:b:Cc:D:E:e:F:fGgI:i:J:KkL:l:Mm:NnO:o:P:p:Q:qR:S:sTtVvW:w:XxYy"
"""The options of ssh. A colon follows an option that has a value."""

if __name__ == "__main__":
    _, (host, *command) = getopt.getopt(sys.argv[1:], OPTIONS)
    options = sys.argv[1 : -1 - len(command)]
    mark = f"HVDLITE_JOB_ID={os.environ.get('HVDLITE_JOB_ID', '')}"  # else the shell reports that its child was killed
    shell = shlex.join(["exec", "env", mark, "/bin/sh", "-c", " ".join(command)])
    os.execvp("ssh", ["ssh", *options, host, shell])
