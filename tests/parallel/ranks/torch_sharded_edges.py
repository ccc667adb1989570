"""`DistributedOptimizer(sharded=True)` where users go further: odd models, odd optimizers, odd orders of calls."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn, optim
from torch.optim.swa_utils import AveragedModel

import hvdlite.torch as hvd
from hvdlite.errors import MismatchError
from tests.parallel.common import last, require_error, require_same_bits, restart
from tests.parallel.ranks.torch_sharded import (
    Make,
    OfElements,
    adam,
    backward,
    continue_training,
    elements,
    folder,
    model,
    require_equal,
    rows,
    same_state,
    train,
    weights,
)

SIZES = (2, 3, 4)
Attach = Callable[..., Any]


def both_ways(*more: Literal["gradients"]) -> Iterator[Attach]:
    """DistributedOptimizer as it is, with sharded=True, and with more values of sharded."""
    ways: list[bool | Literal["gradients"]] = [False, True, *more]
    for sharded in ways:
        yield partial(hvd.DistributedOptimizer, sharded=sharded)


def require_all_equal(nets: Sequence[nn.Module]) -> None:
    for net in nets[1:]:
        require_equal(net, nets[0])


def convolutions() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Unflatten(1, (3, 2, 5)), nn.Conv2d(3, 64, 2), nn.Conv2d(64, 96, (1, 3)), nn.Flatten())


def channels_last(net: nn.Module) -> None:
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


# Models


class Odd(nn.Module):
    """Parameters of no elements, of one, and of five dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.none, self.one = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.tensor(0.5))
        self.weight = nn.Parameter(torch.randn(30, 3))
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.imaginary = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = (x @ self.weight * self.one).double() * self.wide + self.narrow.double()
        return product + self.none.sum() + (self.imaginary * self.imaginary.conj()).real.double()


def few() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(30, 1, bias=False)


def check_odd_parameters_and_more_ranks_than_parameters() -> None:
    path = str(folder() / "run.pt")
    for make in (adam, partial(optim.Adam, foreach=True), partial(optim.SGD, lr=0.001, momentum=0.9, foreach=False)):
        for network in (Odd, few):
            net, optimizer = train(make, True, net=network())
            expected, its = train(make, False, net=network())
            require_equal(net, expected)
            hvd.save(path, consolidate=True, optimizer=optimizer)
            same_state(torch.load(path, weights_only=True)["optimizer"], its.state_dict())
    more: list[Make] = [partial(optim.Adam, fused=True), partial(optim.RMSprop, foreach=True), optim.Adafactor]
    for another in more:
        require_equal(train(another, True, net=few())[0], train(another, False, net=few())[0])


def check_models_that_are_frozen_at_first() -> None:
    nets = []
    for attach in both_ways("gradients"):
        net = model().requires_grad_(False)
        optimizer = attach(adam(net.parameters()))
        optimizer.step()
        continue_training(net.requires_grad_(True), optimizer)
        net[0].requires_grad_(False)
        continue_training(net, optimizer)
        net[0].requires_grad_(True)
        continue_training(net, optimizer)
        nets.append(net)
    require_all_equal(nets)


def check_casts_and_layouts() -> None:
    """Before the first step all parameters are divided again; later their state would not fit."""
    changes: dict[Callable[[], nn.Module], Callable[[Any], object]] = {
        model: lambda net: net.double(),
        convolutions: channels_last,
    }
    path = str(folder() / "run.pt")
    for network, change in changes.items():
        nets = []
        for attach in both_ways("gradients"):
            net = network()
            optimizer = attach(adam(net.parameters()))
            change(net)
            continue_training(net, optimizer)
            hvd.save(path, net=net, optimizer=optimizer)
            again = network()
            another = attach(adam(again.parameters()))
            change(again)
            hvd.load(path, net=again, optimizer=another)
            continue_training(again, another)
            nets.append(again)
        require_all_equal(nets)
        net, optimizer = train(adam, True, steps=1, net=network())
        change(net)
        backward(net, 1)
        require_error(RuntimeError, optimizer.step, "in pieces of parameter.0", "hvd.load")
        require_error(RuntimeError, partial(hvd.save, path, optimizer=optimizer), "parameter.0")


def check_parameters_in_one_memory() -> None:
    net, other = model(), nn.Linear(30, 211)
    other.weight.data = net[0].weight.data  # type: ignore[assignment]
    both = nn.ModuleList([net, other])
    call = partial(hvd.DistributedOptimizer, adam(both.parameters()), both.named_parameters(), sharded=True)
    require_error(ValueError, call, "0.0.weight", "1.weight", "same memory")
    whole = torch.zeros(2, 100)
    train(adam, True, steps=1, net=Parts([nn.Parameter(whole[0]), nn.Parameter(whole[1])]))


