"""Copying gradients into their slots: small ones several at a time, by one call.

A hook runs between two operators of backward, with everything cold that it needs, so each line of Python in it costs
up to a microsecond, ten times what it costs in a loop. So a hook only notes its gradient, and what there is to ask of
each is asked when several are copied: a megabyte of them, which the cache still has.

Where there are no more small ones than that, and nothing leaves before backward ends, none need be noted: all are
looked at then; where each is as usual, by loops that C code runs. (A CNN with 18 gradients: 0.53 ms per step more than
without hvdlite instead of 0.60, medians of five runs in turns; with those loops a tenth less.) Of large ones only what
peers add up is copied then: see `Bucket`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import repeat
from operator import attrgetter, gt, is_
from sys import getrefcount

import torch

from hvdlite.arrays import Array
from hvdlite.reducer import Use
from hvdlite.torch._tensors import to_array, to_tensor
from hvdlite.warned import warn

PACK_BYTES, LENT_BYTES = 1 << 20, 256 * 1024
AT_END_BYTES = 128 << 20
"""So much more memory may be in use when backward ends. Of gradients that are more, each is copied when it is there, so
that its memory is free for the next."""
STRIDED = torch.strided
USUAL = STRIDED, False  # by `kind`: see `ordinary`
gradient, kind = attrgetter("grad"), attrgetter("layout", "requires_grad")
data_ptr, stride = torch.Tensor.data_ptr, torch.Tensor.stride
OVERLAP = 1  # at::MemOverlap::Yes
uses = torch._C._storage_Use_Count


def holders(p: torch.Tensor) -> tuple[int, int]:
    """How many have p.grad, and how many its memory (`p.grad.detach()`, a part of a flat buffer)."""
    grad = p.grad
    assert grad is not None
    return getrefcount(grad), uses(grad.untyped_storage()._cdata)


_alone = [torch.empty(0)]
_storage = _alone[0].untyped_storage()
ALONE = getrefcount(_alone[0])  # of a tensor that only a list has
(ALONE_MAPPED,) = map(getrefcount, _alone)
UNSHARED = uses(_storage._cdata)  # of a storage that one tensor has, and we
_parameter = torch.nn.Parameter(torch.empty(0))
_parameter.grad = torch.empty(0)
NOBODY = holders(_parameter)


class Slots:
    """Where gradients lie for the peers: views that nobody else has; where results come, which is the same memory, or
    other; and an alias of each result to be p.grad, with a storage of its own. What users make of an alias (p.grad.data
    = ..., model.share_memory()) may have it point elsewhere: then another takes its place.

    Users may keep gradients, or have made them. Those of `own` stay what they are, and results are copied into them.

    sent, arrays: the memory of both, in the shapes of the parameters. strides: those in which each is used, all of it.
    """

    def __init__(self, sent: Sequence[Array], arrays: Sequence[Array], strides: Sequence[tuple[int, ...]]) -> None:
        self.arrays, self.strides = arrays, strides
        self.results = [self.tensor(index) for index in range(len(arrays))]
        self.apart = sent is not arrays
        self.views = [tensor_of(*each) for each in zip(sent, strides, strict=True)] if self.apart else self.results
        self.aliases = [self.tensor(index) for index in range(len(arrays))]
        self.addresses = [alias.data_ptr() for alias in self.aliases]
        self.storages = [alias.untyped_storage() for alias in self.aliases]
        self.numbers = [storage._cdata for storage in self.storages]  # which torch knows them by
        self.own: dict[int, torch.Tensor | None] = {}
        """By index: what was taken in this round."""

    def tensor(self, index: int) -> torch.Tensor:
        """Of the result's memory, and of no other tensor's storage."""
        return tensor_of(self.arrays[index], self.strides[index])

    def holds(self, index: int, grad: torch.Tensor) -> bool:
        """Whether this gradient lies where its result comes."""
        return grad is self.aliases[index] and self.alias(index) is grad

    def send(self, indices: Sequence[int]) -> None:
        """What lies where results come is to be sent."""
        if self.apart and indices:
            torch._foreach_copy_([self.views[i] for i in indices], [self.results[i] for i in indices])

    def keep(self, indices: Sequence[int]) -> None:
        """What is to be sent lies where results come, too: whoever looks at an alias before finds it."""
        if self.apart and indices:
            torch._foreach_copy_([self.results[i] for i in indices], [self.views[i] for i in indices])

    def preserve(self, indices: Iterable[int]) -> list[torch.Tensor]:
        """The views of gradients that lie elsewhere are about to be written: who has kept one that was handed out
        (`before = p.grad`, `p.grad.detach()`) goes on to have its values, in other memory, and is believed to do so
        again. Returns the aliases, one for each."""
        found = []
        for index in indices:  # calls nothing of Python's as long as nobody has
            alias = self.aliases[index]
            shared = uses(self.numbers[index]) > UNSHARED
            if shared or getrefcount(alias) > ALONE + 1:  # we have it, too
                self.own[index] = None
                move(alias, self.arrays[index], shared)
                alias = self.renew(index)
            elif alias.data_ptr() != self.addresses[index] or alias.stride() != self.strides[index]:
                alias = self.renew(index)
            found.append(alias)
        return found

    @property
    def untouched(self) -> bool:
        """Whether nobody has kept an alias, nor made anything else of it. Of all in four loops of C, which behind a
        backward take less than one of Python's."""
        return (
            list(map(uses, self.numbers)).count(UNSHARED) == len(self.numbers)
            and list(map(getrefcount, self.aliases)).count(ALONE_MAPPED) == len(self.aliases)
            and list(map(data_ptr, self.aliases)) == self.addresses
            and list(map(stride, self.aliases)) == self.strides
        )

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
        self.numbers[index] = self.storages[index]._cdata
        return alias

    def note_own(self, parameters: Sequence[torch.Tensor]) -> None:
        """A backward begins, or has just begun: gradients that there are already, and that somebody has besides the
        parameter (a list, a flat buffer), are to become the results."""
        for index, p in enumerate(parameters):
            grad = p.grad
            if grad is None or grad is self.aliases[index] or index in self.own or not ordinary(grad):
                continue
            del grad
            if any(map(gt, holders(p), NOBODY)) and can_be_own(p):
                self.own[index] = None

    def handed_over(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """What becomes p.grad once this gradient has been copied into its view."""
        if self.own and index in self.own and not grad.requires_grad:
            self.own[index] = grad
            return grad
        return self.alias(index)


def tensor_of(array: Array, strides: tuple[int, ...]) -> torch.Tensor:
    made = to_tensor(array)
    return made if made.stride() == strides else made.as_strided(made.shape, strides).detach()  # without its base


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


class Packing:
    """Brings gradients to their views, and the views in the gradients' places.

    take: does it for one parameter. settled: whether a gradient changes no more, asked where a parameter has hooks
    besides ours. urgent: parameters that nothing waits behind. singly: whether each gradient needs `take`; otherwise
    only those do that are sparse or part of a graph. to_lend: of each gradient the elements, from and to, that need not
    be copied where all leave at the end. at_end: whether nothing leaves before backward has ended.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], slots: Slots, take: Callable[[int], Use],
        settled: Callable[[torch.Tensor], bool | None], urgent: Collection[int], singly: bool,
        to_lend: Sequence[tuple[int, int]], at_end: bool = False,
    ) -> None:
        self.parameters, self.slots, self.take, self.settled, self.singly = parameters, slots, take, settled, singly
        self.index = {id(p): index for index, p in enumerate(parameters)}
        parts = zip(slots.views, to_lend, strict=True)
        self.large = {i: Large(view, *part) for i, (view, part) in enumerate(parts)
                      if (part[1] - part[0]) * view.itemsize >= LENT_BYTES}  # fmt: skip
        nbytes = [view.nbytes for view in slots.views]
        small = sum(each for each in nbytes if each <= PACK_BYTES or not self.large)
        self.unnoted = at_end and small <= PACK_BYTES and sum(nbytes) <= AT_END_BYTES
        """Whether none need be added, since all are looked at when backward has ended."""
        self.small = [index for index in range(len(parameters)) if index not in self.large]
        weights = [PACK_BYTES if index in urgent else view.nbytes for index, view in enumerate(slots.views)]
        self.weights = dict(zip(self.index, weights, strict=True))
        self.usual = [USUAL] * len(parameters)
        self.forget()

    def forget(self) -> None:
        """What was added stays where it is."""
        self.fresh: list[torch.Tensor] = []
        self.waiting = 0  # the weight of what is fresh

    def add(self, p: torch.Tensor) -> bool:
        """Its gradient has been computed. Whether what is fresh is so much that it is to be packed now."""
        self.fresh.append(p)
        self.waiting += self.weights.get(id(p), 0)
        return self.waiting >= PACK_BYTES

    def pack(self, ended: bool = False) -> list[int]:
        """Pack what is fresh, but users' own, which are taken when backward ends: until then hooks may change them,
        which no view of them shows. ended: whether it has, so that no hook is to come. Returns what lies in its view
        now, by index."""
        slots, aliases, own = self.slots, self.slots.aliases, self.slots.own
        added = [*reversed(self.parameters)] if ended and self.unnoted else self.fresh
        self.forget()
        plain = not self.singly
        fresh: list[int] = []
        moving: list[int] = []
        there: list[int] = []
        grads: list[torch.Tensor] = []
        for p in added:  # one loop: each comprehension, or function, costs 2-3 us to come to
            index, grad = self.index.get(id(p)), p.grad
            if grad is None or index is None or index in own:
                continue
            if not ended and len(p._post_accumulate_grad_hooks or ()) > 1 and not self.settled(p):
                continue
            fresh.append(index)
            if grad.layout is not STRIDED or grad.requires_grad:  # not `ordinary`
                plain = False
            elif grad is not aliases[index] or not slots.holds(index, grad):
                moving.append(index)
                grads.append(grad)
            else:
                there.append(index)
        if not plain:
            return [index for index in fresh if self.take(index) is Use.DENSE and index not in own]
        slots.send(there)
        if moving:
            del grad
            spare = slots.preserve(moving)
            if own and not own.keys().isdisjoint(moving):  # some are users' own from now on
                self.fresh = added
                del spare  # else they would be somebody's
                return self.pack(ended)
            torch._foreach_copy_([slots.views[i] for i in moving], grads)
            slots.keep(moving)
            for index, alias in zip(moving, spare, strict=True):
                self.parameters[index].grad = alias
        return fresh

    def pack_all(self, mark: Callable[[dict[int, Array]], None]) -> bool:
        """`pack` where none were noted and backward has ended as it usually does, or else nothing, and False: every
        parameter has a dense gradient that lies elsewhere, and nobody another. mark: told of what is left where it
        lies, by index; the caller has no part of it, for the frames that an error's traceback keeps would make it look
        like a user's own. `hand_over` is to follow."""
        slots, grads = self.slots, list(map(gradient, self.parameters))
        if (
            not grads or self.singly or slots.own or any(map(is_, grads, repeat(None)))
            or list(map(kind, grads)) != self.usual or not slots.untouched  # nor are those in `grads`
        ):  # fmt: skip
            return False
        lent: dict[int, Array] = {}
        if not self.large:
            torch._foreach_copy_(slots.views, grads)
        else:
            if self.small:
                torch._foreach_copy_([slots.views[i] for i in self.small], [grads[i] for i in self.small])
            found = ((index, large.copy(grads[index])) for index, large in self.large.items())
            lent = {index: rest for index, rest in found if rest is not None}
        mark(lent)
        return True

    def hand_over(self) -> None:
        """What is in the views takes the gradients' places: behind `pack_all`, once it is reduced."""
        for p, alias in zip(self.parameters, self.slots.aliases, strict=True):
            p.grad = alias


class Large:
    """A view of which some elements, from start to stop in memory, need not be copied."""

    def __init__(self, view: torch.Tensor, start: int, stop: int) -> None:
        self.view, self.part = view, slice(start, stop)
        flat = view.as_strided((view.numel(),), (1,))
        self.others = [(each, flat[each]) for each in (slice(start), slice(stop, None)) if flat[each].numel()]

    def copy(self, grad: torch.Tensor) -> Array | None:
        """Copy the gradient but for these, which are returned; or all of it, where it lies otherwise in memory."""
        view = self.view
        odd = type(grad) is not torch.Tensor or grad.is_neg() or grad.is_conj() or grad._is_zerotensor()
        if odd or grad.dtype != view.dtype or grad.stride() != view.stride():
            view.copy_(grad)
            return None
        flat = grad.as_strided((grad.numel(),), (1,))
        for each, there in self.others:
            there.copy_(flat[each])
        return to_array(flat[self.part])


def can_be_own(p: torch.Tensor) -> bool:
    """Whether results can be written into p.grad, an ordinary one: not where elements share memory."""
    grad = p.grad
    assert grad is not None
    return not grad.is_inference() and torch._debug_has_internal_overlap(grad) != OVERLAP


def ordinary(grad: torch.Tensor) -> bool:
    """Dense, and computed without create_graph."""
    return grad.layout is torch.strided and not grad.requires_grad
