"""All-reduce algorithms by name, and the function that runs the chosen one.

`MESSAGES` has each algorithm by messages. It binds `(transport, buffer, scratch, reduction)` and returns a function
that reduces the flat buffer in place, at each call. `shared` and `hierarchical` bind the buffers of all
ranks of the host instead. `prepared` and `prepared_in_arena` choose the algorithm and bind its arguments. Adasum needs
a number of ranks that is a power of two; the others take any number. `movement` and `tree` hold operations other than
all-reduce. `through_memory` holds both, for arrays outside shared memory on one host.

Belongs here: the arithmetic of reductions, and which rank sends what to which. Not here: how bytes travel
(`transports/`), and agreement between ranks (`lanes/`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from hvdlite.algorithms import direct, hierarchical, ring, shared, through_memory, wide
from hvdlite.algorithms.adasum import adasum
from hvdlite.algorithms.choice import Place, across, choose
from hvdlite.algorithms.halving_doubling import doubling, halving_doubling
from hvdlite.algorithms.native import native
from hvdlite.algorithms.pipeline import scratch_length
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array, is_host, is_small_float
from hvdlite.memory.arena import Arena, typed
from hvdlite.memory.workspace import Workspace
from hvdlite.transports import Transport

__all__ = ["MESSAGES", "Place", "allreduce", "choose", "prepared", "prepared_in_arena", "to_lend"]

Prepare: TypeAlias = Callable[[Transport, Array, Array, Reduction], Callable[[], None]]
"""Binds an algorithm's arguments and returns a function to call many times."""


class ByMessages(NamedTuple):
    """An algorithm by messages.

    Attributes:
        prepare: Binds the arguments.
        whole: Whether `scratch` has as many elements as the buffer. Else it has those of a pth of it, or fewer
            (`pipeline.scratch_length`).
    """

    prepare: Prepare
    whole: bool = False


def unprepared(algorithm: Callable[[Transport, Array, Array, Reduction], None], whole: bool = True) -> ByMessages:
    """A `ByMessages` of a function that prepares nothing, and reduces the buffer when it is called."""
    return ByMessages(lambda *arguments: partial(algorithm, *arguments), whole)


MESSAGES = {
    "ring": ByMessages(ring.prepared),
    "direct": ByMessages(direct.prepared),  # replaces the ring for 16-bit floats
    "halving_doubling": unprepared(halving_doubling),
    "doubling": unprepared(doubling),
    "native": unprepared(native, whole=False),
    "nccl": unprepared(native, whole=False),  # on a GPU the transport's own all-reduce is NCCL's
    "adasum": unprepared(adasum),
}
MOST_KINDS = 64  # prepared reductions that a lane keeps for its staging arena, one for each kind of piece


def allreduce(transport: Transport, workspace: Workspace, place: Place, buffer: Array, reduction: Reduction) -> None:
    """Reduce `buffer` (flat, contiguous, in place) over the transport's ranks."""
    prepared(transport, workspace, place, buffer, reduction)()


def prepared(
    transport: Transport, workspace: Workspace, place: Place, buffer: Array, reduction: Reduction
) -> Callable[[], None]:
    """A function that does `allreduce` with this buffer, for many calls.

    Args:
        transport: The ranks that take part.
        workspace: Scratch memory and arenas of the lane.
        place: The facts that the choice depends on.
        buffer: Flat and contiguous, reduced in place.
        reduction: The operation and its scaling.
    """
    run = without_memory(transport, workspace, place, buffer, reduction, in_arena=False)
    return run or partial(staged, transport, workspace, place, buffer, reduction)


def prepared_in_arena(
    transport: Transport,
    workspace: Workspace,
    place: Place,
    buffers: Sequence[Array],
    reduction: Reduction,
    lent: Mapping[int, Array] = shared.NOTHING_LENT,
) -> Callable[[], None]:
    """A function that does `allreduce` with a buffer in an arena, for many calls.

    Every rank has finished writing its buffer when the function is called, because the roll call before it is a
    barrier.

    Args:
        transport: The ranks that take part.
        workspace: Scratch memory and arenas of the lane.
        place: The facts that the choice depends on.
        buffers: The flat buffers of all ranks of this host, in rank order, reduced in place.
        reduction: The operation and its scaling.
        lent: Addends of this rank that lie elsewhere, by their start in the part `to_lend`.
    """
    buffer = buffers[workspace.levels(transport, place.hosts).local.rank]
    run = without_memory(transport, workspace, place, buffer, reduction, in_arena=True)
    return run or in_memory(transport, workspace, place, buffers, reduction, lent)


def without_memory(
    transport: Transport, workspace: Workspace, place: Place, buffer: Array, reduction: Reduction, in_arena: bool
) -> Callable[[], None] | None:
    """A function that reduces the buffer without shared memory; None if it should be reduced in shared memory."""
    if integers := wide.of_integers(reduction, buffer.dtype, transport.size):
        return partial(wide.reduce, integers, buffer, partial(allreduce, transport, workspace, place))
    if transport.size == 1:
        return partial(alone, buffer, reduction)
    name = chosen(place, buffer, reduction, in_arena)
    return by_messages(name, transport, workspace, buffer, reduction) if name in MESSAGES else None


