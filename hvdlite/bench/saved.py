"""Results that `--json` has written: read for another run (`--earlier`), or to be drawn (`draw`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from hvdlite.errors import HvdliteError

Json: TypeAlias = dict[str, object]
"""The content of a JSON file."""
T = TypeVar("T")


def write(path: str, content: Json) -> None:
    """Write a JSON file."""
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


def content_of(path: str) -> Json:
    """The content of a file that `--json` has written.

    Raises:
        HvdliteError: The file cannot be read, or has another content.
    """
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise HvdliteError(f"{path} has no results of a benchmark: {error}") from error
    if not isinstance(found, dict) or not {"benchmark", "machine"} <= set(found):
        raise HvdliteError(f"{path} has no results of a benchmark: write them with --json")
    return found


def rows_of(content: Json, benchmark: str, read: Callable[..., T]) -> list[T]:
    """Make the rows of one benchmark.

    Args:
        content: The content of the file.
        benchmark: The benchmark's name.
        read: Makes a row. Its arguments are the row's content.

    Raises:
        HvdliteError: These are no results of this benchmark.
    """
    try:
        if content["benchmark"] != benchmark:
            raise ValueError(f"they are of {content['benchmark']}")
        return [read(**row) for row in cast(list[Mapping[str, object]], content["rows"])]
    except (ValueError, KeyError, TypeError) as error:
        raise HvdliteError(f"these are no results of the {benchmark} benchmark: {error}") from error


def reader(kind: type[T]) -> Callable[..., T]:
    """A function for `rows_of` that makes a dataclass of its fields in the file, and ignores what else is there."""

    def read(**content: Any) -> T:
        names = [each.name for each in fields(kind) if each.name in content]  # type: ignore[arg-type]
        return kind(**{name: content[name] for name in names})

    return read
