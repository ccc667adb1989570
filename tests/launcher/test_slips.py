"""To a command line for another launcher hvdliterun answers with the line to write."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hvdlite_launcher import slips
from hvdlite_launcher.cli import main

FLAGS = [
    ("--nproc 2 python train.py", "--nproc: no such option: did you mean: hvdliterun -np 2 python train.py"),
    ("--np=2 python train.py", "--np: no such option: did you mean: hvdliterun -np 2 python train.py"),
    ("--num_processes 2 train.py", "did you mean: hvdliterun -np 2 python train.py"),
    ("--nproc_per_node=2 train.py", "-np 2 python train.py (-np counts the ranks of all hosts)"),
    ("-np 2 -m package.train --lr 1", "did you mean: hvdliterun -np 2 python -m package.train --lr 1"),
    ("-np 2 -host a:2 python train.py", "did you mean: hvdliterun -np 2 -H a:2 python train.py"),
    ("-np 2 --machinefile x python train.py", "did you mean: hvdliterun -np 2 --hostfile x python train.py"),
    ("--nnodes 2 python train.py", "--nnodes: no such option: leave it out"),
    ("--no-python -np 2 train", "--no-python: no such option: leave it out, hvdliterun sees to that"),
    ("--tee 3 python train.py", "--tee: no such option: --output-filename FOLDER also writes"),
    ("--max-restarts=3 python train.py", "--max-restarts: no such option: leave it out, hvdliterun starts a job once"),
    ("-np 2 -ppn 1 python train.py", "-ppn: no such option: name the hosts with their ranks, -H server1:N"),
    ("-nproc 2 python train.py", "-nproc: no such option: write -np"),
    ("-np 2 --bind-to core python train.py", '--mpi-args="--bind-to ..."'),
    ("-np 2 --verbos python train.py", "did you mean: hvdliterun -np 2 --verbose python train.py"),
    ("-np 2 --ver python train.py", "--ver: no such option: did you mean --verbose or --version?"),
    ("-np 2 -x LR=1 -x API_TOKEN=abc --start-timeot 5 python train.py",
     "hvdliterun -np 2 -x LR=1 -x API_TOKEN=... --start-timeout 5 python train.py"),
]  # fmt: skip
VALUES = [
    ("-np two python train.py", "-np two: must be a whole number of ranks, as in -np 4"),
    ("-np python train.py", "-np python: must be a whole number of ranks, as in -np 4"),
    ("-np2 python train.py", "-np2: write -np 2"),
    ("-np", "-np: needs a value"),
    ("-np 2 -p ssh true", "-p ssh: must be the number of a port"),
    ("-np 2 --tcp=1 true", "--tcp: takes no value"),
    ("-np 2 --start-timeout soon true", "--start-timeout soon: must be a number of seconds"),
    ("-np 2 --stall-check --no-stall-check true", "--no-stall-check: cannot be given together with --stall-check"),
    ("-np 2 --json true", "--json: goes with --check only"),
    ("-H hosta:1, hostb:1 true", "the host list 'hosta:1,' ends with a comma: write no blank after commas"),
]  # fmt: skip


def said(capfd: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    """The line that hvdliterun prints when it refuses these arguments with this exit code."""
    assert main(arguments) == code
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1, err
    return err.removeprefix("hvdliterun: ").rstrip()


@pytest.fixture(autouse=True)
def _python_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(("line", "text"), [*FLAGS, *VALUES], ids=[line for line, _ in [*FLAGS, *VALUES]])
def test_flags(capfd: pytest.CaptureFixture[str], line: str, text: str) -> None:
    assert text in said(capfd, 2, *line.split())


def test_what_is_near_nothing_gets_no_advice(capfd: pytest.CaptureFixture[str]) -> None:
    assert said(capfd, 2, "-np", "2", "--zzz", "true") == "--zzz: no such option"


@pytest.mark.parametrize("mode", [0o644, 0o755])
def test_a_script_without_python(capfd: pytest.CaptureFixture[str], tmp_path: Path, mode: int) -> None:
    """torchrun accepts it. (Some file systems make all files executable.)"""
    (tmp_path / "train.py").touch(mode=mode)
    for name in ("train.py", "./train.py"):
        text = said(capfd, 127, "-np", "2", "--no-prefix", name, "--lr", "1")
        assert text.endswith(f"did you mean: hvdliterun -np 2 --no-prefix python {name} --lr 1")


def test_a_script_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    text = said(capfd, 127, "-np", "2", "train.py")
    assert text.endswith("did you mean: hvdliterun -np 2 python train.py (there is no file train.py here, though)")


def test_a_shell_script(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "train.sh").touch(mode=0o644)
    assert said(capfd, 127, "-np", "2", "train.sh").endswith("did you mean: hvdliterun -np 2 bash train.sh")


def test_a_script_of_this_folder_that_names_its_interpreter(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("#!/usr/bin/env python\n")
    script.chmod(0o755)
    text = said(capfd, 127, "-np", "2", "train.py")
    assert text == "train.py is not on PATH: did you mean: hvdliterun -np 2 ./train.py"
    assert slips.wrong_command([str(script)], []) is None


STDIN = ["python", "python -", "python3 -u -W ignore - --lr 1", "/opt/bin/python3.11 -i", "python /dev/stdin",
         "env LR=1 python -", "bash", "sh -x", "bash -s 1 2", "bash -o pipefail", "python -X dev"]  # fmt: skip
NOT_STDIN = ["python train.py", "python train.py -", "python -m train", "python -um train", "python -c pass -", "cat",
             "python -W ignore -c pass", "python -Wignore train.py", "python --version", "python -V", "bash -c true",
             "bash -ec true", "bash train.sh -s", "bash -o pipefail train.sh", "env LR=1 python train.py", "env"]  # fmt: skip


@pytest.mark.parametrize("command", STDIN)
def test_a_script_on_stdin_is_one(command: str) -> None:
    meant = slips.script_on_stdin(command.split())
    assert meant[-1] == ("script.sh" if "sh" in command else "train.py") and meant[0] == command.split()[0]


@pytest.mark.parametrize("command", NOT_STDIN)
def test_a_command_that_finds_its_script_elsewhere(command: str) -> None:
    assert slips.script_on_stdin(command.split()) == []


@pytest.mark.parametrize(("ranks", "others"), [("2", "rank 1"), ("4", "ranks 1 to 3")])
def test_a_script_on_stdin_is_refused_where_other_ranks_lack_it(
    capfd: pytest.CaptureFixture[str], ranks: str, others: str
) -> None:
    text = said(capfd, 2, "-np", ranks, "python", "-")
    assert text.startswith("python -: the script would come from stdin, but only rank 0 has a stdin, and ")
    assert f" and {others} would run nothing" in text
    assert text.endswith(f"Save it in a file, and write: hvdliterun -np {ranks} python train.py")
