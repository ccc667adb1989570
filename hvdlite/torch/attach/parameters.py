"""A torch optimizer's parameters: the facts that ranks compare, changes since the plan was made, and the hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_not
from typing import TypeAlias, cast
from weakref import finalize

import torch
from torch.utils.hooks import RemovableHandle

from hvdlite.gradients.compression import Compressor, unknown
from hvdlite.gradients.plan import Spec
from hvdlite.gradients.wire import dtype_on_wire
from hvdlite.ops.variables import naming
from hvdlite.torch.attach.settings import TorchSettings
from hvdlite.torch.private_api import hooks_after_accumulation, renew_hooks_after_accumulation
from hvdlite.torch.tensors import DTYPES, device_name, dtype_name

Parameter = torch.nn.Parameter
ParamGroups: TypeAlias = Sequence[Mapping[str, object]]
"""An optimizer's `param_groups`."""
Hook: TypeAlias = Callable[[torch.Tensor], object]
"""A hook that autograd calls when it has added to a parameter's gradient."""
computed, data_ptr = attrgetter("requires_grad"), torch.Tensor.data_ptr


def strides_of_gradient(p: torch.Tensor) -> tuple[int, ...]:
    """Return the strides that autograd gives p.grad: those of the parameter, if it lies densely in memory."""
    return torch.empty_like(p, device="meta").stride()


def dtype_of_gradient(p: torch.Tensor) -> torch.dtype:
    """Return the dtype of p.grad: `p.grad_dtype` if it is set, otherwise the parameter's."""
    return getattr(p, "grad_dtype", None) or p.dtype


def spec(index: int, p: Parameter, settings: TorchSettings, group: int | None) -> Spec:
    """Return the facts about a parameter that must be the same on all ranks.

    Args:
        index: The parameter's place in the plan.
        p: The parameter.
        settings: The settings of its optimizer.
        group: The number of the parameter's group; None if it is in no group.

    Raises:
        ValueError: The parameter's gradient cannot be communicated. The text names the parameter.
    """
    name = settings.name(p, f"parameter.{index}")
    if torch.nn.parameter.is_lazy(p):
        raise ValueError(f"{name} has no shape yet, as in lazy modules: call the model once before it is attached")
    with naming(name):
        dtype, device = dtype_sent(p, settings.compression), device_name(p)
    strides = strides_of_gradient(p)
    order = () if torch.empty(p.shape, device="meta").stride() == strides else strides
    return Spec(name, tuple(p.shape), dtype, device, group, order)


def dtype_sent(p: Parameter, compression: type[Compressor]) -> str:
    """Return the name of the dtype in which p's gradient travels. Raises ValueError if its shape would change."""
    dtype = dtype_of_gradient(p)
    if unknown(compression):
        small, _ = compression.compress(torch.zeros_like(p, dtype=dtype, requires_grad=False))
        if small.shape != p.shape:
            raise ValueError(
                f"{compression!r} makes {tuple(small.shape)} of a gradient {tuple(p.shape)}: DistributedOptimizer "
                "sends tensors of the gradients' shapes. Reduce others with hvd.allreduce(), inside optimizer.no_sync()"
            )
        return dtype_name(small)
    wire = dtype_on_wire(compression, DTYPES.get(dtype, ""), p.is_floating_point())
    return wire or dtype_name(p, dtype)  # which raises


def flat(groups: ParamGroups) -> Sequence[Parameter]:
    """Return the parameters of all groups. Runs at each backward()."""
    if len(groups) == 1:
        return cast("list[Parameter]", groups[0]["params"])
    return [p for group in groups for p in cast("list[Parameter]", group["params"])]


def total(groups: ParamGroups) -> int:
    """Return the number of parameters in all groups."""
    return sum(len(cast("list[Parameter]", group["params"])) for group in groups)


