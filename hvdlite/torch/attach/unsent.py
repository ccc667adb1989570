"""What lossy compression has not sent, in checkpoints of a torch optimizer.

state_dict() has the values of this rank's host; `hvd.save` writes the sum over all hosts. On loading only the sum over
hosts counts: see `compression.store.Store.to_load`. Values that were loaded count from the next backward() on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

import numpy as np
import torch

from hvdlite.compression.store import ONE_HOST_ONLY, Kept, Saved, Store
from hvdlite.system.user_warnings import say_once

UNSENT = "hvdlite_unsent"
"""The key in state_dict()."""
State = dict[str, object]


def keep_in_state_dict(optimizer: torch.optim.Optimizer, store: Store) -> None:
    """Have state_dict() contain this host's values, and load_state_dict() take them."""

    def add(optimizer: torch.optim.Optimizer, state: State) -> State:
        return {**state, UNSENT: state_of(store.saved())} if store.entries else state

    def take(optimizer: torch.optim.Optimizer, state: State) -> State:
        found = state.get(UNSENT)
        if found is not None:
            store.load(saved_of(cast("State", found)))
        return without_unsent(state)

    optimizer.register_state_dict_post_hook(add)
    optimizer.register_load_state_dict_pre_hook(take)


StateT = TypeVar("StateT")


def without_unsent(state: StateT) -> StateT:
    """Return a state_dict() without these values. Wrappers of optimizers may have a state of another kind."""
    if not isinstance(state, dict):
        return state
    return cast(StateT, {key: value for key, value in state.items() if key != UNSENT})


def forget_loaded(optimizer: torch.optim.Optimizer) -> None:
    """Use no values that this rank has loaded: the other ranks get its state, but each host has values of its own."""
    store = getattr(getattr(optimizer, "_hvdlite", None), "store", None)
    if store and store.loaded:
        say_once(ONE_HOST_ONLY)
        store.load(None)


def state_of(saved: Saved) -> State:
    """Return values as plain data and tensors, which nobody else changes."""
    values = {name: {key: torch.from_numpy(np.array(getattr(kept, key))) for key in Kept.NAMES}
              for name, kept in saved.values.items()}  # fmt: skip
    return {"host": saved.host, "hosts": saved.hosts, "rounds": saved.rounds, "values": values}


def saved_of(state: Mapping[str, object]) -> Saved:
    """Return what `state_of` was given."""
    values = cast("dict[str, dict[str, torch.Tensor]]", state["values"])
    found = {name: Kept(*(its[key].cpu().numpy() for key in Kept.NAMES)) for name, its in values.items()}
    return Saved(cast("int | None", state["host"]), cast(int, state["hosts"]), cast(int, state["rounds"]), found)
