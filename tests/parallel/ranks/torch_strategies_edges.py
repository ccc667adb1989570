"""DistributedOptimizer(strategy=...) in trouble: failed steps, states loaded in the middle, parameters that are added."""

from __future__ import annotations

import copy

import torch

import hvdlite.torch as hvd
from hvdlite.strategies import Strategy
from tests.parallel.common import at_sizes, last, require_error, require_same_bits
from tests.parallel.ranks.torch_strategies import loss_of, model_of, require_close, sgd


def values_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()


@at_sizes(2, 3)
def check_a_state_from_the_warmup() -> None:
    """Loaded when the warm-up is over, it brings the averages of gradients back."""
    for strategy in list[Strategy]([
        hvd.LocalSGD(2, warmup_steps=4), hvd.LocalSGD(2, warmup_steps=4, hierarchical=True),
        hvd.DiLoCo(2, hvd.OuterSGD(1.0, 0.0), warmup_steps=4),
    ]):  # fmt: skip
        model = model_of()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), strategy=strategy)
        train(model, optimizer, range(2))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, range(2, 7))
        expected = values_of(model)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        train(model, optimizer, range(2, 7))
        require_close(model, expected, 1e-12)


@at_sizes(2, 3)
def check_join_in_different_phases() -> None:
    """Rank 0 joins within the warm-up; its next backward() waits for nobody, since the others' average no gradients."""
    for steps, warmup in ((7, 4), (4, 6)):
        w = torch.nn.Parameter(torch.zeros(2))
        plain = torch.optim.SGD([w], lr=1.0)
        optimizer = hvd.DistributedOptimizer(plain, strategy=hvd.LocalSGD(2, warmup_steps=warmup))
        with hvd.uneven_inputs(w):
            for _ in range(2 if hvd.rank() == 0 else steps):
                optimizer.zero_grad()
                w.sum().backward()
                optimizer.step()
        before, mean = w.detach().clone(), (hvd.size() + 1) / 2
        for _ in range(3):
            optimizer.zero_grad()
            (w.sum() * (1 + hvd.rank())).backward()
            optimizer.step()
        alone = 0 if steps > warmup else 1  # the last step: the next average is not due yet
        assert torch.allclose(w, before - (3 - alone) * mean - alone * (1 + hvd.rank())), (w, before)


@at_sizes(2)
def check_join_within_a_host() -> None:
    """With averages within the host, other ranks would wait for the gradients of one that has joined.

    An optimizer that was dropped does not count.
    """
    for strategy, words in ((hvd.LocalSGD(2, hierarchical=True), "hierarchical=True"),
                            (hvd.Neighbors(hvd.RingGraph), "RingGraph")):  # fmt: skip
        model = model_of()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), strategy=strategy)
        train(model, optimizer, range(1))
        require_error(RuntimeError, hvd.join, "hvd.join() is not possible", words)
        del optimizer
        hvd.join()


class Failing(torch.optim.SGD):
    """SGD with a step() that can fail."""

    fails = False

    def step(self, closure=None):  # type: ignore[no-untyped-def]  # torch's own is untyped
        if self.fails:
            self.fails = False
            raise MemoryError("no room")
        return super().step(closure)


@at_sizes(2, 3)
def check_a_failed_step() -> None:
    """A step() that raises on one rank counts: the other ranks have counted theirs, and wait for this one's weights."""
    for strategy in list[Strategy]([
        hvd.LocalSGD(2), hvd.LocalSGD(2, warmup_steps=3), hvd.DiLoCo(2), hvd.DiLoCo(3, overlap=1),
        hvd.Neighbors(hvd.RingGraph),
    ]):  # fmt: skip
        for failing in (1, 3, 5):
            model = model_of()
            plain = Failing(model.parameters(), lr=0.1)
            optimizer = hvd.DistributedOptimizer(plain, strategy=strategy)
            for step in range(6):
                plain.fails = step == failing and last()
                try:
                    train(model, optimizer, range(step, step + 1))
                except MemoryError:
                    assert last() and step == failing
            hvd.average_parameters(model)
            require_same_bits(values_of(model))
            assert optimizer.state_dict()["hvdlite_strategy"]["steps"] == 6


@at_sizes(2, 3)
def check_a_broadcast_while_weights_travel() -> None:
    """What is under way arrives first, so that all ranks go on from the same state."""
    for strategy in list[Strategy]([
        hvd.DiLoCo(4, overlap=2), hvd.Neighbors(hvd.OnePeerExponential()), hvd.Neighbors(hvd.RingGraph),
    ]):  # fmt: skip
        model = model_of()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), strategy=strategy)
        train(model, optimizer, range(5))
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for step in range(5, 12):
            optimizer.zero_grad()
            loss_of(model, 0, step).backward()  # on all ranks the same
            optimizer.step()
        common = {key: value for key, value in optimizer.state_dict()["hvdlite_strategy"].items() if key != "steps"}
        require_same_bits(list(common.values()))
        for p in values_of(model):
            everyone = hvd.allgather(p[None])
            assert (everyone - p).abs().max() < 1e-12, strategy


