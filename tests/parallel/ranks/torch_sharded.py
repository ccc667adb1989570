"""`DistributedOptimizer(sharded=True)`: the same bits as without, and a part of the state on each rank."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

import hvdlite.torch as hvd
from hvdlite.errors import VoidError
from hvdlite.sharding.gather import LARGE
from hvdlite.torch.sharded.pieces import Piece, cut_state
from tests.parallel.common import last, require_error, require_mismatch, require_same_bits

SIZES = (2, 3, 4)
Make = Callable[[Any], optim.Optimizer]

ELEMENTWISE: dict[str, Make] = {
    "SGD": lambda ps: optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "foreach momentum": lambda ps: optim.SGD(ps, lr=0.05, momentum=0.9, foreach=True),
    "fused momentum": lambda ps: optim.SGD(ps, lr=0.05, momentum=0.9, fused=True),
    "Adam": lambda ps: optim.Adam(ps, lr=0.01, amsgrad=True, foreach=False),
    "foreach Adam": lambda ps: optim.Adam(ps, lr=0.01, foreach=True),
    "fused Adam": lambda ps: optim.Adam(ps, lr=0.01, fused=True),
    "AdamW": lambda ps: optim.AdamW(ps, lr=0.01, weight_decay=0.1),
    "RMSprop": lambda ps: optim.RMSprop(ps, lr=0.01, centered=True, momentum=0.5),
    "Adagrad": lambda ps: optim.Adagrad(ps, lr=0.01, initial_accumulator_value=0.1),
    "NAdam": lambda ps: optim.NAdam(ps),
    "Rprop": lambda ps: optim.Rprop(ps),
}


def adam(ps: Any) -> optim.Optimizer:
    return optim.Adam(ps, lr=0.01)


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(30, 211), nn.Tanh(), nn.Linear(211, 97), nn.Tanh(), nn.Linear(97, 5))


def rows(seed: int) -> torch.Tensor:
    """Data, other ones on each rank."""
    generator = torch.Generator().manual_seed(seed + hvd.rank())
    return torch.randn(7, 30, generator=generator, device="cpu").to(torch.get_default_device())


def backward(net: nn.Module, step: int) -> None:
    """Gradients of other data on each rank."""
    net(rows(100 * step).to(next(net.parameters()).dtype)).square().mean().backward()


def train(make: Make, sharded: Any, steps: int = 10, net: nn.Module | None = None, **options: Any) -> Any:
    """A trained model and its optimizer."""
    net = net or model()
    optimizer = hvd.DistributedOptimizer(make(net.parameters()), sharded=sharded, **options)
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(options.get("backward_passes_per_step", 1)):
            backward(net, step)
        optimizer.step()
    return net, optimizer


def weights(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach() for p in net.parameters()]


def require_equal(one: nn.Module, other: nn.Module) -> None:
    """Check that two models have the same bits, on all ranks."""
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert p.shape == q.shape and p.equal(q), name
    require_same_bits(weights(one))


def elements(optimizer: optim.Optimizer) -> int:
    """The number of elements of an optimizer's state."""
    state = [value for its in optimizer.state.values() for value in its.values()]
    return sum(value.numel() for value in state if isinstance(value, torch.Tensor))


def check_the_same_bits_and_a_part_of_the_state() -> None:
    for name, make in ELEMENTWISE.items():
        (whole, all_of_it), (net, optimizer) = train(make, False), train(make, True)
        require_equal(net, whole)
        assert elements(optimizer) <= 1.02 * elements(all_of_it) / hvd.size(), name


def check_optimizers_that_look_at_whole_tensors() -> None:
    for make in (optim.Adafactor, OfTensors, OfElements):
        require_equal(train(make, True)[0], train(make, False)[0])


class OfElements(optim.Optimizer):
    """Signs of momentum."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        grad = p.grad
        assert grad is not None
        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
        momentum.mul_(0.9).add_(grad)
        return torch.sign(momentum)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.direction(p))


class OfTensors(OfElements):
    """Steps of the parameter's length."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        grad = p.grad
        assert grad is not None
        return grad * p.norm() / grad.norm()


