"""The pieces of parameters and of their state, as tensors.

While a parameter is narrow, `p.data` and `p.grad` are the piece: a row of elements, in the order in which they lie in
memory. If the piece is all of the parameter, its shape stays. The parameter stays the same object, so the optimizer's
groups and state find it.
"""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

import torch

from hvdlite.arrays import Array
from hvdlite.torch.attach.part import PartOfGradient
from hvdlite.torch.distributed.buffers import flat
from hvdlite.torch.tensors import laid_out, row


class Piece(NamedTuple):
    """The elements, from and to, of a parameter that this rank owns."""

    p: torch.Tensor
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        """Whether this rank owns all elements."""
        return (self.start, self.stop) == (0, self.p.numel())


class Kept(NamedTuple):
    """A narrow parameter's piece, and the whole parameter and gradient."""

    piece: Piece
    whole: torch.Tensor
    gradient: torch.Tensor


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill its memory without gaps, in any order of dimensions."""
    filled = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != filled:
            return False
        filled *= length
    return True


def memory_of(p: torch.Tensor) -> Array:
    """Return the bytes of a dense parameter."""
    found: Array = flat(row(p.detach())).view("uint8")
    return found


def narrow(piece: Piece) -> Kept | None:
    """Make a parameter its piece, unless it has no gradient. If the piece is empty, the parameter loses its gradient.

    Returns:
        What `widen` needs.
    """
    p, start, stop = piece
    if p.grad is None:
        return None
    kept = Kept(piece, p.data, p.grad)
    gradient = p.grad.whole if isinstance(p.grad, PartOfGradient) else p.grad
    if start == stop:
        p.grad = None
    elif piece.is_whole:
        p.grad = gradient
    else:
        p.data = row(kept.whole)[start:stop]  # first: torch compares a gradient's shape with it
        p.grad = row(laid_out(gradient, kept.whole))[start:stop]
    return kept


def widen(kept: Kept) -> None:
    """Make a parameter whole again. If the optimizer has replaced `p.data`, its values are copied back."""
    (p, start, stop), whole, gradient = kept
    if start < stop and p.data_ptr() != whole.data_ptr() + start * whole.element_size():
        row(whole)[start:stop].copy_(p.data)
    p.data = whole
    p.grad = gradient


def has_elements(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value of a parameter's state is a tensor of several elements, and not a count of steps, say."""
    return isinstance(value, torch.Tensor) and value.numel() > 1


def cut_state(piece: Piece, state: dict[str, object], whole: torch.Tensor) -> None:
    """Replace tensors of the parameter's shape by their pieces, which are copies.

    Args:
        piece: The parameter's piece; not empty.
        state: The parameter's state.
        whole: The whole parameter.

    Raises:
        ValueError: A tensor has neither the parameter's shape nor the piece's.
    """
    _, start, stop = piece
    for key, value in state.items():
        if not has_elements(value) or value.shape == (stop - start,):
            continue
        if value.shape != whole.shape:
            raise ValueError(
                f"the optimizer's state {key!r} has the shape {list(value.shape)}, but its parameter has "
                f"{list(whole.shape)}, and this rank owns {stop - start} elements of it: load it with hvd.load"
            )
        state[key] = row(laid_out(value, whole))[start:stop].clone()
