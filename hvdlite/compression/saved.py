"""What lossy compression has kept, outside shared memory: in checkpoints, and from one plan to the next.

Each host has residuals of its own, and only their sum over hosts means anything. So ranks agree on what they have
loaded (`agree`): each host's own values, or the sum over hosts, which the first host takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from hvdlite.compression import Piece
from hvdlite.system.user_warnings import say_once
from hvdlite.transports import Transport

ARRAYS = ("residual", "velocity", "extra")
"""The names of a parameter's arrays."""
COUNTS = "counts"
"""The name of the array with the numbers of host (-1 for the sum), hosts and rounds, in files."""
NOTHING, SUM, OWN, ANOTHERS = "nothing", "the sum over hosts", "this host's values", "another host's values"
"""What a rank has loaded."""
ANEW = (
    "what lossy compression has not sent starts anew at zero: ranks have loaded one host's values, and each host has "
    "its own. To keep them, save with hvd.save, or save a file of each rank and load each on its rank"
)


@dataclass(frozen=True)
class Kept:
    """One parameter's arrays, flat. An array that the compressor does not need is empty.

    Attributes:
        shape: The parameter's shape, in the order of memory.
        residual: The gradients that have not been sent.
        velocity: The sums of momentum correction.
        extra: What the compressor keeps.
    """

    shape: tuple[int, ...]
    residual: np.ndarray
    velocity: np.ndarray
    extra: np.ndarray

    def of(self, piece: Piece) -> Kept:
        """A driver's piece of the arrays. `extra` stays whole."""
        part = slice(piece.first, piece.first + piece.length)
        return replace(self, residual=self.residual[part], velocity=self.velocity[part])

    @property
    def form(self) -> tuple[object, ...]:
        """What must be equal if one parameter's values are to become another's."""
        return self.shape, self.residual.size, self.velocity.size, self.extra.size

    def take(self, other: Kept) -> None:
        """Copy the values of arrays of the same form."""
        self.residual[...] = other.residual
        self.velocity[...] = other.velocity
        self.extra[...] = other.extra

    def copy(self, residuals: bool = True) -> Kept:
        """A copy. residuals: whether it has them; otherwise it has zeros, since another host has these values."""
        residual, velocity = self.residual.copy(), self.velocity.copy()
        if not residuals:
            residual[...], velocity[...] = 0, 0
        return Kept(self.shape, residual, velocity, self.extra.copy())


@dataclass(frozen=True)
class Saved:
    """The committed values of one host, or their sum over hosts.

    Attributes:
        host: The number of the host that the values are of; None for the sum over all hosts.
        hosts: The number of hosts.
        rounds: The number of committed rounds.
        values: By parameter name, the arrays.
    """

    host: int | None
    hosts: int
    rounds: int
    values: Mapping[str, Kept]


EMPTY = Saved(None, 1, 0, {})
"""The values of a beginning."""


def agree(mine: Saved | None, hosts: tuple[int, int], transport: Transport) -> Saved | None:
    """Agree on what the ranks have loaded. Collective.

    Args:
        mine: What this rank has loaded.
        hosts: This host's number, and the number of hosts.
        transport: All ranks.

    Returns:
        The values for this host; None if no rank has loaded any. No values, with a warning on rank 0, if the ranks'
        files are not those of all hosts.
    """
    kinds = set(transport.allgather_object((kind_of(mine, hosts), mine.rounds if mine else 0)))
    if kinds == {(NOTHING, 0)}:
        return None
    ((kind, _), *others) = kinds
    if mine is None or others or kind == ANOTHERS:
        if transport.rank == 0:
            say_once(ANEW)
        return EMPTY
    if kind == OWN or hosts[0] == 0:
        return mine
    return replace(mine, values={name: kept.copy(residuals=False) for name, kept in mine.values.items()})


def kind_of(loaded: Saved | None, hosts: tuple[int, int]) -> str:
    """What this rank has loaded. hosts: this host's number, and the number of hosts."""
    if loaded is None:
        return NOTHING
    if loaded.host is None or loaded.hosts == 1:
        return SUM
    return OWN if (loaded.host, loaded.hosts) == hosts else ANOTHERS


def as_arrays(saved: Saved) -> dict[str, np.ndarray]:
    """The values as arrays by name, for files: copies. `of_arrays` reads them."""
    host = -1 if saved.host is None else saved.host
    found = {COUNTS: np.array([host, saved.hosts, saved.rounds])}
    for name, kept in saved.values.items():
        found[f"{name}/shape"] = np.array(kept.shape, np.int64)
        found |= {f"{name}/{key}": np.array(getattr(kept, key)) for key in ARRAYS}
    return found


def of_arrays(arrays: Mapping[str, np.ndarray]) -> Saved:
    """The values that `as_arrays` was given."""
    host, hosts, rounds = arrays[COUNTS].tolist()
    values = {}
    for name in sorted({key.rpartition("/")[0] for key in arrays} - {""}):
        values[name] = Kept(tuple(arrays[f"{name}/shape"].tolist()), *(arrays[f"{name}/{key}"] for key in ARRAYS))
    return Saved(None if host < 0 else host, hosts, rounds, values)
