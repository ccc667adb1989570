"""The copies of gradients into their views: at what time, and by how many calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from hvdlite.gradients.use import Use
from hvdlite.torch.attach import packing as _packing
from hvdlite.torch.attach.packing import PACK_BYTES, Packing, Way
from hvdlite.torch.attach.slots import Slots
from hvdlite.torch.tensors import to_array

SMALL, LARGE = 10, PACK_BYTES // 4


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many gradients each call copied."""
    found: list[int] = []
    copy = torch._foreach_copy_

    def counted(views: list[Any], grads: list[Any]) -> None:
        found.append(len(views))
        copy(views, grads)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    return found


class Computed:
    """Parameters of these lengths with gradients i + 1, and a packing for them."""

    def __init__(self, *lengths: int, take: Callable[[int], Use] | None = None, **kwargs: Any) -> None:
        self.parameters = [torch.zeros(length, requires_grad=True) for length in lengths]
        for i, parameter in enumerate(self.parameters):
            parameter.grad = torch.full_like(parameter, i + 1.0)
        self.views = [torch.zeros(length) for length in lengths]
        self.ready: list[int] = []
        self.kept: list[torch.Tensor] = []
        usual: dict[str, Any] = {"settled": lambda p: True, "to_lend": [(0, 0)] * len(lengths)}
        self.slots = Slots([view.numpy() for view in self.views], [view.stride() for view in self.views])
        self.packing = Packing(self.parameters, self.slots, Way(take or self.refuse, **(usual | kwargs)))

    def refuse(self, index: int) -> Use:
        raise AssertionError(index)

    def add(self, *indices: int) -> None:
        for index in indices:
            if self.packing.add(self.parameters[index]):
                self.pack()

    def pack(self, ended: bool = False) -> None:
        self.ready += self.packing.pack(ended)

    def pack_rest(self) -> None:
        """As when backward has ended, and all have been reduced."""
        self.packing.pack_rest(lambda indices, lent: self.ready.extend(indices))
        self.packing.hand_over()

    def require(self, *indices: int) -> None:
        """Exactly these have been packed."""
        assert sorted(self.ready) == sorted(indices)
        for i, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            assert self.slots.holds(i, parameter.grad) == (i in indices)
            assert view.eq(i + 1.0 if i in indices else 0.0).all()


def test_small_ones_wait_for_each_other(calls: list[int]) -> None:
    computed = Computed(*[SMALL] * 5)
    computed.add(4, 3, 1)
    computed.require()
    computed.pack()
    computed.require(4, 3, 1)
    computed.pack()
    assert calls == [3]


def test_nothing_waits_behind_much(calls: list[int]) -> None:
    computed = Computed(SMALL, LARGE, SMALL, SMALL)
    computed.add(3, 2)
    computed.require()
    computed.add(1)
    computed.require(1, 2, 3)
    assert calls == [3]


def test_nothing_waits_where_a_bucket_could_leave(calls: list[int]) -> None:
    computed = Computed(*[SMALL] * 4, urgent={2})
    computed.add(3, 2, 1)
    computed.require(3, 2)
    assert calls == [2]


def test_few_are_not_noted_where_all_leave_at_the_end(calls: list[int]) -> None:
    """Those without a gradient are left to whoever asks for them."""
    computed = Computed(*[SMALL] * 4, at_end=True)
    assert computed.packing.at_end
    grad, computed.parameters[2].grad = computed.parameters[2].grad, None
    computed.pack()
    assert not computed.ready
    computed.pack_rest()
    computed.parameters[2].grad = grad
    computed.require(0, 1, 3)
    assert calls == [3]


@pytest.mark.parametrize(("at_end", "length"), [(False, SMALL), (True, LARGE)])
def test_gradients_are_noted_where_some_leave_earlier_or_they_are_much(at_end: bool, length: int) -> None:
    computed = Computed(length, length, at_end=at_end)
    assert not computed.packing.at_end
    computed.add(1)
    computed.pack(ended=True)
    computed.require(1)


def test_a_round_that_was_given_up_leaves_nothing(calls: list[int]) -> None:
    computed = Computed(*[SMALL] * 3)
    computed.add(2)
    computed.packing.forget()
    computed.add(1)
    computed.pack()
    computed.require(1)
    assert calls == [1]


