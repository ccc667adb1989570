"""`DistributedOptimizer(sharded="gradients")`: each rank gets the averages of its pieces, and all end with the same bits."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

import hvdlite.torch as hvd
from hvdlite.torch.attach.part import PartOfGradient
from tests.parallel.common import last, require_error, require_same_bits, restart
from tests.parallel.ranks.torch_sharded import (
    ELEMENTWISE,
    OfElements,
    OfTensors,
    adam,
    backward,
    continue_training,
    elements,
    folder,
    model,
    require_equal,
    train,
    trained_with_later_parameters,
    weights,
)

SIZES = (2, 3, 4)
GRADIENTS: Any = "gradients"


def check_the_same_bits_and_a_part_of_the_state() -> None:
    for name, make in ELEMENTWISE.items():
        (whole, all_of_it), (net, optimizer) = train(make, False), train(make, GRADIENTS)
        require_equal(net, whole)
        assert elements(optimizer) <= 1.05 * elements(all_of_it) / hvd.size(), name


def check_optimizers_that_look_at_whole_tensors() -> None:
    for make in (optim.Adafactor, OfTensors, OfElements):
        require_equal(train(make, GRADIENTS)[0], train(make, False)[0])


def check_options() -> None:
    """Sums, 16-bit gradients, accumulation, groups, other scaling, and messages instead of memory."""
    for options in (
        {"op": hvd.Sum}, {"compression": hvd.Compression.fp16}, {"backward_passes_per_step": 2}, {"groups": 2},
        {"gradient_predivide_factor": 2.0},
    ):  # fmt: skip
        require_equal(train(adam, GRADIENTS, steps=4, **options)[0], train(adam, False, steps=4, **options)[0])
    before, scattered = train(adam, False)[0], train(adam, GRADIENTS)[0]
    restart(ALGORITHM="ring")
    for net in (train(adam, GRADIENTS)[0], train(adam, GRADIENTS, compression=hvd.Compression.bf16)[0]):
        require_same_bits(weights(net))
        for p, q in zip(net.parameters(), before.parameters(), strict=True):
            assert torch.allclose(p, q, atol=0.05)
    restart()
    require_equal(before, scattered)


def check_parameters_that_come_later() -> None:
    require_equal(trained_with_later_parameters(False)[0], trained_with_later_parameters(GRADIENTS)[0])


def check_channels_last_and_unused_parameters() -> None:
    nets = []
    for sharded in (False, GRADIENTS):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Unflatten(1, (3, 2, 5)), nn.Conv2d(3, 64, 2), nn.Conv2d(64, 96, (1, 3)), nn.Flatten())
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        unused = nn.Linear(100, 100)
        optimizer = hvd.DistributedOptimizer(adam([*net.parameters(), *unused.parameters()]), sharded=sharded)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(7, 30, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))
            loss = net(x).square().mean()
            (loss + unused(torch.ones(100)).sum() if step == 1 and last() else loss).backward()
            assert (unused.weight.grad is None) == (step != 1)
            optimizer.step()
        nets.append(nn.Sequential(net, unused))
    require_equal(*nets)


def clipped(sharded: Any, scaler: torch.amp.GradScaler, norm: float) -> tuple[nn.Module, list[float]]:
    """Train with a scaler and clipping. Returns the model, and the norms."""
    net: Any = model()
    norms = []
    fixed = nn.Parameter(torch.ones(3))  # of no optimizer
    optimizer = hvd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1, momentum=0.9), sharded=sharded)
    for step in range(5):
        optimizer.zero_grad()
        fixed.grad = torch.full((3,), 0.01)
        x = torch.randn(7, 30, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))
        scaler.scale(net(x).square().mean()).backward()
        if step == 3:  # all ranks leave this step out
            grad = net[0].weight.grad
            piece = grad.piece if isinstance(grad, PartOfGradient) else grad
            piece.fill_(torch.inf) if last() or piece is grad else None
        scaler.unscale_(optimizer)
        if step != 3:
            norms.append(hvd.clip_grad_norm_([*net.parameters(), fixed], 0.2, norm_type=norm).item())
        scaler.step(optimizer)
        scaler.update()
    return net, norms


def check_clipping_and_unscaling() -> None:
    for norm in (2.0, 3.0, float("inf")):
        found = [clipped(sharded, torch.amp.GradScaler("cpu", init_scale=8.0), norm) for sharded in (False, GRADIENTS)]
        assert found[0][1] == pytest.approx(found[1][1], rel=1e-5) and len({*found[0][1]}) == 4
        for p, q in zip(found[0][0].parameters(), found[1][0].parameters(), strict=True):
            assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)
        require_same_bits(weights(found[1][0]))
    net, _ = backwarded()
    net[0].weight.grad.whole.fill_(torch.inf)
    clip = partial(hvd.clip_grad_norm_, net.parameters(), 1.0, error_if_nonfinite=True)
    require_error(RuntimeError, clip, "norm of all gradients is inf")


def backwarded() -> tuple[Any, optim.Optimizer]:
    """A model after a backward(), and its optimizer."""
    net, optimizer = train(adam, GRADIENTS, steps=1)
    optimizer.zero_grad()
    backward(net, 1)
    return net, optimizer


def check_gradients_that_are_partly_there_refuse_everything_else() -> None:
    net, optimizer = backwarded()
    p = net[0].weight
    grad = p.grad
    assert isinstance(grad, PartOfGradient) and grad.shape == p.shape and "piece of" in repr(grad)
    calls: list[Callable[[], object]] = [
        grad.norm, grad.sum, grad.clone, grad.detach, grad.numpy, grad.tolist, lambda: grad * 2, lambda: p - grad,
        lambda: grad[0], grad.__dlpack__, lambda: torch.save(grad, io.BytesIO()), lambda: grad.data,
        lambda: copy.deepcopy(grad), lambda: nn.utils.clip_grad_norm_(net.parameters(), 1.0),
        lambda: nn.utils.clip_grad_value_(net.parameters(), 1.0), lambda: optimizer.zero_grad(set_to_none=False),
        lambda: backward(net, 2),
    ]  # fmt: skip
    for call in calls:
        require_error(RuntimeError, call, "hvd.clip_grad_norm_", "zero_grad()")
    optimizer.zero_grad()
    backward(net, 2)
    optimizer.step()
    require_error(RuntimeError, optimizer.step, "after the last backward()", "zero_grad()")
    require_same_bits(weights(net))


def check_gradients_of_an_earlier_backward_are_not_reduced_again() -> None:
    """A parameter that the second backward() does not reach."""
    net, extra = model(), nn.Linear(30, 5)
    optimizer = hvd.DistributedOptimizer(adam([*net.parameters(), *extra.parameters()]), sharded=GRADIENTS)
    (net(torch.ones(1, 30)) + extra(torch.ones(1, 30))).sum().backward()
    optimizer.step()
    for p in net.parameters():
        p.grad = None
    require_error(RuntimeError, lambda: backward(net, 1), "after the last backward()")


def check_flat_buffers_of_users() -> None:
    net = model()
    optimizer = hvd.DistributedOptimizer(adam(net.parameters()), sharded=GRADIENTS)
    buffer = torch.zeros(sum(p.numel() for p in net.parameters()))
    start = 0
    for p in net.parameters():
        p.grad = buffer[start : start + p.numel()].view_as(p)
        start += p.numel()
    require_error(RuntimeError, lambda: backward(net, 1), "that you keep")
    assert optimizer is not None


def check_gradients_kept_by_users_do_no_harm() -> None:
    kept, (whole, _) = [], train(adam, False, steps=4)
    net = model()
    optimizer = hvd.DistributedOptimizer(adam(net.parameters()), sharded=GRADIENTS)
    for step in range(4):
        optimizer.zero_grad()
        backward(net, step)
        kept.append([p.grad for p in net.parameters()])
        optimizer.step()
    require_equal(net, whole)


def check_gradients_of_another_dtype_on_the_wire() -> None:
    net, _ = train(adam, GRADIENTS, steps=1, compression=hvd.Compression.fp16)
    assert all(isinstance(p.grad, PartOfGradient) and p.grad.dtype == p.dtype for p in net.parameters())


def check_what_is_refused() -> None:
    for options, error in (
        ({"sharded": "everything"}, ValueError),
        ({"sharded": GRADIENTS, "op": hvd.Max}, NotImplementedError),
        ({"sharded": GRADIENTS, "compression": Halves}, NotImplementedError),
    ):
        require_error(error, partial(hvd.DistributedOptimizer, adam(model().parameters()), **options), "sharded")


class Halves(hvd.Compression.none):  # type: ignore[valid-type, misc]
    """A user's own compressor."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor / 2, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: object) -> torch.Tensor:
        return tensor * 2


def check_checkpoints() -> None:
    path = str(folder() / "run.pt")
    net, optimizer = train(adam, GRADIENTS, steps=3)
    hvd.save(path, model=net, optimizer=optimizer)
    for sharded in (GRADIENTS, True, False):
        expected, state = train(adam, False, steps=3)
        other = model()
        again = hvd.DistributedOptimizer(adam(other.parameters()), sharded=sharded)
        hvd.load(path, model=other, optimizer=again)
        continue_training(other, again)
        continue_training(expected, state)
        require_equal(other, expected)
