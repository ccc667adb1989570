"""Real jobs on a terminal, and what hvdliterun prints at their end."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest

from tests.launcher.conftest import LIMIT, Runner
from tests.launcher.grids import Grid

SUMMARY = """
import os, sys
path = os.environ["HVDLITE_JOB_DIR"] + "/summary." + os.environ["HVDLITE_JOB_RANK"]
with open(path, "w") as file: file.write("rank {} says {}".format(os.environ["HVDLITE_JOB_RANK"], os.environ.get("HVDLITE_SUMMARY")))
print("last words", file=sys.stderr)
"""


def on_terminal(runner: Runner, *arguments: str, **env: str) -> tuple[int, bytes]:
    """Run hvdliterun with these arguments on a terminal of 60 columns. Returns its exit code and what it has written."""
    terminal, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    found: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(terminal, 65536):
                found.append(data)
        except OSError:  # nobody has it open any more
            pass

    reader = threading.Thread(target=read)
    reader.start()
    command = [sys.executable, "-m", "hvdlite_launcher.cli", *arguments]
    given = {name: value for name, value in runner.env().items()
             if name not in ("COLUMNS", "LINES", "NO_COLOR", "TTY_COMPATIBLE")}  # fmt: skip
    streams = {"stdin": subprocess.DEVNULL, "stdout": theirs, "stderr": theirs}
    code = subprocess.run(command, env={**given, "TERM": "xterm", **env}, timeout=LIMIT, **streams).returncode  # type: ignore[call-overload]
    os.close(theirs)
    reader.join()
    os.close(terminal)
    return code, b"".join(found)


def test_ranks_on_a_terminal(runner: Runner) -> None:
    """Short coloured prefixes; stderr is marked. A bar of rank 0 stays below rank 1's lines."""
    code = (
        "import os, sys, time\n"
        "rank = os.environ['HVDLITE_JOB_RANK']\n"
        "if rank == '1': time.sleep(0.5); print('hello'); print('oh', file=sys.stderr); time.sleep(0.5)\n"
        "else:\n"
        "    for number in range(15): sys.stdout.write(f'\\r{number}/14 '); sys.stdout.flush(); time.sleep(0.1)\n"
        "    print()\n"
    )
    ended, data = on_terminal(runner, "-np", "2", sys.executable, "-c", code)
    assert ended == 0
    assert b"\x1b[0;33m1|\x1b[0mhello" in data and b"\x1b[0;2;33m1:\x1b[0moh" in data
    assert sorted(Grid().feed(data).seen[:2]) == ["1:oh", "1|hello"]
    assert Grid().feed(data).seen[2:] == ["0|14/14"]


SHOW = ("sh", "-c", "echo $HVDLITE_JOB_RANK: $COLUMNS $LINES $TTY_COMPATIBLE")


@pytest.mark.parametrize(("flags", "env", "shown"), [
    ([], {}, ["0|0: 58 24 1", "1|1: 58 24"]),
    (["-x", "TTY_COMPATIBLE=0"], {}, ["0|0: 58 24 0", "1|1: 58 24 0"]),
    (["-x", "COLUMNS=99"], {"NO_COLOR": "1"}, ["0|0: 99 24 1", "1|1: 99 24"]),
    (["--prefix", "full"], {"COLUMNS": "99"}, ["[0]<stdout>:0: 99 1", "[1]<stdout>:1: 99"]),
    (["--no-prefix"], {}, ["0: 60 24", "1: 60 24"]),
])  # fmt: skip
def test_ranks_learn_of_the_terminal(runner: Runner, flags: list[str], env: dict[str, str], shown: list[str]) -> None:
    ended, data = on_terminal(runner, "-np", "2", *flags, *SHOW, **env)
    assert ended == 0 and sorted(Grid().feed(data).seen) == shown
    assert (b"\x1b[0;36m" in data) == (shown[0].startswith("0|") and not env)


@pytest.mark.parametrize("terminal", [True, False])
def test_files_of_output_keep_every_byte(runner: Runner, terminal: bool) -> None:
    """No refresh is dropped there, and rich is not told of the terminal."""
    folder = runner.tmpdir / "out"
    script = "printf '\\r1%%\\r2%%'; printf '\\r3%%\\n'; echo \"<$TTY_COMPATIBLE>\""
    command = ("-np", "1", "--output-filename", str(folder), "sh", "-c", script)
    ended = on_terminal(runner, *command)[0] if terminal else runner.run(*command).returncode
    assert ended == 0
    assert (folder / "rank.0" / "stdout").read_bytes() == b"\r1%\r2%\r3%\n<>\n"


@pytest.mark.parametrize(("flags", "told"), [
    (["--summary"], "1"), (["-v"], "1"), ([], None), (["-x", "HVDLITE_SUMMARY=mine", "--summary"], "mine"),
])  # fmt: skip
def test_the_summary_of_rank_0_comes_last(runner: Runner, flags: list[str], told: str | None) -> None:
    """After all output, and before hvdliterun's own last message. Rank 1's is not printed."""
    job = runner.run("-np", "2", *flags, sys.executable, "-c", f"{SUMMARY}\nsys.exit(3)")
    assert job.returncode == 3
    lines = [line for line in job.stderr.splitlines() if not line.startswith("hvdliterun: start-up")]
    assert lines[-2] == f"rank 0 says {told}" and f"rank 1 says {told}" not in lines, job.stderr
    assert lines[-1].startswith("hvdliterun: rank ")
    assert "[0]<stderr>:last words" in lines[:-2]


@pytest.mark.parametrize(("env", "told"), [({}, "color"), ({"NO_COLOR": "1"}, "1"), ({"HVDLITE_SUMMARY": "x"}, "x")])
def test_a_summary_on_a_terminal_is_coloured(runner: Runner, env: dict[str, str], told: str) -> None:
    ended, data = on_terminal(runner, "-np", "1", "--summary", sys.executable, "-c", SUMMARY, **env)
    assert ended == 0 and Grid().feed(data).seen == ["0:last words", f"rank 0 says {told}"]


def test_a_job_without_a_summary_prints_none(runner: Runner) -> None:
    job = runner.run("-np", "1", "--summary", "sh", "-c", "echo $HVDLITE_SUMMARY")
    assert (job.returncode, job.stdout, job.stderr) == (0, "[0]<stdout>:1\n", "")


def test_ranks_know_when_hvdliterun_began(runner: Runner) -> None:
    """A time of an outer job is replaced."""
    os.environ["HVDLITE_LAUNCHED"] = "1.0"
    try:
        before = time.time()
        job = runner.run("-np", "2", "--no-prefix", "sh", "-c", "echo $HVDLITE_LAUNCHED")
    finally:
        del os.environ["HVDLITE_LAUNCHED"]
    first, second = map(float, job.stdout.split())
    assert first == second and before - 0.001 < first < time.time()


def test_the_command_of_a_dry_run_runs(runner: Runner) -> None:
    job = runner.run("--dry-run", "-np", "1", "sh", "-c", "echo hello > $TMPDIR/hello")
    assert (job.returncode, job.stderr) == (0, "") and not (runner.tmpdir / "hello").exists()
    assert runner.leftovers() == [] and list(runner.tmpdir.iterdir()) == []
    subprocess.run(["sh", "-c", job.stdout], env=runner.env(), capture_output=True, timeout=LIMIT, check=True)
    assert (runner.tmpdir / "hello").read_text() == "hello\n"
    for folder in re.findall(r"mkdir -m 700 (\S+) ", job.stdout):
        os.rmdir(folder)
