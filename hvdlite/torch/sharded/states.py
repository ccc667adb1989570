"""The state of a sharded optimizer in state_dict(), and whole for a checkpoint.

state_dict() has this rank's pieces, and a mark that says so. A state without a mark is whole: any rank may load it, and
keeps its pieces. So a checkpoint serves any number of ranks, and an optimizer that is not sharded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from hvdlite.job.process_sets import ProcessSet
from hvdlite.ops.objects import allgather_object
from hvdlite.torch.attach.parameters import flat
from hvdlite.torch.cuda import on_cpu
from hvdlite.torch.scattering import gather
from hvdlite.torch.sharded.division import Division
from hvdlite.torch.sharded.pieces import has_elements
from hvdlite.torch.tensors import row

MARK = "hvdlite"
"""The key of the mark in state_dict()."""
State = dict[str, object]


@dataclass(frozen=True)
class Form:
    """A tensor of state that lies on its owners, or on one. shape: that of this rank's part."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Sharded(Protocol):
    """A `Shard`, as other modules see it."""

    @property
    def division(self) -> Division: ...
    @property
    def name(self) -> str: ...
    def whole(self, root_rank: int) -> State | None: ...
    def unmarked(self) -> State: ...


def shard_of(optimizer: object) -> Sharded | None:
    """Return what shards an optimizer; None for any other object."""
    return vars(optimizer).get("_hvdlite_shard") if isinstance(optimizer, torch.optim.Optimizer) else None


def refuse_pieces(call: str, value: object) -> None:
    """Raise ValueError if a value is a sharded optimizer whose state is in pieces."""
    shard = shard_of(value)
    if shard and shard.division.in_pieces:
        raise ValueError(
            f"{call}: each rank has another part of the state of {shard.name}. Use hvd.save and hvd.load [HVD411]"
        )


def mark_of(division: Division) -> State:
    """Return the mark of this rank's pieces."""
    return {"rank": division.rank, "size": division.size, "borders": [list(each) for each in division.cuts.borders]}


def keep_dtypes(optimizer: torch.optim.Optimizer, loaded: Mapping[str, object]) -> None:
    """Give an optimizer's state the dtypes of the state that it has loaded: torch casts to the parameters' dtypes."""
    given = loaded.get("state")
    for index, p in enumerate(flat(optimizer.param_groups)):
        its = given.get(index) if isinstance(given, dict) else None
        for name, value in its.items() if isinstance(its, dict) else ():
            found = optimizer.state[p].get(name)
            if isinstance(value, torch.Tensor) and isinstance(found, torch.Tensor) and found.dtype != value.dtype:
                optimizer.state[p][name] = value.to(found.device)


class Loading:
    """The hooks around load_state_dict() of a sharded optimizer.

    Attributes:
        name: The optimizer in messages.
        division: Its division.
        pieces: This rank's pieces that are being loaded; None for a state without a mark.
    """

    def __init__(self, name: str, division: Division) -> None:
        self.name, self.division = name, division
        self.pieces: State | None = None

    def before(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        """Raise ValueError if the state is another rank's pieces."""
        self.pieces = state if MARK in state else None
        check_mark(self.name, self.division, state)

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Give this rank's pieces their dtypes back."""
        if self.pieces is not None:
            keep_dtypes(optimizer, self.pieces)
            self.pieces = None


def check_mark(name: str, division: Division, state: Mapping[str, object]) -> None:
    """A state is to be loaded: if it is marked, it is this rank's pieces.

    Raises:
        ValueError: It is another rank's pieces, or has none.
    """
    if "state" not in state:
        raise ValueError(
            f"load_state_dict() of {name}: the state lies in other files beside this one. Use hvd.load [HVD411]"
        )
    found = state.get(MARK)
    if found is None:
        return
    if found != mark_of(division):
        its = cast("Mapping[str, object]", found)
        raise ValueError(
            f"load_state_dict() of {name}: the state is that of rank {its['rank']} of {its['size']}, but this is rank "
            f"{division.rank} of {division.size}, or its parameters were divided in another way. Save with hvd.save, "
            "and load with hvd.load [HVD411]"
        )
    division.note_pieces()


def forms(optimizer: torch.optim.Optimizer, division: Division) -> list[dict[str, object]]:
    """Return this rank's state by parameter and key: a `Form` in place of each tensor of several elements."""
    return [
        {
            key: Form(value.dtype, tuple(value.shape)) if has_elements(value) else on_cpu(value)
            for key, value in optimizer.state.get(p, {}).items()
        }
        for p in division.parameters
    ]


@torch.no_grad()
def whole_state(
    optimizer: torch.optim.Optimizer, division: Division, process_set: ProcessSet, root_rank: int
) -> list[State]:
    """Return the whole state of each parameter on one rank, and nothing useful on others. Collective; waits for all.

    The tensors travel one by one, so a rank needs memory for one copy of the state.

    Raises:
        ValueError: Owners of a parameter have different kinds of state; on all ranks.

    Args:
        optimizer: The optimizer.
        division: Its division, which has adopted the state.
        process_set: The ranks that reduce together.
        root_rank: The global rank that gets the state.
    """
    everyone = allgather_object(forms(optimizer, division), process_set=process_set, name="hvd.save: forms of state")
    found = []
    for index, p in enumerate(division.parameters):
        owners = [rank for rank in range(division.size) if division.owns(index, rank)]
        kinds = {tuple(everyone[rank][index]) for rank in owners}
        if len(kinds) > 1:
            raise on_some_owners_only(division.lines[index], owners)
        its: State = dict(everyone[owners[0]][index]) if owners else {}
        for key, form in its.items():
            if isinstance(form, Form):
                mine = optimizer.state[p][key] if p in optimizer.state else torch.empty(0, dtype=form.dtype)
                pieces = gather(mine.detach().cpu().reshape(-1), root_rank, f"hvd.save: {key} of {index}", process_set)
                its[key] = None if pieces is None else put_together(pieces, form, p, len(owners))
        found.append(its)
    return found


def on_some_owners_only(line: str, owners: Sequence[int]) -> ValueError:
    """Return the error for a parameter that has other kinds of state on other owners. line: the parameter as text."""
    return ValueError(
        f"hvd.save: the state of {line} is on some of its owners only, ranks {[*owners]}: call "
        "hvd.broadcast_optimizer_state before the first step, or hvd.load"
    )


def put_together(pieces: torch.Tensor, form: Form, p: torch.Tensor, owners: int) -> torch.Tensor:
    """Return a whole tensor of state.

    Args:
        pieces: The pieces, one after another.
        form: What the first owner has.
        p: The parameter.
        owners: How many ranks have pieces.
    """
    if owners == 1:
        return pieces.reshape(form.shape)
    whole = torch.empty_like(p, dtype=form.dtype, device="cpu")
    row(whole).copy_(pieces)
    return whole


def packed(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], states: Sequence[State]) -> State:
    """Return states by the numbers that state_dict() gives to parameters."""
    numbers = {id(p): number for number, p in enumerate(flat(optimizer.param_groups))}
    return {numbers[id(p)]: its for p, its in zip(parameters, states, strict=True) if its and id(p) in numbers}  # type: ignore[misc]
