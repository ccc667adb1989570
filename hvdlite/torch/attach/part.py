"""p.grad with `sharded="gradients"`: this rank has the average of its piece only.

Whatever reads or changes all elements raises an error, so that no rank sums, clips or logs values that are not the
average. `hvd.clip_grad_norm_` and a GradScaler know how to use the pieces of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import torch

from hvdlite.job.process_sets import ProcessSet
from hvdlite.ops import Max, Sum
from hvdlite.torch.private_api import plain_attributes, unscale
from hvdlite.torch.reductions import allreduce_
from hvdlite.torch.tensors import row


class PartOfGradient(torch.Tensor):
    """A gradient of which this rank has a piece. It has the parameter's shape, dtype and memory.

    Attributes:
        whole: The same memory as a plain tensor. Elements outside of the piece are of no use.
        piece: The piece, as a row in the order of memory. Empty on ranks without one.
        process_set: The ranks that have the other pieces.
    """

    whole: torch.Tensor
    piece: torch.Tensor
    process_set: ProcessSet

    __torch_function__ = plain_attributes

    @classmethod
    def of(cls, whole: torch.Tensor, place: slice, process_set: ProcessSet) -> PartOfGradient:
        """Return a tensor on the memory of another one. place: the elements of the piece."""
        found = whole.as_subclass(cls)
        found.__dict__.update(whole=whole.detach(), piece=row(whole)[place], process_set=process_set)
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is no class method
        cls, func: object, types: object, args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> None:
        """torch calls this in place of each operation."""
        if func is not unscale:
            refuse(str(func).removeprefix("aten.").partition(".")[0])
        unscale_pieces(*args)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PartOfGradient(shape={list(self.shape)}, piece of {self.piece.numel()} elements)"

    def numpy(self, *, force: bool = False) -> NoReturn:
        refuse("numpy()")

    def tolist(self) -> NoReturn:
        refuse("tolist()")

    def __dlpack__(self, *args: object, **kwargs: object) -> NoReturn:
        refuse("dlpack")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse("pickle")


@dataclass(frozen=True)
class Parts:
    """This rank's pieces of a plan's gradients, as elements in the order of memory; and the ranks with the others."""

    places: Sequence[slice]
    process_set: ProcessSet

    def of(self, index: int, whole: torch.Tensor) -> PartOfGradient:
        """Return a gradient as the part that this rank has of it. It lies in the same memory."""
        return PartOfGradient.of(whole, self.places[index], self.process_set)


def refuse(call: str) -> NoReturn:
    """Raise RuntimeError for an operation on a gradient that is only partly there."""
    raise RuntimeError(
        f'{call} on p.grad: with sharded="gradients" each rank has a piece of the average only. To clip, call '
        "hvd.clip_grad_norm_(model.parameters(), max_norm). Before another backward(), call zero_grad() (with "
        "set_to_none=True); to accumulate, give backward_passes_per_step=, or use optimizer.no_sync(). For whole "
        "gradients, attach with sharded=True [HVD413]"
    )


def unscale_pieces(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply all pieces, and find out whether a number on any rank is not finite. Collective; waits for all ranks."""
    parts = [each for each in gradients if isinstance(each, PartOfGradient)]
    plain = [each for each in gradients if not isinstance(each, PartOfGradient)]
    unscale([*plain, *(each.piece for each in parts)], found_inf, factor)
    allreduce_(found_inf, op=Max, name="GradScaler.unscale_", process_set=parts[0].process_set)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_`, also for the gradients of `sharded="gradients"`. Changes gradients in place.

    Collective if gradients are sharded; then it waits for all ranks, which send each other one number.

    Args:
        parameters: Parameters with gradients, all of the model. Sharded ones are those of one optimizer.
        max_norm: The largest norm of all gradients together. If their norm is larger, all are scaled.
        norm_type: The p of the p-norm; inf for the largest absolute value.
        error_if_nonfinite: Whether a norm that is not finite is an error.
        foreach: As for torch's function.

    Returns:
        The norm before clipping; the same on all ranks.

    Raises:
        RuntimeError: The norm is not finite, and `error_if_nonfinite` is true; on every rank.
    """
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [p.grad for p in chosen if p.grad is not None]
    parts = [each for each in gradients if isinstance(each, PartOfGradient)]
    if not parts:
        return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite, foreach)
    pieces, norm_type = [each.piece for each in parts], float(norm_type)
    plain = [each for each in gradients if not isinstance(each, PartOfGradient)]
    total = total_norm(pieces, norm_type, parts[0].process_set, parts[0].device)
    if plain:
        together = torch.stack([total, torch.nn.utils.get_total_norm(plain, norm_type, foreach=foreach).to(total)])
        total = torch.linalg.vector_norm(together, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the norm of all gradients is {total.item()}: not clipped, since error_if_nonfinite=True")
    holders = cast("list[torch.Tensor]", [SimpleNamespace(grad=each) for each in (*pieces, *plain)])
    torch.nn.utils.clip_grads_with_norm_(holders, max_norm, total, foreach)
    return total


def total_norm(
    pieces: Sequence[torch.Tensor], norm_type: float, process_set: ProcessSet, device: torch.device
) -> torch.Tensor:
    """Return the norm of all ranks' pieces together. Collective; waits for all ranks."""
    mine = torch.nn.utils.get_total_norm([each for each in pieces if each.numel()], norm_type).to(device)
    if math.isinf(norm_type):
        return allreduce_(mine, op=Max, name="clip_grad_norm_", process_set=process_set)
    power = mine.double() ** norm_type
    total = allreduce_(power, op=Sum, name="clip_grad_norm_", process_set=process_set)
    return (total ** (1.0 / norm_type)).to(mine.dtype)
