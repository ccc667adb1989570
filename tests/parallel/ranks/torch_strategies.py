"""DistributedOptimizer(strategy=LocalSGD or DiLoCo): against simulations of all ranks on one, and around it."""

from __future__ import annotations

import copy
import gc
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hvdlite
import hvdlite.torch as hvd
from hvdlite.strategies import Strategy
from tests.parallel.common import (
    at_sizes,
    last,
    require_error,
    require_mismatch,
    require_same_bits,
    require_threads_end,
    restart,
)

Make = Callable[[Any], torch.optim.Optimizer]


def model_of(dtype: torch.dtype = torch.float64) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(6, 5, dtype=dtype, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: torch.nn.Module, rank: int, step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    x = batch(rank, step, dtype)
    return ((model(x) - x[:, :3].sin() * (1 + rank)) ** 2).mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02)


def train(strategy: Strategy | None, make: Make, steps: int, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """Train with hvdlite."""
    model = model_of(dtype)
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), strategy=strategy)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step, dtype).backward()
        optimizer.step()
    return model


class Simulation:
    """All ranks' training on one rank."""

    def __init__(self, make: Make, dtype: torch.dtype = torch.float64) -> None:
        self.models = [model_of(dtype) for _ in range(hvd.size())]
        self.optimizers = [make(model.parameters()) for model in self.models]
        self.dtype = dtype

    def local(self, step: int) -> None:
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step, self.dtype).backward()
            optimizer.step()

    def synchronous(self, step: int) -> None:
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step, self.dtype).backward()
        for ps in zip(*(model.parameters() for model in self.models), strict=True):
            mean = sum(p.grad for p in ps) / len(ps)
            for p in ps:
                p.grad = mean.clone()
        for optimizer in self.optimizers:
            optimizer.step()

    def weights(self) -> list[list[torch.Tensor]]:
        return [[p.data for p in model.parameters()] for model in self.models]

    def average(self) -> None:
        for ps in zip(*self.weights(), strict=True):
            mean = sum(ps) / len(ps)
            for p in ps:
                p.copy_(mean)

    def average_state(self) -> None:
        for index in range(len(self.weights()[0])):
            states = [optimizer.state[list(model.parameters())[index]] for model, optimizer
                      in zip(self.models, self.optimizers, strict=True)]  # fmt: skip
            for key in states[0]:
                if states[0][key].ndim:
                    mean = sum(state[key] for state in states) / len(states)
                    for state in states:
                        state[key].copy_(mean)


def require_close(model: torch.nn.Module, expected: Sequence[torch.Tensor], within: float) -> None:
    for p, wanted in zip(model.parameters(), expected, strict=True):
        assert (p.detach() - wanted).abs().max() <= within, float((p.detach() - wanted).abs().max())


def check_local_sgd() -> None:
    """Equal to a simulation, between averages and right after one."""
    for make in (sgd, adam):
        for steps in (6, 7):
            model, simulation = train(hvd.LocalSGD(sync_every=3), make, steps), Simulation(make)
            for step in range(steps):
                simulation.local(step)
                if step % 3 == 2:
                    simulation.average()
            require_close(model, simulation.weights()[hvd.rank()], 1e-12)
            bits = [p.detach() for p in model.parameters()]
            if steps == 6:
                require_same_bits(bits)
            elif hvd.size() > 1:
                everyone = hvd.allgather_object(bits[0].tolist())
                assert everyone[0] != everyone[-1]


def check_averaged_state() -> None:
    """The averages of Adam's moments, too."""
    model, simulation = train(hvd.LocalSGD(sync_every=2, state="average"), adam, 6), Simulation(adam)
    for step in range(6):
        simulation.local(step)
        if step % 2:
            simulation.average()
            simulation.average_state()
    require_close(model, simulation.weights()[hvd.rank()], 1e-12)


