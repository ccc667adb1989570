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

from collections.abc import Callable, Collection, Sequence
from operator import attrgetter, is_not
from sys import getrefcount

import torch

from hvdlite.arrays import Array
from hvdlite.gradients.use import Use
from hvdlite.torch.attach.slots import ALONE_MAPPED, UNSHARED, Slots, data_ptr, stride, uses
from hvdlite.torch.tensors import to_array

PACK_BYTES, LENT_BYTES = 1 << 20, 256 * 1024
AT_END_BYTES = 128 << 20
"""So much more memory may be in use when backward ends. Of gradients that are more, each is copied when it is there, so
that its memory is free for the next."""
STRIDED = torch.strided
USUAL = STRIDED, False  # by `kind`: dense, and computed without create_graph
gradient, kind = attrgetter("grad"), attrgetter("layout", "requires_grad")


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
        grads: list[torch.Tensor] = []
        for p in added:  # one loop: each comprehension, or function, costs 2-3 us to come to
            index, grad = self.index.get(id(p)), p.grad
            if grad is None or index is None or index in own:
                continue
            if not ended and len(p._post_accumulate_grad_hooks or ()) > 1 and not self.settled(p):
                continue
            fresh.append(index)
            if grad.layout is not STRIDED or grad.requires_grad:  # not as USUAL
                plain = False
            elif grad is not aliases[index] or not slots.holds(index, grad):
                moving.append(index)
                grads.append(grad)
        if not plain:
            return [index for index in fresh if self.take(index) is Use.DENSE and index not in own]
        if moving:
            del grad
            spare = slots.preserve(moving)
            if own and not own.keys().isdisjoint(moving):  # some are users' own from now on
                self.fresh = added
                del spare  # else they would be somebody's
                return self.pack(ended)
            torch._foreach_copy_([slots.views[i] for i in moving], grads)
            for index, alias in zip(moving, spare, strict=True):
                self.parameters[index].grad = alias
        return fresh

    def pack_all(
        self, now: Sequence[torch.Tensor], addresses: list[int], mark: Callable[[dict[int, Array]], None]
    ) -> bool:
        """`pack` where none were noted and backward has ended as it usually does, or else nothing, and False: these are
        the parameters planned, each has a dense gradient that lies elsewhere, and nobody has kept or changed an alias.
        (Asked in loops of C, which behind a backward take less than one of Python's.) now, addresses: what there is,
        and where it was when planned. mark: where there are large ones, told of what is left where it lies, by index;
        the caller has no part of it, for the frames that an error's traceback keeps would make it look like a user's
        own. `hand_over` is to follow."""
        slots, many = self.slots, len(self.parameters)
        if self.singly or slots.own or not many or len(now) != many or any(map(is_not, now, self.parameters)):
            return False
        grads, aliases = list(map(gradient, now)), slots.aliases
        try:
            if list(map(kind, grads)) != self.usual:
                return False
        except AttributeError:  # there is none of some
            return False
        if not (
            list(map(data_ptr, now)) == addresses
            and list(map(uses, slots.numbers)).count(UNSHARED) == many
            and list(map(getrefcount, aliases)).count(ALONE_MAPPED) == many  # nor are they in `grads`
            and list(map(data_ptr, aliases)) == slots.addresses
            and list(map(stride, aliases)) == slots.strides
        ):
            return False
        if not self.large:
            torch._foreach_copy_(slots.views, grads)
            return True
        if self.small:
            torch._foreach_copy_([slots.views[i] for i in self.small], [grads[i] for i in self.small])
        found = ((index, large.copy(grads[index])) for index, large in self.large.items())
        mark({index: rest for index, rest in found if rest is not None})
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