@pytest.mark.parametrize("how", ["singly", "sparse", "graph"])
def test_what_is_not_ordinary_is_taken_one_by_one(how: str, calls: list[int]) -> None:
    taken: list[int] = []

    def take(index: int) -> Use:
        taken.append(index)
        return Use.SPARSE if how == "sparse" and index == 1 else Use.DENSE

    computed = Computed(*[SMALL] * 3, take=take, singly=how == "singly")
    if how == "sparse":
        computed.parameters[1].grad = torch.ones(SMALL).to_sparse()
    elif how == "graph":
        computed.parameters[1].grad = torch.ones(SMALL, requires_grad=True) * 2
    computed.add(2, 1, 0)
    computed.pack()
    assert taken == [2, 1, 0] and calls == []
    assert computed.ready == ([2, 0] if how == "sparse" else [2, 1, 0])


@pytest.mark.parametrize("change", [
    lambda alias: setattr(alias, "data", torch.ones(3, 3)),
    lambda alias: setattr(alias, "data", alias.data.t()),
    lambda alias: alias.set_(torch.ones(3, 3)),
    lambda alias: alias.share_memory_(),
])  # fmt: skip
def test_an_alias_that_points_elsewhere_is_replaced(change: Callable[[Any], None]) -> None:
    slots = Slots([np.arange(9.0, dtype=np.float32).reshape(3, 3)], [(3, 1)])
    first = slots.alias(0)
    assert slots.alias(0) is first and slots.holds(0, first)
    change(first)
    assert not slots.holds(0, first)
    second = slots.alias(0)
    assert second is not first and torch.equal(second, slots.views[0]) and slots.holds(0, second)


def test_who_keeps_a_gradient_keeps_that_one_only() -> None:
    """The next round, which finds out, neither changes it nor takes the others for kept."""
    computed = Computed(*[SMALL] * 3)
    computed.add(2, 1, 0)
    computed.pack()
    kept = computed.parameters[1].grad
    for i, parameter in enumerate(computed.parameters):
        parameter.grad = torch.full_like(parameter, i + 11.0)
    computed.add(2, 1, 0)
    computed.pack()
    assert kept.eq(2.0).all() and computed.slots.own.keys() == {1}
    assert [view[0].item() for view in computed.views] == [11.0, 2.0, 13.0]  # the kept one's is taken at the end


BIG = PACK_BYTES // 4 + 40  # elements of 4 bytes


def lending(*shapes: tuple[int, ...], to_lend: Any, dtype: Any = torch.float32) -> tuple[Computed, list[Any]]:
    """A packing that lends what is named of these gradients, and the gradients."""
    computed = Computed(at_end=True)
    computed.parameters = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    grads = [torch.arange(1.0, p.numel() + 1).reshape(p.shape).to(dtype) for p in computed.parameters]
    for p, grad in zip(computed.parameters, grads, strict=True):
        p.grad = grad.clone()
    computed.views = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    computed.slots = Slots([to_array(view) for view in computed.views], [view.stride() for view in computed.views])
    way = Way(computed.refuse, lambda p: True, to_lend=to_lend, at_end=True)
    computed.packing = Packing(computed.parameters, computed.slots, way)
    return computed, grads


def lent_by(packing: Packing) -> tuple[list[int], dict[int, Any]]:
    """What is packed when backward has ended, and what of it is left where it lies."""
    found: list[Any] = []
    packing.pack_rest(lambda indices, lent: found.extend([list(indices), dict(lent)]))
    return found[0], found[1]


