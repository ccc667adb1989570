"""Private names of torch that hvdlite needs. No other file uses private names.

torch may change such a name in any release. When an optimizer is attached, `require` raises an error if a name is gone.
tests/unit/test_torch_private_api.py has a test for each name.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter
from types import FrameType
from typing import Any, NoReturn, cast

import torch
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from hvdlite.errors import HvdliteError

NEEDED = {
    "_C._current_graph_task_id": "to tell one backward() from the next",
    "autograd.Variable._execution_engine.queue_callback": "to be called when a backward() ends",
    "autograd.function.BackwardCFunction.apply": "to find out whether a backward() runs inside another one",
    "_C._storage_Use_Count": "to find out whether somebody has kept a gradient's memory",
    "UntypedStorage._cdata": "to find out whether somebody has kept a gradient's memory",
    "Tensor._version": "to find out whether a gradient has been changed",
    "Tensor._post_accumulate_grad_hooks": "to find out which hooks a parameter has",
    "Tensor._is_zerotensor": "to find out whether a gradient has memory",
    "_debug_has_internal_overlap": "to find out whether a gradient can be written to",
    "_foreach_copy_": "to copy many gradients by one call",
    "_C._disabled_torch_function_impl": "to ask a gradient that is partly there for its shape, at no cost",
    "ops.aten._amp_foreach_non_finite_check_and_unscale_.default": "to unscale a gradient that is partly there",
    "optim.Optimizer.profile_hook_step": "to find out whether a step() is part of another one",
}
"""The purpose of each name inside torch."""


def found(name: str) -> Any:
    """Return torch's object of this name; None if there is none."""
    try:
        return attrgetter(name)(torch)
    except AttributeError:
        return None


def require() -> None:
    """Raise HvdliteError if torch lacks a name that hvdlite needs."""
    for name, purpose in NEEDED.items():
        if found(name) is None and not is_none_by_nature(name):
            raise HvdliteError(
                f"torch {torch.__version__} has no torch.{name}, which hvdlite needs {purpose}: install a version of "
                "torch that hvdlite has been tested with, or a newer hvdlite [HVD114]"
            )


def is_none_by_nature(name: str) -> bool:
    """Whether torch has the name, and its value is None."""
    owner, _, attribute = name.rpartition(".")
    return bool(owner) and hasattr(found(owner), attribute)


def missing(*_: object) -> NoReturn:
    """Stand for a function that torch lacks. `require` raises before this can be called."""
    raise HvdliteError("this version of torch lacks a function that hvdlite needs")


# C functions for loops over many gradients. No Python function wraps them.

current_run: Callable[[], int] = found("_C._current_graph_task_id") or missing
"""Return the number of this thread's run of autograd's engine; -1 outside of a run."""

queue_callback: Callable[[Callable[[], None]], None] = (
    found("autograd.Variable._execution_engine.queue_callback") or missing
)
"""Have a function called at the end of this thread's run of autograd's engine."""

storage_uses: Callable[[int], int] = found("_C._storage_Use_Count") or missing
"""Return how many tensors and storages use the memory of a storage, given by its number."""

version: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Return how often a tensor has been changed in place."""


def storage_number(storage: torch.UntypedStorage) -> int:
    """Return torch's number of a storage. It is valid as long as the storage lives."""
    return int(storage._cdata)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its target, by one call."""
    if targets:
        torch._foreach_copy_(targets, sources)


plain_attributes = found("_C._disabled_torch_function_impl") or missing
"""The `__torch_function__` of a subclass of tensors that shape, dtype and the like ask for nothing."""

unscale: Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor], None] = (
    found("ops.aten._amp_foreach_non_finite_check_and_unscale_.default") or missing
)
"""Multiply tensors by a factor in place, and write 1 into the second argument if a number is not finite."""


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for zeros and has no memory."""
    return bool(tensor._is_zerotensor())


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor share memory, as those of an expanded one do."""
    return bool(torch._debug_has_internal_overlap(tensor) == 1)  # at::MemOverlap::Yes


def hooks_after_accumulation(tensor: torch.Tensor) -> dict[int, Callable[[torch.Tensor], object]]:
    """Return the hooks that run when autograd has added to a parameter's gradient, in their order."""
    return getattr(tensor, "_post_accumulate_grad_hooks", None) or {}


def renew_hooks_after_accumulation(tensor: torch.Tensor) -> None:
    """Register a tensor's Python hooks with autograd again: torch.utils.swap_tensors may have lost them there."""
    tensor._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks


_share: Callable[[torch.UntypedStorage], tuple[int, int]] | None = found("UntypedStorage._share_fd_cpu_")
_engine = found("autograd.graph._engine_run_backward")
CAN_MOVE_STORAGES = _share is not None and _engine is not None
"""Whether torch has the names that `to_own_mapping` and `is_autograd` need. hvdlite works without them."""


