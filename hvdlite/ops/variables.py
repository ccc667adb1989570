"""Broadcasting many arrays at once, each under a name that all ranks agree on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from hvdlite.algorithms import movement
from hvdlite.arrays import Array, dtype_name, is_host
from hvdlite.job import runtime
from hvdlite.job.groups import Group
from hvdlite.job.process_sets import ProcessSet
from hvdlite.lanes.calls import calling
from hvdlite.lanes.workplace import Workplace
from hvdlite.ops.common import Operation, array_facts, root_of


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """A ValueError or TypeError inside says which variable it is about."""
    try:
        yield
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name}: {error}") from None


def broadcast_arrays(
    arrays: Sequence[Array], names: Sequence[str], root_rank: int, process_set: ProcessSet | None
) -> None:
    """Overwrite contiguous arrays with root_rank's, in place, as one operation (those on a GPU as a second). Waits for
    all ranks.

    names: of the variables, for messages. Raises MismatchError with a diff, on every rank, where the ranks' lists
    differ; ValueError for a root_rank that there is not; TypeError for arrays of Python objects.
    """
    with calling("hvd.broadcast_variables"):
        broadcast_all(arrays, names, root_rank, runtime.group_of(process_set))


def broadcast_all(arrays: Sequence[Array], names: Sequence[str], root_rank: int, group: Group) -> None:
    """`broadcast_arrays`, in a group."""
    root = root_of(group, "broadcast", root_rank)
    for name, array in zip(names, arrays, strict=True):
        with naming(name):
            array_facts(array)  # neither Python objects nor a foreign byte order
    lines = tuple(
        f"{name}: {dtype_name(array.dtype)}{list(array.shape)} on {'host' if is_host(array) else 'cuda'}"
        for name, array in zip(names, arrays, strict=True)
    )
    facts = (("parameters", lines), ("root rank", group.ranks[root]))
    name = f"variables.{group.serial('broadcast_variables')}"

    def broadcast(name: str, arrays: Sequence[Array]) -> None:
        def work(at: Workplace) -> None:
            for array in arrays:
                movement.broadcast(at.transport, array.reshape(-1), root, at.place.hosts)

        Operation(group, "broadcast", name, facts, work, arrays[0] if arrays else None).run()

    broadcast(name, [array for array in arrays if is_host(array)])
    if there := [array for array in arrays if not is_host(array)]:  # on every rank, then
        broadcast(f"{name} on GPUs", there)