def chosen(place: Place, buffer: Array, reduction: Reduction, in_arena: bool) -> str:
    """The name of the algorithm. in_arena: see `choose`."""
    if reduction.operation == "adasum":
        return "adasum"
    name = choose(place, buffer.nbytes, buffer.dtype, in_arena)
    lossy = name == "native" and reduction.operation in ("min", "max") and buffer.dtype.kind == "f"
    return "ring" if lossy else name  # MPIs lose NaN in minima and maxima


def to_lend(transport: Transport, place: Place, buffer: Array, reduction: Reduction) -> tuple[int, int]:
    """The begin and end of the part of a buffer that only this rank reads. Its addends may lie outside the arena.

    The part is empty unless the algorithm is the two-shot on the host.
    """
    if transport.size == 1 or not is_host(buffer) or chosen(place, buffer, reduction, True) != "shared":
        return 0, 0
    if wide.of_integers(reduction, buffer.dtype, transport.size):
        return 0, 0
    return ring.part(buffer, transport.size, transport.rank)


def alone(buffer: Array, reduction: Reduction) -> None:
    """Scale the buffer, in a job of one rank."""
    if reduction.scales and is_small_float(buffer.dtype):
        wide.reduce(wide.Cast(reduction), buffer, lambda array, how: None)
        return
    reduction.prescale(buffer)
    reduction.postscale(buffer)


def by_messages(
    name: str, transport: Transport, workspace: Workspace, buffer: Array, reduction: Reduction
) -> Callable[[], None]:
    """A function that reduces the buffer by messages.

    16-bit floats are added in float32 and rounded once: `direct` replaces the ring, and other algorithms get float32.
    """
    if is_small_float(buffer.dtype) and name not in ("adasum", "direct"):
        if name == "ring":
            return by_messages("direct", transport, workspace, buffer, reduction)
        return partial(wide.reduce, wide.Cast(reduction), buffer, partial(at_once, name, transport, workspace))
    prepare, whole = MESSAGES[name]
    length = buffer.size if whole else scratch_length(ring.longest_part(buffer, transport.size), buffer)
    return prepare(transport, buffer, workspace.scratch(buffer, length), reduction)


def at_once(name: str, transport: Transport, workspace: Workspace, buffer: Array, reduction: Reduction) -> None:
    """Reduce the buffer by messages."""
    by_messages(name, transport, workspace, buffer, reduction)()


def in_memory(
    transport: Transport,
    workspace: Workspace,
    place: Place,
    peers: Sequence[Array],
    reduction: Reduction,
    lent: Mapping[int, Array],
) -> Callable[[], None]:
    """A function that reduces in shared memory: the two-shot on one host, else the hierarchical algorithm."""
    if place.one_host:
        return shared.prepared(transport, peers, reduction, lent)

    def between(cross: Transport, part: Array, how: Reduction) -> Callable[[], None]:
        return by_messages(across(cross.size, part.nbytes, part.dtype), cross, workspace, part, how)

    return hierarchical.prepared(workspace.levels(transport, place.hosts), peers, reduction, between)


def staged(transport: Transport, workspace: Workspace, place: Place, buffer: Array, reduction: Reduction) -> None:
    """Reduce a buffer outside shared memory, in pieces, through the lane's staging arena.

    If the staging arena is not shared, reduce by messages. All ranks know whether it is.
    """
    arena = workspace.staging(transport, place.hosts)
    if arena.peers is None:
        by_messages("ring", transport, workspace, buffer, reduction)()
        return
    at_home = place.one_host and is_host(buffer)  # `through_memory` makes the pieces
    step = max(buffer.size, 1) if at_home else arena.own.size // buffer.itemsize
    for start in range(0, buffer.size, step):
        piece = buffer[start : start + step]
        on_stage(transport, workspace, place, arena, piece, reduction)(piece)


def on_stage(
    transport: Transport, workspace: Workspace, place: Place, stage: Arena, piece: Array, reduction: Reduction
) -> Callable[[Array], None]:
    """A function that reduces arrays of this kind through the staging arena.

    The workspace keeps the function, because preparing it takes about 7 us.
    """
    kind = piece.nbytes, piece.dtype, reduction
    if kind not in workspace.staged:
        if len(workspace.staged) >= MOST_KINDS:
            workspace.staged.clear()
        assert stage.peers is not None
        if place.one_host and is_host(piece):
            run = through_memory.prepared_allreduce(transport, stage.peers, piece.size, piece.dtype, reduction)
        else:
            views = [typed(peer, 0, piece.size, piece.dtype) for peer in stage.peers]
            run = there_and_back(transport, workspace, place, views, reduction)
        workspace.staged[kind] = run
    return workspace.staged[kind]


def there_and_back(
    transport: Transport, workspace: Workspace, place: Place, peers: Sequence[Array], reduction: Reduction
) -> Callable[[Array], None]:
    """A function that copies an array into this rank's stage, reduces there, and copies it back."""
    local = workspace.levels(transport, place.hosts).local
    mine, reduce = peers[local.rank], in_memory(transport, workspace, place, peers, reduction, shared.NOTHING_LENT)

    def run(array: Array) -> None:
        mine[:] = array
        local.barrier()
        reduce()
        array[:] = mine

    return run
