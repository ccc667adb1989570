"""The parts of a checkpoint that have a sharded optimizer's state: each rank writes its pieces.

The header, in the main file, has no key "state": so a plain `load_state_dict` fails, and does not load half of it. The
header has the borders, shapes and strides of all parameters: a piece is a row of elements in the order of the saved
parameter's memory. On loading, each rank takes the elements of its own pieces from the parts. If it needs all elements
of a parameter, or its own parameter has another order, it puts the whole tensor together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from hvdlite.arrays import Array
from hvdlite.sharding.moves import Move, moves
from hvdlite.torch.attach.parameters import flat
from hvdlite.torch.sharded.pieces import has_elements, is_dense
from hvdlite.torch.sharded.states import Sharded, State, on_some_owners_only, shard_of
from hvdlite.torch.tensors import row

LAYOUTS = "pieces"
"""The key of the header that has each parameter's `Layout`, by the parameter's number in state_dict()."""
Part = Mapping[str, object]
"""A rank's part. "rank": among the ranks that reduce together. "state": by parameter's number and key."""


@dataclass(frozen=True)
class Known:
    """What a rank knows for the header.

    Attributes:
        rank: The rank, among those that reduce together.
        size: Their number.
        header: The header, on the first of them.
        keys: Of each parameter that the rank does not own alone, by number: its name, and the keys of its state.
    """

    rank: int
    size: int
    header: State | None
    keys: dict[int, tuple[str, tuple[str, ...]]]


class Row(NamedTuple):
    """A tensor on its way between ranks. elements: their bytes, in the order of memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    elements: Array

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Row:
        """Return a tensor on the host as a row, in the same memory if the tensor is dense."""
        dense = tensor if is_dense(tensor) else tensor.contiguous()
        return cls(dense.dtype, tuple(dense.shape), dense.stride(), row(dense).view(torch.uint8).numpy())

    def tensor(self) -> torch.Tensor:
        """Return the tensor, in the same memory."""
        return torch.from_numpy(self.elements).view(self.dtype).as_strided(self.shape, self.strides)


def places(optimizer: torch.optim.Optimizer, shard: Sharded) -> list[tuple[torch.Tensor, int | None]]:
    """Return the optimizer's parameters in the order of their numbers, each with its place in the division, if any."""
    return [(p, shard.division.index.get(id(p))) for p in flat(optimizer.param_groups)]


def known(optimizer: torch.optim.Optimizer, shard: Sharded) -> Known:
    """Return what this rank knows for the header.

    Raises:
        ValueError: State is neither whole nor this rank's pieces.
        RuntimeError: Parameters have changed, so that the pieces no longer fit.
    """
    division = shard.division
    division.adopt(optimizer)
    layouts, keys = dict[int, dict[str, list[int]]](), dict[int, tuple[str, tuple[str, ...]]]()
    for number, (p, index) in enumerate(places(optimizer, shard)):
        # A parameter that is frozen since the beginning is not divided: all ranks have its state, if there is any.
        borders = division.cuts.borders[index] if index is not None else (0, *division.size * [p.numel()])
        layouts[number] = {"borders": [*borders], "shape": [*p.shape], "strides": [*p.stride()]}
        if index is not None and 0 < borders[division.rank + 1] - borders[division.rank] < p.numel():
            keys[number] = division.lines[index], tuple(optimizer.state.get(p, ()))
    header = {**shard.unmarked(), LAYOUTS: layouts} if division.rank == 0 else None
    if header:
        del header["state"]
    return Known(division.rank, division.size, header, keys)


def header(name: str, everyone: Sequence[Known]) -> State:
    """Return the header of an optimizer, of what all its ranks know. Pure.

    Raises:
        ValueError: Not all of these ranks have pieces, or owners of a parameter have different kinds of state.
    """
    ranks = [each.rank for each in everyone]
    if len(ranks) != everyone[0].size:
        raise ValueError(
            f"hvd.save: {name} has its state in pieces on some ranks only, {ranks} of {everyone[0].size}: load a "
            "checkpoint (hvd.load) on all ranks"
        )
    for number in sorted({number for each in everyone for number in each.keys}):
        owners = [each for each in everyone if number in each.keys]
        if len({each.keys[number] for each in owners}) > 1:
            raise on_some_owners_only(owners[0].keys[number][0], [each.rank for each in owners])
    return next(each.header for each in everyone if each.header)


def part(optimizer: torch.optim.Optimizer, shard: Sharded) -> Part:
    """Return this rank's part."""
    division, state = shard.division, dict[int, State]()
    for number, (p, index) in enumerate(places(optimizer, shard)):
        mine = division.owns(index, division.rank) if index is not None else division.rank == 0
        if mine and optimizer.state.get(p):
            state[number] = {**optimizer.state[p]}
    return {"rank": division.rank, "state": state}


def packed(part: Part) -> Part:
    """Return a part that was read, for its way between ranks."""
    state = cast("dict[int, State]", part["state"])
    return {**part, "state": {number: {key: with_rows(value) for key, value in its.items()}
                              for number, its in state.items()}}  # fmt: skip


