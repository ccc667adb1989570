"""Which rank has which parts of a `Chain`, and what these take and return. All ranks compare it at the beginning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import keras

from hvdlite.errors import HvdliteError
from hvdlite.gradients.tensors import Tensor
from hvdlite.gradients.variables import common_name
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet
from hvdlite.keras.private_api import mask_of

Place: TypeAlias = "int | ProcessSet"
"""Where a part is: on a global rank, or on each rank of a process set."""
Shape: TypeAlias = "tuple[int | None, ...]"
Ranks: TypeAlias = "tuple[tuple[int, ...], ...]"
"""The global ranks of each part, in the chain's order. The i-th ranks of all parts are a column."""


def ranks_of(places: Sequence[Place]) -> Ranks:
    """Return the ranks of these places.

    Raises:
        ValueError: A process set is not registered, sets overlap or differ in size, or a rank has no part.
    """
    if unknown := [place for place in places if isinstance(place, ProcessSet) and place.process_set_id is None]:
        raise ValueError(f"{unknown[0]} is not registered: give it to hvd.init(process_sets=[...])")
    ranks = tuple(tuple(place.ranks or ()) if isinstance(place, ProcessSet) else (int(place),) for place in places)
    found = sorted(rank for each in set(ranks) for rank in each)
    if len({len(each) for each in ranks}) != 1 or found != list(range(runtime.size())):
        raise ValueError(
            f"the parts' ranks are {', '.join(map(str, map(list, ranks)))}: every part needs equally many ranks, each "
            f"of the {runtime.size()} ranks needs a part, and the ranks of two parts must be the same or all different"
        )
    return ranks


def made(make: Callable[[], keras.Model]) -> keras.Model:
    """Return the part that a function makes.

    Raises:
        TypeError: The function is none, or makes no model.
        ValueError: The model does not begin with keras.Input, or has several outputs.
    """
    if isinstance(make, keras.Layer):
        raise TypeError(f"{make.name} is there on all ranks: give a function that makes it")
    part = make()
    if not isinstance(part, keras.Model):
        raise TypeError(f"a part must be a keras.Model, not a {type(part).__name__}")
    if not part.built or len(getattr(part, "outputs", None) or ()) != 1:
        raise ValueError(
            f"the part {part.name} must begin with keras.Input(shape) and have one output, because the next part must "
            "know its shape: keras.Sequential([keras.Input(shape), ...]), or keras.Model(inputs, output)"
        )
    return part


class Spec(NamedTuple):
    """A tensor's shape and dtype. None in the shape: a dimension that is not fixed, such as the number of rows."""

    shape: Shape
    dtype: str

    def fits(self, other: Spec) -> bool:
        """Return whether the dtypes agree, and the shapes apart from the number of rows."""
        return self.dtype == other.dtype and shapes_fit(self.shape, other.shape)

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


def shapes_fit(one: Shape, other: Shape) -> bool:
    """Return whether two shapes agree where both are known, apart from the number of rows."""
    pairs = zip(one[1:], other[1:], strict=False)
    return len(one) == len(other) and all(a == b or None in (a, b) for a, b in pairs)


def spec_of(tensor: Tensor) -> Spec:
    """Return the shape and dtype of a tensor, also a symbolic one."""
    return Spec(tuple(tensor.shape), keras.backend.standardize_dtype(tensor.dtype))


@dataclass(frozen=True)
class Signature:
    """What a part takes and returns: the shapes of its inputs, its output; names and shapes of its weights."""

    inputs: tuple[Shape, ...]
    output: Spec
    masked: bool
    weights: tuple[str, ...]


def signature(part: keras.Model) -> Signature:
    """Return what a part takes and returns."""
    (output,) = part.outputs
    inputs = tuple(tuple(each.shape) for each in part.inputs)
    weights = tuple(f"{common_name(each)} {tuple(each.shape)}" for each in part.weights)
    return Signature(inputs, spec_of(output), mask_of(output) is not None, weights)


@dataclass(frozen=True)
class Report:
    """What a rank tells the others when it makes a chain: all parts' ranks and its own signatures; or its error."""

    ranks: Ranks = ()
    signatures: dict[int, Signature] = field(default_factory=dict)
    error: str = ""


def signatures_of(reports: Sequence[Report]) -> tuple[Signature, ...]:
    """Return the signatures of all parts. reports: by rank.

    Raises:
        HvdliteError: A rank could not make its parts, or the ranks' parts do not fit together. The same on every rank.
    """
    places = reports[0].ranks
    for rank, report in enumerate(reports):
        if report.error:
            raise HvdliteError(f"hvd.Chain: rank {rank} could not make its parts: {report.error}")
        if report.ranks != places:
            raise HvdliteError(
                f"hvd.Chain: rank {rank} has parts on the ranks {report.ranks}, rank 0 on {places}. Give every rank "
                "the same list of parts"
            )
    for number, (first, *others) in enumerate(places):
        for rank in others:
            one, other = (asdict(reports[each].signatures[number]) for each in (first, rank))
            if differ := [what for what in one if one[what] != other[what]]:
                raise HvdliteError(
                    f"hvd.Chain: rank {first} and rank {rank} made different parts {number}: their {differ[0]} are "
                    f"{one[differ[0]]} and {other[differ[0]]}. Give the function that makes a part the same arguments "
                    "on every rank"
                )
    chain = tuple(reports[ranks[0]].signatures[number] for number, ranks in enumerate(places))
    names = [f"part {number} (rank {ranks[0]})" for number, ranks in enumerate(places)]
    for (giver, taker), (one_name, other_name) in zip(pairwise(chain), pairwise(names), strict=True):
        if problem := misfit(giver, taker, other_name):
            raise HvdliteError(f"hvd.Chain: {one_name} returns {problem}")
    return chain


def misfit(giver: Signature, taker: Signature, name: str) -> str | None:
    """Return what the giver returns and the taker, the next part, cannot take, with the cure; None if all fits."""
    shape, dtype = giver.output
    if len(taker.inputs) != 1 or not shapes_fit(shape, taker.inputs[0]):
        taken = ", ".join(map(str, taker.inputs))
        return f"a tensor of shape {shape}, but {name} takes {taken}. Give {name} keras.Input({shape[1:]})"
    if "float" not in dtype:
        return f"{dtype}, which has no gradient: cut the model where floating point numbers leave a part"
    if giver.masked:
        return f"a mask, which does not travel to {name}: keep the layers that make and use a mask in one part"
    return None
