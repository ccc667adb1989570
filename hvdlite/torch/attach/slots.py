"""Where the gradients of a plan's parameters lie for the peers, and what users have of that.

Users may keep gradients, or have made them. Such a gradient keeps its values. To find out, hvdlite counts who has each
tensor and its memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from operator import gt
from sys import getrefcount

import torch

from hvdlite.arrays import Array
from hvdlite.system.user_warnings import warn
from hvdlite.torch.private_api import overlaps_itself, storage_number, storage_uses, version
from hvdlite.torch.tensors import to_tensor

data_ptr, stride = torch.Tensor.data_ptr, torch.Tensor.stride


def holders(p: torch.Tensor) -> tuple[int, int]:
    """How many have p.grad, and how many have its memory (`p.grad.detach()`, a part of a flat buffer)."""
    grad = p.grad
    assert grad is not None
    return getrefcount(grad), storage_uses(storage_number(grad.untyped_storage()))


_alone = [torch.empty(0)]
_storage = _alone[0].untyped_storage()
ALONE = getrefcount(_alone[0])
"""The count of references to a tensor that only a list has."""
(ALONE_MAPPED,) = map(getrefcount, _alone)
"""The same count, where `map` takes the tensor from the list."""
UNSHARED = storage_uses(storage_number(_storage))
"""The uses of a storage that one tensor has, and Python."""
_parameter = torch.nn.Parameter(torch.empty(0))
_parameter.grad = torch.empty(0)
NOBODY = holders(_parameter)
"""The `holders` of a gradient that only its parameter has."""


class Slots:
    """For each parameter a view of the peers' memory, which nobody else has, and an alias of the view to be p.grad.

    An alias has a storage of its own. What users make of an alias (p.grad.data = ..., model.share_memory()) may have it
    point elsewhere: then another alias takes its place. The gradients in `own` stay the tensors that they are, and
    results are copied into them.

    arrays: the memory, in the shapes of the parameters. strides: the strides in which each is used, all of it.
    """

    def __init__(self, arrays: Sequence[Array], strides: Sequence[tuple[int, ...]]) -> None:
        self.arrays, self.strides = arrays, strides
        self.views = [self.tensor(index) for index in range(len(arrays))]
        self.aliases = [self.tensor(index) for index in range(len(arrays))]
        self.addresses = [view.data_ptr() for view in self.views]
        self.storages = [alias.untyped_storage() for alias in self.aliases]
        self.numbers = list(map(storage_number, self.storages))
        """Those of the storages, as long as these live."""
        self.own: dict[int, torch.Tensor | None] = {}
        """Users' own gradients, by index: what was taken in this round."""

    def tensor(self, index: int) -> torch.Tensor:
        """Of this memory, and of no other tensor's storage."""
        made, strides = to_tensor(self.arrays[index]), self.strides[index]
        return made if made.stride() == strides else made.as_strided(made.shape, strides).detach()  # without its base

    def holds(self, index: int, grad: torch.Tensor) -> bool:
        """Whether this gradient lies there."""
        return grad is self.aliases[index] and self.alias(index) is grad

    def preserve(self, indices: Iterable[int]) -> None:
        """The views of gradients that lie elsewhere are about to be written. Where a user has kept the alias that was
        handed out (`before = p.grad`, `p.grad.detach()`), its values move to other memory, and the user is believed to
        keep the next one, too."""
        for index in indices:  # calls nothing of Python's as long as nobody has
            alias = self.aliases[index]
            shared = storage_uses(self.numbers[index]) > UNSHARED
            if shared or getrefcount(alias) > ALONE + 1:  # we have it, too
                self.own[index] = None
                move(alias, self.arrays[index], shared)
                self.renew(index)
            elif alias.data_ptr() != self.addresses[index] or alias.stride() != self.strides[index]:
                self.renew(index)

    def alias(self, index: int) -> torch.Tensor:
        """The view, for users."""
        alias = self.aliases[index]
        if alias.data_ptr() != self.addresses[index] or alias.stride() != self.strides[index]:
            alias = self.renew(index)
        return alias

    def renew(self, index: int) -> torch.Tensor:
        """Another alias takes the place of one that is somebody else's now."""
        alias = self.aliases[index] = self.tensor(index)
        self.storages[index] = alias.untyped_storage()
        self.numbers[index] = storage_number(self.storages[index])
        return alias

    def note_own(self, parameters: Sequence[torch.Tensor], first: torch.Tensor | None = None) -> None:
        """A backward begins, or has just begun: gradients that there were already, and that somebody has besides the
        parameter (a list, a flat buffer), are to become the results. first: the parameter that autograd has accumulated
        into: where its gradient was there, that has changed."""
        for index, p in enumerate(parameters):
            grad = p.grad
            if grad is None or grad is self.aliases[index] or index in self.own:
                continue
            if grad.layout is not torch.strided or grad.requires_grad:  # part of a graph
                continue
            if p is first and not grad.is_inference() and version(grad) == 0:
                continue
            del grad
            if any(map(gt, holders(p), NOBODY)) and can_be_own(p):
                self.own[index] = None

    def untouched(self) -> bool:
        """Whether nobody has kept an alias, or had it point elsewhere. By loops of C, which are quick where caches are
        cold."""
        many = len(self.aliases)
        return (
            list(map(storage_uses, self.numbers)).count(UNSHARED) == many
            and list(map(getrefcount, self.aliases)).count(ALONE_MAPPED) == many
            and list(map(data_ptr, self.aliases)) == self.addresses
            and list(map(stride, self.aliases)) == self.strides
        )

    def note_taken(self, index: int, grad: torch.Tensor) -> None:
        """Results are to be copied into this gradient of a user's."""
        self.own[index] = grad

    def forget_taken(self) -> None:
        """The round is over. The same gradients are believed to be users' own in the next."""
        self.own = dict.fromkeys(self.own)

    def handed_over(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """What becomes p.grad once this gradient has been copied into its view."""
        if self.own and index in self.own and not grad.requires_grad:
            self.note_taken(index, grad)
            return grad
        return self.alias(index)


def move(alias: torch.Tensor, memory: Array, shared: bool) -> None:
    """Give whoever has this tensor, or its storage (`shared`), other memory with the same values."""
    for each in (alias, alias.untyped_storage()):  # their .numpy() still lies in this
        each._hvdlite = memory  # type: ignore[union-attr]
    before = alias.data_ptr()
    if shared:
        with contextlib.suppress(RuntimeError, OSError):  # it takes a file's descriptor, and room in /dev/shm
            alias.untyped_storage().share_memory_()  # all that torch offers to change a storage itself; not on a GPU
    if alias.data_ptr() == before and alias.numel():
        alias.data = alias.clone()  # which graphs that have saved it take for the same tensor
        if shared:
            warn("the values of a gradient that was kept (p.grad.detach()) are lost, this once: clone it")


def can_be_own(p: torch.Tensor) -> bool:
    """Whether results can be written into p.grad, an ordinary one: not where elements share memory."""
    grad = p.grad
    assert grad is not None
    return not grad.is_inference() and not overlaps_itself(grad)
