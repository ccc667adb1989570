"""Broadcasting many arrays at once. All ranks agree on each array's name."""

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
    """Put the variable's name into the text of a ValueError or TypeError that is raised inside."""
    try:
        yield
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name}: {error}") from None


def broadcast_arrays(
    arrays: Sequence[Array], names: Sequence[str], root_rank: int, process_set: ProcessSet | None
) -> None:
    """Overwrite arrays with root_rank's, in place: those on the host as one operation, those on a GPU as another.

    Collective; waits for all ranks of the process set.

    Args:
        arrays: Contiguous. Equally many on every rank.
        names: The arrays' names, which ranks compare.
        root_rank: A global rank.
        process_set: The ranks that take part. None: all.

    Raises:
        MismatchError: The ranks' names, shapes, dtypes or devices differ. Every rank raises it, with a diff.
        ValueError: `root_rank` is no member.
        TypeError: An array holds Python objects, or numbers in a foreign byte order.
    """
    with calling("hvd.broadcast_variables"):
        broadcast_all(arrays, names, root_rank, runtime.group_of(process_set))


def broadcast_all(arrays: Sequence[Array], names: Sequence[str], root_rank: int, group: Group) -> None:
    """As `broadcast_arrays`, for a group."""
    root = root_of(group, "broadcast", root_rank)
    for name, array in zip(names, arrays, strict=True):
        with naming(name):
            array_facts(array)  # raises for Python objects and for a foreign byte order
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
    if there := [array for array in arrays if not is_host(array)]:  # all ranks have agreed on the devices
        broadcast(f"{name} on GPUs", there)
