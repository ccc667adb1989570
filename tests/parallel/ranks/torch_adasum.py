"""DistributedOptimizer(op=Adasum): orthogonal steps are added, and of equal steps one is taken."""

from __future__ import annotations

from typing import Any

import torch

import hvdlite.torch as hvd
from tests.parallel.common import at_sizes, last, require_error, require_mismatch, require_same_bits


def check_steps_are_combined() -> None:
    """Rank r's loss moves element r of one tensor by -(r+1), and all of another by -2: learning rate 1."""
    p, r = hvd.size(), hvd.rank()
    own, common = torch.nn.Parameter(torch.zeros(p)), torch.nn.Parameter(torch.zeros(2, 3))
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        optimizer: Any = torch.optim.SGD([own, common, frozen], lr=1.0)
        if p & (p - 1):
            require_error(
                NotImplementedError, lambda: hvd.DistributedOptimizer(optimizer, op=hvd.Adasum), "power of two"
            )
            return
        optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Adasum, compression=compression)
        with torch.no_grad():
            own.zero_()
            common.zero_()
        for step in range(1, 4):
            optimizer.zero_grad(set_to_none=True)
            loss = own[r] * (r + 1) + common.sum() * 2
            loss.backward()
            assert own.grad[r] == r + 1 and (common.grad == 2).all()
            optimizer.synchronize()
            assert optimizer.step(lambda: loss) is loss
            assert own.tolist() == [-step * (i + 1.0) for i in range(p)] and (common == -2 * step).all()
        assert (frozen == 1).all()


def check_momentum_and_accumulation() -> None:
    """Two backwards per step; the weights of all ranks end with the same bits, though their momenta differ."""
    p = hvd.size()
    if p & (p - 1):
        return
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.05), model.named_parameters(),
                                         backward_passes_per_step=2, op=hvd.Adasum)  # fmt: skip
    torch.manual_seed(hvd.rank())
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(32, 6)
            loss = ((model(x) - x.sum(1, keepdim=True).tanh()) ** 2).mean()
            loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    require_same_bits(list(model.state_dict().values()))
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5]), losses


@at_sizes(1, 2, 4)
def check_frozen_ones_that_still_move() -> None:
    """By momentum, which is each rank's own, or by a gradient that is older."""
    for zeros in (False, True):
        params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0, momentum=0.5), op=hvd.Adasum)
        for _ in range(3):
            if zeros:
                optimizer.zero_grad(set_to_none=False)
            (sum(p.sum() for p in params if p.requires_grad) * (hvd.rank() + 1)).backward()
            params[0].requires_grad_(False)
            optimizer.step()
        require_same_bits(params)


def check_grad_scaler() -> None:
    """Rank r moves element r by -(r+1) in each step, but for the last rank in the second, where that is infinite: the
    others' steps are combined with nothing, not with its third. Its gradients and momentum stay as they are."""
    p, r = hvd.size(), hvd.rank()
    if p & (p - 1):
        return
    for unscale in (False, True):
        w = torch.nn.Parameter(torch.zeros(p))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), op=hvd.Adasum)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for step in range(1, 5):
            optimizer.zero_grad()
            infinite = step == 2 and r == p - 1
            scaler.scale(w[r] * (float("inf") if infinite else r + 1.0)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            moved = [step * (i + 1.0) - (p if i == p - 1 and step >= 2 else 0) for i in range(p)]
            assert w.tolist() == [-each for each in moved], f"step {step}"
            assert float(w.grad[r]) == (float("inf") if infinite else r + 1)
            assert scaler.get_scale() == (8 if step >= 2 and r == p - 1 else 16)


@at_sizes(2, 4)
def check_grad_scaler_after_a_step_that_raises() -> None:
    """It may go on with the next, and the rank's gradients are there."""

    def refuse(*_: object) -> None:
        raise ValueError("as if a hook of the user's had failed")

    for factor in (1.0, float("inf")):
        w = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam([w], lr=1.0), op=hvd.Adasum)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        hook = optimizer.register_step_pre_hook(refuse)
        scaler.scale((w * factor).sum()).backward()
        require_error(ValueError, lambda: scaler.step(optimizer), "as if")
        assert w.grad is not None and bool(w.grad.isfinite().all()) == (factor == 1)
        hook.remove()
        for _ in range(2):
            scaler.update()
            optimizer.zero_grad()
            scaler.scale((w * factor).sum()).backward()
            scaler.step(optimizer)
        assert bool((w == 0).all()) == (factor != 1)
        scaler.scale(w.sum()).backward()
        optimizer.step()
        require_same_bits(w)


def check_nothing_to_move() -> None:
    """On no rank, also while some have joined, is nothing to do; on some only, an error on all."""
    p, r = hvd.size(), hvd.rank()
    if p & (p - 1):
        return
    w = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), op=hvd.Adasum)
    for _ in range(r + 1):
        optimizer.step()
    hvd.join()
    assert (w == 1).all()
    if p > 1:
        w.grad = torch.ones(2) if last() else None
        require_mismatch(optimizer.step, "number of tensors differs", f"rank {p - 1} has 1", "0")


def check_rules() -> None:
    p = hvd.size()
    if p & (p - 1):
        return
    w = torch.nn.Parameter(torch.zeros(3))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), op=hvd.Adasum)
    if p > 1:
        require_error(AssertionError, lambda: optimizer.skip_synchronize(), "Adasum")
        require_error(
            NotImplementedError,
            lambda: hvd.DistributedOptimizer(
                torch.optim.SGD([w], lr=1.0), op=hvd.Adasum, process_set=hvd.ProcessSet([0])
            ),
            "global",
        )
    require_error(RuntimeError, lambda: hvd.DistributedOptimizer(optimizer, op=hvd.Adasum), "attached already")
    hvd.shutdown()
    hvd.init()
    w.grad = torch.ones(3)
    if p > 1:
        require_error(RuntimeError, optimizer.step, "attached before hvd.shutdown()")
    hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
    optimizer.step()
    assert (w == -1).all()


def check_joining() -> None:
    """A rank that has joined takes no step: the others' are combined with nothing."""
    p, r = hvd.size(), hvd.rank()
    if p & (p - 1):
        return
    w = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), op=hvd.Adasum)
    for step in range(r + 1):
        w.grad = torch.ones(2)
        optimizer.step()
        assert (w == -step - 1).all()
    assert hvd.join() == p - 1
    require_same_bits(torch.tensor(hvd.join() >= 0))
    if p > 1:
        w.grad = torch.ones(2)
        require_error(hvd.HorovodInternalError, optimizer.step, "root_rank=(the rank that hvd.join() returned)")
