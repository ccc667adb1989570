"""`make demo` and `make test` print what they install and what to do next. pip and all programs are simulated."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make here")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files that the Makefile needs, and programs that only report their arguments."""
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("pip", "python", "hvdliterun", "ruff", "mypy"):
        (programs / name).write_text(f'#!/bin/sh\necho "called: {name} $*"\n')
        (programs / name).chmod(0o755)
    (tmp_path / ".venv" / "python").touch()
    return tmp_path


def make(folder: Path, *words: str, terminal: bool = False) -> list[str]:
    """Run make with these arguments, and return its output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    if not terminal:
        done = subprocess.run(["make", *words], cwd=folder, env=env, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()
    ours, theirs = os.openpty()
    with subprocess.Popen(["make", *words], cwd=folder, env=env, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        text = b""
        try:
            while data := os.read(ours, 65536):
                text += data
        except OSError:  # EIO: no process has the terminal open any more
            pass
        os.close(ours)
    assert process.returncode == 0, text
    return text.decode().splitlines()


def pips(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("called: pip")]


def test_the_demo_says_what_comes_and_what_next(folder: Path) -> None:
    lines = make(folder, "demo", "NP=3", "PIP_ARGS=--no-index")
    (install,) = pips(lines)
    assert "--quiet" not in install and "--no-index" in install
    before = " ".join(lines[: lines.index(install)])
    assert "Installing" in before and "minutes" in before and "3 GB" in before
    (demo,) = (line for line in lines if line.startswith("called: hvdliterun"))
    after = lines[lines.index(demo) + 1 :]
    assert "What next:" in after
    for words in ("hvdliterun -np 3 python train.py", "hvdliterun --check", "README.md"):
        assert any(words in line for line in after)


def test_the_demo_is_what_make_does_alone(folder: Path) -> None:
    assert "--quiet" not in pips(make(folder))[0]


@pytest.mark.parametrize("target", ["test", "lint"])
def test_logs_of_tests_hold_no_progress_but_say_what_comes(folder: Path, target: str) -> None:
    lines = make(folder, target)
    assert len(pips(lines)) == 2 and all("--quiet" in line for line in pips(lines))
    assert sum(line.startswith("Installing") for line in lines) == 2


def test_the_documentation_needs_no_framework_and_has_no_warnings(folder: Path) -> None:
    lines = make(folder, "docs")
    (install,) = pips(lines)
    assert install.endswith("-e .[docs]") and "--quiet" in install
    (build,) = (line for line in lines if line.startswith("called: python -m sphinx"))
    assert " -W " in build and build.endswith(" docs docs/_build")
    assert pips(make(folder, "docs")) == []


def test_a_terminal_shows_progress(folder: Path) -> None:
    lines = pips(make(folder, "test", terminal=True))
    assert len(lines) == 2 and not any("--quiet" in line for line in lines)


def test_nothing_is_said_of_what_is_installed(folder: Path) -> None:
    make(folder, "test")
    assert not any("Installing" in line or "pip" in line for line in make(folder, "test"))
