"""What lossy compression has not sent, in checkpoints of a torch optimizer.

state_dict() has the values of this rank's host; `hvd.save` writes the sum over all hosts. On loading only the sum over
hosts counts: see `compression.saved.agree`. Values that were loaded count from the next backward() on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

import torch

from hvdlite.compression.saved import ANEW, EMPTY, Saved, as_arrays, of_arrays
from hvdlite.compression.store import Store
from hvdlite.system.user_warnings import say_once

UNSENT = "hvdlite_unsent"
"""The key in state_dict()."""
KEPT = "_hvdlite_unsent"
"""The attribute of an optimizer whose state_dict() contains the values."""
State = dict[str, object]
StateT = TypeVar("StateT")


def store_of(optimizer: object) -> Store | None:
    """Return what an attached optimizer's compression keeps; None without lossy compression."""
    return getattr(getattr(optimizer, "_hvdlite", None), "store", None)


def keep_in_state_dict(optimizer: torch.optim.Optimizer) -> None:
    """Have state_dict() contain this host's values, and load_state_dict() take them. Safe to call twice."""
    if KEPT not in vars(optimizer):
        optimizer.__dict__[KEPT] = True
        optimizer.register_state_dict_post_hook(add)
        optimizer.register_load_state_dict_pre_hook(take)


def add(optimizer: torch.optim.Optimizer, state: State) -> State:
    """A hook after state_dict(): add the values."""
    store = store_of(optimizer)
    return {**state, UNSENT: state_of(store.saved())} if store and store.entries else state


def take(optimizer: torch.optim.Optimizer, state: State) -> State:
    """A hook before load_state_dict(): take the values out. A state without values changes none."""
    store, found = store_of(optimizer), state.get(UNSENT)
    if store and found is not None:
        store.load(saved_of(cast("Mapping[str, torch.Tensor]", found)))
    return without_unsent(state)


def without_unsent(state: StateT) -> StateT:
    """Return a state_dict() without these values. Wrappers of optimizers may have a state of another kind."""
    if not isinstance(state, dict):
        return state
    return cast(StateT, {key: value for key, value in state.items() if key != UNSENT})


def state_for_others(optimizer: torch.optim.Optimizer) -> object:
    """Return this rank's state_dict() for all ranks.

    Each host has values of its own. If this rank has loaded some, all ranks' values start anew at zero.
    """
    store, state = store_of(optimizer), without_unsent(optimizer.state_dict())
    if store is None or store.loaded is None:
        return state
    if store.loaded is not EMPTY:
        say_once(ANEW)
    store.load(EMPTY)
    return {**state, UNSENT: state_of(EMPTY)}


def start_anew(optimizer: torch.optim.Optimizer) -> None:
    """Start at zero, since all ranks load a checkpoint without these values."""
    if store := store_of(optimizer):
        store.load(EMPTY)


def state_of(saved: Saved) -> dict[str, torch.Tensor]:
    """Return values as tensors, which nobody else changes."""
    return {name: torch.from_numpy(array) for name, array in as_arrays(saved).items()}


def saved_of(state: Mapping[str, torch.Tensor]) -> Saved:
    """Return what `state_of` was given."""
    return of_arrays({name: tensor.cpu().numpy() for name, tensor in state.items()})
