"""Progress of benchmarks: lines in a pipe, a bar on a terminal."""

from __future__ import annotations

import fcntl
import io
import os
import struct
import termios
import threading

import mpi4py
import pytest
from rich.console import Console

mpi4py.rc.initialize = False  # no test here communicates

from hvdlite.bench import progress  # noqa: E402


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def test_plain_lines_in_a_pipe(clock: Clock) -> None:
    """Three stages took 30 s, so the fourth and last takes about 10."""
    out = io.StringIO()
    show = progress.lines(out)
    show(0, 4, "one")
    clock.now += 30.0
    show(3, 4, "four")
    assert out.getvalue() == "[1/4] one\n[4/4] four, 10 s left\n"


def test_estimates_in_words() -> None:
    found = [progress.readable(seconds) for seconds in (0, 7.2, 60, 61, 3599, 3601, 4800)]
    assert found == ["1 s", "8 s", "1 min", "2 min", "1 h 0 min", "1 h 1 min", "1 h 20 min"]


def test_a_bar_is_drawn_when_a_stage_begins_and_never_between(clock: Clock) -> None:
    """No thread draws: it would take time from what is measured."""
    out, before = io.StringIO(), threading.active_count()
    with progress.bar(Console(file=out, force_terminal=True, width=80)) as show:
        show(0, 4, "one [of four]")
        clock.now += 30.0
        show(3, 4, "four")
        assert threading.active_count() == before
        text = out.getvalue()
    assert "one [of four]" in text and "0/4" in text and "four" in text and "10 s left" in text
    assert "\n" not in text  # it stays in its place
    assert out.getvalue().endswith("\x1b[2K")  # and vanishes


def test_a_terminal_without_a_size_is_none() -> None:
    """Open MPI gives ranks such terminals."""
    master, slave = os.openpty()
    with open(slave) as stream:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
        assert progress.terminal_of(stream) is None
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        terminal = progress.terminal_of(stream)
        assert terminal is not None
        with terminal:
            terminal.write("here")
        assert os.read(master, 100) == b"here"
    os.close(master)


def test_pipes_and_closed_streams_are_no_terminals() -> None:
    read, write = os.pipe()
    os.close(write)
    with open(read) as stream:
        assert progress.terminal_of(stream) is None
    assert progress.terminal_of(stream) is None and progress.terminal_of(None) is None
