"""Copying gradients into their slots: small ones several at a time, by one call.

Where buckets leave during backward, or gradients are many, a hook notes each gradient (`add`), and `pack` copies those
noted once they are a megabyte, which the cache still has. Where all leave when backward ends and they are few, no hook
notes anything, and `pack_rest` copies all. Of large gradients it copies only what peers read: see `Bucket`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from hvdlite.arrays import Array
from hvdlite.gradients.use import Use
from hvdlite.torch.attach.slots import Slots
from hvdlite.torch.private_api import copy_all, hooks_after_accumulation, is_zero_tensor
from hvdlite.torch.tensors import to_array

PACK_BYTES, LENT_BYTES = 1 << 20, 256 * 1024
AT_END_BYTES = 128 << 20
"""So much more memory may be in use when backward ends. Of gradients that are more, each is copied when it is there, so
that its memory is free for the next."""
STRIDED = torch.strided
USUAL = STRIDED, False
"""The `kind` of a gradient that is dense, and was computed without create_graph."""
gradient, kind = attrgetter("grad"), attrgetter("layout", "requires_grad")
Mark = Callable[[Sequence[int], Mapping[int, Array]], None]
"""Takes the indices of gradients that are packed, and for some the elements that are lent instead of copied."""


NOTHING_LENT: Mapping[int, Array] = {}


@dataclass(frozen=True)
class Way:
    """How a plan's gradients are packed."""

    take: Callable[[int], Use]
    """Brings one gradient to its view, by index, and says what it was."""
    settled: Callable[[torch.Tensor], bool | None]
    """Whether a gradient changes no more; asked where a parameter has hooks besides hvdlite's."""
    singly: bool = False
    """Every gradient needs `take`; otherwise only those that are sparse or part of a graph."""
    urgent: Collection[int] = ()
    """The gradients with which a bucket may leave, by index."""
    to_lend: Sequence[tuple[int, int]] = ()
    """The elements of each gradient, from and to, that need not be copied where all leave at the end."""
    at_end: bool = False
    """Nothing leaves before backward has ended."""


