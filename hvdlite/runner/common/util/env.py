"""What a launcher says of this process, under the name of Horovod's module."""

from __future__ import annotations

import os

TOLD = (("HOROVOD_RANK", "HOROVOD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))


def get_env_rank_and_size() -> tuple[int, int]:
    """Rank and size before `init()`, or without it, as the launcher's environment has them; (0, 1) where it has none.
    Raises RuntimeError where only one of the two is there."""
    for names in TOLD:
        rank, size = map(os.environ.get, names)
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            raise RuntimeError(f"{names[0]}={rank} and {names[1]}={size}: the environment has only one of them")
    return 0, 1


__all__ = ["get_env_rank_and_size"]
