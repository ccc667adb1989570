"""Signals to the ranks of one host, and files that tell them something."""

from __future__ import annotations

import os

from hvdlite_launcher.janitor import rank_processes, send

ROOM = 64 * 1024  # bytes that the job's folder must have room for, before anything starts


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


def publish(folder: str, name: str, data: bytes) -> None:
    """Write a file into the job's folder, which appears with all its contents. Raises OSError."""
    path = os.path.join(folder, name)
    with open(f"{path}.new", "wb") as file:
        file.write(data)
    os.rename(f"{path}.new", path)