def check_averaged_state_that_some_ranks_lack() -> None:
    """Rank 0 never has a gradient of the second weight: its momentum is the average of the other ranks'."""
    first, second = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))
    plain = torch.optim.SGD([first, second], lr=1.0, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(plain, strategy=hvd.LocalSGD(sync_every=1, state="average"))
    (first.sum() + (second.sum() * hvd.rank() if hvd.rank() else 0)).backward()
    optimizer.step()
    p = hvd.size()
    assert (first == -1).all() and torch.allclose(second.data, -torch.full((3,), (p - 1) / 2))
    if hvd.rank() == 0 and p > 1:
        assert "momentum_buffer" not in optimizer.state[second]
    elif p > 1:
        mean = sum(range(1, p)) / (p - 1)
        assert torch.allclose(optimizer.state[second]["momentum_buffer"], torch.full((3,), mean))


def check_every_step_is_synchronous_training() -> None:
    """With SGD; float64 to 1e-12, float32 to 1e-6. DiLoCo with plain outer SGD at learning rate 1 averages, too."""
    for strategy in (hvd.LocalSGD(sync_every=1), hvd.DiLoCo(1, hvd.OuterSGD(lr=1.0, momentum=0.0))):
        for dtype, within in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
            model, simulation = train(strategy, plain_sgd, 10, dtype), Simulation(plain_sgd, dtype)
            for step in range(10):
                simulation.synchronous(step)
            require_close(model, simulation.weights()[0], within)
            require_same_bits([p.detach() for p in model.parameters()])


def check_warmup() -> None:
    """Post-local SGD: the first steps are synchronous, with a momentum that only then is every rank's."""
    for strategy in (hvd.LocalSGD(sync_every=2, warmup_steps=3), hvd.DiLoCo(2, hvd.OuterSGD(1.0, 0.0), warmup_steps=3)):
        model, simulation = train(strategy, sgd, 8), Simulation(sgd)
        for step in range(8):
            if step < 3:
                simulation.synchronous(step)
            else:
                simulation.local(step)
                if (step - 3) % 2:
                    simulation.average()
        require_close(model, simulation.weights()[hvd.rank()], 1e-12)


def check_hierarchical_on_one_host() -> None:
    """All ranks are on one host, so that every step is synchronous."""
    model, simulation = train(hvd.LocalSGD(sync_every=4, hierarchical=True, warmup_steps=2), sgd, 6), Simulation(sgd)
    for step in range(6):
        simulation.synchronous(step)
    require_close(model, simulation.weights()[0], 1e-12)


def outer_step(simulation: Simulation, common: list[torch.Tensor], velocity: list[torch.Tensor]) -> None:
    for index, ps in enumerate(zip(*simulation.weights(), strict=True)):
        gradient = common[index] - sum(ps) / len(ps)
        velocity[index].mul_(0.9).add_(gradient)
        common[index].sub_(0.7 * (gradient + 0.9 * velocity[index]))
        for p in ps:
            p.copy_(common[index])


@at_sizes(2, 3, 4)
def check_diloco() -> None:
    """Nesterov outer steps against a simulation; the inner AdamW keeps its state."""

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.02)

    model, simulation = train(hvd.DiLoCo(sync_every=4), adamw, 13), Simulation(adamw)
    common = [p.clone() for p in simulation.weights()[0]]
    velocity = [torch.zeros_like(p) for p in common]
    for step in range(13):
        simulation.local(step)
        if step % 4 == 3:
            outer_step(simulation, common, velocity)
    require_close(model, simulation.weights()[hvd.rank()], 1e-12)


def check_torchs_nesterov() -> None:
    """OuterSGD is torch.optim.SGD."""
    for momentum, nesterov in ((0.0, False), (0.9, False), (0.9, True)):
        p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        theirs = torch.optim.SGD([p], lr=0.3, momentum=momentum, nesterov=nesterov)
        mine, outer = np.ones(3), hvd.OuterSGD(0.3, momentum, nesterov)
        memories = [np.zeros(3) for _ in range(outer.memories)]
        for step in range(5):
            p.grad = torch.tensor([1.0, -2.0, step], dtype=torch.float64)
            theirs.step()
            outer.update(mine, p.grad.numpy().copy(), memories)
        assert np.abs(mine - p.detach().numpy()).max() < 1e-15


