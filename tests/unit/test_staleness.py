"""Bounded staleness on threads as ranks: bounds, synchronous training, ranks that end early, servers."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hvdlite.arrays import bfloat16
from hvdlite.errors import HvdliteError, ShutdownError
from hvdlite.job.groups import Group
from hvdlite.lanes.mailbox import Letter
from hvdlite.strategies import Site
from hvdlite.strategies.owner import ANSWER, FIRST_UPDATE, PARK, UPDATE, Owner, Terms
from hvdlite.strategies.staleness import BoundedStaleness, Server
from tests.unit.test_mailbox import mailbox_threads, on_groups


class Model:
    """Least squares on this rank's rows, with several parameters and a momentum SGD.

    Attributes:
        weights: The parameters.
        running: The strategy at work; None trains alone.
    """

    def __init__(self, group: Group, strategy: BoundedStaleness, dtype: Any = np.float64) -> None:
        self.group = group
        self.weights = [np.linspace(-1, 1, n).reshape(shape).astype(dtype) for n, shape in SHAPES]
        names = [f"p{i}" for i in range(len(SHAPES))]
        self.running = strategy.start(Site(group, "opt", "DistributedOptimizer(SGD)", names))
        self.momenta = [np.zeros_like(weight) for weight in self.weights]

    def step(self, gradients: Sequence[np.ndarray], rate: float = 0.1) -> bool:
        """One update with these gradients."""
        assert self.running.update_begins()
        self.running.before_update(self.weights, gradients)
        update(self.weights, self.momenta, gradients, rate)
        assert self.running.update_ends()
        return self.running.after_update(self.weights, {})


SHAPES = [(6, (2, 3)), (1, ()), (5, (5,)), (4, (2, 2))]


def update(
    weights: Sequence[np.ndarray], momenta: Sequence[np.ndarray], gradients: Sequence[np.ndarray], rate: float
) -> None:
    """SGD with momentum, in place."""
    for weight, momentum, gradient in zip(weights, momenta, gradients, strict=True):
        momentum[...] = 0.9 * momentum + gradient.astype(momentum.dtype)
        weight[...] = weight - np.asarray(rate, weight.dtype) * momentum


def gradients_of(weights: Sequence[np.ndarray], rank: int, step: int) -> list[np.ndarray]:
    """A rank's gradients: linear in the weights, and different for each rank and step."""
    noise = np.random.default_rng(1000 * rank + step)
    return [np.asarray(w * (1 + 0.1 * rank) - noise.standard_normal(w.shape), w.dtype) for w in weights]


# Synchronous training


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", [BoundedStaleness(0), BoundedStaleness(age=0)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-6)])
def test_zero_is_synchronous_training(size: int, strategy: BoundedStaleness, dtype: Any, tolerance: float) -> None:
    steps = 30

    def rank_main(group: Group) -> list[np.ndarray]:
        model, delays = Model(group, strategy, dtype), random.Random(group.rank)
        for step in range(steps):
            time.sleep(delays.choice((0, 0, 0.003)))
            assert model.step(gradients_of(model.weights, group.rank, step))
        assert model.running.counts == {0: steps}
        return model.weights

    everyone = on_groups(size, rank_main)
    expected = [np.linspace(-1, 1, n).reshape(shape).astype(dtype) for n, shape in SHAPES]
    momenta = [np.zeros_like(weight) for weight in expected]
    for step in range(steps):
        each = [gradients_of(expected, rank, step) for rank in range(size)]
        update(expected, momenta, [np.mean(parts, axis=0) for parts in zip(*each, strict=True)], 0.1)
    for weights in everyone:
        assert [w.tobytes() for w in weights] == [w.tobytes() for w in everyone[0]]
        for mine, wanted in zip(weights, expected, strict=True):
            assert mine.dtype == dtype
            np.testing.assert_allclose(mine, wanted, rtol=tolerance, atol=tolerance)
    assert not mailbox_threads()


# Bounds: each rank counts its updates in the weights


class Count:
    """A model that counts: worker w's update adds 1 to element w of each owner's slice."""

    def __init__(self, group: Group, strategy: BoundedStaleness, workers: int, owners: int) -> None:
        self.workers, self.rank = workers, group.rank
        self.weights = [np.zeros(workers) for _ in range(owners)]
        site = Site(group, "opt", "counter", [f"p{i}" for i in range(owners)])
        self.running = strategy.start(site)

    def step(self) -> None:
        """One update."""
        self.running.update_begins()
        self.running.before_update(self.weights, [None] * len(self.weights))
        for weight in self.weights:
            weight[self.rank] += self.workers
        if self.running.update_ends():
            self.running.after_update(self.weights, {})

    @property
    def seen(self) -> np.ndarray:
        """For each owner's slice, each worker's updates that this rank sees."""
        return np.array(self.weights)


