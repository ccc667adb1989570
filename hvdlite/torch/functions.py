"""Starting alike: parameters and optimizer state of one rank, given to all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.lanes.calls import calling
from hvdlite.ops.objects import allgather_object, broadcast_object
from hvdlite.ops.variables import broadcast_arrays, naming
from hvdlite.torch.attach.parameters import flat
from hvdlite.torch.cuda import on_cpu
from hvdlite.torch.tensors import DTYPES, in_place

__all__ = [
    "allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters", "broadcast_variables",
]  # fmt: skip

HELD = ("param_groups", "state")  # what users, schedulers and wrappers hold on to
LARGE_BYTES = 64 * 1024
"""From which size on a tensor of an optimizer's state is not pickled with the rest."""


@calling("hvd.broadcast_parameters")
def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[torch.Tensor | tuple[str, torch.Tensor]], root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite tensors with root_rank's, in place. params: `model.state_dict()`, `model.named_parameters()`, a list
    of tensors or of (name, tensor) pairs; values that are no tensors are left alone. Waits for all ranks of the process
    set. Raises MismatchError with a diff, on every rank, where names, shapes or dtypes differ; ValueError for anything
    else.
    """
    tensors = [(name, value) for name, value in named_values(params) if isinstance(value, torch.Tensor)]
    memories = []
    for name, tensor in tensors:
        with naming(name):
            memories.append(in_place(tensor))
    broadcast_arrays([array for array, _ in memories], [name for name, _ in tensors], root_rank, process_set)
    for _, deliver in memories:
        deliver(None)


def named_values(params: Any) -> list[tuple[str, Any]]:
    """(name, value) pairs, in the same order on all ranks. Raises ValueError for what has none."""
    if isinstance(params, Mapping):
        for name, value in params.items():
            if isinstance(value, Mapping) and any(isinstance(each, torch.Tensor) for each in value.values()):
                raise ValueError(f"broadcast_parameters: {name!r} is a dict of tensors: give each of these by itself")
        return sorted(params.items())
    several = list(params) if isinstance(params, Iterable) and not isinstance(params, (str, torch.Tensor)) else [None]
    if not all(isinstance(p, (tuple, torch.Tensor)) for p in several):
        raise ValueError(
            f"broadcast_parameters takes a state_dict, or several tensors or (name, tensor) pairs, not {type(params)}"
        )
    return [p if isinstance(p, tuple) else (f"parameter.{i}", p) for i, p in enumerate(several)]


@calling("hvd.broadcast_optimizer_state")
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None, process_set: ProcessSet = global_process_set
) -> None:
    """Give every rank root_rank's optimizer state and options (learning rates, ...), through `load_state_dict`, in the
    groups and the state that there are.

    The ranks that have no state yet get it from the root: no step is taken to create it, so parameters do not move.
    Large tensors travel by themselves, so that others need memory for one copy of the state. model: accepted for
    Horovod's sake. Raises ValueError for LBFGS, whose state is not tensors by parameter, TypeError for what is no
    optimizer: a module, a scheduler.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("broadcast_optimizer_state cannot serve torch.optim.LBFGS")
    if not all(hasattr(optimizer, name) for name in ("param_groups", "state_dict", "load_state_dict")):
        raise TypeError(not_an_optimizer(optimizer))
    mine, large = runtime.rank() == root_rank, list[torch.Tensor]()

    def take_out(value: Any) -> Any:
        """A tensor on no device in place of a large one."""
        if not is_large(value):
            return value
        large.append(value)
        return torch.empty_like(value, device="meta")

    def put_in(value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_meta):
            return value
        large.append(torch.empty_like(value, device="cpu"))
        return large[-1]

    state = with_values(on_cpu(optimizer.state_dict()), take_out) if mine else None
    state = broadcast_object(state, root_rank, process_set=process_set)
    state = state if mine else with_values(state, put_in)
    broadcast_parameters(large, root_rank, process_set)
    if not mine:
        load_in_place(optimizer, state)


