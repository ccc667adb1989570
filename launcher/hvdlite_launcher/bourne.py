"""Runs ssh for Open MPI, so that a Bourne shell executes the command: `python bourne.py OPTIONS... HOST COMMAND...`.

mpirun starts this script instead of ssh, on several hosts, unless the login shell here is csh. Open MPI writes the
command of its daemon for a Bourne shell. This script makes /bin/sh on the other host execute it: the login shell there
may be of another kind, or have a .bashrc with `set -u`, and would fail or hang. This script is isolated from the user's
Python settings, and imports nothing of this package.
"""

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