@at_sizes(2, 3, 4)
def check_fragments_and_overlap() -> None:
    """Two fragments, each sent every four steps, two steps apart; applied two steps later, mixed half and half."""
    plan = hvd.DiLoCo(sync_every=4, fragments=2, overlap=1, mix=0.25, outer_optimizer=hvd.OuterSGD(0.5, 0.0))
    model, simulation = train(plan, sgd, 11), Simulation(sgd)
    common = [p.clone() for p in simulation.weights()[0]]
    sizes, parts = [p.numel() for p in common], []
    for number in range(2):
        middles = [sum(sizes[:i]) + sizes[i] / 2 for i in range(len(sizes))]
        parts.append([i for i, middle in enumerate(middles) if int(middle * 2 // sum(sizes)) == number])
    assert all(parts)
    due: dict[int, list[tuple[int, torch.Tensor]]] = {}
    for step in range(1, 12):
        simulation.local(step - 1)
        for index, gradient in due.pop(step, []):
            common[index] -= 0.5 * gradient
            for weights in simulation.weights():
                weights[index].copy_(0.25 * weights[index] + 0.75 * common[index])
        part = {2: 0, 0: 1}.get(step % 4)
        for index in parts[part] if part is not None else []:
            mean = sum(weights[index] for weights in simulation.weights()) / hvd.size()
            due.setdefault(step + 1, []).append((index, common[index] - mean))
    require_close(model, simulation.weights()[hvd.rank()], 1e-12)


def check_compressed_outer_gradients() -> None:
    """bf16: as with gradients rounded to it. A lossy compressor on one host leaves them whole."""
    exact = train(hvd.DiLoCo(2, hvd.OuterSGD(1.0, 0.0)), sgd, 6)
    rounded = train(hvd.DiLoCo(2, hvd.OuterSGD(1.0, 0.0), compression=hvd.Compression.bf16), sgd, 6)
    require_same_bits([p.detach() for p in rounded.parameters()])
    differences = [
        float((a - b).detach().abs().max()) for a, b in zip(exact.parameters(), rounded.parameters(), strict=True)
    ]
    assert hvd.size() == 1 or 0 < max(differences) < 1e-2, differences
    whole = train(hvd.DiLoCo(2, hvd.OuterSGD(1.0, 0.0), compression=hvd.Compression.int8()), sgd, 6)
    require_close(whole, [p.detach() for p in exact.parameters()], 1e-12)


def check_half_precision() -> None:
    """bfloat16 weights: the common weights are in float32, so that small outer steps add up."""
    model = train(hvd.DiLoCo(2), adam, 6, torch.bfloat16)
    require_same_bits([p.detach() for p in model.parameters()])


def check_other_layouts() -> None:
    """channels_last weights, and a frozen one."""
    torch.manual_seed(0)
    model: Any = torch.nn.Conv2d(3, 4, 3)
    model = model.to(memory_format=torch.channels_last)
    model.bias.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), strategy=hvd.LocalSGD(2))
    before = model.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        (model.weight.sum() * (hvd.rank() + 1)).backward()
        optimizer.step()
    assert torch.allclose(model.weight, before - 2 * sum(range(1, hvd.size() + 1)) / hvd.size(), atol=1e-5)


@at_sizes(2, 3, 4)
def check_grad_scaler() -> None:
    """The last rank overflows in the second step; the ranks still average after the same steps."""
    for unscale in (False, True):
        w = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), strategy=hvd.LocalSGD(2))
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for step in range(1, 5):
            optimizer.zero_grad()
            scaler.scale(w.sum() * (float("inf") if step == 2 and last() else 1.0)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        missed = 1 / hvd.size() if hvd.size() > 1 else 0
        assert torch.allclose(w.data, torch.full((2,), -4 + missed)), w


@at_sizes(2, 3)
def check_join() -> None:
    """Averages are those of the ranks that still train; then all go on from the last one's weights."""
    w = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), strategy=hvd.LocalSGD(2))
    with hvd.uneven_inputs(w):
        for _ in range(2 if hvd.rank() == 0 else 6):
            optimizer.zero_grad()
            (w.sum() * hvd.rank()).backward()
            optimizer.step()
    mean = sum(range(hvd.size())) / hvd.size()
    alone = sum(range(1, hvd.size())) / (hvd.size() - 1)
    assert torch.allclose(w.data, torch.full((2,), -2 * mean - 4 * alone)), w
    for _ in range(2):
        optimizer.step()
    require_same_bits(w)