@at_sizes(2)
def check_states_of_other_strategies() -> None:
    """A state that lacks something is an error, and changes nothing."""
    optimizers = [
        hvd.DistributedOptimizer(sgd(model_of().parameters()), strategy=strategy)
        for strategy in list[Strategy]([hvd.LocalSGD(2), hvd.Neighbors(hvd.RingGraph)])
    ]
    for mine, other in (optimizers, reversed(optimizers)):
        state = other.state_dict()
        state["hvdlite_strategy"]["steps"] = 5
        require_error(ValueError, lambda m=mine, s=state: m.load_state_dict(s), "another strategy", "hvdlite_strategy")  # type: ignore[misc]
        assert mine.state_dict()["hvdlite_strategy"]["steps"] == 0


@at_sizes(2, 3)
def check_added_parameters() -> None:
    """Before the first step, or between two: they are kept together with the others."""
    for strategy, after in list[tuple[Strategy, int]]([
        (hvd.DiLoCo(2, hvd.OuterSGD(1.0, 0.0), compression=hvd.Compression.bf16), 0), (hvd.Neighbors(hvd.RingGraph), 0),
        (hvd.Neighbors(hvd.RingGraph), 3), (hvd.LocalSGD(2, state="average"), 2),
    ]):  # fmt: skip
        model, added = model_of(), torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), strategy=strategy)
        train(model, optimizer, range(after))
        optimizer.add_param_group({"params": [added]})
        for _ in range(2):
            optimizer.zero_grad()
            (added.sum() * hvd.rank()).backward()
            optimizer.step()
        mean = (hvd.size() - 1) / 2
        if isinstance(
            strategy, hvd.Neighbors
        ):  # the first step is mixed with the neighbours', the second one is not yet
            assert torch.allclose(added.data, torch.full((2,), -mean - hvd.rank()) if hvd.size() < 4 else added.data)
        else:
            assert torch.allclose(added.data, torch.full((2,), -2 * mean)), (strategy, added)


@at_sizes(3)
def check_join_is_exact() -> None:
    """In float64, averages over the ranks that have not joined have float64's precision."""
    w = torch.nn.Parameter(torch.full((3,), 1 / 3, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), strategy=hvd.LocalSGD(1))
    with hvd.uneven_inputs(w):
        for _ in range(1 if hvd.rank() == 0 else 4):
            optimizer.zero_grad()
            (w.sum() * 0).backward()
            optimizer.step()
    assert (w - 1 / 3).abs().max() < 1e-15, w


@at_sizes(2)
def check_a_wrong_compression() -> None:
    """It is an error when the optimizer is attached, not at the first outer step."""
    for wrong in ("fp16", 3, torch.float16):
        plain, strategy = sgd(model_of().parameters()), hvd.DiLoCo(500, compression=wrong)
        require_error(ValueError, lambda p=plain, s=strategy: hvd.DistributedOptimizer(p, strategy=s), "compression")  # type: ignore[misc]


def check_shared_parameters() -> None:
    """Of two optimizers, one of which has a strategy; an optimizer that is gone does not count."""
    for strategy in list[Strategy | None]([None, hvd.LocalSGD(2)]):
        model = model_of()
        first = hvd.DistributedOptimizer(sgd(model.parameters()), strategy=strategy)
        second = hvd.DistributedOptimizer(sgd(model.parameters()), strategy=hvd.LocalSGD(2, warmup_steps=1))
        if hvd.size() > 1:
            require_error(ValueError, second.step, "another optimizer", "give each parameter to one")
        scheduler = torch.optim.lr_scheduler.ConstantLR(first)
        del first, second, scheduler
        third = hvd.DistributedOptimizer(sgd(model.parameters()), strategy=hvd.LocalSGD(2))
        train(model, third, range(2))
        require_same_bits(values_of(model))


@at_sizes(2, 3)
def check_ema_schedulers_and_accumulation() -> None:
    """Two backwards per step, a scheduler, and an average over time whose average over ranks is evaluated."""
    model, simulated = model_of(), [model_of() for _ in range(hvd.size())]
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), strategy=hvd.LocalSGD(2))
    optimizers = [sgd(each.parameters()) for each in simulated]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (optimizer, *optimizers)]
    emas = [torch.optim.swa_utils.AveragedModel(each, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8))
            for each in (model, *simulated)]  # fmt: skip
    for step in range(5):
        for rank, (each, its) in enumerate(((model, optimizer), *zip(simulated, optimizers, strict=True)), start=-1):
            its.zero_grad()
            for half in range(2):
                loss_of(each, hvd.rank() if rank < 0 else rank, 10 * step + half).backward()
            its.step()
        if step % 2:
            for ps in zip(*(each.parameters() for each in simulated), strict=True):
                mean = torch.stack([p.data for p in ps]).mean(0)
                for p in ps:
                    p.data.copy_(mean)
        for scheduler in schedulers:
            scheduler.step()
        for ema, each in zip(emas, (model, *simulated), strict=True):
            ema.update_parameters(each)
    require_close(model, [p.detach() for p in simulated[hvd.rank()].parameters()], 1e-12)
    with hvd.average_parameters(emas[0]):
        means = [
            torch.stack([p.detach() for p in ps]).mean(0)
            for ps in zip(*(e.parameters() for e in emas[1:]), strict=True)
        ]
        require_close(emas[0], means, 1e-12)
        require_same_bits(values_of(emas[0]))