class Parts(nn.Module):
    def __init__(self, parts: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(part.sum() for part in self.parts) * x


# Optimizers


class OneElementCounts(OfElements):
    """Counts its steps in a tensor of one element."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        count = self.state[p].setdefault("step", torch.zeros(1))
        count += 1
        return super().direction(p) / count.sqrt()


class History(OfElements):
    """Keeps a list of gradients."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        history = self.state[p].setdefault("history", [])
        history.append(p.grad.clone())
        del history[:-2]
        return sum(history, torch.zeros_like(p))


class Layerwise(OfElements):
    """Looks at whole tensors in the groups that say so, as LARS does where it is not told to leave out biases."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.defaults["whole"] = False
        for group in self.param_groups:
            group.setdefault("whole", False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad * (p.norm() / p.grad.norm() if group["whole"] else 1))


def matrices_by_muon(ps: Any) -> optim.Optimizer:
    return optim.Muon([p for p in ps if p.ndim == 2], lr=0.01)


def whole_in_the_second_group(ps: Any) -> optim.Optimizer:
    ps = [*ps]
    return Layerwise([{"params": ps[1::2]}, {"params": ps[::2], "whole": True}])


def check_optimizers_of_users() -> None:
    """Their weights, and their states in a file."""
    path = str(folder() / "run.pt")
    for make in (OneElementCounts, History, matrices_by_muon, whole_in_the_second_group):
        net, optimizer = train(make, True)
        expected, its = train(make, False)
        require_equal(net, expected)
        assert elements(optimizer) < 0.9 * elements(its) or make not in (OneElementCounts, matrices_by_muon)
        hvd.save(path, consolidate=True, optimizer=optimizer)
        whole, right = torch.load(path, weights_only=True)["optimizer"], its.state_dict()
        if make is History:
            for each in (whole, right):
                each["state"] = {i: dict(enumerate(it["history"])) for i, it in each["state"].items()}
        same_state(whole, right)


def check_groups_of_another_kind_that_come_later() -> None:
    nets = []
    for attach in both_ways("gradients"):
        net = model()
        ps = [*net.parameters()]
        optimizer = attach(Layerwise(ps[1::2]))
        continue_training(net, optimizer)
        optimizer.add_param_group({"params": ps[::2], "whole": True})
        continue_training(net, optimizer)
        nets.append(net)
    require_all_equal(nets)


class Masters(OfElements):
    """Steps float32 copies of the parameters, which it keeps in its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            its = self.state[p]
            its.setdefault("master", p.detach().float().clone())
            its.setdefault("momentum", torch.zeros_like(its["master"]))
            its["momentum"].mul_(0.9).add_(p.grad.float(), alpha=0.1)
            its["master"].sub_(0.01 * its["momentum"])
            p.copy_(its["master"])


def short() -> nn.Module:
    return model().to(torch.bfloat16)


def check_masters_in_the_state() -> None:
    """They stay float32: in steps, in files, and in state_dict() of a rank."""
    path = str(folder() / "run.pt")
    net, optimizer = train(Masters, True, net=short())
    expected, its = train(Masters, False, net=short())
    hvd.save(path, consolidate=True, net=net, optimizer=optimizer)
    same_state(torch.load(path, weights_only=True)["optimizer"], its.state_dict())
    again = short()
    another = hvd.DistributedOptimizer(Masters(again.parameters()), sharded=True)
    hvd.load(path, net=again, optimizer=another)
    continue_training(again, another)
    continue_training(expected, its)
    require_equal(again, expected)
    third = copy.deepcopy(again)
    last_one = hvd.DistributedOptimizer(Masters(third.parameters()), sharded=True)
    last_one.load_state_dict(copy.deepcopy(another.state_dict()))
    continue_training(third, last_one)
    continue_training(expected, its)
    require_equal(third, expected)
    assert {value.dtype for its in last_one.state.values() for value in its.values()} == {torch.float32}


def check_masters_as_parameters() -> None:
    """The model is bfloat16. The optimizer has float32 copies, and gets gradients that the user copies."""
    results = []
    for attach in both_ways():
        net = short()
        masters = [p.detach().float().requires_grad_() for p in net.parameters()]
        optimizer = attach(adam(masters))
        for step in range(5):
            net.zero_grad()
            backward(net, step)
            for master, p in zip(masters, net.parameters(), strict=True):
                assert p.grad is not None
                master.grad = p.grad.float()
            optimizer.step()
            with torch.no_grad():
                for master, p in zip(masters, net.parameters(), strict=True):
                    p.copy_(master)
        results.append((net, masters))
    require_equal(results[0][0], results[1][0])
    assert all(map(torch.equal, results[0][1], results[1][1]))


def check_compression() -> None:
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        for network in (model, short):
            options: dict[str, Any] = {"compression": compression, "steps": 3}
            require_equal(
                train(adam, True, net=network(), **options)[0], train(adam, False, net=network(), **options)[0]
            )


# Calls


def check_averages_of_weights() -> None:
    """Averaged models, and hooks after the step that were registered before and after attaching."""
    results = []
    for attach in both_ways():
        net = model()
        optimizer, averages = (
            adam(net.parameters()),
            [AveragedModel(net), AveragedModel(model()), AveragedModel(model())],
        )

        def update(average: AveragedModel, net: nn.Module, *_: object) -> None:
            average.update_parameters(net)

        optimizer.register_step_post_hook(partial(update, averages[1], net))
        attach(optimizer)
        optimizer.register_step_post_hook(partial(update, averages[2], net))
        for step in range(5):
            optimizer.zero_grad()
            backward(net, step)
            optimizer.step()
            averages[0].update_parameters(net)
        results.append(averages)
    for mine, expected in zip(*results, strict=True):
        require_equal(mine.module, expected.module)


def check_gradients_that_ranks_lack() -> None:
    """None on one rank, on all ranks, and zeros that were not set to None."""
    nets = []
    for attach in both_ways():
        net = model()
        optimizer = attach(adam(net.parameters()))
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            if last() and step == 1:
                optimizer.synchronize()  # without a backward()
            else:
                backward(net, step)
            if step == 3:
                net[0].weight.grad = None
            optimizer.step()
        nets.append(net)
    require_equal(*nets)


def check_fused_steps_unscale_all_gradients() -> None:
    """A GradScaler has a fused optimizer divide gradients. An infinite one makes all ranks leave the step out."""
    results = []
    for attach in both_ways():
        net = model()
        optimizer = attach(optim.Adam(net.parameters(), lr=0.01, fused=True))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            optimizer.zero_grad()
            x = rows(100 * step)
            scaler.scale(net(x).square().mean() * (torch.inf if step == 2 and last() else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append((net, [p.grad for p in net.parameters()]))
    require_equal(results[0][0], results[1][0])
    assert all(map(torch.equal, results[0][1], results[1][1]))


def check_closures_that_raise_on_one_rank() -> None:
    """The other ranks raise an error, too, and the next step works."""
    net = model()
    optimizer = hvd.DistributedOptimizer(adam(net.parameters()), sharded=True)
    for fails in (False, True, False, False):

        def closure(fails: bool = fails) -> None:
            optimizer.zero_grad()
            if fails and last():
                raise KeyError("of the user")
            backward(net, 0)

        if fails:
            require_error(KeyError if last() else MismatchError, partial(optimizer.step, closure))
        else:
            optimizer.step(closure)
        require_same_bits(weights(net))


def check_optimizers_in_pieces_are_not_copied() -> None:
    net = model()
    optimizer = hvd.DistributedOptimizer(adam(net.parameters()), sharded=True)
    copied, its = copy.deepcopy((net, optimizer))  # there are no pieces yet
    backward(copied, 0)
    its.step()
    backward(net, 0)
    optimizer.step()
    for call in (copy.deepcopy, copy.copy, pickle.dumps, lambda it: torch.save(it, io.BytesIO())):
        require_error(ValueError, partial(call, optimizer), "hvd.save")


def check_attached_again_after_shutdown() -> None:
    _net, optimizer = train(adam, True, steps=1)
    restart()
    for attach in both_ways():
        require_error(ValueError, partial(attach, optimizer), "hvd.shutdown()", "new optimizer")
    train(adam, True, steps=1)


def check_several_optimizers_of_one_model() -> None:
    net = model()
    first = hvd.DistributedOptimizer(adam(net.parameters()))
    second = hvd.DistributedOptimizer(OfElements(net.parameters()), sharded=True)
    backward(net, 0)
    second.step()
    require_error(ValueError, first.step, "sharded=")
    third = hvd.DistributedOptimizer(adam(net.parameters()))
    backward(net, 1)
    third.step()
    require_error(RuntimeError, second.step, "another optimizer")
    require_error(RuntimeError, partial(hvd.DistributedOptimizer, third, sharded=True), "attached already")
    require_same_bits(weights(net))


def check_files_keep_the_state_of_frozen_layers() -> None:
    path = str(folder() / "run.pt")
    _, its = train(adam, False, steps=3)
    hvd.save(path, optimizer=its)
    net = model()
    net[2].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(adam(net.parameters()), sharded=True)
    hvd.load(path, optimizer=optimizer)
    hvd.save(path, consolidate=True, optimizer=optimizer)
    same_state(torch.load(path, weights_only=True)["optimizer"], its.state_dict())


def check_modes_of_torch() -> None:
    """no_grad, inference_mode and torch.compile around step()."""

    def compiled(optimizer: optim.Optimizer) -> Callable[[], Any]:
        return torch.compile(optimizer.step, backend="eager")

    def within(mode: Callable[[], Any], optimizer: optim.Optimizer) -> Callable[[], Any]:
        return mode()(optimizer.step)

    for how in (partial(within, torch.no_grad), partial(within, torch.inference_mode), compiled):
        nets = []
        for attach in both_ways():
            net = model()
            optimizer = attach(adam(net.parameters()))
            step = how(optimizer)
            for number in range(3):
                optimizer.zero_grad()
                backward(net, number)
                step()
            nets.append(net)
        require_equal(*nets)


def check_many_optimizers_one_after_another() -> None:
    """Neither memory nor open files grow."""
    sizes = []
    for _ in range(2):
        for _ in range(20):
            train(adam, True, steps=1)
        gc.collect()
        with open("/proc/self/statm") as memory:
            sizes.append(int(memory.read().split()[1]) * 4096)
    assert sizes[1] - sizes[0] < 20 * 2 * sum(p.nbytes for p in model().parameters()), sizes