@at_sizes(2)
def check_join_with_diloco() -> None:
    w = torch.nn.Parameter(torch.zeros(2))
    plain = torch.optim.SGD([w], lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, strategy=hvd.DiLoCo(2, hvd.OuterSGD(1.0, 0.0), warmup_steps=1))
    with hvd.uneven_inputs(w):
        for _ in range(3 if hvd.rank() == 0 else 5):
            optimizer.zero_grad()
            (w.sum() * (1 + hvd.rank())).backward()
            optimizer.step()
    assert torch.allclose(w.data, torch.full((2,), -1.5 * 3 - 2 * 2)), w
    for _ in range(2):
        optimizer.zero_grad()
        (w.sum() * (1 + hvd.rank())).backward()
        optimizer.step()
    assert torch.allclose(w.data, torch.full((2,), -8.5 - 3)), w


@at_sizes(2, 3, 4)
def check_checkpoints() -> None:
    """Training that stops after a checkpoint and goes on elsewhere ends with the same bits."""
    for strategy in list[Strategy]([hvd.LocalSGD(3, warmup_steps=2), hvd.DiLoCo(3), hvd.DiLoCo(4, warmup_steps=6)]):

        def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
            model = model_of()
            return model, hvd.DistributedOptimizer(sgd(model.parameters()), strategy=strategy)

        model, optimizer = fresh()
        file = Path(hvd.broadcast_object(tempfile.mkdtemp())) / "checkpoint.pt"
        mine: Any = None
        for step in range(14):
            if step == 5:
                hvd.save(file, optimizer=optimizer)
                mine = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
        other, resumed = fresh()
        hvd.load(file, optimizer=resumed)  # counters and outer state; weights and momentum are each rank's own
        assert resumed.state_dict()["hvdlite_strategy"]["steps"] == 5
        other.load_state_dict(mine[0])
        resumed.load_state_dict(mine[1])
        for step in range(5, 14):
            resumed.zero_grad()
            loss_of(other, hvd.rank(), step).backward()
            resumed.step()
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)


@at_sizes(2, 3, 4)
def check_a_broadcast_state() -> None:
    """Rank 0's counters and outer state reach the other ranks."""
    model = model_of()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), strategy=hvd.DiLoCo(4))
    if hvd.rank() == 0:
        state = optimizer.state_dict()
        common = {f"common.{i}": p.detach() + 1 for i, p in enumerate(model.parameters())}
        outer = {f"outer.{i}.0": p.detach() + 2 for i, p in enumerate(model.parameters())}
        state["hvdlite_strategy"] = {"steps": 7, "step": torch.tensor(7), **common, **outer}
        optimizer.load_state_dict(state)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    found = optimizer.state_dict()["hvdlite_strategy"]
    assert int(found["steps"]) == 7 and int(found["step"]) == 7
    for i, p in enumerate(model.parameters()):
        assert torch.equal(found[f"common.{i}"], p.detach() + 1) and torch.equal(found[f"outer.{i}.0"], p.detach() + 2)
    loss_of(model, hvd.rank(), 0).backward()
    optimizer.step()
    require_same_bits([p.detach() for p in model.parameters()])


@at_sizes(2, 3, 4)
def check_average_parameters() -> None:
    """For good, and within a block. BatchNorm's statistics are averaged, its count is the largest."""
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    model[1].num_batches_tracked.fill_(hvd.rank())
    model[1].running_mean.fill_(hvd.rank())
    with torch.no_grad():
        model[0].weight.fill_(hvd.rank())
    mean = (hvd.size() - 1) / 2
    with hvd.average_parameters(model):
        assert torch.allclose(model[0].weight, torch.tensor(mean)) and model[1].num_batches_tracked == hvd.size() - 1
        assert torch.allclose(model[1].running_mean, torch.tensor(mean))
    assert (model[0].weight == hvd.rank()).all() and model[1].num_batches_tracked == hvd.rank()
    hvdlite.average_parameters(model)
    require_same_bits(list(model.state_dict().values()))
    require_error(TypeError, lambda: hvd.average_parameters(model[0].weight), "torch.nn.Module")


