"""In the usual case all gradients are packed at once when a backward() ends, even if other ranks cannot do so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

import hvdlite.torch as hvd
from hvdlite.errors import MismatchError
from hvdlite.torch.attach.packing import Packing
from tests.parallel.common import at_sizes, last, require_same_bits
from tests.parallel.ranks.torch_backwards import backward_of, few, numbers, require_averages
from tests.parallel.ranks.torch_gradients import attach, weights


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """How the gradients of the rounds inside were packed: 'at once', or 'one by one' where something was unusual."""
    calls: list[str] = []
    pack_rest, chosen = Packing.pack_rest, Packing.chosen

    def told(packing: Packing, *arguments: Any) -> None:
        calls.append("at once")
        pack_rest(packing, *arguments)

    def one_by_one(packing: Packing, *arguments: Any) -> Any:
        calls[-1:] = ["one by one"]
        return chosen(packing, *arguments)

    Packing.pack_rest, Packing.chosen = told, one_by_one  # type: ignore[assignment]
    try:
        yield calls
    finally:
        Packing.pack_rest, Packing.chosen = pack_rest, chosen


def step(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, seed: int) -> list[str]:
    """Train one; how it was packed."""
    with counted() as calls:
        optimizer.zero_grad()
        backward_of(params, numbers(params, seed))
    require_averages(params, seed)
    require_same_bits([p.grad for p in params])
    optimizer.step()
    return calls


@at_sizes(2, 3, 4)
def check_a_training_loop_packs_all_at_once() -> None:
    """From its first step on: also after one that a rank packed otherwise."""
    params, optimizer = few()
    if params[0].is_cuda:
        return
    for seed in range(4):
        assert step(params, optimizer, seed) == ["at once"], seed
    kept = params[1].grad if last() else None  # the next step sets None
    assert step(params, optimizer, 4) == (["one by one"] if last() else ["at once"])
    values = None if kept is None else kept.clone()
    step(params, optimizer, 5)
    assert kept is None or torch.equal(kept, values)

    for p in params[2:]:
        p.requires_grad_(False)  # and still the optimizer's
    step(params[:2], optimizer, 6)
    for seed in range(7, 9):
        assert step(params[:2], optimizer, seed) == ["at once"], seed

    params, optimizer = few()
    step(params, optimizer, 0)
    for seed, change in enumerate((added_to, swapped, nested, by_hand), 1):
        if last():
            change(params, optimizer)
            require_averages(params, seed)
            require_same_bits([p.grad for p in params])
            optimizer.step()
        else:
            step(params, optimizer, seed)
    for seed in range(5, 8):
        assert step(params, optimizer, seed) == (["one by one"] if last() else ["at once"]), seed


@at_sizes(2, 3, 4)
def check_a_layer_that_was_frozen_when_planned_is_thawed() -> None:
    """All ranks make the plan anew then, also those behind whose backward all is as usual."""
    params, optimizer = few()
    step(params, optimizer, 0)
    optimizer.zero_grad()
    params[0].requires_grad_(False).grad = torch.ones(5, device=params[0].device)
    params.append(torch.nn.Parameter(torch.zeros(3, device=params[0].device)))
    optimizer.add_param_group({"params": params[-1:]})
    backward_of(params[1:], numbers(params[1:], 1))
    optimizer.step()
    params[0].requires_grad_()
    for seed in range(2, 5):
        step(params, optimizer, seed)
        assert not optimizer._hvdlite.planned.frozen  # type: ignore[attr-defined]
    optimizer.zero_grad()
    reached = params[1:] if last() else params
    backward_of(reached, [torch.ones_like(p) for p in reached])
    assert torch.equal(params[0].grad, torch.full_like(params[0], (hvd.size() - 1) / hvd.size()))


@at_sizes(2, 3, 4)
def check_what_is_handed_out_is_nobodys_own() -> None:
    """Where a plan is made anew when backward ends, and behind an error that is kept."""
    params = weights((5,), (3, 4))
    params[0].requires_grad_(False)
    optimizer = attach(params)
    gradients = optimizer._hvdlite.gradients
    for seed in range(4):
        params[0].requires_grad_(seed > 1)
        trained = params[seed < 2 :]
        backward_of(trained, numbers(trained, seed))
        require_averages(trained, seed)
        assert not gradients.slots.own, seed
        optimizer.zero_grad(set_to_none=False)

    params, optimizer = few()
    with torch.no_grad():
        params[1].add_(hvd.rank())
    gradients, errors = optimizer._hvdlite.gradients, []  # type: ignore[attr-defined]
    for seed in range(3):
        optimizer.zero_grad()
        try:
            backward_of(params, numbers(params, seed))
        except MismatchError as error:
            errors.append(error)
            hvd.broadcast_(params[1].data, 0)
        require_averages(params, seed)
        assert not gradients.slots.own and len(errors) == 1, seed


def by_hand(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """A gradient that there was before, and that somebody has: it becomes the result."""
    optimizer.zero_grad()
    mine = [torch.zeros_like(p) for p in params]
    for p, grad in zip(params, mine, strict=True):
        p.grad = grad
    backward_of(params, numbers(params, 4))
    assert all(p.grad is grad for p, grad in zip(params, mine, strict=True))
    optimizer.zero_grad()
    for p, grad in zip(params, mine, strict=True):
        p.grad = grad.clone()


def added_to(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Zeros instead of none."""
    optimizer.zero_grad(set_to_none=False)
    backward_of(params, numbers(params, 1))


def swapped(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Other memory for a parameter."""
    optimizer.zero_grad()
    params[0].data = params[0].data.clone()
    backward_of(params, numbers(params, 2))


def nested(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """A backward inside another one's function."""

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1.0

        @staticmethod
        def backward(context: Any, grad: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                backward_of(params[:2], grads[:2])
            return grad

    optimizer.zero_grad()
    grads = numbers(params, 3)
    start = torch.ones((), requires_grad=True)
    torch.autograd.backward([Nested.apply(start * 1.0), *(p * 1.0 for p in params[2:])], [torch.ones(()), *grads[2:]])
