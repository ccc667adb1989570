"""A hundred steps with `sharded=True` and without: the same bits, with all that users combine with an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn, optim
from torch.optim.lr_scheduler import OneCycleLR

import hvdlite.torch as hvd
from tests.parallel.common import at_sizes, restart
from tests.parallel.ranks.torch_sharded import (
    Make,
    OfElements,
    adam,
    backward,
    elements,
    model,
    require_equal,
    rows,
    train,
    weights,
)

SIZES = (2, 3, 4)
STEPS = 100
FOREACH, FUSED, PLAIN = {"foreach": True}, {"fused": True}, {"foreach": False}

CLASSES: dict[str, tuple[Callable[..., optim.Optimizer], tuple[dict[str, bool], ...]]] = {
    "SGD": (partial(optim.SGD, lr=0.1), (PLAIN, FOREACH, FUSED)),
    "momentum": (partial(optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01), (PLAIN, FOREACH, FUSED)),
    "Adam": (partial(optim.Adam, lr=0.01), (PLAIN, FOREACH, FUSED)),
    "AdamW": (partial(optim.AdamW, lr=0.01, amsgrad=True), (PLAIN, FOREACH, FUSED)),
    "Adagrad": (partial(optim.Adagrad, lr=0.01), (PLAIN, FOREACH, FUSED)),
    "RMSprop": (partial(optim.RMSprop, lr=0.01, momentum=0.5), (PLAIN, FOREACH)),
}


class Lion(OfElements):
    """X. Chen et al., Symbolic Discovery of Optimization Algorithms, 2023."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
        found = torch.sign(momentum.mul(0.9).add_(p.grad, alpha=0.1)).add_(p, alpha=0.01)
        momentum.mul_(0.99).add_(p.grad, alpha=0.01)
        return found


class Lamb(OfElements):
    """Y. You et al., Large Batch Optimization for Deep Learning, 2020: Adam's steps, as long as the parameter."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        its = self.state[p]
        first, second = (its.setdefault(key, torch.zeros_like(p)) for key in ("first", "second"))
        first.lerp_(p.grad, 0.1)
        second.lerp_(p.grad.square(), 0.01)
        step = first / (second.sqrt() + 1e-6) + 0.01 * p
        return step * (p.norm() / step.norm())


class Lars(OfElements):
    """Y. You et al., Large Batch Training of Convolutional Networks, 2017: momentum. Vectors are left out."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
        scale = p.norm() / (p.grad.norm() + 1e-9) if p.ndim > 1 else 1.0
        momentum.mul_(0.9).add_(p.grad * scale)
        return momentum.clone()


def muon(ps: Any) -> optim.Optimizer:
    return optim.Muon([p for p in ps if p.ndim == 2], lr=0.01)


def check_elementwise_optimizers() -> None:
    for name, (make, ways) in CLASSES.items():
        for way in ways:
            (net, optimizer), (expected, its) = (
                train(partial(make, **way), sharded, STEPS) for sharded in (True, False)
            )
            require_equal(net, expected)
            assert elements(optimizer) <= 1.02 * elements(its) / hvd.size(), (name, way)


def check_lion() -> None:
    (net, optimizer), (expected, its) = (train(Lion, sharded, STEPS) for sharded in (True, False))
    require_equal(net, expected)
    assert elements(optimizer) <= 1.02 * elements(its) / hvd.size()


def check_optimizers_that_look_at_whole_tensors() -> None:
    for make in (optim.Adafactor, muon, Lamb, Lars):
        (net, optimizer), (expected, its) = (train(make, sharded, STEPS) for sharded in (True, False))
        for p, q in zip(net.parameters(), expected.parameters(), strict=True):
            assert (p - q).abs().max() <= 1e-6
        assert elements(optimizer) < elements(its)


def check_options() -> None:
    """Accumulation, groups of gradients, compression, and division before the sum."""
    ps = partial(lambda net: [[*net.parameters()][:2], [*net.parameters()][2:]])
    for options in (
        {"backward_passes_per_step": 3},
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.bf16, "gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"groups": ps, "op": hvd.Sum},
    ):
        nets = []
        for sharded in (True, False):
            net = model()
            given = {key: value(net) if value is ps else value for key, value in options.items()}
            nets.append(train(partial(optim.Adam, lr=0.001), sharded, STEPS, net, **given)[0])
        require_equal(*nets)


def check_schedulers_clipping_scaling_and_groups() -> None:
    """In channels_last, with groups that have options of their own, and one that comes later."""
    nets = []
    for sharded in (True, False):
        torch.manual_seed(1)
        net = nn.Sequential(
            nn.Unflatten(1, (3, 2, 5)), nn.Conv2d(3, 64, 2), nn.Conv2d(64, 96, (1, 3)), nn.Flatten(), nn.Linear(192, 5)
        )
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        groups: list[dict[str, Any]] = [{"params": net[1].parameters()}, {"params": net[2].parameters(), "lr": 0.02}]
        optimizer = optim.AdamW(groups)
        scheduler = OneCycleLR(optimizer, [0.01, 0.02], total_steps=2 * STEPS)
        hvd.DistributedOptimizer(optimizer, sharded=sharded)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10)
        for step in range(STEPS):
            if step == STEPS // 2:
                optimizer.add_param_group({"params": net[4].parameters(), "lr": 0.001, "initial_lr": 0.001})
                scheduler = OneCycleLR(optimizer, [0.01, 0.02, 0.001], total_steps=2 * STEPS)
            net.zero_grad()
            x = rows(100 * step)
            if step % 30 == 7 and hvd.rank() == 0:
                x[0, 0] = torch.inf  # all ranks leave this step out
            scaler.scale(net(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        nets.append(net)
    require_equal(*nets)


@at_sizes(3, 4)
def check_two_sets_train_two_models_at_once() -> None:
    """At three ranks, the second set is one rank."""
    sets = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([*range(2, hvd.size())])]
    hvd.shutdown()
    hvd.init(process_sets=sets)
    mine = int(hvd.rank() > 1)
    make: Make = (adam, Lamb)[mine]
    nets = [train(make, sharded, STEPS, process_set=sets[mine])[0] for sharded in (False, True)]
    assert all(map(torch.equal, *map(weights, nets)))
    restart()


def check_accumulation_by_hand() -> None:
    """no_sync() around all backward() calls but the last one."""
    nets = []
    for sharded in (True, False):
        net = model()
        optimizer: Any = hvd.DistributedOptimizer(adam(net.parameters()), sharded=sharded)
        for step in range(STEPS):
            optimizer.zero_grad()
            with optimizer.no_sync():
                backward(net, 2 * step)
            backward(net, 2 * step + 1)
            optimizer.step()
        nets.append(net)
    require_equal(*nets)
