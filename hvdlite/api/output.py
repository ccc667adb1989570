"""Output of training scripts: `hvd.print` on rank 0 or from all ranks, and functions that only rank 0 calls.

`print` stands in no `__all__`: `from hvdlite.torch import *` must leave Python's own print alone.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

from hvdlite.job import facts
from hvdlite.lanes.calls import calling
from hvdlite.ops.objects import allgather_object

P = ParamSpec("P")
R = TypeVar("R")


class Writable(Protocol):
    """What `print` writes to."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...


def print(
    *objects: object,
    all: bool = False,
    sep: str | None = " ",
    end: str | None = "\n",
    file: Writable | None = None,
    flush: bool = True,
) -> None:
    """Print on rank 0 only; on other ranks do nothing. Works after `hvd.shutdown()`, too.

        hvd.print(f"epoch {epoch}: loss {loss:.4f}")
        hvd.print(f"{len(loader)} batches", all=True)        # "rank 0: 45 batches", "rank 1: 44 batches", ...

    Args:
        *objects: As for Python's print.
        all: Whether rank 0 prints every rank's text, in rank order. Each line then begins with its rank, as in
            "rank 1: ". This is collective: every rank must make the call, and waits for all ranks.
        sep: As for Python's print.
        end: As for Python's print. With `all`, what follows each rank's text.
        file: As for Python's print, on rank 0.
        flush: Whether the text is written at once. (Python's default is False.)

    Raises:
        NotInitializedError: `hvd.init()` has not been called.
    """
    rank = facts.rank() if all else facts.last_rank()
    texts = [(" " if sep is None else sep).join(map(str, objects))] if all or rank == 0 else []
    if all:
        with calling("hvd.print(all=True)"):
            texts = [prefixed(text, place) for place, text in enumerate(allgather_object(texts[0]))]
    for text in texts if rank == 0 else ():
        builtins.print(text, end=end, file=file, flush=flush)


def prefixed(text: str, rank: int) -> str:
    """Return the text with its rank before each line."""
    return "\n".join(f"rank {rank}: {line}" for line in text.split("\n"))


def rank_zero_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Decorate a function that only rank 0 runs. It may not call collectives, for which rank 0 would wait.

        @hvd.rank_zero_only
        def draw(losses): ...

    Args:
        function: Any function or method.

    Returns:
        A function with the same name, docstring and parameters. On rank 0 it returns the function's result; on other
        ranks, None. It raises NotInitializedError before `hvd.init()`, and works after `hvd.shutdown()`.
    """

    @functools.wraps(function)
    def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if facts.last_rank() == 0 else None

    return on_rank_zero
