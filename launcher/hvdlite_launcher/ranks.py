"""Signals to the ranks of one host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from hvdlite_launcher.janitor import rank_processes


class Farewell:
    """A signal that ends ranks: each gets it once, those too that have only started since the last time."""

    def __init__(self) -> None:
        self._told: set[int] = set()

    def say(self, folder: str, number: int) -> bool:
        """Send it to the ranks that have not got it; whether there are any ranks."""
        ranks = rank_processes(folder)
        send([rank for rank in ranks if rank not in self._told], number)
        self._told.update(ranks)
        return bool(ranks)


def send(processes: Iterable[int], number: int) -> None:
    """Send a signal to those of the processes that are still there."""
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, number)