@pytest.mark.parametrize(("size", "clock"), [(2, 1), (3, 1), (4, 2), (4, 8)])
def test_no_rank_runs_ahead_of_the_slowest(size: int, clock: int) -> None:
    """An independent record: before each update the numbers of updates that all ranks have begun and ended."""
    record, lock, steps = [0] * size, threading.Lock(), 800

    def rank_main(group: Group) -> int:
        model, delays, most = Count(group, BoundedStaleness(clock=clock), size, size), random.Random(group.rank), 0
        for number in range(steps):
            with lock:
                most = max(most, number - min(record))
            assert (model.seen >= number - clock).all(), "the view lacks updates that it must contain"
            assert (model.seen[:, group.rank] == number).all(), "the view lacks this rank's own updates"
            if delays.random() < 0.1 * (1 + group.rank):
                time.sleep(0.001 * delays.random())
            with lock:
                record[group.rank] = number + 1  # it is about to be sent
            model.step()
        model.running.settle(model.weights)
        assert (model.seen == steps).all()
        return most

    most = max(on_groups(size, rank_main))
    assert 1 <= most <= clock


@pytest.mark.parametrize(
    "terms", [Terms(clock=s, age=None) for s in (0, 1, 3)] + [Terms(None, s) for s in (0, 1, 2, 5)]
)
def test_ten_thousand_updates_within_the_bound(terms: Terms) -> None:
    """The owner alone, with workers that send in random order. The record is kept from the values alone."""
    p, chance = 5, random.Random(7)
    owner = Owner(terms, range(p))
    views = [np.zeros(p) for _ in range(p)]
    sent, waiting, order = np.zeros(p, int), set[int](), list[int]()
    speed = [1, 1, 2, 4, 10]
    for _ in range(10_000):
        free = [rank for rank in range(p) if rank not in waiting]
        assert free, "nobody can go on"
        rank = chance.choices(free, [speed[rank] for rank in free])[0]
        sent[rank] += 1
        first = sent[rank] == 1
        body = np.concatenate([np.eye(p)[rank], np.zeros(p)] if first else [np.eye(p)[rank]])
        before = np.array(owner.values) if owner.values.size else np.zeros(p)
        waiting.add(rank)
        answers = owner.take(Letter(FIRST_UPDATE if first else UPDATE, 1, 1, int(sent[rank]), 1, 8, body, rank))
        added = np.rint(owner.values - before).astype(int)
        order += [each for each in range(p) if added[each]]
        if terms.age:
            for worker in range(p):
                age = owner.values.sum() - views[worker].sum()
                if added[worker]:
                    age -= added.sum()  # its own, and those that came with it
                assert age <= terms.age * p, "an update was added that made a view too old"
        for dest, answer in answers:
            waiting.remove(dest)
            views[dest] = np.array(answer.body.view(np.float64))
            assert views[dest][dest] == sent[dest]
            if terms.clock is not None:
                assert sent[dest] - sent.min() <= terms.clock
                assert views[dest].min() >= sent[dest] - terms.clock
        if terms.together and answers:
            assert len(answers) == p and (views[0] == sent).all()
    assert len(order) > 9_900


@pytest.mark.parametrize("terms", [Terms(0, None), Terms(2, None), Terms(None, 0), Terms(None, 1), Terms(None, 3)])
@pytest.mark.parametrize("seed", range(8))
def test_owners_that_get_letters_in_different_orders_do_not_block(terms: Terms, seed: int) -> None:
    """Three owners and four workers, which pause now and then. Letters overtake those of other senders."""
    p, chance, owners = 4, random.Random(seed), [Owner(terms, range(4), range(3), rank) for rank in range(3)]
    under_way: dict[tuple[int, int], list[Letter]] = {}  # by sender and receiver
    missing = {rank: set[int]() for rank in range(p)}  # owners that have not answered
    clocks, parked = [0] * p, set[int]()
    for _ in range(3000):
        free = [rank for rank in range(p) if not missing[rank]]
        busy = [way for way, letters in under_way.items() if letters]
        assert free or busy, "all workers wait, and no letter is under way"
        if busy and (not free or chance.random() < 0.8):
            way = chance.choice(busy)
            letter = under_way[way].pop(0)
            for dest, answer in owners[way[1]].take(letter):
                if answer.kind == ANSWER:
                    missing[dest].remove(way[1])
                else:
                    under_way.setdefault((way[1], dest), []).append(answer._replace(source=way[1]))
            continue
        rank = chance.choice(free)
        clocks[rank] += 1
        if rank not in parked and chance.random() < 0.1:
            parked.add(rank)
            letter = Letter(PARK, era=1, source=rank)
        else:
            parked.discard(rank)
            missing[rank] = {0, 1, 2}
            letter = Letter(FIRST_UPDATE, 1, 1, clocks[rank], 1, 8, np.zeros(2), rank)
        for owner in range(3):
            under_way.setdefault((rank, owner), []).append(letter)
    assert min(clocks) > 20