def to_own_mapping(storage: torch.UntypedStorage) -> int:
    """Move a storage on the host, in place, to a mapping of its own: an unlinked file in /dev/shm.

    From then on the storage has no allocator: `resize_` to a larger size crashes the process.

    Returns:
        The file's descriptor. The storage owns and closes it.

    Raises:
        RuntimeError: There is no room in /dev/shm, or the process has too many descriptors.
    """
    assert _share is not None
    return int(_share(storage)[0])


def is_autograd(frame: FrameType | None) -> bool:
    """Whether the frame is the one that runs autograd's engine. It is the caller of what C++ code calls in that run."""
    return frame is not None and _engine is not None and frame.f_code is _engine.__code__


BUILTIN_HOOK = "_register_builtin_comm_hook"
"""The method of DistributedDataParallel that registers a communication hook written in C++."""


# Frames of the interpreter

_function = vars(found("autograd.function.BackwardCFunction") or object)
APPLY = {id(_function[name].__code__) for name in ("apply", "apply_boxed") if name in _function}
"""The code that runs the backward of an autograd function, by id(). The frame's `self` is the node."""
_around = found("optim.Optimizer.profile_hook_step")
AROUND_STEP: str = _around(lambda: None).__code__.co_qualname if _around else ""
"""The name of the function that calls the hooks around step()."""


def outermost_node() -> Node | None:
    """Return the node of the outermost run around this thread's run; None if the run is not nested."""
    frame: FrameType | None = sys._getframe(1)
    node = None
    while frame is not None:
        if id(frame.f_code) in APPLY:
            node = cast(Node, frame.f_locals["self"])
        frame = frame.f_back
    return node


def step_is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the present step() is part of another step() of the same optimizer, as in a subclass.

    torch calls hooks around each.
    """
    frame: FrameType | None = sys._getframe(1)
    steps = 0
    while frame is not None:
        steps += frame.f_code.co_qualname == AROUND_STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps > 1


# Modules and optimizers

BatchNorm = torch.nn.modules.batchnorm._BatchNorm
"""The base class of all batch normalizations."""


def scaler_that_steps() -> torch.amp.GradScaler | None:
    """Return the GradScaler whose step() is under way in this thread; None if there is none, or it does not scale."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            scaler = cast(torch.amp.GradScaler, frame.f_locals["self"])
            return scaler if scaler.is_enabled() else None
        frame = frame.f_back
    return None


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Return a module's children by name. A child may have several names."""
    children: dict[str, torch.nn.Module | None] | None = vars(module).get("_modules")
    if children is None:
        raise HvdliteError(f"torch {torch.__version__} keeps a module's children elsewhere than in _modules")
    return children


SCALES = "_step_supports_amp_scaling"
"""The attribute by which an optimizer declares to a GradScaler that its step() divides by the scale."""


def takes_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer can have hooks around step(): its class has called Optimizer.__init__."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def names_of_step_hooks() -> tuple[str, str]:
    """Return the names of the attributes in which an optimizer keeps its hooks around step()."""
    return "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"


def without_step_hooks() -> dict[str, object]:
    """Return an optimizer's attributes for hooks around step(), without hooks."""
    return {name: OrderedDict[int, object]() for name in names_of_step_hooks()}


def put_next_to_step(optimizer: torch.optim.Optimizer, before: RemovableHandle, after: RemovableHandle) -> None:
    """Have one hook called last before an optimizer's step(), and another one first after it."""
    pre, post = (getattr(optimizer, name) for name in names_of_step_hooks())
    pre.move_to_end(before.id)
    post.move_to_end(after.id, last=False)


# torch.compile

AUTOGRAD = "torch._dynamo.compiled_autograd"
"""The module of compiled autograd, which may not have been imported."""


def rules_of_dynamo() -> object:
    """Return dynamo's rules of what it does not trace; None if dynamo has not been imported, which takes seconds."""
    return getattr(sys.modules.get("torch._dynamo"), "trace_rules", None)


def leave_out(rules: object, package: str) -> None:
    """Have dynamo run a package's functions as they are. Raises HvdliteError if the rules take no additions."""
    add: Callable[[str], object] | None = getattr(rules, "add", None)
    if add is None:
        raise HvdliteError(
            f"torch {torch.__version__} has no torch._dynamo.trace_rules.add, which hvdlite needs so that "
            "torch.compile leaves it out: train without torch.compile, or install a newer hvdlite [HVD114]"
        )
    add(package)


def in_compiled_autograd() -> bool:
    """Whether compiled autograd traces the present backward()."""
    return bool(getattr(sys.modules.get(AUTOGRAD), "in_compiled_autograd_region", False))


def python_in_backward() -> bool:
    """Whether the caller was called by Python code that a backward pass runs, such as DDP's communication hooks.

    If C++ has called it, the next frame is of the Python code that started the backward pass, or there is none.
    """
    frame = sys._getframe(1).f_back
    return current_run() >= 0 and frame is not None and not is_autograd(frame)
