"""`Division`: an optimizer's parameters, divided among the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from hvdlite.arrays import Array
from hvdlite.gradients.compression import unknown
from hvdlite.gradients.plan import Borders
from hvdlite.gradients.settings import GRADIENTS
from hvdlite.job import runtime
from hvdlite.ops import Average, Sum
from hvdlite.sharding.cuts import Cuts, Parameter, cut, cut_each
from hvdlite.sharding.gather import Gather
from hvdlite.sharding.kinds import Kind
from hvdlite.torch.attach.parameters import data_ptr, flat
from hvdlite.torch.attach.settings import TorchSettings
from hvdlite.torch.sharded.kinds import kind_of
from hvdlite.torch.sharded.pieces import Piece, cut_state, is_dense, memory_of
from hvdlite.torch.tensors import device_name, dtype_name


@dataclass(frozen=True)
class Way:
    """How an optimizer's parameters are divided.

    Attributes:
        kind: Finds out whether parameters can be cut. Groups that come later may have another kind.
        gradients: Whether gradients are sharded as well. Then each parameter is cut.
        name: Returns a parameter's name in messages. It takes the parameter, and the name of one without a name.
    """

    kind: Callable[[], Kind]
    gradients: bool
    name: Callable[[torch.Tensor, str], str]

    @property
    def asked(self) -> bool | str:
        """The user's argument `sharded`."""
        return GRADIENTS if self.gradients else True

    def cut(self, parameters: Sequence[torch.Tensor], size: int) -> Cuts:
        """Divide parameters among ranks."""
        cuttable = self.kind() is Kind.ELEMENTS
        found = [Parameter(p.numel(), p.element_size(), cuttable) for p in parameters]
        return cut_each(found, size) if self.gradients else cut(found, size)


