"""`Division`: an optimizer's parameters, divided among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hvdlite.arrays import Array
from hvdlite.gradients.compression import unknown
from hvdlite.gradients.plan import Borders
from hvdlite.gradients.settings import GRADIENTS
from hvdlite.job import runtime
from hvdlite.ops import Average, Sum
from hvdlite.sharding.cuts import Cuts, Parameter, cut, cut_each
from hvdlite.sharding.gather import Gather
from hvdlite.torch.attach.parameters import data_ptr, flat
from hvdlite.torch.attach.settings import TorchSettings
from hvdlite.torch.sharded.kinds import Kind, kind_of
from hvdlite.torch.sharded.pieces import Piece, cut_state, is_dense, memory_of
from hvdlite.torch.tensors import device_name, dtype_name


@dataclass(frozen=True)
class Way:
    """How an optimizer's parameters are divided.

    Attributes:
        kind: Whether parameters can be cut.
        gradients: Whether gradients are sharded as well. Then each parameter is cut.
        name: Returns a parameter's name in messages.
    """

    kind: Kind
    gradients: bool
    name: Callable[[torch.Tensor], str]

    @property
    def asked(self) -> bool | str:
        """The user's argument `sharded`."""
        return GRADIENTS if self.gradients else True

    def cut(self, parameters: Sequence[torch.Tensor], size: int) -> Cuts:
        """Divide parameters among ranks."""
        cuttable = self.kind is Kind.ELEMENTS
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
        lines: The same as text, for ranks to compare.
        cuts: All ranks' pieces.
        pieces: This rank's pieces of the parameters that change for a step: those of which it does not own all, or all.
        gather: The way in which all ranks get all pieces.
        addresses: Where the parameters lay at the last gather.
        memory: Their bytes.
        in_pieces: Whether the optimizer's state has been cut. The same on all ranks, since steps and hvd.load cut it.
    """

    def __init__(self, rank: int, size: int, way: Way) -> None:
        self.rank, self.size, self.way = rank, size, way
        self.parameters: list[torch.Tensor] = []
        self.index: dict[int, int] = {}
        self.lines: list[str] = []
        self.cuts = Cuts()
        self.pieces: list[Piece] = []
        self.gather = Gather(self.cuts, (), size)
        self.addresses: list[int] = []
        self.memory: list[Array] = []
        self.in_pieces = False

    def divide(self, parameters: Sequence[torch.Tensor]) -> None:
        """Divide those of the parameters that are new. Pieces of earlier ones stay where they are.

        Raises:
            ValueError: A parameter cannot be divided, nor sent to other ranks.
        """
        new, name = [p for p in parameters if id(p) not in self.index], self.way.name
        if not new:
            return
        for p in new:
            device_name(p)
            dtype_name(p)
            if not is_dense(p):
                raise ValueError(
                    f"sharded={self.way.asked!r} cannot serve {name(p)}, of shape {list(p.shape)} and strides "
                    f"{list(p.stride())}: it is a part of another tensor. Give it memory of its own"
                )
        first = len(self.parameters)
        self.cuts += self.way.cut(new, self.size)
        self.parameters += new
        self.index = {id(p): index for index, p in enumerate(self.parameters)}
        self.lines += [f"{name(p)}: {p.dtype}{list(p.shape)}" for p in new]
        mine = (Piece(p, *self.cuts.piece(first + i, self.rank)) for i, p in enumerate(new))
        self.pieces += [piece for piece in mine if self.way.gradients or not piece.is_whole]
        self.gather = Gather(self.cuts, [p.element_size() for p in self.parameters], self.size)

    def borders(self, parameters: Sequence[torch.Tensor]) -> Borders:
        """Return the borders between the ranks' pieces of these parameters. Divides those that are new."""
        self.divide(parameters)
        return tuple(self.cuts.borders[self.index[id(p)]] for p in parameters)

    def owns(self, index: int, rank: int) -> bool:
        """Whether a rank has a piece of a parameter."""
        start, stop = self.cuts.piece(index, rank)
        return start < stop

    def in_memory(self) -> list[Array]:
        """Return the bytes of all parameters, wherever they lie now."""
        addresses = list(map(data_ptr, self.parameters))
        if addresses != self.addresses:
            self.addresses, self.memory = addresses, [memory_of(p) for p in self.parameters]
        return self.memory

    def note_pieces(self) -> None:
        """The optimizer's state is this rank's pieces."""
        self.in_pieces = True

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep this rank's pieces of whole state (which a class made early, or which was loaded); drop the rest.

        Raises:
            ValueError: State is neither whole nor this rank's pieces.
        """
        self.note_pieces()
        for piece in self.pieces:
            if piece.start == piece.stop:
                optimizer.state.pop(piece.p, None)
            elif piece.p in optimizer.state and not piece.is_whole:
                cut_state(piece, optimizer.state[piece.p], piece.p.data)


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
    kind, group = kind_of(optimizer), runtime.current().groups.find(settings.process_set)
    if group is None or group.size == 1:
        return None
    found = Division(group.rank, group.size, Way(kind, gradients, settings.name))
    found.divide([p for p in flat(optimizer.param_groups) if p.requires_grad])
    return found
