"""The place of this process in its MPI job, from the variables that launchers set. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Place(NamedTuple):
    """A rank's place in its job. local_rank, local_size: among its host's ranks; None if the launcher is silent."""

    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None


LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_RANK", "PMI_SIZE", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    ("PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""),
)
"""For each launcher its variables of rank, size, local rank and local size. Slurm's SLURM_PROCID is not among them: a
script that sbatch runs has it, too, and is no rank."""


def place_in(env: Mapping[str, str]) -> Place | None:
    """The place that the environment tells; None if no MPI launcher has started this process.

    If several launchers' variables are set, the first with the most numbers.
    """
    found = []
    for names in LAUNCHERS:
        numbers = [int(env[name]) if env.get(name, "").isdigit() else None for name in names]
        rank, size, local_rank, local_size = numbers
        if rank is not None and size is not None:
            found.append(Place(rank, size, local_rank, local_size))
    return min(found, key=lambda place: place.count(None), default=None)


def variables(place: Place) -> dict[str, str]:
    """torchrun's variables for a place."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {name: str(number) for name, number in zip(names, place, strict=True) if number is not None}
