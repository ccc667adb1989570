"""How far a benchmark has come: a bar on the terminal, or a line for each stage elsewhere, from rank 0.

The bar is drawn when a stage begins, and at no other time: no thread wakes up while something is measured. hvdliterun
passes rank 0's output on in pipes, and lends it the terminal as standard input. So the bar goes there, and not into
output that is kept in a file. Lines go to standard error.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

import hvdlite as hvd
from hvdlite.bench import timing


@contextmanager
def progress() -> Iterator[timing.Progress]:
    """A context with a function that shows progress on rank 0, and nothing on other ranks."""
    if hvd.rank() != 0:
        yield lambda done, total, text: None
    elif terminal := terminal_of(sys.stdin):
        with terminal, bar(Console(file=terminal, force_terminal=True)) as show:
            yield show
    else:
        yield lines(sys.stderr)


def terminal_of(stream: TextIO | None) -> TextIO | None:
    """Open the terminal that a stream belongs to, for writing. None: the stream is none, or its terminal has no size.

    Open MPI gives ranks terminals without a size, which nobody looks at.
    """
    try:
        number = stream.fileno() if stream else -1
        return open(os.ttyname(number), "w") if os.get_terminal_size(number).columns else None
    except (OSError, ValueError):  # no terminal; a closed stream, or one without a descriptor
        return None


@contextmanager
def bar(out: Console) -> Iterator[timing.Progress]:
    """A context with a progress bar. It vanishes at the end."""
    left = Left()
    text = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True))
    columns = (
        text,
        BarColumn(24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}", table_column=Column(width=16)),
    )
    with Progress(
        *columns, console=out, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False,
        expand=True,
    ) as drawn:  # fmt: skip
        task = drawn.add_task("", total=None, left="", visible=False)
        out.show_cursor(True)  # Ctrl-C may end this process before it could

        def show(done: int, total: int, text: str) -> None:
            drawn.update(task, completed=done, total=total, description=text, left=left(done, total), visible=True)
            drawn.refresh()

        yield show


def lines(out: TextIO) -> timing.Progress:
    """A function that prints a line for each stage."""
    left = Left()

    def show(done: int, total: int, text: str) -> None:
        print(", ".join(filter(None, (f"[{done + 1}/{total}] {text}", left(done, total)))), file=out, flush=True)

    return show


class Left:
    """The time that is left, if all stages take equally long.

    Attributes:
        began: When the first stage began; None: no stage has begun.
    """

    def __init__(self) -> None:
        self.began: float | None = None

    def __call__(self, done: int, total: int) -> str:
        """The estimate in words, at the beginning of a stage. Empty in the first stage, which has none."""
        now = time.monotonic()
        self.began = now if self.began is None else self.began
        return f"{readable((now - self.began) / done * (total - done))} left" if done else ""


def readable(seconds: float) -> str:
    """'8 s', '3 min', '1 h 20 min': rounded up, as an estimate has no more digits."""
    whole = max(1, -int(-seconds // 1))
    if whole < 60:
        return f"{whole} s"
    minutes = -(-whole // 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