class Division:
    """The parameters that have been divided, in that order, and the pieces of one rank.

    Attributes:
        rank: This rank, among the ranks that reduce together.
        size: Their number.
        way: How parameters are divided.
        parameters: The parameters.
        index: Their places among these, by id().
        lines: What they were when they were divided, as text, for ranks to compare.
        cuts: All ranks' pieces.
        pieces: This rank's pieces of the parameters that change for a step: those of which it does not own all, or all.
        gather: The way in which all ranks get all pieces.
        addresses: Where the parameters lay when this was asked last.
        memory: Their bytes.
        in_pieces: Whether the optimizer's state has been cut. The same on all ranks, since steps and hvd.load cut it.
    """

    def __init__(self, rank: int, size: int, way: Way) -> None:
        self.rank, self.size, self.way = rank, size, way
        self.addresses: list[int] = []
        self.memory: list[Array] = []
        self.in_pieces = False
        self.clear()

    def clear(self) -> None:
        """Forget all parameters."""
        self.parameters: list[torch.Tensor] = []
        self.index: dict[int, int] = {}
        self.lines: list[str] = []
        self.cuts = Cuts()
        self.pieces: list[Piece] = []
        self.gather = Gather(self.cuts, (), self.size)

    def name(self, p: torch.Tensor, index: int) -> str:
        """Return a parameter's name in messages. index: its place among all."""
        return self.way.name(p, f"parameter.{index}")

    def line(self, p: torch.Tensor, index: int) -> str:
        """Return a parameter as text: all that its pieces depend on. index: its place among all."""
        return f"{self.name(p, index)}: {p.dtype}{list(p.shape)}, strides {list(p.stride())}, on {p.device.type}"

    def divide(self, parameters: Sequence[torch.Tensor]) -> None:
        """Divide those of the parameters that are new. Pieces of earlier ones stay where they are.

        Raises:
            ValueError: A parameter cannot be divided, nor sent to other ranks.
        """
        new = [p for p in parameters if id(p) not in self.index]
        if not new:
            return
        first = len(self.parameters)
        everyone = [*self.parameters, *new]
        lines = [self.line(p, first + i) for i, p in enumerate(new)]
        for p, line in zip(new, lines, strict=True):
            device_name(p)
            dtype_name(p)
            if not is_dense(p):
                raise ValueError(
                    f"sharded={self.way.asked!r} cannot serve {line}: it is a part of another tensor. Give it memory "
                    "of its own"
                )
        self.refuse_common_memory(everyone)
        self.refuse_two_places(everyone)
        self.cuts += self.way.cut(new, self.size)
        self.parameters = everyone
        self.index = {id(p): index for index, p in enumerate(everyone)}
        self.lines += lines
        mine = (Piece(p, *self.cuts.piece(first + i, self.rank)) for i, p in enumerate(new))
        self.pieces += [piece for piece in mine if self.way.gradients or not piece.is_whole]
        self.gather = Gather(self.cuts, [p.element_size() for p in self.parameters], self.size)

    def refuse_common_memory(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raise ValueError if parameters lie in the same memory: ranks would overwrite each other's steps."""
        places = sorted((data_ptr(p), data_ptr(p) + p.nbytes, i) for i, p in enumerate(parameters) if p.numel())
        for (_, end, one), (start, _, other) in pairwise(places):
            if start < end:
                names = " and ".join(self.name(parameters[index], index) for index in (one, other))
                raise ValueError(
                    f"sharded={self.way.asked!r} cannot serve {names}, which lie in the same memory. Make them one "
                    "parameter (b.weight = a.weight), or give each memory of its own"
                )

    def refuse_two_places(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raise ValueError if some parameters lie on the host and some on a GPU: they travel by one operation."""
        found = {device_name(p): self.name(p, i) for i, p in enumerate(parameters)}
        if len(found) > 1:
            where = ", ".join(
                f"{name} on the {'host' if device == 'host' else 'GPU'}" for device, name in found.items()
            )
            raise ValueError(f"sharded={self.way.asked!r} needs all parameters on one device, but there is {where}")

    def borders(self, parameters: Sequence[torch.Tensor]) -> Borders:
        """Return the borders between the ranks' pieces of these parameters. Divides those that are new or changed."""
        self.in_memory()
        self.divide(parameters)
        return tuple(self.cuts.borders[self.index[id(p)]] for p in parameters)

    def owns(self, index: int, rank: int) -> bool:
        """Whether a rank has a piece of a parameter."""
        start, stop = self.cuts.piece(index, rank)
        return start < stop

    def in_memory(self) -> list[Array]:
        """Return the bytes of all parameters, wherever they lie now.

        If parameters have been cast, moved or given another shape, all are divided again.

        Raises:
            RuntimeError: The state is in pieces that no longer fit.
        """
        addresses = list(map(data_ptr, self.parameters))
        if addresses != self.addresses:
            now = [self.line(p, index) for index, p in enumerate(self.parameters)]
            if now != self.lines:
                self.refuse_if_in_pieces(now)
                parameters = self.parameters
                self.clear()
                self.divide(parameters)
            self.addresses, self.memory = addresses, [memory_of(p) for p in self.parameters]
        return self.memory

    def refuse_if_in_pieces(self, now: Sequence[str]) -> None:
        """Raise RuntimeError if the optimizer's state is in pieces. now: the parameters as they are now, as text."""
        if self.in_pieces:
            old, new = next(pair for pair in zip(self.lines, now, strict=True) if pair[0] != pair[1])
            raise RuntimeError(
                f"sharded={self.way.asked!r}: the optimizer's state is in pieces of {old}; but now it is {new}. Cast, "
                "move or convert a model before the first step and before hvd.load. Or call hvd.save before, and then "
                "hvd.load with a new optimizer"
            )

    def note_pieces(self) -> None:
        """The optimizer's state is this rank's pieces."""
        self.in_pieces = True

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep this rank's pieces of whole state (which a class made early, or which was loaded); drop the rest.

        Raises:
            ValueError: State is neither whole nor this rank's pieces.
            RuntimeError: Parameters have changed, so that the pieces no longer fit.
        """
        self.in_memory()
        self.note_pieces()
        for piece in self.pieces:
            if piece.start == piece.stop:
                optimizer.state.pop(piece.p, None)
            elif piece.p in optimizer.state and not piece.is_whole:
                cut_state(piece, optimizer.state[piece.p], piece.p.data)


def kind_of_referent(reference: weakref.ref[torch.optim.Optimizer]) -> Kind:
    """Return how the parameters of an optimizer that lives can be divided."""
    optimizer = reference()
    assert optimizer is not None
    return kind_of(optimizer)


def divided(optimizer: torch.optim.Optimizer, settings: TorchSettings) -> Division | None:
    """Divide an optimizer's trainable parameters. Returns None if this rank steps alone.

    Raises:
        ValueError: They cannot be divided.
        NotImplementedError: Their gradients cannot be reduced in parts.
    """
    gradients = settings.sharded == GRADIENTS
    if gradients and settings.terms.op not in (Average, Sum):
        raise NotImplementedError(f"op={settings.terms.op.name} with sharded={GRADIENTS!r}: use sharded=True")
    if gradients and unknown(settings.compression):
        raise NotImplementedError(f"compression={settings.compression!r} with sharded={GRADIENTS!r}: use sharded=True")
    kind_of(optimizer)
    group = runtime.current().groups.find(settings.process_set)
    if group is None or group.size == 1:
        return None
    kind = partial(kind_of_referent, weakref.ref(optimizer))
    found = Division(group.rank, group.size, Way(kind, gradients, settings.name))
    found.divide([p for p in flat(optimizer.param_groups) if p.requires_grad])
    return found
