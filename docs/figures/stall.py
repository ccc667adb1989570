"""Makes docs/diagnose/stall.svg from what a job that hangs prints: `.venv/bin/python docs/figures/stall.py`.

The script runs `train.py` on 4 ranks in a terminal of its own, and ends the job when the stall report has come, after a
minute. `rich` draws the terminal.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shutil
import signal
import struct
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
COMMAND = "hvdliterun -np 4 python train.py"
COLUMNS = 116
LAST = "torch.load"  # in the last row of the report
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace"


def printed(folder: str) -> str:
    """What the job prints until the report is complete."""
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
        os.chdir(folder)
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        os.execvp("hvdliterun", COMMAND.split())
    text = b""
    try:
        while not re.search(rb"%s[^\n]*\n" % LAST.encode(), text):
            text += os.read(terminal, 4096)
    finally:
        os.kill(pid, signal.SIGINT)
        os.waitpid(pid, 0)
    return text.decode().replace("\r\n", "\n")


def drawn(text: str) -> str:
    """The terminal as SVG. It uses the reader's own fonts: pages may not load others."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(f"$ {COMMAND}", highlight=False)
    console.print(Text.from_ansi(text.rstrip()))
    svg = console.export_svg(title="a job that hangs", unique_id="stall")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    return re.sub(r"font-family: Fira Code[^;]*;", f"font-family: {FONTS};", svg)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(HERE / "train.py", folder)
        os.mkfifo(Path(folder, "part-2.pt"))
        picture = drawn(printed(folder))
    (HERE.parent / "diagnose" / "stall.svg").write_text(picture)
