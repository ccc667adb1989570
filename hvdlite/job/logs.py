"""hvdlite's log: Python's `logging`, logger "hvdlite", with Horovod's levels and switches where the user sets them.

Without HVDLITE_LOG_LEVEL an application's own logging decides; where there is none, warnings are shown as by Python's
default, but with whose they are. With it, lines go to stderr with time and rank, so that they can be told apart without
a launcher.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdlite.algorithms.choice import Place, choose
from hvdlite.config import Config
from hvdlite.job.topology import Topology

LOG = logging.getLogger("hvdlite")
SIZES = {"4 KiB": 1 << 12, "256 KiB": 1 << 18, "4 MiB": 1 << 22, "64 MiB": 1 << 26}

class LastResort(logging.StreamHandler[Any]):
    """In place of Python's own, which would not say whose a warning is: where the application has no handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and LOG.handlers == [self]:
            self.stream = sys.stderr
            super().emit(record)


_handler: logging.Handler = LastResort()
_handler.setLevel(logging.WARNING)
_handler.setFormatter(logging.Formatter("hvdlite: %(message)s"))
LOG.addHandler(_handler)


def configure(settings: Config, rank: int) -> None:
    """Set level and form as the settings say; called again, replaces what it set before."""
    global _handler
    if not settings.log_level:
        return
    LOG.removeHandler(_handler)
    time = "" if settings.log_hide_time else "[%(asctime)s] "
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter(f"{time}hvdlite rank {rank} %(levelname)s: %(message)s"))
    LOG.addHandler(_handler)
    LOG.propagate = False
    LOG.setLevel("DEBUG" if settings.log_level == "trace" else settings.log_level.upper())


def tell_choice(place: Place, topology: Topology) -> None:
    """Say which all-reduce will be used, at level INFO and on rank 0 alone: all ranks choose alike."""
    if topology.rank or topology.size == 1 or not LOG.isEnabledFor(logging.INFO):
        return
    kind = np.dtype(np.float32)
    gradients = choose(place, 1 << 24, kind, place.in_memory)
    arrays = ", ".join(f"{name} {choose(place, size, kind, False)}" for name, size in SIZES.items())
    hosts = "+".join(str(len(ranks)) for ranks in topology.hosts)
    LOG.info("all-reduce on hosts of %s ranks: gradients %s; arrays of %s", hosts, gradients, arrays)


def tell_misspelt(rank: int, settings: Mapping[str, str]) -> None:
    """Say on rank 0 which variables have no effect. settings: these, and what was probably meant."""
    for name, meant in settings.items() if rank == 0 else ():
        LOG.warning("%s is set, and means nothing: is it %s?", name, meant)
