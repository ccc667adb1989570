"""TorchState and ElasticSampler, and training that goes on after an error."""

from __future__ import annotations

import gc
from typing import Any

import torch

import hvdlite.torch as hvd
from hvdlite import elastic
from hvdlite.torch.elastic import state as states
from tests.parallel.common import at_sizes, last, require_error, require_same_bits


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The same on all ranks; attached, with momentum."""
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters())


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    data = torch.arange(8.0).reshape(2, 4).sin() + number + hvd.rank()
    optimizer.zero_grad()
    (model(data) ** 2).mean().backward()
    optimizer.step()


def check_training_through_an_error_is_training_without_one() -> None:
    """To the bit, weights and momentum: the attached optimizer goes on under the new communicator."""
    model, optimizer = model_and_optimizer()
    for number in range(8):
        step(model, optimizer, number)
    expected = [p.detach().clone() for p in model.parameters()]

    for everywhere in (True, False):
        model, optimizer = model_and_optimizer()
        failed: list[int] = []

        @hvd.elastic.run
        def train(state: hvd.elastic.TorchState, everywhere: bool = everywhere, failed: list[int] = failed) -> None:
            while state.number < 8:
                if state.number == 5 and not failed:
                    failed.append(1)
                    if everywhere or last() or hvd.size() == 1:
                        raise hvd.HorovodInternalError("as if something had failed")
                step(state.model, state.optimizer, state.number)
                state.number += 1
                if state.number == 3:
                    state.commit()

        state = hvd.elastic.TorchState(model, optimizer, number=0)
        train(state)
        assert failed and state.optimizer is optimizer
        found = [p.detach() for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        require_same_bits(found)
        require_same_bits([optimizer.state[p]["momentum_buffer"] for p in model.parameters()])


@at_sizes(2, 3)
def check_a_strategy_goes_on_through_an_error() -> None:
    """With its counters and outer state: the commit is right after an outer step, and the error is between two."""
    found = []
    for fails in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Linear(4, 1)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), strategy=hvd.DiLoCo(2, warmup_steps=1))
        failed: list[int] = []

        @hvd.elastic.run
        def train(state: hvd.elastic.TorchState, fails: bool = fails, failed: list[int] = failed) -> None:
            while state.number < 9:
                if fails and state.number == 6 and not failed:
                    failed.append(1)
                    raise hvd.HorovodInternalError("as if something had failed")
                step(state.model, state.optimizer, state.number)
                state.number += 1
                if state.number == 5:
                    state.commit()

        train(hvd.elastic.TorchState(model, optimizer, number=0))
        assert bool(failed) == fails
        found.append([p.detach() for p in model.parameters()])
        require_same_bits(found[-1])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def check_gradients_of_a_step_that_is_taken_back_are_gone() -> None:
    """In loops that zero them behind the step, also where several backwards make one; so is what spoiled them."""
    for passes in (1, 2):
        found = []
        for fails in (False, True):
            model = torch.nn.Linear(4, 1)
            torch.nn.init.ones_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            hvd.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=passes)
            failed: list[int] = []

            @hvd.elastic.run
            def train(state: hvd.elastic.TorchState, fails: bool = fails, failed: list[int] = failed) -> None:
                while state.number < 4:
                    for number in range(passes):
                        bad = fails and state.number == 2 and not failed
                        (
                            model(torch.ones(2, 4) * (hvd.rank() + number)) * (float("nan") if bad else 1)
                        ).sum().backward()
                        if bad:
                            failed.append(1)
                            raise hvd.HorovodInternalError("the loss is not finite")
                    state.optimizer.step()
                    state.optimizer.zero_grad()
                    state.number += 1
                    state.commit()

            train(hvd.elastic.TorchState(model, optimizer, number=0))
            assert bool(failed) == fails
            found.append(model.weight.detach())
        assert torch.equal(*found), found


def check_passes_before_a_restore_by_hand_do_not_count() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Sum, backward_passes_per_step=2)
    state = hvd.elastic.TorchState(model, optimizer)
    for number in (8.0, 1.0, 3.0):
        model(torch.tensor([[number]])).sum().backward()
        if number == 8:
            state.restore()
    optimizer.step()
    assert model.weight.item() == -4 * hvd.size()


def check_an_optimizer_attached_by_the_function_itself() -> None:
    """It calls DistributedOptimizer again after an error; twice in one call is a mistake, as ever."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    calls: list[int] = []

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        calls.append(1)
        hvd.DistributedOptimizer(optimizer, model.named_parameters())
        if hvd.size() > 1:
            require_error(RuntimeError, lambda: hvd.DistributedOptimizer(optimizer), "attached already")
        for number in range(3):
            step(model, optimizer, number)
            if len(calls) < 3 and number == 1:
                raise hvd.HorovodInternalError(f"once {len(calls)}")

    train(hvd.elastic.TorchState(model, optimizer))
    assert len(calls) == 3
    require_same_bits([p.detach() for p in model.parameters()])


