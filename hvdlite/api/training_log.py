"""`hvd.logger`: a logger for training scripts. hvdlite's own log is another one, the logger "hvdlite" (`job/logs.py`).

The logger decides which records pass: those from INFO on from rank 0, those from WARNING on from the other ranks. It
prints them only if the application has no handler for them. So the application's own configuration decides about files
and formats, and no line appears twice.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import TextIO

from hvdlite.job import facts

FORM = "[%(asctime)s] rank %(rank)s %(levelname)s: %(message)s"


def logger(name: str = "train") -> logging.Logger:
    """Return a logger that logs INFO on rank 0, and WARNING and above on every rank.

        log = hvd.logger()
        log.info("epoch %d: loss %.4f", epoch, loss)      # [2026-11-29 22:30:08,123] rank 0 INFO: epoch 3: loss 0.1234

    Lines go to stderr, with time and rank. If the application has handlers (`logging.basicConfig`), they get the lines
    instead. A level that the application has set is kept. Before `hvd.init()` the rank is the one that the launcher
    announces.

    Handlers' formats may contain %(rank)s. A handler that gets records of other loggers, too, needs a default for it:
    `logging.Formatter(form, defaults={"rank": "-"})`. Loggers below this one do not inherit what each rank logs: get
    them with `hvd.logger`, too.

    Args:
        name: The logger's name, as for `logging.getLogger`.

    Returns:
        The same logger for every call with this name.

    Raises:
        ValueError: The name is empty, or belongs to hvdlite's own log.
    """
    if not name or name == "root" or name.partition(".")[0] == "hvdlite":
        raise ValueError(
            f"hvd.logger({name!r}): the root logger is the application's, and hvdlite has a log of its own"
        )
    log = logging.getLogger(name)
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    log.addFilter(passes)
    if not any(isinstance(each, Lines) for each in log.handlers):
        log.addHandler(Lines())
    return log


def passes(record: logging.LogRecord) -> bool:
    """Give the record its rank. Return whether this rank logs it."""
    rank = facts.presumed_rank()
    record.__dict__["rank"] = rank
    return rank == 0 or record.levelno >= logging.WARNING


class Lines(logging.StreamHandler[TextIO]):
    """Prints records with time and rank to the present stderr, if the application has no handler for them."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORM))
        self.addFilter(passes)  # records of loggers below this one have not passed its own filter

    def emit(self, record: logging.LogRecord) -> None:
        found = [each for each in handlers_for(record.name) if not isinstance(each, logging.NullHandler)]
        if found[:1] == [self] and all(isinstance(each, Lines) for each in found):
            self.stream = sys.stderr
            super().emit(record)


def handlers_for(name: str) -> Iterator[logging.Handler]:
    """Yield the handlers that get the records of a logger, its own first."""
    log: logging.Logger | None = logging.getLogger(name)
    while log is not None:
        yield from log.handlers
        log = log.parent if log.propagate else None