class OfAll(OfElements):
    """Steps that depend on all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step()


class OfNorm(OfElements):
    """Steps divided by the norm of all gradients, which pieces of them all have in common."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        ps = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.double().square().sum() for p in ps) ** 0.5
        for p in ps:
            p.sub_(p.grad / norm.float())


def check_optimizers_that_cannot_be_divided() -> None:
    for make, word in (
        (optim.LBFGS, "LBFGS: it steps all"),
        (optim.SparseAdam, "sparse"),
        (partial(optim.Adam, differentiable=True), "differentiable"),
        (OfAll, "depends on other parameters"),
        (OfNorm, "depends on other parameters"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = make(model().parameters())
        require_error(ValueError, partial(hvd.DistributedOptimizer, optimizer, sharded=True), word)
    require_error(ValueError, lambda: train(adam, True, op=hvd.Adasum), "Adasum") if hvd.size() != 3 else None
    part = nn.Linear(4, 4)
    part.weight = nn.Parameter(torch.zeros(4, 8)[:, :4])
    require_error(ValueError, lambda: train(adam, True, net=part), "memory of its own")


def check_what_users_do_between_backward_and_step() -> None:
    """Clipping, schedulers made before and after, a GradScaler, accumulation, groups, compression."""
    results = []
    for sharded in (False, True):
        net = model()
        ps = [*net.parameters()]
        optimizer = optim.AdamW([{"params": ps[:2], "lr": 0.02}, {"params": ps[2:], "weight_decay": 0.3}], lr=0.01)
        before = optim.lr_scheduler.StepLR(optimizer, 2)
        hvd.DistributedOptimizer(
            optimizer, sharded=sharded, backward_passes_per_step=2, compression=hvd.Compression.fp16
        )
        scaler, norms = torch.amp.GradScaler("cpu", init_scale=8.0), []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            after = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            for step in range(5):
                optimizer.zero_grad()
                for part in range(2):
                    scaler.scale(net(rows(100 * step + 10 * part)).square().mean()).backward()
                scaler.unscale_(optimizer)
                norms.append(nn.utils.clip_grad_norm_(ps, 0.01))
                scaler.step(optimizer)
                scaler.update()
                before.step()
                after.step()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in ps)
        results.append((net, norms))
    require_equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def check_other_layouts() -> None:
    def convolutions() -> nn.Module:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Unflatten(1, (3, 2, 5)), nn.Conv2d(3, 64, 2), nn.Conv2d(64, 96, (1, 3)), nn.Flatten())
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return net

    for make in (adam, ELEMENTWISE["fused Adam"]):
        require_equal(train(make, True, net=convolutions())[0], train(make, False, net=convolutions())[0])
    nets = []
    for sharded in (True, False):  # the gradient's order of memory is not the parameter's
        net = convolutions()
        optimizer = hvd.DistributedOptimizer(adam(net.parameters()), sharded=sharded)
        backward(net, 0)
        for p in net.parameters():
            assert p.grad is not None
            p.grad = p.grad.contiguous() if p.ndim == 4 else p.grad
        optimizer.step()
        nets.append(net)
    require_equal(*nets)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torch rounds 16-bit numbers in another way at the ends of its threads' parts
    short, whole = (train(adam, sharded, net=model().to(torch.bfloat16))[0] for sharded in (True, False))
    torch.set_num_threads(threads)
    require_equal(short, whole)


