"""A torch optimizer's parameters: what ranks compare of them, what changes under a plan, and hooks on them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_not
from typing import Any
from weakref import finalize

import torch

from hvdlite.gradients.compression import unknown
from hvdlite.gradients.plan import Spec
from hvdlite.ops.variables import naming
from hvdlite.torch.attach.settings import Settings
from hvdlite.torch.private_api import hooks_after_accumulation, renew_hooks_after_accumulation
from hvdlite.torch.tensors import device_name, dtype_name

Parameter = torch.nn.Parameter
Groups = Sequence[Mapping[str, Any]]
Hook = Callable[[torch.Tensor], Any]
computed, data_ptr = attrgetter("requires_grad"), torch.Tensor.data_ptr


def strides_of_gradient(p: torch.Tensor) -> tuple[int, ...]:
    """Those that autograd gives p.grad: the parameter's own, if it lies densely in memory."""
    return torch.empty_like(p, device="meta").stride()


def dtype_of_gradient(p: torch.Tensor) -> torch.dtype:
    """That of p.grad: the parameter's own, if it has no other grad_dtype."""
    return getattr(p, "grad_dtype", None) or p.dtype


def spec(index: int, p: Parameter, settings: Settings) -> Spec:
    """What all ranks must have alike. Raises ValueError, which names the parameter, for what cannot be communicated."""
    name = settings.names.get(id(p), f"parameter.{index}")
    if torch.nn.parameter.is_lazy(p):
        raise ValueError(f"{name} has no shape yet, as in lazy modules: call the model once before that")
    with naming(name):
        dtype, device = dtype_on_wire(p, settings.compression), device_name(p)
    strides = strides_of_gradient(p)
    order = () if torch.empty(p.shape, device="meta").stride() == strides else strides
    return Spec(name, tuple(p.shape), dtype, device, settings.groups.get(id(p)), order)


def dtype_on_wire(p: Parameter, compression: Any) -> str:
    """The dtype in which p's gradient travels. Raises ValueError where it would travel in another shape."""
    if unknown(compression):
        small, _ = compression.compress(torch.zeros_like(p, dtype=dtype_of_gradient(p), requires_grad=False))
        if small.shape != p.shape:
            raise ValueError(
                f"{compression!r} makes {tuple(small.shape)} of a gradient {tuple(p.shape)}: DistributedOptimizer "
                "sends tensors of the gradients' shapes. Reduce others with hvd.allreduce(), inside optimizer.no_sync()"
            )
        return dtype_name(small)
    wire = getattr(compression, "wire", None)
    return wire if wire is not None and p.is_floating_point() else dtype_name(p, dtype_of_gradient(p))


def flat(groups: Groups) -> Sequence[Parameter]:
    """The parameters of all groups."""
    return groups[0]["params"] if len(groups) == 1 else [p for group in groups for p in group["params"]]


def total(groups: Groups) -> int:
    return len(groups[0]["params"]) if len(groups) == 1 else sum(len(group["params"]) for group in groups)