@pytest.mark.parametrize("part", [(0, BIG - 40), (40, BIG), (20, BIG - 20), (0, BIG)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_a_large_gradient_only_what_others_read_is_copied(part: tuple[int, int], dtype: Any) -> None:
    start, stop = part
    computed, (grad, small) = lending((BIG // 8, 8), (3,), to_lend=[part, (0, 3)], dtype=dtype)
    assert computed.packing.at_end
    given = computed.parameters[0].grad
    packed, lent = lent_by(computed.packing)
    assert packed == [0, 1] and list(lent) == [0]
    assert computed.parameters[0].grad is given and torch.equal(given, grad)  # until it has been reduced
    assert lent[0].tobytes() == to_array(given.view(-1)[start:stop]).tobytes()
    assert lent[0].ctypes.data == given.view(-1)[start:stop].data_ptr()
    grad.view(-1)[start:stop] = 0
    assert torch.equal(computed.views[0], grad) and torch.equal(computed.views[1], small)
    computed.packing.hand_over()
    assert all(computed.slots.holds(i, p.grad) for i, p in enumerate(computed.parameters))


def test_all_gradients_may_be_large() -> None:
    computed, (grad,) = lending((BIG,), to_lend=[(0, BIG)])
    _, lent = lent_by(computed.packing)
    assert lent[0].tobytes() == grad.numpy().tobytes() and computed.views[0].eq(0).all()


@pytest.mark.parametrize("other", [
    lambda grad: grad.t().contiguous().t(),
    lambda grad: torch._neg_view(-grad),
    lambda grad: grad.as_subclass(torch.nn.Buffer),
    lambda grad: torch._efficientzerotensor(grad.shape),  # as torch.sgn's gradient is
])  # fmt: skip
def test_a_large_gradient_that_lies_otherwise_is_copied(other: Callable[[Any], Any]) -> None:
    computed, (grad,) = lending((BIG // 8, 8), to_lend=[(0, BIG)])
    computed.views[0].fill_(7.0)
    computed.parameters[0].grad = made = other(grad)
    assert lent_by(computed.packing) == ([0], {})
    assert torch.equal(computed.views[0], made + 0)


def test_one_may_be_lent_where_another_is_not_as_usual() -> None:
    computed, (grad, _) = lending((BIG,), (3,), to_lend=[(0, BIG), (0, 0)])
    computed.parameters[1].grad = None
    packed, lent = lent_by(computed.packing)
    assert packed == [0] and lent[0].tobytes() == grad.numpy().tobytes()
    assert all(view.eq(0).all() for view in computed.views)
    computed.packing.hand_over()
    assert computed.slots.holds(0, computed.parameters[0].grad) and computed.parameters[1].grad is None


def test_large_ones_of_which_nothing_is_lent_are_copied_as_they_come() -> None:
    """On a GPU, say."""
    assert not lending((BIG,), to_lend=[(0, 0)])[0].packing.at_end
    assert lending((BIG,), (BIG,), to_lend=[(0, 0), (0, BIG)])[0].packing.at_end  # then they may as well wait


def test_much_is_copied_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_packing, "AT_END_BYTES", 4 * BIG)
    assert lending((BIG,), to_lend=[(0, BIG)])[0].packing.at_end
    assert not lending((BIG,), (1,), to_lend=[(0, BIG), (0, 0)])[0].packing.at_end


@pytest.mark.parametrize(("change", "left_out"), [
    (lambda computed: setattr(computed.parameters[1], "grad", None), True),
    (lambda computed: computed.kept.append(computed.slots.aliases[1]), True),
    (lambda computed: computed.kept.append(computed.slots.aliases[1].detach()), True),
    (lambda computed: computed.slots.own.update({1: None}), True),
    (lambda computed: setattr(computed.slots.aliases[1], "data", torch.zeros(3, 3)), False),
    (lambda computed: setattr(computed.slots.aliases[1], "data", computed.slots.aliases[1].detach()[1:]), False),
    (lambda computed: computed.slots.aliases[1].t_(), False),
    (lambda computed: setattr(computed.parameters[1], "grad", computed.slots.aliases[1]), False),
])  # fmt: skip
def test_what_is_not_as_usual_is_looked_at_one_by_one(change: Callable[[Any], Any], left_out: bool) -> None:
    """Users' own, and what nobody has computed, is left to whoever asks for it; a view is written in either case."""
    computed, grads = lending((5,), (3, 3), to_lend=[(0, 0)] * 2)
    assert computed.packing.usual_gradients() is not None
    computed.slots.views[1].fill_(7.0)
    change(computed)
    assert computed.packing.usual_gradients() is None
    packed, lent = lent_by(computed.packing)
    assert sorted(packed) == ([0] if left_out else [0, 1]) and not lent
    assert torch.equal(computed.slots.views[0], grads[0])
    in_place = computed.parameters[1].grad is computed.slots.aliases[1]
    assert in_place or left_out or torch.equal(computed.slots.views[1], grads[1])
    assert all(kept.eq(7.0).all() for kept in computed.kept)
    computed.packing.hand_over()
    assert all(computed.slots.holds(i, computed.parameters[i].grad) for i in packed)


@pytest.mark.parametrize("kind", ["sparse", "graph"])
def test_what_has_another_kind_is_taken_one_by_one_at_the_end(kind: str) -> None:
    taken: list[int] = []
    computed = Computed(*[SMALL] * 3, take=lambda index: taken.append(index) or Use.DENSE, at_end=True)
    other = torch.ones(SMALL).to_sparse() if kind == "sparse" else torch.ones(SMALL, requires_grad=True) * 2
    computed.parameters[1].grad = other
    assert lent_by(computed.packing) == ([2, 1, 0], {}) and taken == [2, 1, 0]