def check_what_some_ranks_have_none_of() -> None:
    """Theirs stays None, the others' is theirs; and what is set to None is let go of."""
    for lacking in (0, hvd.size() - 1):
        model, optimizer = model_and_optimizer()
        optimizer.param_groups[0]["lr"] = 0.5
        mine = None if hvd.rank() == lacking else optimizer
        state = hvd.elastic.TorchState(model, mine, number=hvd.rank())
        state.sync()
        assert state.optimizer is mine and state.number == 0
    state.model = None
    state.restore()
    assert state.model is None
    state.sync()


def check_models_in_containers_are_refused() -> None:
    net = torch.nn.Linear(1, 1)
    for given in ({"g": net}, [net], (torch.optim.SGD(net.parameters(), lr=0.1),)):
        require_error(ValueError, lambda: hvd.elastic.TorchState(nets=given), "nets=", "TorchState(generator=g")
    assert hvd.elastic.TorchState(nets={"g": 1}, more=torch.nn.ModuleList([net])).nets == {"g": 1}


@at_sizes(2, 3, 4)
def check_a_set_of_one_goes_on_through_an_error() -> None:
    """Optimizers that have nothing to reduce here: of a set of rank 0 alone, and of one that this rank is not in."""
    sets = [hvd.ProcessSet([0]), hvd.ProcessSet(range(1, hvd.size()))]
    hvd.shutdown()
    hvd.init(process_sets=sets)
    for process_set in sets:
        model = torch.nn.Linear(4, 1)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), process_set=process_set)
        failed: list[int] = []

        @hvd.elastic.run
        def train(state: hvd.elastic.ObjectState, failed: list[int] = failed) -> None:
            step(model, optimizer, 0)
            if not failed:
                failed.append(1)
                raise hvd.HorovodInternalError("as if something had failed")

        train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank))
    hvd.shutdown()
    hvd.init()


def check_what_one_rank_has_let_go_of_is_not_attached_again() -> None:
    """The others would wait for it for ever."""
    model, optimizer = model_and_optimizer()
    others = [model_and_optimizer()]
    if last():
        others.clear()
        gc.collect()
    elastic.start_again()
    step(model, optimizer, 0)
    require_same_bits([p.detach() for p in model.parameters()])


def check_sync_gives_rank_0s() -> None:
    model: Any
    model, optimizer = model_and_optimizer()
    with torch.no_grad():
        model.weight.fill_(hvd.rank())
    optimizer.param_groups[0]["lr"] = 0.5 + hvd.rank()
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=hvd.rank() + 7)
    state.sync()
    assert (model.weight == 0).all() and optimizer.param_groups[0]["lr"] == 0.5 and state.epoch == 7
    with torch.no_grad():
        model.weight.fill_(9)
    state.restore()
    assert (model.weight == 0).all()


def check_what_has_a_state_stays_the_same_object() -> None:
    """A scheduler goes on steering the optimizer that trains; it and a scaler go back to the commit, too."""
    model, optimizer = model_and_optimizer()
    scheduler, scaler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), torch.amp.GradScaler("cpu")
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, scaler=scaler, number=0)
    rates: list[float] = []

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.number < 4:
            rates.append(optimizer.param_groups[0]["lr"])
            step(model, optimizer, state.number)
            scheduler.step()
            scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0 ** (state.number + 1)})
            if state.number == 2 and len(rates) == 3:
                raise hvd.HorovodInternalError("as if something had failed")
            state.number += 1
            state.commit()

    train(state)
    assert rates == [0.1, 0.05, 0.025, 0.025, 0.0125], rates
    assert state.scheduler is scheduler and scheduler.optimizer is optimizer and state.scaler is scaler
    assert scheduler.last_epoch == 4 and scaler.get_scale() == 16


def check_a_scheduler_on_rank_0_alone() -> None:
    model, optimizer = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if hvd.rank() == 0 else None
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, number=hvd.rank())
    state.sync()
    assert state.number == 0 and state.scheduler is scheduler


