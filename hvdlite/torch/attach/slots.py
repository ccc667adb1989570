"""The places of gradients in memory that other ranks read, and the tensors that users have on it.

    view     a gradient's place, as a tensor that only hvdlite keeps
    alias    another tensor on the same memory, with a storage of its own; it becomes p.grad
    own      gradients that users keep besides the parameter: such a gradient stays the same tensor

A gradient that a user has kept must not change its values. hvdlite finds such gradients by counting the references to
each tensor and to its storage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from operator import gt
from sys import getrefcount

import torch

from hvdlite.arrays import Array
from hvdlite.system.user_warnings import warn
from hvdlite.torch.attach.part import Parts
from hvdlite.torch.private_api import overlaps_itself, storage_number, storage_uses, version
from hvdlite.torch.tensors import to_tensor

data_ptr, stride = torch.Tensor.data_ptr, torch.Tensor.stride


def holders(p: torch.Tensor) -> tuple[int, int]:
    """Return the number of references to p.grad, and to its storage (`p.grad.detach()`, a part of a flat buffer)."""
    grad = p.grad
    assert grad is not None
    return getrefcount(grad), storage_uses(storage_number(grad.untyped_storage()))


_alone = [torch.empty(0)]
_storage = _alone[0].untyped_storage()
ALONE = getrefcount(_alone[0])
"""The number of references to a tensor that only a list has."""
(ALONE_MAPPED,) = map(getrefcount, _alone)
"""The same number, counted by `map` over the list."""
UNSHARED = storage_uses(storage_number(_storage))
"""The number of references to a storage that one tensor and one Python object have."""
_parameter = torch.nn.Parameter(torch.empty(0))
_parameter.grad = torch.empty(0)
NOBODY = holders(_parameter)
"""The `holders` of a gradient that only its parameter has."""


class Slots:
    """The views and aliases of one plan's gradients, by index of the parameter.

    Users may let an alias point to other memory (p.grad.data = ..., model.share_memory()). Another alias then takes its
    place. Results are copied into the gradients in `own`.

    Attributes:
        arrays: The memory of each gradient, in the shape of its parameter.
        strides: The strides of each view. A view covers all of its memory.
        parts: This rank's pieces, if it has no whole results: aliases then are `PartOfGradient`.
        views: The views.
        aliases: The aliases.
        addresses: Where the views lie.
        storages: The aliases' storages.
        numbers: torch's numbers of these storages.
        own: Users' own gradients. The value is the tensor that was copied in this round, or None.
    """

    def __init__(
        self,
        arrays: Sequence[Array],
        strides: Sequence[tuple[int, ...]],
        parts: Parts | None = None,
    ) -> None:
        self.arrays, self.strides, self.parts = arrays, strides, parts
        self.views = [self.tensor(index) for index in range(len(arrays))]
        self.aliases = [self.new_alias(index) for index in range(len(arrays))]
        self.addresses = [view.data_ptr() for view in self.views]
        self.storages = [alias.untyped_storage() for alias in self.aliases]
        self.numbers = list(map(storage_number, self.storages))
        self.own: dict[int, torch.Tensor | None] = {}

    def tensor(self, index: int) -> torch.Tensor:
        """Return a new tensor on a gradient's memory, with a storage of its own."""
        made, strides = to_tensor(self.arrays[index]), self.strides[index]
        return made if made.stride() == strides else made.as_strided(made.shape, strides).detach()  # without its base

    def new_alias(self, index: int) -> torch.Tensor:
        """Return another alias."""
        made = self.tensor(index)
        return self.parts.of(index, made) if self.parts else made

    def holds(self, index: int, grad: torch.Tensor) -> bool:
        """Whether this gradient is the alias, and lies in the view's memory."""
        return grad is self.aliases[index] and self.alias(index) is grad

    def preserve(self, indices: Iterable[int]) -> None:
        """Save the aliases that users have kept, before other gradients are copied into these views.

        An alias that a user has kept (`before = p.grad`, `p.grad.detach()`) moves to other memory with its values.
        hvdlite then assumes that the user keeps the next gradient as well.
        """
        for index in indices:  # calls no Python function unless a user has kept an alias
            alias = self.aliases[index]
            shared = storage_uses(self.numbers[index]) > UNSHARED
            if shared or getrefcount(alias) > ALONE + 1:  # the variable `alias` is a reference, too
                if self.parts is None:  # otherwise nobody can read it
                    self.own[index] = None
                    move(alias, self.arrays[index], shared)
                self.renew(index)
            elif alias.data_ptr() != self.addresses[index] or alias.stride() != self.strides[index]:
                self.renew(index)

    def alias(self, index: int) -> torch.Tensor:
        """Return the alias of a view, a new one if the last one points elsewhere."""
        alias = self.aliases[index]
        if alias.data_ptr() != self.addresses[index] or alias.stride() != self.strides[index]:
            alias = self.renew(index)
        return alias

    def renew(self, index: int) -> torch.Tensor:
        """Make and return another alias. The last one belongs to a user now."""
        alias = self.aliases[index] = self.new_alias(index)
        self.storages[index] = alias.untyped_storage()
        self.numbers[index] = storage_number(self.storages[index])
        return alias

    def note_own(self, parameters: Sequence[torch.Tensor], first: torch.Tensor | None = None) -> None:
        """A backward() begins: find gradients from before it that a user keeps (in a list, in a flat buffer).

        These gradients will receive the results.

        Args:
            parameters: The plan's parameters.
            first: The parameter whose gradient autograd has just added to, or made; None if no backward() is under
                way.
        """
        for index, p in enumerate(parameters):
            grad = p.grad
            if grad is None or grad is self.aliases[index] or index in self.own:
                continue
            if grad.layout is not torch.strided or grad.requires_grad:  # part of a graph
                continue
            if p is first and not grad.is_inference() and version(grad) == 0:  # made by this backward()
                continue
            del grad
            if any(map(gt, holders(p), NOBODY)) and can_be_own(p):
                self.own[index] = None

    def untouched(self) -> bool:
        """Whether no user has kept an alias, or let it point elsewhere. The loops run in C, which is quick."""
        many = len(self.aliases)
        return (
            list(map(storage_uses, self.numbers)).count(UNSHARED) == many
            and list(map(getrefcount, self.aliases)).count(ALONE_MAPPED) == many
            and list(map(data_ptr, self.aliases)) == self.addresses
            and list(map(stride, self.aliases)) == self.strides
        )

    def note_taken(self, index: int, grad: torch.Tensor) -> None:
        """Have the result copied into this gradient of a user's at the end of the round."""
        self.own[index] = grad

    def forget_taken(self) -> None:
        """The round is over. hvdlite assumes that users keep the same gradients in the next round."""
        self.own = dict.fromkeys(self.own)

    def handed_over(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """Return what becomes p.grad, once this gradient has been copied into its view."""
        if self.own and index in self.own and not grad.requires_grad:
            self.note_taken(index, grad)
            return grad
        return self.alias(index)


def move(alias: torch.Tensor, memory: Array, shared: bool) -> None:
    """Give an alias that a user has kept other memory with the same values.

    Args:
        alias: The alias.
        memory: The present memory. The user may have a NumPy array on it, so the alias keeps it.
        shared: Whether another tensor uses the alias's storage: then the storage itself gets other memory.
    """
    for each in (alias, alias.untyped_storage()):
        each._hvdlite = memory  # type: ignore[union-attr]
    before = alias.data_ptr()
    if shared:
        with contextlib.suppress(RuntimeError, OSError):  # it needs a file descriptor, and room in /dev/shm
            alias.untyped_storage().share_memory_()  # torch's only way to move a storage; not possible on a GPU
    if alias.data_ptr() == before and alias.numel():
        alias.data = alias.clone()  # graphs that have saved the alias accept it as the same tensor
        if shared:
            warn("the values of a gradient that was kept (p.grad.detach()) are lost, this once: clone it")


def can_be_own(p: torch.Tensor) -> bool:
    """Whether results can be written into p.grad, a dense gradient: not if its elements share memory."""
    grad = p.grad
    assert grad is not None
    return not grad.is_inference() and not overlaps_itself(grad)
