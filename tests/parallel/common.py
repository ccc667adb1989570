"""Helpers for checks on ranks: a restart with other settings, and assertions about all ranks."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

import hvdlite as hvd

T = TypeVar("T")


def at_sizes(*sizes: int) -> Callable[[T], T]:
    """Say that a check runs at these of its module's world sizes alone. `jobs` reads this from the source."""

    def mark(check: T) -> T:
        check.sizes = sizes  # type: ignore[attr-defined]  # a function's
        return check

    return mark


def restart(**settings: str) -> None:
    """Shut down and initialize again with these HVDLITE_ settings, and no others."""
    hvd.shutdown()
    for name in [name for name in os.environ if name.startswith("HVDLITE_")]:
        del os.environ[name]
    os.environ.update({f"HVDLITE_{name}": value for name, value in settings.items()})
    hvd.init()


def digest(value: Any) -> str:
    """A digest of the bits of an array, a tensor, or a list of them."""
    if isinstance(value, (list, tuple)):
        return " ".join(digest(item) for item in value)
    if hasattr(value, "detach"):
        import torch

        value = value.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]


def require_same_bits(value: Any) -> None:
    """Check that all ranks have the same bytes."""
    digests = hvd.allgather_object(digest(value))
    assert len(set(digests)) == 1, f"bits differ between ranks: {digests}"


def require_error(
    kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any], *words: str
) -> str:
    """Check that the call raises this kind of error, with these words. Returns the text."""
    try:
        call()
    except kind as error:
        text = str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"
    return text


def require_threads_end(name: str) -> None:
    """Check that this process' threads of this name end within 20 s."""
    until = time.monotonic() + 20
    while any(thread.name == name for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


def require_mismatch(call: Callable[[], Any], *words: str) -> str:
    """Check that every rank gets a MismatchError with these words within 5 s.

    All texts are the same, and an all-reduce afterwards works.
    """
    hvd.barrier()
    began = time.monotonic()
    text = require_error(hvd.MismatchError, call, *words)
    assert time.monotonic() - began < 5
    assert len(set(hvd.allgather_object(text))) == 1
    assert (hvd.allreduce(np.ones(3), op=hvd.Sum) == hvd.size()).all()
    return text


@contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[str]]:
    """A context that collects hvdlite's log messages, from this level on."""
    log, told, listener = logging.getLogger("hvdlite"), list[str](), logging.Handler(level)
    listener.emit = lambda record: told.append(record.getMessage())
    before = log.level
    log.addHandler(listener)
    log.setLevel(level)
    try:
        yield told
    finally:
        log.removeHandler(listener)
        log.setLevel(before)


def rows_of(rank: int, rows: int) -> int:
    """The number of rows that this rank gets."""
    return rows // hvd.size() + (rank < rows % hvd.size())


def last() -> bool:
    """Whether this is the last rank of several: the rank that differs in many checks."""
    return hvd.rank() == hvd.size() - 1 > 0