def test_age_lets_ranks_run_at_their_own_speeds_and_clock_does_not() -> None:
    """One of four ranks is 4 times slower."""
    times = [0.04, 0.04, 0.04, 0.16]  # of which the owners' work, with four ranks in one process, is a small part

    def speed(strategy: BoundedStaleness) -> float:
        """Updates per second of all ranks, over the sum of their own speeds."""

        def rank_main(group: Group) -> int:
            model, number = Count(group, strategy, 4, 4), 0
            model.step()
            until = time.monotonic() + 2.5
            while time.monotonic() < until:
                time.sleep(times[group.rank])
                model.step()
                number += 1
            model.running.park()
            return number

        return sum(on_groups(4, rank_main)) / 2.5 / sum(1 / each for each in times)

    quick = {name: speed(s) for name, s in (("age", BoundedStaleness(age=4)), ("none", BoundedStaleness(None)))}
    slow = speed(BoundedStaleness(clock=4))
    assert quick["age"] > 0.8 and quick["none"] > 0.8 and slow < 0.6, (quick, slow)


# What is added


def send(owner: Owner, rank: int, clock: int, *parts: float, base: float | None = None) -> float:
    """Send an update of a slice of one element. Returns the value in the answer to this rank."""
    numbers = np.array(parts if base is None else (*parts, base))
    letter = Letter(UPDATE if base is None else FIRST_UPDATE, 1, 1, clock, 1, 8, numbers, rank)
    return dict(owner.take(letter))[rank].body.view(np.float64).item()


def test_delay_compensation() -> None:
    """As DC-ASGD's server: w -= rate (g + lambda g g (w - w')), with deltas of -rate g."""
    owner, rate, factor = Owner(Terms(None, None, compensation=0.3), range(2)), 0.1, 0.3
    first = send(owner, 0, 1, -rate * 2.0, 2.0, base=5.0)
    assert first == pytest.approx(5.0 - rate * 2.0)  # nobody else has changed anything
    late = send(owner, 1, 1, -rate * 3.0, 3.0, base=5.0)
    assert late == pytest.approx(first - rate * (3.0 + factor * 9.0 * (first - 5.0)))
    again = send(owner, 0, 2, -rate * 1.5, 1.5)
    assert again == pytest.approx(late - rate * (1.5 + factor * 1.5**2 * (late - first)))


def test_scaling_by_staleness() -> None:
    owner = Owner(Terms(None, None, scaled=True), range(2))
    assert send(owner, 0, 1, 1.0, base=0.0) == 1.0
    for clock in range(2, 6):
        assert send(owner, 0, clock, 1.0) == clock
    assert send(owner, 1, 1, 1.0, base=0.0) == 5 + 1 / 3  # 5 updates of 2 ranks: 2 steps
    assert owner.workers[1].staleness == 2


@pytest.mark.parametrize("strategy", [{"delay_compensation": 0.5}, {"scale_by_staleness": True}])
def test_synchronous_updates_are_not_stale(strategy: dict[str, Any]) -> None:
    def rank_main(group: Group) -> None:
        model = Model(group, BoundedStaleness(0, **strategy))
        plain = Model(group, BoundedStaleness(0))
        for step in range(5):
            model.step(gradients_of(model.weights, group.rank, step))
            plain.step(gradients_of(plain.weights, group.rank, step))
        assert [w.tobytes() for w in model.weights] == [w.tobytes() for w in plain.weights]

    on_groups(3, rank_main)