class Planned:
    """Parameters as they were when a plan was made for them.

    Attributes:
        parameters: The parameters, in the plan's order.
        settings: The settings of their optimizer.
        facts: The facts about each parameter that ranks compare, and its device.
        addresses: Where the parameters' values lie.
        index: The place of each parameter in the plan, by id().
        names: The parameters' names, or their places in the optimizer. They stay when others are frozen.
        frozen: The parameters of the plan that were frozen.
        total: The number of all parameters of the optimizer.
        all_frozen: The parameters of the optimizer that were frozen, in the plan or not.
    """

    def __init__(self, parameters: Sequence[Parameter], settings: TorchSettings, groups: ParamGroups) -> None:
        self.parameters, self.settings = parameters, settings
        self.facts = self.facts_of(parameters)
        self.note_addresses()
        self.index = {id(p): i for i, p in enumerate(parameters)}
        places = {id(p): f"parameter.{i}" for i, p in enumerate(flat(groups))}
        self.names = [settings.name(p, places[id(p)]) for p in parameters]
        self.frozen = [p for p in parameters if not p.requires_grad]
        self.total = total(groups)
        self.all_frozen = [p for p in flat(groups) if not p.requires_grad]

    def facts_of(self, now: Sequence[Parameter]) -> list[tuple[Spec, torch.device]]:
        """Return the facts about these parameters."""
        groups = self.settings.groups.numbers([id(p) for p in now])
        return [
            (spec(i, p, self.settings, group), p.device) for i, (p, group) in enumerate(zip(now, groups, strict=True))
        ]

    @property
    def specs(self) -> list[Spec]:
        return [each for each, _ in self.facts]

    def name(self, p: torch.Tensor) -> str:
        """Return a parameter's name in messages."""
        return self.specs[self.index[id(p)]].name

    def may_lack_some(self, groups: ParamGroups) -> bool:
        """Whether parameters have been added to the optimizer, or unfrozen. Quick, since each step() asks."""
        return self.total != total(groups) or bool(self.all_frozen and any(p.requires_grad for p in self.all_frozen))

    def untouched(self, groups: ParamGroups) -> bool:
        """Whether these are all parameters of the optimizer, at the same addresses, and all are trained.

        Quick, since each backward() asks.
        """
        now = flat(groups)
        if len(now) != len(self.parameters) or any(map(is_not, now, self.parameters)):
            return False
        return all(map(computed, now)) and self.addresses == list(map(data_ptr, now)) and not self.frozen

    def are(self, now: Sequence[Parameter]) -> bool:
        """Whether these are the same objects, and no frozen parameter has been unfrozen."""
        if len(now) != len(self.parameters) or any(map(is_not, now, self.parameters)):
            return False
        return not (self.frozen and any(p.requires_grad for p in self.frozen))

    def moved(self, now: Sequence[Parameter]) -> bool:
        """Whether the values of the same objects lie elsewhere: they were cast, moved or copied."""
        return self.addresses != list(map(data_ptr, now))

    def note_addresses(self) -> None:
        """Remember where the values lie now."""
        self.addresses = list(map(data_ptr, self.parameters))

    def changed(self, now: Sequence[Parameter]) -> bool:
        """Whether the plan no longer fits the same objects: a dtype, a device, a shape or strides have changed."""
        return self.facts != self.facts_of(now)


class Hooks:
    """One hook on each parameter of an optimizer, for as long as their owner lives.

    The garbage collector does not see the hooks of tensors. A hook must therefore not keep an object that is to be
    collected.

    Attributes:
        hook: The hook.
        handles: The parameters that have the hook, and torch's handles, by id() of the parameter.
        reported: Whether a message about later hooks has been logged.
    """

    def __init__(self, owner: object, hook: Hook) -> None:
        self.hook = hook
        self.handles: dict[int, tuple[Parameter, RemovableHandle]] = {}
        self.reported = False
        finalize(owner, remove, self.handles).atexit = False

    def renew(self, members: Sequence[Parameter]) -> None:
        """Have the hook on these parameters and no others. Frozen parameters get it too, since they may be unfrozen."""
        wanted = set(map(id, members))
        for p in [p for p, _ in self.handles.values() if id(p) not in wanted]:
            self.handles.pop(id(p))[1].remove()
        for p in members:
            if not (p.is_floating_point() or p.is_complex()):  # autograd computes no gradient for it
                continue
            known, there = self.handles.get(id(p)), hooks_after_accumulation(p)
            if known is None or there.get(known[1].id) is not self.hook:  # torch.utils.swap_tensors removes hooks
                if known is not None:
                    known[1].remove()
                self.handles[id(p)] = p, registered(p, self.hook)
            else:
                renew_hooks_after_accumulation(p)

    def are_last(self, p: torch.Tensor, name: Callable[[torch.Tensor], str] | None) -> bool:
        """Whether autograd calls no other hook of a parameter after this one.

        Args:
            p: The parameter.
            name: Gives the parameter's name, if a later hook delays its gradient: the first time this is logged. None:
                a later hook costs nothing.
        """
        there, known = hooks_after_accumulation(p), self.handles.get(id(p))
        last = not there or (known is not None and next(reversed(there)) == known[1].id)
        if name and not last and not self.reported:
            self.reported = True
            logging.getLogger("hvdlite").info(
                "a hook on %s was registered after hvd.DistributedOptimizer() and may still change the gradient, so "
                "this gradient and those in its bucket leave only when backward() ends: register hooks before "
                "hvd.DistributedOptimizer()",
                name(p),
            )
        return last

    def remove(self) -> None:
        """Remove the hook from all parameters."""
        remove(self.handles)


def registered(p: Parameter, hook: Hook) -> RemovableHandle:
    """Register the hook on a parameter, and return the handle.

    torch refuses hooks on a frozen parameter, but a parameter that is frozen later keeps its hooks.
    """
    frozen = not p.requires_grad
    try:
        handle = p.requires_grad_().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return cast(RemovableHandle, handle)
    finally:
        if frozen:
            p.requires_grad_(False)


def remove(handles: Mapping[int, tuple[Parameter, RemovableHandle]]) -> None:
    """Remove these hooks from their parameters."""
    for _, handle in handles.values():
        handle.remove()
