"""hvdlite's log: the logger "hvdlite" of Python's `logging`, with Horovod's levels.

Without HVDLITE_LOG_LEVEL the application's own logging decides. If the application has none, warnings go to stderr and
begin with "hvdlite: ". With HVDLITE_LOG_LEVEL, lines go to stderr with time and rank.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TextIO

import numpy as np

from hvdlite.algorithms.choice import Place, choose
from hvdlite.config import LogStyle
from hvdlite.job.topology import Topology

LOG = logging.getLogger("hvdlite")
SIZES = {"4 KiB": 1 << 12, "256 KiB": 1 << 18, "4 MiB": 1 << 22, "64 MiB": 1 << 26}


class LastResort(logging.StreamHandler[TextIO]):
    """Prints warnings if the application has no handler. Python's own last resort would not name hvdlite."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and LOG.handlers == [self]:
            self.stream = sys.stderr
            super().emit(record)


_handler: logging.Handler = LastResort()
_handler.setLevel(logging.WARNING)
_handler.setFormatter(logging.Formatter("hvdlite: %(message)s"))
LOG.addHandler(_handler)


def configure(style: LogStyle, rank: int) -> None:
    """Set the level and the form of lines. A later call replaces the handler of an earlier one.

    Args:
        style: The settings.
        rank: This rank, which begins each line.
    """
    global _handler
    if not style.level:
        return
    LOG.removeHandler(_handler)
    time = "" if style.hide_time else "[%(asctime)s] "
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter(f"{time}hvdlite rank {rank} %(levelname)s: %(message)s"))
    LOG.addHandler(_handler)
    LOG.propagate = False
    LOG.setLevel("DEBUG" if style.level == "trace" else style.level.upper())


def log_choice(place: Place, topology: Topology) -> None:
    """Log the algorithms that all ranks will choose for all-reduces, at level INFO on rank 0."""
    if topology.rank or topology.size == 1 or not LOG.isEnabledFor(logging.INFO):
        return
    kind = np.dtype(np.float32)
    gradients = choose(place, 1 << 24, kind, place.in_memory)
    arrays = ", ".join(f"{name} {choose(place, size, kind, False)}" for name, size in SIZES.items())
    hosts = "+".join(str(len(ranks)) for ranks in topology.hosts)
    LOG.info("all-reduce on hosts of %s ranks: gradients %s; arrays of %s", hosts, gradients, arrays)


def warn_of_misspelt(rank: int, settings: Mapping[str, str]) -> None:
    """Warn on rank 0 of variables without an effect.

    Args:
        rank: This rank.
        settings: These variables, and for each the setting that was probably meant.
    """
    for name, meant in settings.items() if rank == 0 else ():
        LOG.warning("%s is set, but hvdlite has no such setting. Did you mean %s?", name, meant)
