"""The command that -v and --dry-run show."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hvdlite_launcher import cli, shown
from hvdlite_launcher.command import Command, Job, Settings
from hvdlite_launcher.hosts import Host

LAUNCHER = Path(cli.__file__).parents[1]
JOB = Job("job", "/tmp/job", "/dev/shm/job", ("python", "-I", "keeper.py"))
SETTINGS = Settings(2, (Host("localhost", 2),), ("python", "-c", "print('a b')\n", "--lr", "-1"))
ARGV = ("mpirun", "-np", "2", "--mca", "btl", "tcp,self", *JOB.keeper, *SETTINGS.command)
TEXT = """\
mkdir -m 700 /dev/shm/job && \\
  API_TOKEN=... \\
  BACKING=/dev/shm/job \\
  LIST='a b' \\
  mpirun \\
  -np 2 \\
  --mca btl tcp,self \\
  python -I keeper.py \\
  python \\
  -c 'print('"'"'a b'"'"')
' \\
  --lr \\
  -1"""


def test_one_argument_a_line() -> None:
    """A flag stands with its values. A shell reads the same words."""
    env = {"LIST": "a b", "API_TOKEN": "x", "BACKING": "/dev/shm/job"}
    text = shown.command(Command(ARGV, env), SETTINGS, JOB)
    assert text == TEXT
    assert tuple(shlex.split(text.replace(" \\\n", " ")))[-len(ARGV) :] == ARGV
    assert shown.command(Command(ARGV, {}), SETTINGS, JOB).startswith("mpirun \\\n"), "no folder if nothing is in it"


def test_names_that_a_shell_cannot_assign() -> None:
    """Open MPI's own may contain dots."""
    odd = {"a.b": "1 2", "c d": "3"}
    ours = Command(("env",), odd | {"LIST": "a b"})
    text = shown.command(ours, Settings(1, (), ()), Job("job", "/tmp/job", None, ()))
    found = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True).stdout.splitlines()
    assert {"a.b=1 2", "c d=3", "LIST=a b"} <= set(found)


@pytest.mark.parametrize("hosts", [[], ["-H", "localhost:1,other.invalid:1"]])
def test_a_dry_run_starts_nothing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, hosts: list[str], tmp_path: Path
) -> None:
    """No agent, no connection, no folder."""

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError(f"started: {arguments}")

    for name in ("own_agent", "run", "launch"):
        monkeypatch.setattr(cli, name, refuse)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert cli.main(["--dry-run", "-np", "2", *hosts, "--output-filename", f"{tmp_path}/out", "true"]) == 0
    out, err = capfd.readouterr()
    assert err == "" and out.endswith(" \\\n  true\n") and str(tmp_path) in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("redirection", "code", "said"), [
    ("> /dev/full", 1, "hvdliterun: stdout: No space left on device\n"),
    (">&-", 0, ""),
    ("| true; exit ${PIPESTATUS[0]}", 141, ""),
    ("| tail -1", 0, ""),
])  # fmt: skip
def test_a_dry_run_whose_output_cannot_be_written(redirection: str, code: int, said: str) -> None:
    """Exit codes are those of a job. Arguments may be any bytes."""
    argv = [sys.executable, "-m", "hvdlite_launcher.cli", "--dry-run", "-np", "1", "echo", os.fsdecode(b"\xff")]
    words = ["bash", "-c", f'"$@" {redirection}', "bash", *argv]
    env = {**os.environ, "PYTHONPATH": str(LAUNCHER), "PYTHONIOENCODING": "utf-8:strict"}
    ended = subprocess.run(words, capture_output=True, env=env, timeout=20)
    assert (ended.returncode, ended.stderr.decode()) == (code, said)
    assert ended.stdout in (b"", b"  echo '\xff'\n")