def test_delay_compensation_trains() -> None:
    """The gradients travel, for several owners and parameters."""

    def rank_main(group: Group) -> float:
        model = Model(group, BoundedStaleness(clock=2, delay_compensation=0.1))
        for _ in range(200):
            model.step([np.asarray(weight * 0.5) for weight in model.weights], 0.01)
        model.running.settle(model.weights)
        return max(float(np.abs(weight).max()) for weight in model.weights)

    assert max(on_groups(3, rank_main)) < 0.05


def test_half_precision_is_added_in_single() -> None:
    """A quarter of the smallest change of 1.0 in bfloat16, from each of four ranks, makes a whole one."""

    def rank_main(group: Group) -> None:
        weights = [np.ones(9, bfloat16), np.ones(3, np.float32)]
        running = BoundedStaleness(None).start(Site(group, "opt", "opt", ["a", "b"]))
        running.before_update(weights, [None, None])
        for weight in weights:
            weight[...] = 1 + 2**-7
        running.after_update(weights, {})
        running.settle(weights)
        assert weights[0].dtype == bfloat16 and (weights[0].astype(np.float32) == 1 + 2**-7).all()
        assert weights[1].dtype == np.float32 and (weights[1] == 1 + 2**-7).all()

    on_groups(4, rank_main)


def test_integers_are_refused() -> None:
    def rank_main(group: Group) -> None:
        running = BoundedStaleness(None).start(Site(group, "opt", "opt", ["steps"]))
        with pytest.raises(TypeError, match="steps is int64"):
            running.before_update([np.ones(3, np.int64)], [None])

    on_groups(1, rank_main)


# Ends, and changes from outside


@pytest.mark.parametrize(
    "strategy", [BoundedStaleness(0), BoundedStaleness(clock=2), BoundedStaleness(age=1), BoundedStaleness(None)]
)
@pytest.mark.parametrize("by", ["park", "end"])
def test_a_rank_that_ends_early_goes_on_serving(strategy: BoundedStaleness, by: str) -> None:
    def rank_main(group: Group) -> np.ndarray:
        model = Count(group, strategy, 3, 3)
        for _ in range(5 if group.rank == 0 else 30):
            model.step()
        if by == "park":
            model.running.park()
        return model.seen

    views = on_groups(3, rank_main)
    assert (views[0][:, 0] == 5).all()
    assert max(view[:, 1].max() for view in views) == 30
    assert not mailbox_threads()


@pytest.mark.parametrize(
    "strategy", [BoundedStaleness(0), BoundedStaleness(clock=3), BoundedStaleness(age=1), BoundedStaleness(None)]
)
def test_settle_gives_all_ranks_all_updates(strategy: BoundedStaleness) -> None:
    """Several times, after different numbers of updates, and training goes on within the bound."""

    def rank_main(group: Group) -> None:
        model, total = Count(group, strategy, 3, 3), np.zeros(3)
        model.running.settle(model.weights)
        assert not model.seen.any()
        for turn in range(4):
            for _ in range(turn + 3 * group.rank):
                time.sleep(0.001 * group.rank)
                model.step()
            total += turn + 3 * np.arange(3)
            model.running.settle(model.weights)
            assert (model.seen == total).all()

    on_groups(3, rank_main)


def test_settle_is_synchronous_again_afterwards() -> None:
    """Rank 0 is quick: its first update after settle waits for the others'."""

    def rank_main(group: Group) -> None:
        model = Count(group, BoundedStaleness(0), 3, 3)
        for number in range(1, 20):
            model.running.settle(model.weights)
            time.sleep(0.002 * group.rank)
            model.step()
            assert (model.seen == number).all()

    on_groups(3, rank_main)


@pytest.mark.parametrize("strategy", [BoundedStaleness(0), BoundedStaleness(None)])
def test_weights_from_outside_replace_the_slices(strategy: BoundedStaleness) -> None:
    """Two ranks are quick, and another has made one update before the change."""

    def rank_main(group: Group) -> None:
        model = Count(group, strategy, 3, 3)
        for _ in range(4 if group.rank != 2 or strategy.clock == 0 else 1):
            model.step()
        if strategy.clock is None:
            model.running.park()
        group.transport.barrier()
        for weight in model.weights:
            weight[...] = 100
        model.step()
        model.running.settle(model.weights)
        assert (model.seen == 101).all()

    on_groups(3, rank_main)


