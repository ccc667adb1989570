"""What must be the same on all ranks that train a torch model: weights, the optimizer's state and its settings."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvdlite.gradients.replica_check import Alike, checksum_of
from hvdlite.gradients.replica_check import checksum as checksum_of_array
from hvdlite.torch.attach.parameters import flat

HOW = {"foreach", "fused", "capturable", "differentiable"}  # a step is made, not what it does
STATE = "hvd.broadcast_optimizer_state(optimizer, root_rank={root})"
CALLS = {
    "weights": "hvd.broadcast_parameters(model.state_dict(), root_rank={root})", "state": STATE, "settings": STATE,
}  # fmt: skip


def alike(optimizer: torch.optim.Optimizer, names: Mapping[int, str], mode: str, state: bool = True) -> Alike:
    """Comparisons of what one optimizer trains. names: its parameters', by id(). mode: see `Alike`. state: whether that
    is to be the same on all ranks when training begins, too; later, what differs there shows in the weights."""
    reference = weakref.ref(optimizer)

    def values(begins: bool) -> dict[tuple[str, str], Any] | None:
        optimizer = reference()
        if optimizer is None or getattr(vars(optimizer).get("_hvdlite"), "apart", False):
            return None
        return {**weights_and_state(optimizer, names, state and begins), **settings(optimizer)}

    return Alike(values, CALLS, f"hvd.DistributedOptimizer({type(optimizer).__name__})", mode)


def weights_and_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], state: bool
) -> dict[tuple[str, str], Any]:
    values: dict[tuple[str, str], Any] = {}
    for index, p in enumerate(flat(optimizer.param_groups)):
        name = names.get(id(p), f"parameter.{index}")
        values["weights", name] = checksum(p)
        its = optimizer.state.get(p) if state else None
        for key, value in its.items() if isinstance(its, Mapping) else ():
            values["state", f"{key} of {name}"] = checksum(value)
    return values


def settings(optimizer: torch.optim.Optimizer) -> dict[tuple[str, str], Any]:
    """The learning rate and others: those that the optimizer's class has, not what users keep beside them."""
    groups, keys = optimizer.param_groups, set(getattr(optimizer, "defaults", {})) - HOW
    return {("settings", f"{key} of param_groups[{number}]"): number_in(group[key])
            for number, group in enumerate(groups) for key in sorted(keys & group.keys())}  # fmt: skip


def checksum(value: Any) -> int | None:
    """Of a tensor's bits, in their order; None for what has none."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized or value.is_meta:
        return None
    try:
        bits = bits_of(value.detach().resolve_conj().resolve_neg())
        if bits.device.type == "cpu":
            return checksum_of_array(bits.numpy())  # torch's sums of integers are slow there
        return checksum_of(bits, torch.int64, lambda part: part.cpu().numpy())
    except (TypeError, ValueError, RuntimeError):  # of a kind of its own (nested, masked, quantized by a library)
        return None


def bits_of(value: torch.Tensor) -> torch.Tensor:
    """As bytes in one row, in memory that can be seen as words of 64 bits."""
    real = torch.view_as_real(value) if value.is_complex() else value
    bits = real.reshape(-1).contiguous().view(torch.uint8)
    return bits.clone() if bits.storage_offset() % 8 else bits


def number_in(value: Any) -> Any:
    """A setting that can be compared; None for others."""
    if isinstance(value, torch.Tensor):
        return number_in(value.item()) if value.numel() == 1 and not value.is_meta else None
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(number_in(each) for each in value)
    return ("nan" if value != value else value) if isinstance(value, (int, float)) else None
