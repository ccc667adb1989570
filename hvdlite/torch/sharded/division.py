"""`Division`: an optimizer's parameters, divided among the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite.arrays import Array
from hvdlite.sharding.cuts import Cuts, Parameter, cut
from hvdlite.sharding.gather import Gather
from hvdlite.torch.attach.parameters import data_ptr
from hvdlite.torch.sharded.kinds import Kind
from hvdlite.torch.sharded.pieces import Piece, cut_state, is_dense, memory_of
from hvdlite.torch.tensors import device_name, dtype_name


class Division:
    """The parameters that have been divided, in that order, and the pieces of one rank.

    Attributes:
        rank: This rank, among the ranks that reduce together.
        size: Their number.
        kind: How parameters are divided.
        parameters: The parameters.
        known: The same, by id().
        lines: The same as text, for ranks to compare.
        cuts: All ranks' pieces.
        partial: This rank's pieces of the parameters that it does not own alone.
        gather: The way in which all ranks get all pieces.
        addresses: Where the parameters lay at the last gather.
        memory: Their bytes.
        in_pieces: Whether the optimizer's state has been cut. The same on all ranks, since steps and hvd.load cut it.
    """

    def __init__(self, rank: int, size: int, kind: Kind) -> None:
        self.rank, self.size, self.kind = rank, size, kind
        self.parameters: list[torch.Tensor] = []
        self.known: set[int] = set()
        self.lines: list[str] = []
        self.cuts = Cuts()
        self.partial: list[Piece] = []
        self.gather = Gather(self.cuts, (), size)
        self.addresses: list[int] = []
        self.memory: list[Array] = []
        self.in_pieces = False

    def add(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Divide more parameters. Pieces of earlier ones stay where they are.

        Args:
            parameters: The parameters.
            names: Their names in messages.

        Raises:
            ValueError: A parameter cannot be divided, nor sent to other ranks.
        """
        for p, name in zip(parameters, names, strict=True):
            device_name(p)
            dtype_name(p)
            if not is_dense(p):
                raise ValueError(
                    f"sharded=True cannot serve {name}, of shape {list(p.shape)} and strides {list(p.stride())}: it "
                    "is a part of another tensor. Give it memory of its own"
                )
        cuttable, first = self.kind is Kind.ELEMENTS, len(self.parameters)
        self.cuts += cut([Parameter(p.numel(), p.element_size(), cuttable) for p in parameters], self.size)
        self.parameters += parameters
        self.known.update(map(id, parameters))
        self.lines += [f"{name}: {p.dtype}{list(p.shape)}" for p, name in zip(parameters, names, strict=True)]
        mine = ((p, *self.cuts.piece(first + i, self.rank)) for i, p in enumerate(parameters))
        self.partial += [Piece(p, start, stop) for p, start, stop in mine if (start, stop) != (0, p.numel())]
        self.gather = Gather(self.cuts, [p.element_size() for p in self.parameters], self.size)

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
        for piece in self.partial:
            if piece.start == piece.stop:
                optimizer.state.pop(piece.p, None)
            elif piece.p in optimizer.state:
                cut_state(piece, optimizer.state[piece.p], piece.p.data)