class Planned:
    """Parameters as they were when a plan was made for them. groups: those of the optimizer, all its parameters."""

    def __init__(self, parameters: Sequence[Parameter], settings: Settings, groups: Groups) -> None:
        self.parameters, self.settings = parameters, settings
        self.facts = self.facts_of(parameters)
        self.note_addresses()
        self.index = {id(p): i for i, p in enumerate(parameters)}
        self.frozen = [p for p in parameters if not p.requires_grad]
        self.total = total(groups)
        self.all_frozen = [p for p in flat(groups) if not p.requires_grad]

    def facts_of(self, now: Sequence[Parameter]) -> list[tuple[Spec, torch.device]]:
        return [(spec(i, p, self.settings), p.device) for i, p in enumerate(now)]

    @property
    def specs(self) -> list[Spec]:
        return [each for each, _ in self.facts]

    def name(self, p: torch.Tensor) -> str:
        """One of these parameters', for messages."""
        return self.specs[self.index[id(p)]].name

    def may_lack_some(self, groups: Groups) -> bool:
        """Whether parameters have been added to the optimizer, or unfrozen. Quick: asked at each step."""
        return self.total != total(groups) or bool(self.all_frozen and any(p.requires_grad for p in self.all_frozen))

    def untouched(self, groups: Groups) -> bool:
        """Whether they are all that the optimizer has, lie where they did, and are trained. Quick: asked at each
        backward."""
        now = flat(groups)
        if len(now) != len(self.parameters) or any(map(is_not, now, self.parameters)):
            return False
        return all(map(computed, now)) and self.addresses == list(map(data_ptr, now)) and not self.frozen

    def are(self, now: Sequence[Parameter]) -> bool:
        """Whether these are the same objects, and those that were frozen still are."""
        if len(now) != len(self.parameters) or any(map(is_not, now, self.parameters)):
            return False
        return not (self.frozen and any(p.requires_grad for p in self.frozen))

    def moved(self, now: Sequence[Parameter]) -> bool:
        """Whether the same objects' memory is another than when it was last noted: cast, moved, or only copied."""
        return self.addresses != list(map(data_ptr, now))

    def note_addresses(self) -> None:
        self.addresses = list(map(data_ptr, self.parameters))

    def changed(self, now: Sequence[Parameter]) -> bool:
        """Whether the plan fits the same objects no more: their dtype, device, shape or strides."""
        return self.facts != self.facts_of(now)


class Hooks:
    """On parameters, as long as their owner lives: hook is told of gradients. It may not keep what is to be collected:
    the collector of cycles does not see the hooks of tensors, which keep all that they refer to."""

    def __init__(self, owner: object, hook: Hook) -> None:
        self.hook = hook
        self.handles: dict[int, tuple[Parameter, Any]] = {}  # by id() of the parameter
        self.told = False
        finalize(owner, remove, self.handles).atexit = False

    def renew(self, members: Sequence[Parameter]) -> None:
        """Be on these, and on no others; on frozen ones, too: they may be thawed."""
        wanted = set(map(id, members))
        for p in [p for p, _ in self.handles.values() if id(p) not in wanted]:
            self.handles.pop(id(p))[1].remove()
        for p in members:
            if not (p.is_floating_point() or p.is_complex()):  # never computed by autograd
                continue
            known, there = self.handles.get(id(p)), hooks_after_accumulation(p)
            if known is None or there.get(known[1].id) is not self.hook:  # torch.utils.swap_tensors takes them away
                if known is not None:
                    known[1].remove()
                self.handles[id(p)] = p, registered(p, self.hook)
            else:
                renew_hooks_after_accumulation(p)

    def are_last(self, p: torch.Tensor, name: Callable[[torch.Tensor], str] | None) -> bool:
        """Whether no hook on this one is called after ours. name: of a parameter, where one behind ours costs time,
        which is said once."""
        there, known = hooks_after_accumulation(p), self.handles.get(id(p))
        last = not there or (known is not None and next(reversed(there)) == known[1].id)
        if name and not last and not self.told:
            self.told = True
            logging.getLogger("hvdlite").info(
                "the gradient of %s, and others that travel with it, leaves at the end of backward only, since a hook "
                "that was registered after hvd.DistributedOptimizer() may still change it: register hooks before that",
                name(p),
            )
        return last

    def remove(self) -> None:
        remove(self.handles)


def registered(p: Parameter, hook: Hook) -> Any:
    """The handle of this hook on a parameter. A frozen one takes none, but keeps those that it has."""
    frozen = not p.requires_grad
    try:
        return p.requires_grad_().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    finally:
        if frozen:
            p.requires_grad_(False)


def remove(handles: Mapping[int, tuple[Parameter, Any]]) -> None:
    """Take these hooks off their parameters."""
    for _, handle in handles.values():
        handle.remove()