def check_neighbors() -> None:
    """D-PSGD and adapt-then-combine on a ring, a star and one-peer exponential graphs, against simulations."""
    p = hvd.size()
    for topology, rounds in ((hvd.RingGraph, [hvd.RingGraph(p)]), (hvd.StarGraph, [hvd.StarGraph(p)]),
                             (hvd.OnePeerExponential(), hvd.OnePeerExponential().rounds(p))):  # fmt: skip
        for mode in ("combine-then-adapt", "adapt-then-combine"):
            model, simulation = train(hvd.Neighbors(topology, mode=mode), sgd, 7), Simulation(sgd)
            for step in range(7):
                matrix = torch.tensor(rounds[step % len(rounds)].matrix)
                for rank, each in enumerate(simulation.models):
                    each.zero_grad()
                    loss_of(each, rank, step).backward()
                if mode == "combine-then-adapt":
                    mix(simulation, matrix)
                for optimizer in simulation.optimizers:
                    optimizer.step()
                if mode == "adapt-then-combine":
                    mix(simulation, matrix)
            require_close(model, simulation.weights()[hvd.rank()], 1e-12)


def mix(simulation: Simulation, matrix: torch.Tensor) -> None:
    for ps in zip(*simulation.weights(), strict=True):
        mixed = torch.tensordot(matrix, torch.stack(ps), 1)
        for p, value in zip(ps, mixed, strict=True):
            p.copy_(value)


@at_sizes(2, 3)
def check_neighbors_and_the_average() -> None:
    """`average_parameters` waits for what is under way, and training goes on as without it."""
    found = []
    for averages in (False, True):
        model = model_of()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), strategy=hvd.Neighbors(hvd.RingGraph))
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
            if averages:
                with hvd.average_parameters(model):
                    require_same_bits([p.detach() for p in model.parameters()])
        found.append([p.detach() for p in model.parameters()])
        if averages:
            require_error(RuntimeError, hvd.join, "hvd.join() is not possible", "RingGraph")
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def check_zero_staleness_is_synchronous_training() -> None:
    """float64 to 1e-12, float32 to 1e-6; the same bits on all ranks."""
    for dtype, within in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        model, simulation = train(hvd.BoundedStaleness(0), plain_sgd, 10, dtype), Simulation(plain_sgd, dtype)
        for step in range(10):
            simulation.synchronous(step)
        require_close(model, simulation.weights()[0], within)
        require_same_bits([p.detach() for p in model.parameters()])


@at_sizes(2, 3)
def check_staleness() -> None:
    """Constant gradients: after the average all updates have been added, whatever their order; then join."""
    for strategy in (hvd.BoundedStaleness(clock=2), hvd.BoundedStaleness(age=1), hvd.BoundedStaleness(None)):
        w = torch.nn.Module()
        w.w = torch.nn.Parameter(torch.zeros(5))
        before = sum(hvd.staleness().values())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(w.parameters(), lr=1.0), strategy=strategy)
        for _ in range(20):
            optimizer.zero_grad()
            (w.w.sum() * (hvd.rank() + 1)).backward()
            optimizer.step()
        with hvd.average_parameters(w):
            total = 20 * sum(range(1, hvd.size() + 1)) / hvd.size()
            assert torch.allclose(w.w, torch.tensor(-total)), w.w
            require_same_bits(w.w)
        assert sum(hvd.staleness().values()) - before == 20
        for _ in range(2 * hvd.rank()):
            optimizer.step()  # the same gradients
        hvd.join()
        optimizer.step()
        hvd.average_parameters(w)
        total += sum((1 + 2 * rank) * (rank + 1) for rank in range(hvd.size())) / hvd.size()
        assert torch.allclose(w.w, torch.tensor(-total)), w.w


@at_sizes(2, 3)
def check_collectives_between_stale_updates() -> None:
    """A quick rank waits in a collective: it does not hold back slow ranks, whose updates would be too old."""
    w = torch.nn.Parameter(torch.zeros(5))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), strategy=hvd.BoundedStaleness(age=1))
    for epoch in range(3):
        for _ in range(4 if hvd.rank() == 0 else 30):
            optimizer.zero_grad()
            w.sum().backward()
            optimizer.step()
        assert hvd.allreduce(torch.tensor(float(epoch))) == epoch