class Packing:
    """Brings gradients to their views, and the views in the gradients' places."""

    def __init__(self, parameters: Sequence[torch.Tensor], slots: Slots, way: Way) -> None:
        self.parameters, self.way = parameters, way
        self.slots = slots
        self.index = {id(p): index for index, p in enumerate(parameters)}
        parts = zip(slots.views, way.to_lend, strict=True)
        self.large = {i: Large(view, *part) for i, (view, part) in enumerate(parts)
                      if (part[1] - part[0]) * view.itemsize >= LENT_BYTES}  # fmt: skip
        nbytes = [view.nbytes for view in slots.views]
        small = sum(each for each in nbytes if each <= PACK_BYTES or not self.large)
        self.at_end = way.at_end and small <= PACK_BYTES and sum(nbytes) <= AT_END_BYTES
        """Whether nothing is noted, and `pack_rest` packs all."""
        weights = [PACK_BYTES if index in way.urgent else view.nbytes for index, view in enumerate(slots.views)]
        self.weights = dict(zip(self.index, weights, strict=True))
        self.all = range(len(parameters))
        self.moved: Sequence[int] = ()
        """The gradients that `hand_over` is to replace."""
        self.forget()

    def forget(self) -> None:
        """Forget what was noted: it stays where it is."""
        self.fresh: list[torch.Tensor] = []
        self.waiting = 0
        """The weight of what is fresh."""

    def add(self, p: torch.Tensor) -> bool:
        """Note that a gradient has been computed. Returns whether so much is fresh that it is to be packed now."""
        self.fresh.append(p)
        self.waiting += self.weights.get(id(p), 0)
        return self.waiting >= PACK_BYTES

    def pack(self, ended: bool = False) -> list[int]:
        """Pack what is fresh. Returns by index what lies in its view now.

        Users' own gradients are left out: hooks may change them until backward ends, which no view of them shows.
        ended: whether it has, so that no hook is to come.
        """
        fresh = self.fresh
        self.forget()
        packed, moving = self.chosen(fresh, ended)
        if moving:
            copy_all([self.slots.views[i] for i in moving], self.gradients(moving))
            self.moved = moving
            self.hand_over()
        return packed

    def pack_rest(self, mark: Mark) -> None:
        """Pack all gradients that there are, when backward has ended; users' own are left out. `hand_over` is to follow
        once they are reduced.

        mark: takes what is packed and what is lent. The caller has no part of that: the frames that an error's
        traceback keeps would make a gradient look like a user's own.
        """
        grads = self.usual_gradients()
        packed: Sequence[int] = self.all
        moving: Sequence[int] = self.all
        if grads is None:
            packed, moving = self.chosen(reversed(self.parameters), True)
            grads = self.gradients(moving)
        self.moved = moving
        views = self.slots.views if moving is self.all else [self.slots.views[i] for i in moving]
        if not self.large:
            copy_all(views, grads)
            mark(packed, NOTHING_LENT)
            return
        large = self.large
        small = [place for place, i in enumerate(moving) if i not in large]
        copy_all([views[place] for place in small], [grads[place] for place in small])
        lent = ((i, large[i].copy(grad)) for i, grad in zip(moving, grads, strict=True) if i in large)
        mark(packed, {i: rest for i, rest in lent if rest is not None})

    def usual_gradients(self) -> list[torch.Tensor] | None:
        """All gradients, if each is dense, none lies in its view, and none is a user's own or kept; otherwise None. By
        loops of C, which take a fraction of one of Python's where caches are cold."""
        slots = self.slots
        if self.way.singly or slots.own:
            return None
        grads = list(map(gradient, self.parameters))
        try:
            usual = list(map(kind, grads)).count(USUAL) == len(grads)
        except AttributeError:  # some have none
            return None
        return grads if usual and slots.untouched() else None

    def chosen(self, candidates: Iterable[torch.Tensor], ended: bool) -> tuple[list[int], list[int]]:
        """Two lists of indices among these parameters: the gradients that are to be reduced; and the part of them that
        is to be copied into views. Unusual gradients are taken one by one here, and are not to be copied."""
        slots, way = self.slots, self.way
        plain = not way.singly
        fresh: list[int] = []
        moving: list[int] = []
        for p in candidates:  # one loop: each function, or comprehension, costs 2-3 us to come to
            index, grad = self.index.get(id(p)), p.grad
            if grad is None or index is None or index in slots.own:
                continue
            if not ended and len(hooks_after_accumulation(p)) > 1 and not way.settled(p):
                continue
            fresh.append(index)
            if grad.layout is not STRIDED or grad.requires_grad:
                plain = False
            elif grad is not slots.aliases[index] or not slots.holds(index, grad):
                moving.append(index)
        if not plain:
            return [index for index in fresh if way.take(index) is Use.DENSE and index not in slots.own], []
        slots.preserve(moving)
        if slots.own:  # some have turned out to be users' own
            fresh = [index for index in fresh if index not in slots.own]
            moving = [index for index in moving if index not in slots.own]
        return fresh, moving

    def gradients(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """What these parameters have in p.grad."""
        return [gradient(self.parameters[index]) for index in indices]

    def hand_over(self) -> None:
        """What is in the views takes the place of the gradients that were copied there."""
        parameters, aliases = self.parameters, self.slots.aliases
        for index in self.moved:
            parameters[index].grad = aliases[index]
        self.moved = ()


class Large:
    """A view of which some elements, from start to stop in memory, need not be copied."""

    def __init__(self, view: torch.Tensor, start: int, stop: int) -> None:
        self.view, self.part = view, slice(start, stop)
        flat = view.as_strided((view.numel(),), (1,))
        self.others = [(each, flat[each]) for each in (slice(start), slice(stop, None)) if flat[each].numel()]

    def copy(self, grad: torch.Tensor) -> Array | None:
        """Copy the gradient but for these elements, which are returned. Where it lies otherwise in memory, copy all of
        it, and return None."""
        view = self.view
        odd = type(grad) is not torch.Tensor or grad.is_neg() or grad.is_conj() or is_zero_tensor(grad)
        if odd or grad.dtype != view.dtype or grad.stride() != view.stride():
            view.copy_(grad)
            return None
        flat = grad.as_strided((grad.numel(),), (1,))
        for each, there in self.others:
            there.copy_(flat[each])
        return to_array(flat[self.part])
