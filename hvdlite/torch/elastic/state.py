"""`TorchState`: the elastic state of models, optimizers and other values.

A commit copies each value's `state_dict`, or the value itself if it has none. A restore loads the copies. See
`hvdlite.elastic`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, ValuesView
from typing import cast

import torch

from hvdlite.elastic import ObjectState
from hvdlite.job import runtime
from hvdlite.ops.objects import allgather_object, broadcast_object
from hvdlite.torch.attach.attachment import Attachment
from hvdlite.torch.elastic.sampler import ElasticSampler
from hvdlite.torch.functions import Stateful, broadcast_optimizer_state, broadcast_parameters
from hvdlite.torch.sharded.states import shard_of


class StateHandler:
    """Saves, restores and synchronizes one value that has a `state_dict`.

    Attributes:
        value: The value.
        saved: Its state when it was saved last, a deep copy.
    """

    def __init__(self, value: Stateful) -> None:
        self.value = value

    def set_value(self, value: Stateful) -> None:
        """Handle another value from now on, and save it."""
        self.value = value
        self.save()

    def save(self) -> None:
        """Save the value's state."""
        self.saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Return to the saved state."""
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def sync(self) -> None:
        """Give rank 0's state to all ranks, and save it. Collective."""
        self.broadcast()
        self.save()

    def broadcast(self) -> None:
        """Give rank 0's state to all ranks. Collective."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), root_rank=0))


class TrainedStateHandler(StateHandler):
    """Handles a value with gradients."""

    value: torch.nn.Module | torch.optim.Optimizer

    def restore(self) -> None:
        """Return to the saved state, and drop gradients: these belong to the step that is undone."""
        super().restore()
        self.value.zero_grad(set_to_none=True)


class ModelStateHandler(TrainedStateHandler):
    """Handles a module's parameters and buffers."""

    value: torch.nn.Module

    def broadcast(self) -> None:
        """Give rank 0's parameters and buffers to all ranks. Collective."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(TrainedStateHandler):
    """Handles an optimizer's state and options."""

    value: torch.optim.Optimizer

    def restore(self) -> None:
        """Return to the saved state, and drop gradients, also those of passes before the last one."""
        super().restore()
        if isinstance(attached := vars(self.value).get("_hvdlite"), Attachment):
            attached.forget_passes()

    def broadcast(self) -> None:
        """Give rank 0's state and options to all ranks. Collective."""
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateHandler):
    """Handles an `ElasticSampler`. Loading its state deals out the rest of the epoch again."""


Registry = list[tuple[type, type[StateHandler]]]
_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """Return the handlers of types. The first type that fits a value counts."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Use these handlers in states that are made from now on."""
    global _registry
    _registry = registry


def handler_for(value: object) -> type[StateHandler] | None:
    """Return the handler of a value; None if the value is handled as an object."""
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    usual = StateHandler if all(map(callable, methods)) and not isinstance(value, type) else None
    return next((how for kind, how in _registry if isinstance(value, kind)), usual)


def refuse_containers(given: Mapping[str, object]) -> None:
    """Raise ValueError for models and optimizers in lists and dicts, which would be copied and not restored."""
    for name, value in given.items():
        several = value.values() if isinstance(value, Mapping) else value
        members = several if isinstance(several, ValuesView | list | tuple | set) else ()
        if any(isinstance(member, torch.nn.Module | torch.optim.Optimizer) for member in members):
            raise ValueError(
                f"{name}= is a {type(value).__name__} with models or optimizers in it, which would be copied and not "
                "restored: give each by a name of its own, TorchState(generator=g, critic=c) [HVD511]"
            )


class TorchState(ObjectState):
    """A model, an optimizer, and other values by name: `TorchState(model, optimizer, epoch=0, batch=0)`.

    A value with a `state_dict` and a `load_state_dict` (a module, an optimizer, an ElasticSampler, a scheduler, a
    GradScaler) stays the same object. A deep copy of its state is saved at construction, by `save` and `sync`, and when
    the attribute is set to another object. `sync` gives rank 0's present states to all ranks, and `restore` also drops
    gradients. Any other value is an attribute, as in an `ObjectState`.
    """

    _handlers: dict[str, StateHandler]

    def __init__(self, model: object = None, optimizer: object = None, **kwargs: object) -> None:
        """
        Args:
            model: A module.
            optimizer: An optimizer.
            **kwargs: Other values by name.

        Raises:
            ValueError: A value is a list or dict with models or optimizers in it, or a sharded optimizer.
        """
        given = {"model": model, "optimizer": optimizer, **kwargs}
        refuse_containers(given)
        handlers = {name: made for name, value in given.items() if (made := handled(value))}
        object.__setattr__(self, "_handlers", handlers)
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
            handler.save()
        plain = {name: value for name, value in given.items() if name not in self._handlers}
        super().__init__(broadcast_object, runtime.rank, **plain)

    def __setattr__(self, name: str, value: object) -> None:
        if name in self._handlers:
            if handler_for(value):
                self._handlers[name].set_value(cast(Stateful, value))
            else:  # None, say: from now on it is handled as an object
                del self._handlers[name]
                self._saved_state[name] = value
        super().__setattr__(name, value)

    def _set_attributes(self) -> None:
        """Set the saved attributes, except for those with a handler here: rank 0 may have None instead."""
        self._saved_state = {name: value for name, value in self._saved_state.items() if name not in self._handlers}
        super()._set_attributes()

    def save(self) -> None:
        """Save all values."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Return to the saved values, and drop gradients."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give rank 0's present values to all ranks, and save them. Collective."""
        everyones = allgather_object(list(self._handlers))
        for name in everyones[0]:
            if all(name in theirs for theirs in everyones):  # a rank may have None instead
                self._handlers[name].sync()
        super().sync()

    def reset(self) -> None:
        """Have samplers deal out the rest of the epoch among the present ranks."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()


def handled(value: object) -> StateHandler | None:
    """Return a new handler for a value; None if the value is handled as an object."""
    if shard := shard_of(value):
        raise ValueError(
            f"an elastic state cannot keep {shard.name}: the pieces of a rank that is lost would be lost. Save with "
            "hvd.save, or attach the optimizer without sharded=True [HVD511]"
        )
    how = handler_for(value)
    return how(cast(Stateful, value)) if how else None