@at_sizes(2)
def check_mailboxes_end_with_their_optimizers() -> None:
    """Also if they go at different times."""
    for _ in range(3):
        w = torch.nn.Parameter(torch.zeros(5))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), strategy=hvd.BoundedStaleness(clock=1))
        for _ in range(2):
            w.sum().backward()
            optimizer.step()
        del optimizer
        if hvd.rank():
            gc.collect()
    gc.collect()
    require_threads_end("hvdlite-mailbox")


@at_sizes(2, 3)
def check_a_parameter_server() -> None:
    """The last rank serves. The average leaves out its statistics, and gives it the workers'."""
    for wrong_first in (False, True):  # a wrong step() on the server takes part in the comparison of weights, too
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        hvd.broadcast_parameters(model.state_dict(), 0)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, strategy=hvd.BoundedStaleness(clock=1, servers=1))
        statistics: Any = model[1].running_mean
        if last():
            if wrong_first:
                require_error(hvd.HorovodInternalError, optimizer.step, "do not train", "serve_parameters")
            statistics.fill_(100)
            hvd.serve_parameters(optimizer, model)
        else:
            require_error(ValueError, lambda: hvd.serve_parameters(optimizer, model), "servers")
            for step in range(5):
                optimizer.zero_grad()
                model(batch(hvd.rank(), step, torch.float32)[:, :2]).square().mean().backward()
                optimizer.step()
            hvd.average_parameters(model)
        mine = [each.detach().tolist() for each in model.state_dict().values()]
        assert (statistics.abs() < 1).all()
        restart()
        everyone = hvd.allgather_object(mine)
        assert everyone == [everyone[0]] * hvd.size()


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@at_sizes(2, 3, 4)
def check_rules() -> None:
    w = torch.nn.Parameter(torch.zeros(2))

    def attach(**options: Any) -> None:
        hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), **options)

    require_error(TypeError, lambda: attach(strategy="local"), "hvd.LocalSGD")
    require_error(ValueError, lambda: attach(strategy=hvd.LocalSGD(2), op=hvd.Sum), "leave op out")
    for bits in (hvd.Compression.bf16, hvd.Compression.topk(ratio=0.1)):
        require_error(
            ValueError, partial(attach, strategy=hvd.DiLoCo(2), compression=bits), "no effect", "hvd.DiLoCo(comp"
        )
    attach(strategy=hvd.LocalSGD(2, warmup_steps=1), compression=hvd.Compression.bf16)
    require_error(ValueError, lambda: attach(strategy=hvd.LocalSGD(2), sharded=True), "sharded")
    for bad in (lambda: hvd.LocalSGD(0), lambda: hvd.LocalSGD(2, warmup_steps=-1), lambda: hvd.LocalSGD(2, state="all"),  # type: ignore[arg-type]

                lambda: hvd.DiLoCo(2, fragments=3), lambda: hvd.DiLoCo(2, overlap=2), lambda: hvd.DiLoCo(4, mix=2),
                lambda: hvd.OuterSGD(lr=0), lambda: hvd.DiLoCo(4, compression=1, overlap=1)):  # fmt: skip
        require_error(ValueError, bad, "hvd.")
    if hvd.size() > 1:
        require_mismatch(lambda: attach(strategy=hvd.LocalSGD(3 if last() else 2)), "sync_every=3", "sync_every=2")
        require_mismatch(lambda: attach(strategy=hvd.LocalSGD(2) if last() else None), "strategy")


@at_sizes(2, 3)
def check_different_weights_are_an_error() -> None:
    """At the first step, as without a strategy."""
    w = torch.nn.Parameter(torch.full((2,), float(last())))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), [("w", w)], strategy=hvd.LocalSGD(2))
    w.sum().backward()
    require_mismatch(optimizer.step, "w differs", "broadcast_parameters")


@at_sizes(2, 3, 4)
def check_methods() -> None:
    """The optimizer's methods do no harm: a gradient is this rank's own."""
    w = torch.nn.Parameter(torch.zeros(2))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), strategy=hvd.LocalSGD(2))
    with optimizer.no_sync():
        (w.sum() * (hvd.rank() + 1)).backward()
    optimizer.synchronize()
    assert hvd.size() == 1 or (w.grad == hvd.rank() + 1).all()
    require_error(RuntimeError, lambda: hvd.DistributedOptimizer(optimizer), "attached already")