def test_weights_from_outside_on_one_rank_are_an_error_there() -> None:
    def rank_main(group: Group) -> None:
        model = Count(group, BoundedStaleness(None), 2, 2)
        for _ in range(3):
            model.step()
        model.running.park()
        group.transport.barrier()
        if group.rank == 0:
            model.weights[0][...] = 100
            model.step()
        group.transport.barrier()
        if group.rank == 1:
            model.step()
            with pytest.raises(HvdliteError, match="changed between updates on another rank, and not on rank 1"):
                model.step()

    on_groups(2, rank_main)


def test_after_join_all_count_from_zero() -> None:
    def rank_main(group: Group) -> None:
        model = Count(group, BoundedStaleness(0), 3, 3)
        for _ in range(3 + 4 * group.rank):
            model.step()
        model.running.park()
        group.transport.barrier()  # as hvd.join()
        model.running.start_over(0)
        model.running.settle(model.weights)
        assert (model.seen == [3, 7, 11]).all()
        model.step()
        assert (model.seen == [4, 8, 12]).all()

    on_groups(3, rank_main)


def test_settle_after_another_rank_has_left_is_an_error() -> None:
    def rank_main(group: Group) -> None:
        model = Count(group, BoundedStaleness(clock=2), 2, 2)
        model.step()
        if group.rank == 0:
            with pytest.raises(ShutdownError, match="rank 1"):
                model.running.settle(model.weights)

    on_groups(2, rank_main)


# Mistakes


def test_other_weights_at_the_beginning_are_an_error_on_all_ranks() -> None:
    def rank_main(group: Group) -> str:
        model = Count(group, BoundedStaleness(clock=1), 3, 3)
        group.transport.barrier()
        model.weights[0][1] = group.rank == 2
        with pytest.raises(HvdliteError) as caught:
            for _ in range(10):
                model.step()
        return str(caught.value)

    for text in on_groups(3, rank_main, ends=False):
        assert "begins with other weights" in text and "broadcast" in text


def test_other_parameters_are_an_error_on_all_ranks() -> None:
    def rank_main(group: Group) -> str:
        model = Count(group, BoundedStaleness(clock=1), 3, 3)
        group.transport.barrier()
        if group.rank == 2:
            model.weights[1] = model.weights[1].astype(np.float32)
        with pytest.raises(HvdliteError) as caught:
            for _ in range(10):
                model.step()
        return str(caught.value)

    for text in on_groups(3, rank_main, ends=False):
        assert "names, shapes or dtypes" in text


def test_an_error_in_an_owners_thread_reaches_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Owner.take

    def bad_take(self: Owner, letter: Letter) -> Any:
        if letter.kind == UPDATE and letter.clock == 7 and letter.source == 1:
            raise ZeroDivisionError("seven")
        return take(self, letter)

    monkeypatch.setattr(Owner, "take", bad_take)

    def rank_main(group: Group) -> str:
        model = Count(group, BoundedStaleness(clock=2), 3, 3)
        with pytest.raises(HvdliteError) as caught:
            for _ in range(100):
                model.step()
        return str(caught.value)

    began = time.monotonic()
    assert all("seven" in text for text in on_groups(3, rank_main, ends=False))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "given", [{"clock": -1}, {"age": 1.5}, {"clock": 1, "age": 1}, {"servers": -1}, {"clock": True}]
)
def test_impossible_settings(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="BoundedStaleness"):
        BoundedStaleness(**given)


# Servers


@pytest.mark.parametrize(("size", "servers"), [(2, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("strategy", [{"clock": 0}, {"clock": 2}, {"age": 1}, {}])
def test_servers(size: int, servers: int, strategy: dict[str, Any]) -> None:
    """The last ranks own all slices, answer until all workers have left, and take part in settle."""
    workers = size - servers

    def rank_main(group: Group) -> None:
        model = Count(group, BoundedStaleness(**strategy, servers=servers), workers, servers)
        if isinstance(model.running, Server):
            with pytest.raises(HvdliteError, match="serve_parameters"):
                model.running.update_begins()
            model.running.serve(lambda: model.running.settle(model.weights))
            assert (model.seen == 20).all()  # those of the last settle
            return
        for turn in (1, 2):
            for _ in range(10):
                model.step()
            model.running.settle(model.weights)
            assert (model.seen == 10 * turn).all()
        model.step()

    on_groups(size, rank_main)
    assert not mailbox_threads()


def test_all_ranks_as_servers_is_an_error() -> None:
    def rank_main(group: Group) -> None:
        with pytest.raises(ValueError, match="no worker"):
            Count(group, BoundedStaleness(servers=2), 2, 2)

    on_groups(2, rank_main)
