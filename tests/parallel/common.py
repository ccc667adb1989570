"""What checks on ranks share: restarting with other settings, and statements about all ranks."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import hvdlite as hvd


def restart(**settings: str) -> None:
    """Shut down and initialize again with these HVDLITE_ settings, and no others."""
    hvd.shutdown()
    for name in [name for name in os.environ if name.startswith("HVDLITE_")]:
        del os.environ[name]
    os.environ.update({f"HVDLITE_{name}": value for name, value in settings.items()})
    hvd.init()


def digest(value: Any) -> str:
    """Of the bits of an array, a tensor, or a list of them."""
    if isinstance(value, (list, tuple)):
        return " ".join(digest(item) for item in value)
    if hasattr(value, "detach"):
        import torch

        value = value.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]


def require_same_bits(value: Any) -> None:
    """All ranks hold the same bytes."""
    digests = hvd.allgather_object(digest(value))
    assert len(set(digests)) == 1, f"bits differ between ranks: {digests}"


def require_error(kind: type[BaseException], call: Callable[[], Any], *words: str) -> str:
    """The call raises this kind of error, with these words in it. Returns the text."""
    try:
        call()
    except kind as error:
        text = str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"
    return text


def require_mismatch(call: Callable[[], Any], *words: str) -> str:
    """Every rank gets a MismatchError with these words within 5 s, all the same text; an all-reduce afterwards works."""
    hvd.barrier()
    began = time.monotonic()
    text = require_error(hvd.MismatchError, call, *words)
    assert time.monotonic() - began < 5
    assert len(set(hvd.allgather_object(text))) == 1
    assert (hvd.allreduce(np.ones(3), op=hvd.Sum) == hvd.size()).all()
    return text


@contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[str]]:
    """What hvdlite logs meanwhile, from this level on."""
    log, told, listener = logging.getLogger("hvdlite"), list[str](), logging.Handler(level)
    listener.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    before = log.level
    log.addHandler(listener)
    log.setLevel(level)
    try:
        yield told
    finally:
        log.removeHandler(listener)
        log.setLevel(before)


def rows_of(rank: int, rows: int) -> int:
    """How many of so many rows are dealt to this rank."""
    return rows // hvd.size() + (rank < rows % hvd.size())


def last() -> bool:
    """Whether this is the last rank, the odd one out in many checks (with one rank: no)."""
    return hvd.rank() == hvd.size() - 1 > 0