def with_rows(value: object) -> object:
    """Return a plain tensor as a `Row`, and any other value as it is."""
    plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized
    return Row.of(value) if plain else value  # type: ignore[arg-type]


class Wanted:
    """The elements of a parameter that a rank needs, in the order of the saved parameter's memory.

    Attributes:
        moves: Where they come from, by rank; without those that have been taken.
        start, stop: The elements.
        whole: The saved shape and strides, if these are all elements.
        borders: Of the saved pieces.
        alone: Whether one rank had all elements. Then its state is of any shape.
    """

    def __init__(self, layout: Mapping[str, list[int]], borders: Sequence[int], rank: int) -> None:
        """
        Args:
            layout: The saved layout.
            borders: Of the new pieces.
            rank: The new piece that is wanted.
        """
        self.borders = layout["borders"]
        self.moves: dict[int, Move] = {
            move.source: move for move in moves(self.borders, borders) if move.target == rank
        }
        self.start, self.stop = borders[rank], borders[rank + 1]
        all_of_them = (self.start, self.stop) == (0, self.borders[-1])
        self.whole = (layout["shape"], layout["strides"]) if all_of_them else None
        self.alone = self.borders[-1] in (self.borders[i + 1] - self.borders[i] for i in range(len(self.borders) - 1))

    def filled(self, before: object, value: object, move: Move) -> object:
        """Return state with the elements of one saved piece put in.

        Args:
            before: The state so far, if there is any.
            value: The saved state.
            move: Which elements.
        """
        if not isinstance(value, Row):
            return value
        tensor = value.tensor()
        if self.alone or (tensor.numel() <= 1 and not has_elements(before)):  # a count, or all that is wanted
            return tensor.clone()
        first = self.borders[move.source]
        found = before if isinstance(before, torch.Tensor) else torch.empty(self.stop - self.start, dtype=tensor.dtype)
        found[move.start - self.start : move.stop - self.start] = tensor[move.start - first : move.stop - first]
        return found

    def shaped(self, value: object) -> object:
        """Return state when it is complete: in the parameter's shape if it is whole."""
        if self.whole is None or self.alone or not has_elements(value):
            return value
        return value.as_strided(*self.whole)


class Join:
    """Takes from the parts the state that an optimizer needs on this rank: its pieces, or all if it is not sharded."""

    def __init__(self, name: str, optimizer: object, header: State) -> None:
        """
        Raises:
            ValueError: The file is not of these parameters.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"hvd.load: {name!r} is a {type(optimizer).__name__}, but the file has a sharded optimizer of this "
                "name: give a torch optimizer"
            )
        self.name, self.header, self.found = name, header, dict[int, State]()
        self.wanted: dict[int, Wanted] = {}
        shard, layouts = shard_of(optimizer), cast("dict[int, dict[str, list[int]]]", header[LAYOUTS])
        if shard:
            shard.division.in_memory()  # divides parameters again that have been cast since
        indices = [(p, None) for p in flat(optimizer.param_groups)] if shard is None else places(optimizer, shard)
        if len(indices) != len(layouts):
            raise ValueError(f"hvd.load: {name!r} has {len(indices)} parameters, but {len(layouts)} in the file")
        for number, (p, index) in enumerate(indices):
            layout = layouts[number]
            if [*p.shape] != layout["shape"]:
                raise ValueError(
                    f"hvd.load: parameter {number} of {name!r} has the shape {[*p.shape]}, but {layout['shape']} in "
                    "the file"
                )
            borders: Sequence[int] = (0, p.numel())
            rank = 0
            if shard and index is not None and [*p.stride()] == layout["strides"]:
                borders, rank = shard.division.cuts.borders[index], shard.division.rank
            elif shard and index is not None and not shard.division.owns(index, shard.division.rank):
                continue
            self.wanted[number] = Wanted(layout, borders, rank)

    def take(self, part: object) -> None:
        """Take from one part."""
        given = cast("Part", part)
        rank, state = cast("int", given["rank"]), cast("dict[int, State]", given["state"])
        for number, its in state.items():
            wanted = self.wanted.get(number)
            if wanted and (move := wanted.moves.pop(rank, None)):
                found = self.found.setdefault(number, {})
                found |= {key: wanted.filled(found.get(key), value, move) for key, value in its.items()}

    def state(self) -> State:
        """Return a state_dict() of what this rank needs.

        Raises:
            ValueError: Parts are missing.
        """
        if missing := sorted({rank for number in self.found for rank in self.wanted[number].moves}):
            raise ValueError(f"hvd.load: the state of {self.name!r} lacks what ranks {missing} had")
        state = {number: {key: self.wanted[number].shaped(value) for key, value in its.items()}
                 for number, its in sorted(self.found.items())}  # fmt: skip
        return {**{key: value for key, value in self.header.items() if key != LAYOUTS}, "state": state}