def check_state_of_another_dtype_and_order() -> None:
    """It keeps its dtype, and the piece is of the parameter's order."""
    p = torch.zeros(8, 4, 2, 2, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    value = torch.randn(p.shape)
    state: dict[str, object] = {"moment": value}
    cut_state(Piece(p, 32, 64), state, p)
    found = state["moment"]
    assert isinstance(found, torch.Tensor) and found.equal(value.permute(0, 2, 3, 1).reshape(-1)[32:64])


def trained_with_later_parameters(sharded: Any) -> tuple[nn.Module, optim.Optimizer]:
    """A trained model and its optimizer. A layer was added, and one unfrozen; earlier ones' state stayed."""
    net = model()
    net[4].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(adam([*net[0].parameters(), *net[4].parameters()]), sharded=sharded)
    for step in range(6):
        if step == 2:
            optimizer.add_param_group({"params": [*net[2].parameters()], "lr": 0.02})
        if step == 4:
            net[4].requires_grad_(True)
        optimizer.zero_grad()
        backward(net, step)
        before = {p: {**its} for p, its in optimizer.state.items()}
        optimizer.step()
        assert all(optimizer.state[p].keys() == its.keys() for p, its in before.items())
    return net, optimizer


def check_parameters_that_come_later() -> None:
    """Added and unfrozen ones get owners, and the earlier ones' state stays where it is."""
    (whole, all_of_it), (net, optimizer) = map(trained_with_later_parameters, (False, True))
    require_equal(whole, net)
    assert elements(optimizer) < 1.3 * elements(all_of_it) / hvd.size()


def check_a_step_with_all_parameters_frozen() -> None:
    net = model().requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(adam(net.parameters()), sharded=True)
    optimizer.step()
    require_equal(net, model())


class Twice(OfElements):
    """Calls its closure twice in a step, as a line search does."""

    def step(self, closure: Any = None) -> None:
        for _ in range(2):
            closure()
            super().step()


def check_closures_see_whole_parameters_of_now() -> None:
    nets = []
    for sharded in (False, True):
        net = model()
        optimizer = hvd.DistributedOptimizer(Twice(net.parameters()), sharded=sharded)
        for step in range(4):

            def closure(net: nn.Module = net, optimizer: optim.Optimizer = optimizer, step: int = step) -> None:
                optimizer.zero_grad()
                backward(net, step)

            optimizer.step(closure)
        nets.append(net)
    require_equal(*nets)


def check_hooks_see_whole_parameters() -> None:
    net = model()
    optimizer, shapes = adam(net.parameters()), []

    def look(*_: Any) -> None:
        shapes.extend((p.shape, p.grad.shape) for p in net.parameters() if p.grad is not None)

    optimizer.register_step_post_hook(look)
    hvd.DistributedOptimizer(optimizer, sharded=True)
    optimizer.register_step_pre_hook(look)
    backward(net, 0)
    optimizer.step()
    assert shapes == 2 * [(p.shape, p.shape) for p in net.parameters()]


def check_a_step_that_fails_on_one_rank() -> None:
    """Its parameters are whole when the error is caught; the other ranks raise one that names the rank."""
    net, optimizer = train(adam, True, steps=1)
    backward(net, 1)
    if last():
        optimizer.param_groups[0]["betas"] = None
        require_error(TypeError, optimizer.step)
    else:
        require_error(VoidError, optimizer.step, f"rank {hvd.size() - 1}", "hvd.load")
    assert all(p.shape == q.shape for p, q in zip(net.parameters(), model().parameters(), strict=True))
    if last():
        optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    hvd.broadcast_parameters(net.state_dict(), 0)
    optimizer.step()  # the job lives
    require_same_bits(weights(net))


def check_graphs_of_before_the_step_raise_on_all_ranks() -> None:
    net, optimizer = train(adam, True, steps=1)
    loss = net(torch.ones(1, 30)).sum()
    backward(net, 1)
    optimizer.step()
    require_error(RuntimeError, loss.backward, "modified by an inplace operation")
    before = [p._version for p in net.parameters()]
    backward(net, 2)
    optimizer.step()
    assert all(p._version > version for p, version in zip(net.parameters(), before, strict=True))


def check_steps_that_ranks_do_not_take_together() -> None:
    net, optimizer = train(adam, True, steps=1)
    with optimizer.no_sync():
        backward(net, 1)
        require_error(RuntimeError, optimizer.step, "no_sync")
    optimizer.zero_grad()
    require_error(RuntimeError, lambda: type(optimizer).step(optimizer), "optimizer.step()")
    require_error(RuntimeError, hvd.join, "sharded=True")
    require_error(RuntimeError, hvd.uneven_inputs(net).__enter__, "sharded=True")
    net, optimizer = train(adam, True, steps=1)
    backward(net, 2)
    require_mismatch((lambda: backward(net, 3)) if last() else optimizer.step)  # the last rank leaves a step out


def check_sparse_gradients() -> None:
    net = nn.Embedding(50, 400, sparse=True)
    hvd.broadcast_parameters(net.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), sharded=True)
    net(torch.tensor([hvd.rank()])).sum().backward()
    require_error(NotImplementedError, optimizer.step, "sparse=False")
    hvd.allreduce(torch.ones(1))


