"""Values that must be the same on all ranks that train a torch model: weights, the optimizer's state, its options."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch

from hvdlite.gradients.replica_check import Alike, checksum_of
from hvdlite.gradients.replica_check import checksum as checksum_of_array
from hvdlite.torch.attach.parameters import flat
from hvdlite.torch.attach.settings import TorchSettings

HOW = {"foreach", "fused", "capturable", "differentiable"}
"""Settings that change how a step is computed, not its result."""
STATE = "hvd.broadcast_optimizer_state(optimizer, root_rank={root})"
CALLS = {
    "weights": "hvd.broadcast_parameters(model.state_dict(), root_rank={root})", "state": STATE, "settings": STATE,
}  # fmt: skip


def alike(optimizer: torch.optim.Optimizer, settings: TorchSettings, state: bool = True) -> Alike:
    """Return the comparison between ranks of one optimizer's weights.

    Args:
        optimizer: The optimizer, which the comparison does not keep.
        settings: Its settings.
        state: Whether the ranks compare the optimizer's state as well, when training begins. Later a difference in the
            state shows in the weights.
    """
    reference = weakref.ref(optimizer)

    def values(begins: bool) -> dict[tuple[str, str], object] | None:
        optimizer = reference()
        if optimizer is None or getattr(vars(optimizer).get("_hvdlite"), "apart", False):
            return None
        return {**weights_and_state(optimizer, settings, state and begins), **options(optimizer)}

    return Alike(values, CALLS, f"hvd.DistributedOptimizer({type(optimizer).__name__})", settings.replica_check)


def weights_and_state(
    optimizer: torch.optim.Optimizer, settings: TorchSettings, state: bool
) -> dict[tuple[str, str], object]:
    """Return checksums of an optimizer's parameters and, if `state`, of their state, by kind and name."""
    values: dict[tuple[str, str], object] = {}
    for index, p in enumerate(flat(optimizer.param_groups)):
        name = settings.name(p, f"parameter.{index}")
        values["weights", name] = checksum(p)
        its = optimizer.state.get(p) if state else None
        for key, value in its.items() if isinstance(its, Mapping) else ():
            values["state", f"{key} of {name}"] = checksum(value)
    return values


def options(optimizer: torch.optim.Optimizer) -> dict[tuple[str, str], object]:
    """Return an optimizer's options, such as the learning rate. Options of its class only, not the user's additions."""
    groups, keys = optimizer.param_groups, set(getattr(optimizer, "defaults", {})) - HOW
    return {("settings", f"{key} of param_groups[{number}]"): number_in(group[key])
            for number, group in enumerate(groups) for key in sorted(keys & group.keys())}  # fmt: skip


def checksum(value: object) -> int | None:
    """Return a checksum of the bits of a tensor, in their order; None for any other value."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized or value.is_meta:
        return None
    try:
        bits = bits_of(value.detach().resolve_conj().resolve_neg())
        if bits.device.type == "cpu":
            return checksum_of_array(bits.numpy())  # torch is slow at sums of integers
        return checksum_of(bits, torch.int64, lambda part: part.cpu().numpy())
    except (TypeError, ValueError, RuntimeError):  # a tensor of a special kind: nested, masked, a library's own
        return None


def bits_of(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory as a row of bytes that can be read in words of 64 bits."""
    real = torch.view_as_real(value) if value.is_complex() else value
    bits = real.reshape(-1).contiguous().view(torch.uint8)
    return bits.clone() if bits.storage_offset() % 8 else bits


def number_in(value: object) -> object:
    """Return an option's value if ranks can compare it: a number, or a tuple of numbers. Otherwise return None."""
    if isinstance(value, torch.Tensor):
        return number_in(value.item()) if value.numel() == 1 and not value.is_meta else None
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(number_in(each) for each in value)
    return ("nan" if value != value else value) if isinstance(value, (int, float)) else None
