"""`TorchState`: what has a `state_dict`, by a handler of its kind, and any other attribute as an object."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from hvdlite.elastic import ObjectState
from hvdlite.job import runtime
from hvdlite.ops.objects import allgather_object, broadcast_object
from hvdlite.torch.attach.attachment import Attachment
from hvdlite.torch.elastic.sampler import ElasticSampler
from hvdlite.torch.functions import broadcast_optimizer_state, broadcast_parameters


class StateHandler:
    """Saves, restores and synchronizes one value that has a `state_dict`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def set_value(self, value: Any) -> None:
        """Handle this one from now on, and save it."""
        self.value = value
        self.save()

    def save(self) -> None:
        self.saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def sync(self) -> None:
        """Give rank 0's to all ranks, and save it. Collective."""
        self.broadcast()
        self.save()

    def broadcast(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), root_rank=0))


class TrainedStateHandler(StateHandler):
    """One with gradients, which belong to the step that is taken back."""

    def restore(self) -> None:
        super().restore()
        self.value.zero_grad(set_to_none=True)


class ModelStateHandler(TrainedStateHandler):
    """A module's parameters and buffers."""

    def broadcast(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(TrainedStateHandler):
    """An optimizer's state and options."""

    def restore(self) -> None:
        super().restore()
        if isinstance(attached := vars(self.value).get("_hvdlite"), Attachment):
            attached.forget_passes()

    def broadcast(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateHandler):
    """How far an epoch has come. (Loading it deals out the rest anew.)"""


Registry = list[tuple[type, type[StateHandler]]]
_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """Which type is handled how; the first that fits counts."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Handle values so in states made from now on."""
    global _registry
    _registry = registry


def handler_for(value: Any) -> type[StateHandler] | None:
    """How this value is handled; None: as an object."""
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    usual = StateHandler if all(map(callable, methods)) and not isinstance(value, type) else None
    return next((how for kind, how in _registry if isinstance(value, kind)), usual)


def refuse_containers(given: Mapping[str, Any]) -> None:
    """Raise ValueError for models and optimizers in lists and dictionaries, which would be copied and not restored."""
    for name, value in given.items():
        several = value.values() if isinstance(value, Mapping) else value
        members = several if isinstance(value, Mapping | list | tuple | set) else ()
        if any(isinstance(member, torch.nn.Module | torch.optim.Optimizer) for member in members):
            raise ValueError(
                f"{name}= is a {type(value).__name__} with models or optimizers in it, which would be copied and not "
                "taken back: give each by a name of its own, TorchState(generator=g, critic=c)"
            )


class TorchState(ObjectState):
    """A model, an optimizer, and whatever else is given by name: `TorchState(model, optimizer, epoch=0, batch=0)`.

    What has a `state_dict` and a `load_state_dict` (modules, optimizers, ElasticSamplers, learning-rate schedulers,
    GradScalers) stays the same object: it is saved by a deep copy of its state, at construction, `save` and `sync`, and
    whenever the attribute is set to another object; `sync` gives rank 0's present ones to all ranks, and `restore` lets
    go of gradients. Anything else is an attribute of an `ObjectState`. Raises ValueError for models and optimizers in a
    list or a dictionary.
    """

    _handlers: dict[str, StateHandler]

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        refuse_containers(given)
        kinds = {name: handler_for(value) for name, value in given.items()}
        object.__setattr__(self, "_handlers", {name: how(given[name]) for name, how in kinds.items() if how})
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
            handler.save()
        plain = {name: value for name, value in given.items() if name not in self._handlers}
        super().__init__(broadcast_object, runtime.rank, **plain)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            if handler_for(value):
                self._handlers[name].set_value(value)
            else:  # None: from now on it is an object like others
                del self._handlers[name]
                self._saved_state[name] = value
        super().__setattr__(name, value)

    def _set_attributes(self) -> None:
        """But for what has a handler here: rank 0 may have None in its place."""
        self._saved_state = {name: value for name, value in self._saved_state.items() if name not in self._handlers}
        super()._set_attributes()

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        everyones = allgather_object(list(self._handlers))
        for name in everyones[0]:
            if all(name in theirs for theirs in everyones):  # a rank may have None in its place
                self._handlers[name].sync()
        super().sync()

    def reset(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()