def not_an_optimizer(given: Any) -> str:
    """Why broadcast_optimizer_state refuses this, and what serves it."""
    text = f"broadcast_optimizer_state takes a torch optimizer, not {type(given).__name__}"
    if isinstance(given, torch.nn.Module):
        return f"{text}: give its state_dict() to hvd.broadcast_parameters"
    if hasattr(given, "load_state_dict") and hasattr(given, "state_dict"):
        return (
            f"{text}: hvd.save and hvd.load restore one alike on all ranks. Without a file, call "
            "scheduler.load_state_dict(hvd.broadcast_object(scheduler.state_dict(), root_rank)) on all ranks"
        )
    return text


@torch.no_grad()
def load_in_place(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """`load_state_dict`, but into the groups, the state and the tensors among options that there are, to which users,
    schedulers and wrappers hold on, and in the root's dtypes, where that function casts to the parameters'."""
    if not isinstance(optimizer, torch.optim.Optimizer):  # what is like one: it knows what it holds
        optimizer.load_state_dict(state)
        return
    before = [(each, name, vars(each)[name]) for each in with_inner(optimizer) for name in HELD if name in vars(each)]
    optimizer.load_state_dict(state)
    given = state.get("state")
    for index, p in enumerate(flat(optimizer.param_groups)):
        its = given.get(index) if isinstance(given, dict) else None
        for name, value in its.items() if isinstance(its, dict) else ():
            loaded = optimizer.state[p].get(name)
            if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                optimizer.state[p][name] = value.to(loaded.device)
    filled: set[int] = set()  # by id(): wrappers share groups with those inside
    for each, name, old in before:
        new, vars(each)[name] = vars(each)[name], old
        if new is not old and id(old) not in filled:
            filled.add(id(old))
            for mapping, loaded in [(old, new)] if name == "state" else zip(old, new, strict=True):
                replace(mapping, loaded)


def with_inner(
    optimizer: torch.optim.Optimizer, found: Sequence[torch.optim.Optimizer] = ()
) -> list[torch.optim.Optimizer]:
    """Those found, the optimizer, and what it has inside (SAM, Lookahead), at any depth."""
    everyone = [*found, optimizer]
    for value in vars(optimizer).values():
        if isinstance(value, torch.optim.Optimizer) and not any(value is each for each in everyone):
            everyone = with_inner(value, everyone)
    return everyone


def replace(old: Any, new: Mapping[Any, Any]) -> None:
    """Give one mapping what is in the other. A tensor in the place of one like it is copied there."""
    for key in old.keys() - new.keys():
        del old[key]
    for key, value in new.items():
        kept = old.get(key)
        if isinstance(value, torch.Tensor) and isinstance(kept, torch.Tensor) and kept.shape == value.shape:
            kept.copy_(value)
        elif value is not kept:
            old[key] = value


def is_large(value: Any) -> bool:
    """Whether it is a plain tensor, each of whose elements has its place in memory, that is worth a message."""
    return (
        type(value) is torch.Tensor and value.layout is torch.strided and value.dtype in DTYPES
        and value.nbytes >= LARGE_BYTES and torch.empty_like(value, device="meta").stride() == value.stride()
    )  # fmt: skip


def with_values(state: Any, change: Callable[[Any], Any]) -> Any:
    """An optimizer's state_dict with other values of its parameters' state. That of another kind as it is."""
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return state
    each = {key: {name: change(value) for name, value in its.items()} if isinstance(its, dict) else its
            for key, its in state["state"].items()}  # fmt: skip
    return {**state, "state": each}


@calling("hvd.broadcast_variables")
def broadcast_variables(variables: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Give every rank root_rank's weights (a module, tensors in a dict or sequence) or optimizer state."""
    if isinstance(variables, torch.optim.Optimizer):
        broadcast_optimizer_state(variables, root_rank, process_set=process_set)
    elif isinstance(variables, torch.nn.Module):
        broadcast_parameters(variables.state_dict(), root_rank, process_set)
    elif hasattr(variables, "load_state_dict"):  # a scheduler
        raise TypeError(not_an_optimizer(variables))
    else:
        several = [variables] if isinstance(variables, torch.Tensor) else variables
        broadcast_parameters(several, root_rank, process_set)
