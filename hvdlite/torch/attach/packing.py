"""How gradients are copied into their views: several small ones by one call.

There are two cases. A hook notes each gradient (`add`) if buckets leave early, if small gradients exceed 1 MiB
together, or if all gradients exceed 128 MiB. (Where no gradient is lent, all count as small.) Once the noted gradients
make a megabyte, `pack` copies them, while they are still in the cache. Otherwise no hook notes a gradient, and
`pack_rest` copies all gradients when the backward() ends. Of a large gradient `pack_rest` copies only the part that
other ranks read, and lends the other part: see `gradients/bucket.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

import torch

from hvdlite.arrays import Array
from hvdlite.gradients.use import Use
from hvdlite.torch.attach.slots import Slots
from hvdlite.torch.private_api import copy_all, hooks_after_accumulation, is_zero_tensor
from hvdlite.torch.tensors import to_array

PACK_BYTES, LENT_BYTES = 1 << 20, 256 * 1024
AT_END_BYTES = 128 << 20
"""How much memory unpacked gradients may hold when a backward() ends. If gradients are larger together, each is copied
as it comes, so that its memory is free for the next one."""
STRIDED = torch.strided
USUAL = STRIDED, False
"""The `kind` of a dense gradient that was computed without create_graph."""
gradient, kind = attrgetter("grad"), attrgetter("layout", "requires_grad")
Mark: TypeAlias = Callable[[Sequence[int], Mapping[int, Array]], None]
"""Receives the indices of packed gradients, and by index the elements that are lent instead of copied."""


NOTHING_LENT: Mapping[int, Array] = {}


@dataclass(frozen=True)
class Way:
    """How the gradients of a plan are packed.

    Attributes:
        take: Brings one gradient to its view, by index, and returns what the gradient was.
        settled: Whether a gradient will not change any more. Called if a parameter has hooks besides hvdlite's.
        singly: Whether every gradient needs `take`. Otherwise only sparse gradients and parts of a graph do.
        urgent: The gradients that complete a bucket, by index.
        to_lend: The elements of each gradient, from and to, that can be lent if all buckets leave at the end.
        at_end: Whether no bucket leaves before the backward() ends.
    """

    take: Callable[[int], Use]
    settled: Callable[[torch.Tensor], bool | None]
    singly: bool = False
    urgent: Collection[int] = ()
    to_lend: Sequence[tuple[int, int]] = ()
    at_end: bool = False


class Packing:
    """Copies the gradients of a plan into their views, and makes the aliases p.grad.

    Attributes:
        parameters: The plan's parameters.
        way: How their gradients are packed.
        slots: The views and aliases.
        index: The place of each parameter in the plan, by id().
        large: The gradients that are lent in part, by index.
        at_end: Whether no hook notes gradients, and `pack_rest` packs all of them.
        weights: How much each gradient counts toward the next `pack`, by id() of the parameter; mostly its bytes.
        all: The indices of all gradients.
        moved: The indices of the gradients that `hand_over` replaces.
        fresh: The parameters whose gradients were noted since the last `pack`.
        waiting: The weight of these.
    """

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
        weights = [PACK_BYTES if index in way.urgent else view.nbytes for index, view in enumerate(slots.views)]
        self.weights = dict(zip(self.index, weights, strict=True))
        self.all = range(len(parameters))
        self.moved: Sequence[int] = ()
        self.forget()

    def forget(self) -> None:
        """Forget the noted gradients, which stay where they are."""
        self.fresh: list[torch.Tensor] = []
        self.waiting = 0

    def add(self, p: torch.Tensor) -> bool:
        """Note that a gradient has been computed. Returns whether the noted gradients are enough for `pack`."""
        self.fresh.append(p)
        self.waiting += self.weights.get(id(p), 0)
        return self.waiting >= PACK_BYTES

    def pack(self, ended: bool = False) -> list[int]:
        """Pack the noted gradients, and return the indices of those that are in their views now.

        Gradients that users keep are left out. Hooks may change such a gradient until the backward() ends, and the
        view would not change with it.

        Args:
            ended: Whether the backward() has ended, so that no more hooks run.
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
        """The backward() has ended: pack all gradients but those that users keep. `hand_over` follows the reduction.

        Args:
            mark: Receives the result. A returned result would stay in the frames of an error's traceback, and hvdlite
                would take its gradients for gradients that a user keeps.
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
        """Return all gradients if each is dense, none lies in its view, and no user keeps any; otherwise None.

        The loops run in C: they take a fraction of a Python loop's time.
        """
        slots = self.slots
        if self.way.singly or slots.own:
            return None
        grads = list(map(gradient, self.parameters))
        try:
            usual = list(map(kind, grads)).count(USUAL) == len(grads)
        except AttributeError:  # a parameter has no gradient
            return None
        return grads if usual and slots.untouched() else None

    def chosen(self, candidates: Iterable[torch.Tensor], ended: bool) -> tuple[list[int], list[int]]:
        """Choose the gradients of these parameters that are to be reduced.

        Unusual gradients are taken one by one here.

        Returns:
            The indices of the chosen gradients; and of those that are still to be copied into their views.
        """
        slots, way = self.slots, self.way
        plain = not way.singly
        fresh: list[int] = []
        moving: list[int] = []
        for p in candidates:  # one loop, since each further call takes 2-3 us
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
        if slots.own:  # `preserve` may have found more of them
            fresh = [index for index in fresh if index not in slots.own]
            moving = [index for index in moving if index not in slots.own]
        return fresh, moving

    def gradients(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Return p.grad of these parameters."""
        return [gradient(self.parameters[index]) for index in indices]

    def hand_over(self) -> None:
        """Make the aliases p.grad, in place of the gradients that were copied into the views."""
        parameters, aliases = self.parameters, self.slots.aliases
        for index in self.moved:
            parameters[index].grad = aliases[index]
        self.moved = ()


class Large:
    """A view that needs a copy of only a part of its gradient, since the other part is lent.

    Attributes:
        view: The view.
        part: The elements that are lent, in the order of memory.
        others: The other elements: as slices, and as parts of the view.
    """

    def __init__(self, view: torch.Tensor, start: int, stop: int) -> None:
        self.view, self.part = view, slice(start, stop)
        flat = view.as_strided((view.numel(),), (1,))
        self.others = [(each, flat[each]) for each in (slice(start), slice(stop, None)) if flat[each].numel()]

    def copy(self, grad: torch.Tensor) -> Array | None:
        """Copy the gradient's other elements, and return the lent ones.

        If the gradient lies in memory otherwise than the view, all of it is copied, and None is returned.
        """
        view = self.view
        odd = type(grad) is not torch.Tensor or grad.is_neg() or grad.is_conj() or is_zero_tensor(grad)
        if odd or grad.dtype != view.dtype or grad.stride() != view.stride():
            view.copy_(grad)
            return None
        flat = grad.as_strided((grad.numel(),), (1,))
        for each, there in self.others:
            there.copy_(flat[each])
        return to_array(flat[self.part])
