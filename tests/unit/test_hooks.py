"""Hooks on parameters, and the beginning and end of a backward()."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from hvdlite.torch.attach.backward import Backward
from hvdlite.torch.attach.parameters import Hooks
from hvdlite.torch.private_api import current_run


def test_hooks_are_on_members_alone() -> None:
    """Once, and no longer than their owner lives."""

    class Owner:
        pass

    told, owner = list[torch.Tensor](), Owner()
    hooks = Hooks(owner, told.append)
    kept, left = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    for members in [kept, left], [kept], [kept]:
        hooks.renew(members)
        (kept.sum() + left.sum()).backward()
        assert set(map(id, told)) == set(map(id, members)) and len(told) == len(members)
        told.clear()
    hooks.remove()
    kept.sum().backward()
    assert not told
    hooks.renew([left])
    assert len(left._post_accumulate_grad_hooks) == 1
    del owner
    assert not left._post_accumulate_grad_hooks


class Told:
    """Three parameters with a Backward's hook, and the runs in which it has told of a gradient."""

    def __init__(self) -> None:
        self.runs: list[int] = []
        self.ended = 0
        self.backward = Backward(self.end)
        self.parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
        for p in self.parameters:
            p.register_post_accumulate_grad_hook(self.tell)

    def tell(self, _: torch.Tensor) -> None:
        run = current_run()
        if self.backward.run != run:
            self.runs.append(run)
            if not self.backward.goes_on(run):
                self.backward.begin(run)

    def end(self) -> None:
        self.ended += 1
        self.backward.expect_another()
        self.backward.forget()

    def loss(self) -> torch.Tensor:
        return sum((p.sum() for p in self.parameters), torch.zeros(()))


class Failing(torch.autograd.Function):
    """Behind which a backward has gradients of some parameters and raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("as planned")


class Nested(torch.autograd.Function):
    """Whose backward runs another one, as reentrant checkpointing does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, told: Told) -> torch.Tensor:
        ctx.told = told
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.enable_grad():
            ctx.told.loss().backward()
        return grad, None


def test_a_backward_is_announced_once() -> None:
    told = Told()
    for count in 1, 2:
        told.loss().backward()
        assert len(set(told.runs)) == told.ended == len(told.runs) == count


def test_the_next_one_is_announced_where_a_backward_has_failed() -> None:
    told = Told()
    for count in 1, 2:
        p, *others = told.parameters
        with pytest.raises(ArithmeticError):
            (Failing.apply(p.sum()) + sum(q.mul(2).sum() for q in others)).backward()
        assert len(set(told.runs)) == len(told.runs) == count and not told.ended
    told.loss().backward()
    assert len(told.runs) == 3 and told.ended == 1


@pytest.mark.parametrize("fails", (False, True))
def test_the_next_one_is_announced_behind_a_signal(fails: bool) -> None:
    """Its handler raises once C++ is done: where the backward ends, or, where it has failed by then, behind that. The
    exception, whose frames are kept, keeps no backward under way."""

    def late(*_: Any) -> None:
        raise TimeoutError

    told, factor = Told(), torch.full((1500, 1500), 1 / 1500)
    told.loss().backward()
    p, *others = told.parameters
    scale = p.sum().exp()
    slow = factor * scale
    for _ in range(8):
        slow = slow @ factor
    loss = slow.sum() + sum(q.sum() for q in others)
    if fails:
        scale.detach().add_(1)  # which exp() wants in its backward
    before, threads = signal.signal(signal.SIGVTALRM, late), torch.get_num_threads()
    torch.set_num_threads(1)  # however many there are, backward takes longer than until the signal comes
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.02)  # of its own computing time
        try:
            loss.backward()
        except RuntimeError:
            time.sleep(0.001)
        pytest.fail("no signal came")
    except TimeoutError:
        assert len(told.runs) == 2
        told.loss().backward()
        assert len(told.runs) == 3
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        torch.set_num_threads(threads)


def test_one_that_is_forgotten_is_announced_again() -> None:
    """An optimizer may step() in the middle of a backward."""
    told = Told()

    def step(_: torch.Tensor) -> None:
        told.backward.forget()
        told.backward.expect_another()

    handles = [p.register_post_accumulate_grad_hook(step) for p in told.parameters]
    told.loss().backward()
    assert len(told.runs) == 3 and len(set(told.runs)) == 1
    for handle in handles:
        handle.remove()
    told.loss().backward()
    assert len(told.runs) == 4


def test_nested_runs_are_announced() -> None:
    """Each, while the backward around them goes on: it may fail unseen."""
    told = Told()
    x = torch.zeros(2, requires_grad=True)
    Nested.apply(Nested.apply(x.sum(), told), told).backward()
    assert len(set(told.runs)) == 2 and told.ended == 1
    told.runs.clear()
    told.loss().backward()
    assert len(told.runs) == 1 and told.ended == 2