def check_restore_and_replace() -> None:
    """Also under any other name; an object set anew is saved at once; None is an ordinary attribute."""
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    state = hvd.elastic.TorchState(net=first, epoch=0)
    assert state.model is None and state.optimizer is None
    kept = first.weight.detach().clone()
    with torch.no_grad():
        first.weight.zero_()
    state.restore()
    assert torch.equal(first.weight, kept)
    state.net = second
    kept = second.weight.detach().clone()
    with torch.no_grad():
        second.weight.zero_()
        first.weight.fill_(4)
    state.restore()
    assert state.net is second and torch.equal(second.weight, kept) and (first.weight == 4).all()


def check_handlers_of_ones_own() -> None:
    class Counter:
        n = 0

        def state_dict(self) -> dict[str, int]:
            return {"n": self.n}

        def load_state_dict(self, given: dict[str, int]) -> None:
            self.n = given["n"]

    before = states.get_handler_registry()
    states.set_handler_registry([*before, (Counter, states.StateHandler)])
    counter = Counter()
    state = hvd.elastic.TorchState(counter=counter)
    states.set_handler_registry(before)
    counter.n = hvd.rank() + 3
    state.sync()
    assert state.counter is counter and counter.n == 3


def check_a_handler_is_made_before_it_saves() -> None:
    class Kept(states.StateHandler):
        def __init__(self, value: Any) -> None:
            super().__init__(value)
            self.history: list[Any] = []

        def save(self) -> None:
            super().save()
            self.history.append(self.saved)

    before = states.get_handler_registry()
    states.set_handler_registry([(torch.nn.Linear, Kept), *before])
    state = hvd.elastic.TorchState(torch.nn.Linear(1, 1))
    states.set_handler_registry(before)
    state.save()
    assert len(state._handlers["model"].history) == 2  # type: ignore[attr-defined]


def check_sampler_deals_out_everything_once() -> None:
    """All ranks together see each sample of an epoch, in an order that the epoch decides; some twice, to be even."""
    p, r = hvd.size(), hvd.rank()
    data: Any = list(range(10))
    sampler = hvd.elastic.ElasticSampler(data, seed=5)
    assert (sampler.num_replicas, sampler.rank, len(sampler)) == (p, r, -(-10 // p))
    orders = []
    for epoch in range(2):
        everyone = hvd.allgather_object(list(sampler))
        assert {len(mine) for mine in everyone} == {len(sampler)}
        assert {i for mine in everyone for i in mine} == set(data)
        assert sum(len(mine) for mine in everyone) == sampler.total_size < 10 + p
        orders.append(everyone)
        sampler.set_epoch(epoch + 1)
    assert orders[0] != orders[1]
    plain = hvd.elastic.ElasticSampler(data, shuffle=False)
    assert list(plain)[:2] == [r, r + p] and next(iter(torch.utils.data.DataLoader(data, sampler=plain))).item() == r


def check_sampler_goes_on_where_it_was() -> None:
    p = hvd.size()
    sampler = hvd.elastic.ElasticSampler(range(20), seed=1)
    done = [i for mine in hvd.allgather_object(list(sampler)[:2]) for i in mine]
    sampler.record_batch(0, 2)
    assert sampler.processed_num == 2 * p and sampler.state_dict() == {"epoch": 0, "processed_num": 2 * p}
    other = hvd.elastic.ElasticSampler(range(20), seed=1)
    other.load_state_dict(sampler.state_dict())
    assert sorted(other.processed_indices) == sorted(done)
    rest = [i for mine in hvd.allgather_object(list(other)) for i in mine]
    assert set(rest) == set(range(20)) - set(done) and len(other) == -(-(20 - 2 * p) // p)
    other.record_batch(1, 100)
    other.reset()
    assert list(other) == [] and len(other) == 0
    other.set_epoch(1)
    assert other.processed_num == 0 and len(other) == -(-20 // p)
    tiny = hvd.elastic.ElasticSampler(range(1))
    assert list(tiny) == [0]  # on every rank


def check_sampler_in_a_state() -> None:
    """Progress is committed, restored, given to all, and dealt out anew at a reset."""
    sampler = hvd.elastic.ElasticSampler(range(16), seed=2)
    state = hvd.elastic.TorchState(sampler=sampler, batch=0)
    sampler.record_batch(0, 1)
    state.commit()
    sampler.record_batch(1, 1)
    state.restore()
    assert sampler.processed_num == hvd.size()
    sampler.processed_num = 4 + hvd.rank()
    state.sync()
    assert sampler.processed_num == 4 and len(sampler) == -(-12 // hvd.size())
    sampler.num_replicas = 99
    state.on_reset()
    assert sampler.num_replicas == hvd.size()