def folder() -> Path:
    """A new folder, the same on all ranks."""
    return Path(hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, 0))


def check_checkpoints() -> None:
    """One file of all ranks' state; loaded by all, by optimizers that are not sharded, and by plain torch."""
    path = str(folder() / "run.pt")
    for make in (adam, optim.Adafactor, ELEMENTWISE["momentum"]):
        net, optimizer = train(make, True, steps=3)
        hvd.save(path, model=net, optimizer=optimizer, epoch=3, consolidate=True)
        found = torch.load(path, weights_only=True)
        same_state(found["optimizer"], train(make, False, steps=3)[1].state_dict())
        alone = make(net.parameters())
        alone.load_state_dict(found["optimizer"])
        same_state(alone.state_dict(), found["optimizer"])
        for sharded in (True, False):
            expected, state = train(make, False, steps=3)
            other = model()
            again = hvd.DistributedOptimizer(make(other.parameters()), sharded=sharded)
            assert hvd.load(path, model=other, optimizer=again)["epoch"] == 3
            continue_training(other, again)
            continue_training(expected, state)
            require_equal(other, expected)


def same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Check that two state_dicts have the same contents."""
    assert one.keys() == other.keys() and one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number, its in other["state"].items():
        for key, value in its.items():
            found = one["state"][number][key]
            assert found.equal(value.to(found.device)) if isinstance(value, torch.Tensor) else found == value, (
                number,
                key,
            )


def continue_training(net: nn.Module, optimizer: optim.Optimizer) -> None:
    for step in range(3, 5):
        optimizer.zero_grad()
        backward(net, step)
        optimizer.step()


def check_states_of_one_rank_are_marked() -> None:
    _, optimizer = train(adam, True, steps=2)
    state = optimizer.state_dict()
    again = hvd.DistributedOptimizer(adam(model().parameters()), sharded=True)
    again.load_state_dict(copy.deepcopy(state))
    assert elements(again) == elements(optimizer)
    path = str(folder() / "run.pt")
    hvd.save(path, optimizer=again, consolidate=True)
    same_state(torch.load(path, weights_only=True)["optimizer"], train(adam, False, steps=2)[1].state_dict())
    optimizer.state.clear() if last() else None
    for consolidate in (True, False):
        refused = partial(hvd.save, path, optimizer=optimizer, consolidate=consolidate)
        require_error(ValueError, refused, "on some of its owners only")
    theirs = hvd.broadcast_object(state, 0)
    if hvd.rank():
        require_error(ValueError, lambda: again.load_state_dict(theirs), f"rank 0 of {hvd.size()}", "hvd.load")
    require_error(ValueError, lambda: hvd.broadcast_optimizer_state(optimizer, 0), "hvd.save")


def check_torchs_name_for_it() -> None:
    """ZeroRedundancyOptimizer, with its ways to save and load."""
    net, whole = model(), model()
    plain = hvd.DistributedOptimizer(optim.AdamW([*whole[0].parameters()], lr=0.02, weight_decay=0.1))
    zero: Any = hvd.ZeroRedundancyOptimizer(
        net[0].parameters(), optim.AdamW, parameters_as_bucket_view=True, lr=0.02, weight_decay=0.1
    )
    for optimizer, its in ((zero, net), (plain, whole)):
        assert isinstance(optimizer, optim.AdamW) and optimizer.state_dict()["state"] == {}
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": [*its[2:].parameters()], "lr": 0.01})
                scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
            optimizer.zero_grad()
            backward(its, step)
            optimizer.step()
            scheduler.step()
    require_equal(net, whole)
    assert elements(zero) < 1.02 * elements(plain) / hvd.size() + 9_000
    to = hvd.size() - 1
    require_error(RuntimeError, zero.state_dict, f"consolidate_state_dict(to={hvd.rank()})")
    require_error(ValueError, lambda: zero.consolidate_state_dict(to=9), "ranks are 0 to")
    zero.consolidate_state_dict(to=to)
    if last():
        same_state(zero.state_dict(), plain.state_dict())
    else:
        require_error(RuntimeError, zero.state_dict, "hvd.save")
    state = hvd.broadcast_object(zero.state_dict() if last() else None, to)
    path = str(folder() / "run.pt")
    hvd.save(path, optimizer=zero, consolidate=True)
    same_state(torch.load(path, weights_only=True)["optimizer"], state)
    zero.load_state_dict(copy.deepcopy(state))  # whole until the next step
    hvd.save(path, optimizer=zero)
    zero.load_state_dict(copy.deepcopy(state))
    continue_training(net, zero)
    continue_training(whole, plain)
    require_equal(net, whole)
    hvd.load(path, optimizer=zero)
    zero.consolidate_state_dict(to)
    same_state(zero.state_dict(), state) if last() else None
    refusals: dict[str, Any] = {"process_group": object(), "overlap_with_ddp": True}
    for name, value in refusals.items():
        refused = partial(hvd.ZeroRedundancyOptimizer, net.parameters(), optim.SGD, **{name: value})
        require_error(ValueError, refused, name)


def check_elastic_states_refuse_pieces() -> None:
    net, optimizer = train(adam, True, steps=1)
    require_error(ValueError, lambda: hvd.elastic.TorchState(net, optimizer), "hvd.save")


def check_broadcasts_before_the_first_step() -> None:
    """As in nearly all scripts: the state is empty, or whole."""
    net = model()
    optimizer = adam(net.parameters())
    if hvd.rank() == 0:
        backward(net, 0)
        optimizer.step()
        optimizer.zero_grad()
    hvd.DistributedOptimizer(optimizer, sharded=True)
    hvd.broadcast_parameters(net.state_dict(), 0)
    path = str(folder() / "run.pt")
    hvd.save(path, optimizer=optimizer)  # rank 0 has all of it
    hvd.broadcast_optimizer_state(optimizer, 0)
    same_state(torch.load(path, weights_only=True)["optimizer"], optimizer.state_dict())
    backward(net, 1)
    optimizer.step()
    require_same_bits(weights(net))
    assert elements(optimizer) <= 1.02 * (2 * sum(p.numel() for p in net.parameters()) + 6) / hvd.size()


def check_the_report_of_memory() -> None:
    gc.collect()
    net, _optimizer = train(adam, True, steps=1)
    million = sum(p.nbytes for p in net.parameters()) / 1e6
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        rows = hvd.memory_report()
    assert len(rows) == hvd.size()
    for row in rows:
        assert abs(row["parameters"] - million) < 1e-9 and abs(row["gradients"] - million) < 1e-9
        assert abs(row["optimizer state"] - 2 * million / hvd.size()) < 0.02 * million
        assert row["parameters"] < row["process"] and 0 <= row["arenas"] < row["process"]
        assert row["scratch"] < row["process"]
        assert row["scratch"] >= hvd.size() * LARGE / 1e6  # the gather of the pieces
    assert ("optimizer state" in out.getvalue()) == (hvd.rank() == 0)


def check_copies_and_ends() -> None:
    """A copy of the model is whole; and nothing keeps the optimizer alive."""
    import weakref

    net, optimizer = train(adam, True, steps=2)
    require_equal(copy.deepcopy(net), net)
    end = weakref.ref(optimizer)
    del optimizer
    assert end() is None
