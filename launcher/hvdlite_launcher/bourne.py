"""Stands before ssh, for Open MPI: `python bourne.py OPTIONS... HOST COMMAND...`.

Open MPI writes its daemon's command in the language of our own login shell, or of bash where it does not know that
(fish), and leaves it to the other host's login shell: another one, or a .bashrc that says `set -u`, does not understand
it, and some wait for more. So we have a Bourne shell execute it. Runs as a script, isolated from the user's Python
settings, and imports nothing of this package.
"""

from __future__ import annotations

import getopt
import os
import shlex
import sys

OPTIONS = "1246AaB:b:Cc:D:E:e:F:fGgI:i:J:KkL:l:Mm:NnO:o:P:p:Q:qR:S:sTtVvW:w:XxYy"
"""Of ssh's: those with a colon have a value."""

if __name__ == "__main__":
    _, (host, *command) = getopt.getopt(sys.argv[1:], OPTIONS)
    options = sys.argv[1 : -1 - len(command)]
    mark = f"HVDLITE_JOB_ID={os.environ.get('HVDLITE_JOB_ID', '')}"  # else the shell tells that its child was killed
    shell = shlex.join(["exec", "env", mark, "/bin/sh", "-c", " ".join(command)])
    os.execvp("ssh", ["ssh", *options, host, shell])
