"""What scripts ask Horovod's `_basics` object, under the name of Horovod's module."""

from __future__ import annotations

from typing import Any

from hvdlite.api import names
from hvdlite.job import runtime


class HorovodBasics:
    """Jobs, ranks and process sets: `init`, `rank`, `size`, ... as attributes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(names, name)

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """The ranks of each registered process set, by its number; 0 is all ranks. Raises ValueError before init()."""
        return {number: list(ranks) for number, ranks in sorted(runtime.current().groups.ranks.items())}


__all__ = ["HorovodBasics"]
