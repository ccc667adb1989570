"""`horovod.common.basics`: the object that Horovod's scripts ask about ranks and process sets."""

from __future__ import annotations

from typing import Any

from hvdlite.api import names
from hvdlite.job import runtime


class HorovodBasics:
    """Jobs, ranks and process sets: `init`, `rank`, `size`, ... as attributes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(names, name)

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Return the ranks of each registered process set by its number. The set 0 has all ranks.

        Raises:
            NotInitializedError: `init()` has not been called.
        """
        return {number: list(ranks) for number, ranks in sorted(runtime.current().groups.ranks.items())}


__all__ = ["HorovodBasics"]
