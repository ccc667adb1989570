"""`Step`: what `optimizer.step` is while the optimizer is sharded.

torch calls an optimizer's hooks around step() in the order of registering, and none after a step() that has raised.
The users' hooks must see whole parameters, and so must the code that catches an error. `Step` therefore keeps our hooks
next to the optimizer's own step, and widens whatever happens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from hvdlite.torch.attach.attachment import Attachment
from hvdlite.torch.private_api import put_next_to_step
from hvdlite.torch.sharded.division import Division
from hvdlite.torch.sharded.shard import Shard
from hvdlite.torch.sharded.states import Loading, refuse_pieces

T = TypeVar("T")


class Step:
    """Calls the optimizer's own step(). Does not keep the optimizer alive.

    It has the attributes of a method (`__self__`, `__func__`), since learning rate schedulers ask for them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, shard: Shard) -> None:
        self.reference = weakref.ref(optimizer)
        own: Callable[..., object] | None = optimizer.__dict__.get("step")  # a scheduler's, made before attaching
        plain: Callable[..., object] = type(optimizer).step
        hooks: tuple[RemovableHandle, RemovableHandle] = (
            optimizer.register_step_pre_hook(shard.before), optimizer.register_step_post_hook(shard.after)
        )  # fmt: skip

        def step(optimizer: torch.optim.Optimizer, *args: object, **kwargs: object) -> object:
            if not shard.enter():  # a subclass's step() has called this one
                return plain(optimizer, *args, **kwargs)
            put_next_to_step(optimizer, *hooks)
            try:
                return own(*args, **kwargs) if own else plain(optimizer, *args, **kwargs)
            except BaseException as error:
                shard.fail(error)
                raise
            finally:
                shard.leave()

        self.__func__ = step
        self.__dict__.update(getattr(own, "__dict__", {}))  # a scheduler's mark that it has seen this method

    @property
    def __self__(self) -> torch.optim.Optimizer | None:
        return self.reference()

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Step this rank's pieces, and give all ranks all pieces. Collective; waits for all ranks."""
        optimizer = self.reference()
        assert optimizer is not None
        return self.__func__(optimizer, *args, **kwargs)


def shard(optimizer: torch.optim.Optimizer, division: Division) -> None:
    """Shard an attached optimizer. Its parameters have been divided."""
    attachment: Attachment = optimizer.__dict__["_hvdlite"]
    found = Shard(attachment, division)
    loading = Loading(found.name, found.division)
    optimizer.register_state_dict_post_hook(found.add_mark)
    optimizer.register_load_state_dict_pre_hook(loading.before)
    optimizer.register_load_state_dict_post_hook(loading.after)
    plain = type(optimizer).__getstate__

    def contents() -> object:
        """Return what a copy or a pickle is made of: neither would know that the state is in pieces."""
        refuse_pieces("copy.deepcopy() or pickle", found.optimizer)
        return plain(found.optimizer)

    optimizer.__dict__.update(step=Step(optimizer, found), _hvdlite_shard=found, __getstate__=contents)
