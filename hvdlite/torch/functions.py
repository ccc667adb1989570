"""Parameters and optimizer state of one rank, given to all ranks, so that training starts from the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, TypeGuard, cast

import torch

from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.lanes.calls import calling
from hvdlite.ops.objects import allgather_object, broadcast_object
from hvdlite.ops.variables import broadcast_arrays, naming
from hvdlite.torch.attach.strategy_steps import strategy_of
from hvdlite.torch.attach.unsent import state_for_others
from hvdlite.torch.cuda import on_cpu
from hvdlite.torch.sharded.states import keep_dtypes, refuse_pieces
from hvdlite.torch.tensors import DTYPES, in_place

__all__ = [
    "allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters", "broadcast_variables",
]  # fmt: skip

HELD = ("param_groups", "state")
"""The attributes of an optimizer that users, schedulers and wrappers keep references to."""
LARGE_BYTES = 64 * 1024
"""The size from which a tensor of an optimizer's state travels by itself instead of being pickled."""


class Stateful(Protocol):
    """An object with a state: a module, an optimizer, a scheduler, a GradScaler."""

    def state_dict(self) -> object: ...
    def load_state_dict(self, state_dict: Any, /) -> object: ...


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Whether a value has a `state_dict` and a `load_state_dict`."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


@calling("hvd.broadcast_parameters")
def broadcast_parameters(
    params: Mapping[str, object] | Iterable[torch.Tensor | tuple[str, torch.Tensor]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite tensors with root_rank's, in place. Collective; waits for all ranks of the process set.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, or a list of tensors or of (name, tensor) pairs. In a
            dict, values that are no tensors are left alone.
        root_rank: The global rank whose values are taken.
        process_set: The ranks that take part.

    Raises:
        MismatchError: Names, shapes or dtypes differ between ranks; on every rank, with a diff.
        ValueError: `params` is something else, or root_rank is not a member of the process set.
    """
    tensors = [(name, value) for name, value in named_values(params) if isinstance(value, torch.Tensor)]
    memories = []
    for name, tensor in tensors:
        with naming(name):
            memories.append(in_place(tensor))
    broadcast_arrays([array for array, _ in memories], [name for name, _ in tensors], root_rank, process_set)
    for _, deliver in memories:
        deliver(None)


def named_values(params: object) -> list[tuple[str, object]]:
    """Return (name, value) pairs, in the same order on all ranks. Raises ValueError if `params` has none."""
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
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: object = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank root_rank's optimizer state and options (learning rates, ...). Waits for all ranks of the set.

    Changes the optimizer's groups and state in place. Ranks without state get the root's: no step is taken to create
    the state, so no parameter moves. A strategy first finishes what it has under way, which may move parameters. Large
    tensors travel one by one, so that each rank needs memory for one copy of the state.

    Args:
        optimizer: The optimizer.
        root_rank: The global rank whose state is taken.
        model: Ignored; accepted for Horovod's sake.
        process_set: The ranks that take part.

    Raises:
        ValueError: The optimizer is an LBFGS, since its state is not tensors by parameter. Or it is sharded, and has
            taken a step.
        TypeError: `optimizer` is no optimizer but a module, say, or a scheduler.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("broadcast_optimizer_state cannot serve torch.optim.LBFGS")
    if not all(hasattr(optimizer, name) for name in ("param_groups", "state_dict", "load_state_dict")):
        raise TypeError(not_an_optimizer(optimizer))
    refuse_pieces("broadcast_optimizer_state", optimizer)
    if attached := strategy_of(optimizer):
        attached.settle()  # the state has nothing of what is under way
    mine, large = runtime.rank() == root_rank, list[torch.Tensor]()

    def take_out(value: object) -> object:
        """Return a tensor on no device in place of a large one."""
        if not is_large(value):
            return value
        large.append(value)
        return torch.empty_like(value, device="meta")

    def put_in(value: object) -> object:
        if not (isinstance(value, torch.Tensor) and value.is_meta):
            return value
        large.append(torch.empty_like(value, device="cpu"))
        return large[-1]

    state = with_values(on_cpu(state_for_others(optimizer)), take_out) if mine else None
    state = broadcast_object(state, root_rank, process_set=process_set)
    state = state if mine else with_values(state, put_in)
    broadcast_parameters(large, root_rank, process_set)
    if not mine:
        load_in_place(optimizer, state)


def not_an_optimizer(given: object) -> str:
    """Return the text of an error: `given` is no optimizer, and which function takes it."""
    text = f"broadcast_optimizer_state takes a torch optimizer, not {type(given).__name__}"
    if isinstance(given, torch.nn.Module):
        return f"{text}: give its state_dict() to hvd.broadcast_parameters"
    if is_stateful(given):
        return (
            f"{text}: hvd.save and hvd.load restore it on all ranks. Without a file, call "
            "scheduler.load_state_dict(hvd.broadcast_object(scheduler.state_dict(), root_rank)) on all ranks"
        )
    return text


@torch.no_grad()
def load_in_place(optimizer: Stateful, state: object) -> None:
    """Load a state_dict into an optimizer, without replacing the groups, the state and the tensors among the options.

    Users, schedulers and wrappers keep references to these. Unlike `load_state_dict`, this keeps the dtypes of the
    given state, instead of casting to the parameters' dtypes. An object that only resembles an optimizer loads the
    state itself.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer.load_state_dict(state)
        return
    before = [(each, name, vars(each)[name]) for each in with_inner(optimizer) for name in HELD if name in vars(each)]
    loadable = cast("dict[str, object]", state)
    optimizer.load_state_dict(loadable)
    keep_dtypes(optimizer, loadable)
    filled: set[int] = set()  # by id(): wrappers share groups with the optimizers inside
    for each, name, old in before:
        new, vars(each)[name] = vars(each)[name], old
        if new is not old and id(old) not in filled:
            filled.add(id(old))
            for mapping, loaded in [(old, new)] if name == "state" else zip(old, new, strict=True):
                replace(mapping, loaded)


def with_inner(
    optimizer: torch.optim.Optimizer, found: Sequence[torch.optim.Optimizer] = ()
) -> list[torch.optim.Optimizer]:
    """Return the optimizers found so far, this one, and those inside it (SAM, Lookahead), at any depth."""
    everyone = [*found, optimizer]
    for value in vars(optimizer).values():
        if isinstance(value, torch.optim.Optimizer) and not any(value is each for each in everyone):
            everyone = with_inner(value, everyone)
    return everyone


def replace(old: MutableMapping[object, object], new: Mapping[object, object]) -> None:
    """Give one mapping the contents of another. Tensors of the same shape are copied in place."""
    for key in old.keys() - new.keys():
        del old[key]
    for key, value in new.items():
        kept = old.get(key)
        if isinstance(value, torch.Tensor) and isinstance(kept, torch.Tensor) and kept.shape == value.shape:
            kept.copy_(value)
        elif value is not kept:
            old[key] = value


def is_large(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a plain tensor, dense in memory, that is large enough for a message of its own."""
    return (
        type(value) is torch.Tensor and value.layout is torch.strided and value.dtype in DTYPES
        and value.nbytes >= LARGE_BYTES and torch.empty_like(value, device="meta").stride() == value.stride()
    )  # fmt: skip


def with_values(state: object, change: Callable[[object], object]) -> object:
    """Return an optimizer's state_dict with changed values of the parameters' state. Any other state stays as it is."""
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return state
    each = {key: {name: change(value) for name, value in its.items()} if isinstance(its, dict) else its
            for key, its in state["state"].items()}  # fmt: skip
    return {**state, "state": each}


@calling("hvd.broadcast_variables")
def broadcast_variables(variables: object, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Give every rank root_rank's weights or optimizer state, in place. Waits for all ranks of the process set.

    Args:
        variables: A module, an optimizer, a tensor, or tensors in a dict or a sequence.
        root_rank: The global rank whose values are taken.
        process_set: The ranks that take part.

    Raises:
        MismatchError: Names, shapes or dtypes differ between ranks; on every rank, with a diff.
        TypeError: `variables` is a scheduler.
        ValueError: `variables` is something else.
    """
    if isinstance(variables, torch.optim.Optimizer):
        broadcast_optimizer_state(variables, root_rank, process_set=process_set)
    elif isinstance(variables, torch.nn.Module):
        broadcast_parameters(variables.state_dict(), root_rank, process_set)
    elif hasattr(variables, "load_state_dict"):  # a scheduler
        raise TypeError(not_an_optimizer(variables))
    else:
        several = [variables] if isinstance(variables, torch.Tensor) else variables
        broadcast_parameters(cast("Iterable[torch.Tensor]", several), root_rank, process_set)
