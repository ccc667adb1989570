"""What lossy compression keeps from round to round, on threads as ranks of hosts, and one driver's part of a bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdlite.algorithms import Place
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import LINE, DType
from hvdlite.compression import Column, Compressor, Exchange, Piece, RoundMemory
from hvdlite.compression.codec import Codec
from hvdlite.compression.part import Part, Section
from hvdlite.compression.powersgd import PowerSGD
from hvdlite.compression.saved import ANEW, EMPTY, Saved, as_arrays, of_arrays
from hvdlite.compression.store import Store
from hvdlite.compression.topk import TopK
from hvdlite.gradients.lossy import LossyBucket, LossyRounds, marked, shape_in_memory
from hvdlite.gradients.plan import Spec, plan
from hvdlite.memory.arena import Arena
from hvdlite.memory.workspace import Workspace
from hvdlite.system import user_warnings
from hvdlite.transports.threads import ThreadTransport, alone, run_ranks
from hvdlite.transports.two_levels import split

HOSTS = ((0, 1), (2, 3))
ONE = ("w", (20, 60), "float32")
TWO = ("v", (30, 40), "float64")


def allocate(store: Store, transport: ThreadTransport, *wanted: tuple[str, tuple[int, ...], str]) -> int:
    """Allocate on two hosts of two ranks. Returns the number of this rank's host."""
    host = transport.rank // 2
    store.allocate(wanted, transport, split(transport, HOSTS).local, (host, 2))
    return host


def fill(store: Store, name: str, value: float) -> None:
    """Write a round's values."""
    kept = store.after(name)
    kept.residual[...], kept.extra[...] = value, -value


def on_four(main: Callable[[ThreadTransport], None]) -> None:
    run_ranks(4, main)


def test_a_round_counts_once_it_is_committed() -> None:
    store = Store(TopK(), lambda: 1.0)
    store.allocate([ONE, TWO], alone(), alone(), (0, 1))
    assert not store.before("w").residual.any() and store.before("v").residual.dtype == np.float64
    for name in ("w", "v"):
        fill(store, name, 1.0)
    assert not store.before("w").residual.any() and store.rounds == 0
    store.commit(["w"])
    assert (store.before("w").residual == 1).all() and not store.before("v").residual.any() and store.rounds == 1
    fill(store, "w", 2.0)
    assert (store.before("w").residual == 1).all()  # this round is not committed
    fill(store, "w", 3.0)
    store.commit(["w", "v"])
    assert (store.before("w").residual == 3).all() and (store.before("v").residual == 1).all() and store.rounds == 2


def test_a_hosts_ranks_share_one_memory() -> None:
    def main(transport: ThreadTransport) -> None:
        store = Store(PowerSGD(), lambda: 1.0)
        host = allocate(store, transport, ONE)
        if transport.rank % 2 == 0:
            fill(store, "w", 1.0 + host)
        transport.barrier()
        store.commit(["w"])
        assert (store.before("w").residual == 1 + host).all() and (store.before("w").extra == -1 - host).all()
        assert store.first_of_host == (transport.rank % 2 == 0)
        transport.barrier()

    on_four(main)


def test_values_outlive_plans() -> None:
    """Parameters that are frozen or added, or lie elsewhere, keep their values; those of another shape do not."""

    def main(transport: ThreadTransport) -> None:
        store = Store(PowerSGD(), lambda: 1.0)
        host = allocate(store, transport, ONE, TWO)
        for name, value in (("w", 1.0), ("v", 2.0)):
            if transport.rank % 2 == 0:
                fill(store, name, value + 10 * host)
        transport.barrier()
        store.commit(["w"])
        store.commit(["v"])
        for wanted in ((TWO,), (("u", (50, 50), "float32"), TWO, ONE), (("v", (30, 40), "float32"),)):
            allocate(store, transport, *wanted)
            assert store.rounds == 2
            for half in (store.before, store.after):
                assert (half("w").residual == 1 + 10 * host).all() and (half("w").extra == -1 - 10 * host).all()
                assert (half("v").residual == 2 + 10 * host).all()
        assert store.before("v").residual.dtype == np.float32 and not store.before("u").residual.any()
        allocate(store, transport, ("w", (60, 30), "float32"))
        assert store.before("w").residual.shape == (1800,) and not store.before("w").residual.any()
        assert all(entry.start % LINE == 0 for entry in store.entries.values())

    on_four(main)


def trained(transport: ThreadTransport) -> Store:
    """A store with other residuals on each host, after one round."""
    store = Store(PowerSGD(), lambda: 1.0)
    host = allocate(store, transport, ONE, TWO)
    if transport.rank % 2 == 0:
        for name in ("w", "v"):
            fill(store, name, 1.0 + host)
    transport.barrier()
    store.commit(["w", "v"])
    return store


def copied(saved: Saved) -> Saved:
    """The values of a checkpoint, as in a file."""
    return of_arrays(as_arrays(saved))


def test_the_sum_over_hosts_is_loaded_on_the_first_host() -> None:
    """What every host keeps alike is loaded on all. Both halves have the values, and both times nothing is lost."""

    def main(transport: ThreadTransport) -> None:
        store = trained(transport)

        def add(array: np.ndarray) -> None:
            array[...] = np.sum(transport.allgather_object(array.copy()), axis=0)

        saved = store.summed(add)
        assert saved.host is None and saved.rounds == 1 and (saved.values["w"].residual == 3).all()
        again = Store(PowerSGD(), lambda: 1.0)
        again.load(saved)
        host = allocate(again, transport, ONE)
        for half in (again.before, again.after):
            assert (half("w").residual == (0 if host else 3)).all() and half("w").extra.any()
        assert again.rounds == 1 and again.loaded is None and {*again.entries} == {"w", "v"}
        transport.barrier()
        fill(again, "w", 5.0)
        transport.barrier()
        again.commit(["w"])
        allocate(again, transport, ONE, TWO)  # the checkpoint's values do not come back
        assert (again.before("w").residual == 5).all() and again.rounds == 2
        assert (again.before("v").residual == (0 if host else 3)).all()  # of a parameter that was frozen until now

    on_four(main)


def test_a_file_of_each_host_is_loaded_on_its_host() -> None:
    def main(transport: ThreadTransport) -> None:
        saved = copied(trained(transport).saved())
        again = Store(PowerSGD(), lambda: 1.0)
        again.load(saved)
        host = allocate(again, transport, ONE, TWO)
        assert (again.before("v").residual == 1 + host).all() and again.rounds == 1

    on_four(main)


@pytest.mark.parametrize("wrong", ["first", "some", "swapped", "rounds"])
def test_files_of_one_host_only_are_left_out(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks begin anew, and rank 0 says so."""
    said: list[str] = []
    monkeypatch.setattr("hvdlite.compression.saved.say_once", said.append)

    def main(transport: ThreadTransport) -> None:
        every = transport.allgather_object(copied(trained(transport).saved()))
        chosen = {"first": 0, "some": transport.rank, "swapped": 3 - transport.rank, "rounds": transport.rank}
        again = Store(PowerSGD(), lambda: 1.0)
        saved: Saved = every[chosen[wrong]]
        if wrong == "rounds":
            saved = replace(saved, rounds=1 + transport.rank // 2)
        if wrong != "some" or transport.rank != 1:
            again.load(saved)
        allocate(again, transport, ONE, TWO)
        for name in ("w", "v"):
            assert not again.before(name).residual.any() and not again.before(name).extra.any()
        assert again.rounds == 0

    on_four(main)
    assert said == [ANEW] and user_warnings.say_once


def test_a_file_of_a_job_on_one_host_is_a_sum() -> None:
    def main(transport: ThreadTransport) -> None:
        saved = Saved(0, 1, 7, copied(trained(transport).saved()).values)
        values = transport.allgather_object(saved)[0]
        again = Store(PowerSGD(), lambda: 1.0)
        again.load(values)
        host = allocate(again, transport, ONE)
        assert (again.before("w").residual == (0 if host else 1)).all() and again.rounds == 7

    on_four(main)


# One driver's part


@dataclass(frozen=True)
class HalfSent:
    """Sends a half of each value, and writes to the padding. Keeps the number of its rounds."""

    error_feedback: bool = True
    whole: bool = True
    momentum: float = 0.0
    clip: float = 0.0
    seen: list[np.ndarray] = field(default_factory=list, compare=False)

    def fits(self, shape: tuple[int, ...]) -> bool:
        return True

    def extra(self, shape: tuple[int, ...]) -> int:
        return 1

    def prepare(self, column: Column, pieces: Sequence[Piece], length: int, dtype: DType) -> Exchange:
        def exchange(values: np.ndarray, sent: np.ndarray, now: RoundMemory) -> None:
            self.seen.append(values.copy())
            sent[...] = values / 2
            values[...] = sent + 1e-9
            column.sum(values)
            for before, after in zip(now.before, now.after, strict=True):
                after[...] = before + 1

        return exchange


PIECES = [Piece("a", (4,), 1, 2, 2), Piece("b", (3,), 5, 0, 3)]
INSIDE = np.array([0, 1, 1, 0, 0, 1, 1, 1, 0, 0], bool)


def part_of(how: Compressor, values: np.ndarray, scale: list[float], reduction: Reduction) -> tuple[Store, Part]:
    """A part on one host."""
    store = Store(how, lambda: scale[0])
    store.allocate([("a", (4,), "float32"), ("b", (3,), "float32")], alone(), alone(), (0, 1))
    return store, Part(store, Column(alone()), Section(PIECES, values, reduction, 1.0, []))


def test_what_was_not_sent_is_added_to_the_next_rounds_values() -> None:
    """Whatever the loss scale. Padding is zero for the compressor and in the result, also after NaN."""
    values, scale, how = np.full(10, 8.0, np.float32), [4.0], HalfSent()
    store, part = part_of(how, values, scale, Reduction(divisor=2))
    part()
    assert (how.seen[0][INSIDE] == 8).all() and not how.seen[0][~INSIDE].any()
    np.testing.assert_allclose(values, 2 * INSIDE, atol=1e-6)
    assert not values[~INSIDE].any() and not store.before("a").residual.any()
    assert store.after("a").residual.tolist() == [0, 0, 1, 1] and store.after("b").residual.tolist() == [1, 1, 1]
    store.commit(["a", "b"])

    values[2] = np.inf
    part()
    assert np.isnan(values).all()  # and nobody commits the round
    values[INSIDE], scale[0] = 8.0, 2.0
    part()
    assert (how.seen[1][INSIDE] == 8 + 2).all() and not how.seen[1][~INSIDE].any() and len(how.seen) == 2
    assert not values[~INSIDE].any() and (values[INSIDE] > 0).all()
    store.commit(["a"])
    assert store.before("a").residual.tolist() == [0, 0, 2.5, 2.5] and store.before("a").extra.tolist() == [2]
    assert store.before("b").residual.tolist() == [1, 1, 1] and store.before("b").extra.tolist() == [1]


def test_a_result_that_is_not_finite_is_all_nan() -> None:
    values = np.full(10, 3e38, np.float32)
    _, part = part_of(HalfSent(), values, [1.0], Reduction(after=4.0))
    with np.errstate(over="ignore"):
        part()
    assert np.isnan(values).all()


def test_velocity_and_norm() -> None:
    """Momentum correction: values are velocities, which become zero where something was sent. Norms are of gradients."""
    scale, values = [2.0], np.zeros(10, np.float32)
    how: Any = HalfSent(error_feedback=False, momentum=0.5)
    store, part = part_of(how, values, scale, Reduction())
    store.before("a").velocity[...] = 4.0
    values[1:3] = 6.0, -4.0  # the second velocity becomes zero, so that nothing is sent of it
    part()
    assert how.seen[0][1:3].tolist() == [10, 0] and store.after("a").velocity.tolist() == [0, 0, 0, 0]
    assert not store.after("b").velocity.any() and not store.after("a").residual.size

    how = HalfSent(clip=1.0)
    store, part = part_of(how, values, scale, Reduction())
    values[...] = 0
    values[1:3], values[5:8] = (6.0, 8.0), (0.0, 1.0, 1.0)
    part()
    np.testing.assert_allclose(how.seen[0][1:3], [1.2, 1.6], rtol=1e-6)  # the norm is 1 in unscaled gradients
    np.testing.assert_allclose(how.seen[0][5:8], [0, 1, 1], rtol=1e-6)


def test_a_part_without_parameters_sends_nothing() -> None:
    """A user's codec need not encode nothing: means of nothing are NaN."""

    def main(transport: ThreadTransport) -> None:
        store = Store(Codec(), lambda: 1.0)
        store.allocate([], alone(), alone(), (0, 1))
        part = Part(store, Column(transport), Section([], np.zeros(0, np.float32), Reduction(), 1.0, []))
        part()
        assert part.column.sent_bytes == 0

    run_ranks(2, main)


# Drivers' parts of a bucket


@pytest.mark.parametrize("how", [TopK(), PowerSGD()], ids=repr)
@pytest.mark.parametrize("drivers", [1, 2, 3, 5])
def test_drivers_share_a_bucket(how: Compressor, drivers: int) -> None:
    """Each element of each parameter is in one part. Whole parameters are not divided; some drivers get none then."""
    shapes = [(33, 40), (7, 300), (64, 64), (1300, 3)]
    specs = [Spec(f"p{i}", shape, "float32", lossy=f"name{i}") for i, shape in enumerate(shapes)]
    made = plan(specs, 1 << 20, 1 << 20)
    rounds = LossyRounds(Store(how, lambda: 1.0), made, within_host=False)
    (bucket,) = rounds.buckets.values()
    assert isinstance(bucket, LossyBucket) and rounds.names == [f"name{i}" for i in range(4)]
    buffer = np.zeros(made.buckets[0].length, np.float32)
    bucket.borders = bucket.borders_of(buffer, drivers)
    assert len(bucket.borders) == drivers + 1 and (bucket.borders[0], bucket.borders[-1]) == (0, buffer.size)
    found: dict[str, list[tuple[int, int]]] = {}
    for start, stop in zip(bucket.borders, bucket.borders[1:], strict=False):
        assert start <= stop
        for piece in bucket.pieces(start, stop):
            index = int(piece.name[4:])
            assert piece.shape == shapes[index] and 0 <= piece.start <= piece.start + piece.length <= stop - start
            assert start + piece.start - piece.first == made.slots[index].offset
            found.setdefault(piece.name, []).append((piece.first, piece.length))
    for index, shape in enumerate(shapes):
        ends = [0, *(first + length for first, length in found[f"name{index}"])]
        assert [first for first, _ in found[f"name{index}"]] == ends[:-1] and ends[-1] == np.prod(shape)
        assert not how.whole or len(found[f"name{index}"]) == 1
    assert bucket.firsts == sorted(set(bucket.borders[:-1]) - {buffer.size})


@pytest.mark.parametrize("place", [0, 1])
def test_results_that_are_not_finite_are_not_committed(place: int) -> None:
    """Those of a compressed bucket, or of an exact one. Unused parameters are not committed either."""
    specs = [Spec("a", (40, 40), "float32", lossy="a"), Spec("b", (40, 40), "float32", lossy="b"), Spec("c", (3,), "float32")]  # fmt: skip
    made = plan(specs, 1 << 20, 1 << 20)
    store = Store(TopK(), lambda: 1.0)
    rounds = LossyRounds(store, made, within_host=True)
    store.allocate([(name, (40, 40), "float32") for name in "ab"], alone(), alone(), (0, 1))
    results: list[Any] = [np.ones(bucket.length, np.float32) for bucket in made.buckets]
    for number, bucket in rounds.buckets.items():
        bucket.borders = bucket.borders_of(results[number], 2)
    settle = partial(rounds.settle, results, agree=print)
    results[place][bucket.borders[1] if made.buckets[place].lossy else 1] = np.nan
    settle(set())
    assert store.rounds == 0 and store.turns == {"a": 0, "b": 0}
    results[place][...] = 1
    settle({"b"})
    assert store.rounds == 1 and store.turns == {"a": 1, "b": 0}


def test_what_is_compressed() -> None:
    """Matrices of floats between hosts, under names that are given."""
    store, two, one = Store(TopK(), lambda: 1.0), Place(4, True, hosts=HOSTS), Place(4, True)
    specs = {
        "a": Spec("p0", (40, 40), "float32"), "b": Spec("p1", (40,), "float32"), "c": Spec("p2", (40, 40), "int32"),
        "d": Spec("p3", (40, 40), "bfloat16"), "e": Spec("p4", (40, 40), "complex64"),
    }  # fmt: skip
    wanted = ["a", "", "", "d", ""]
    assert [spec.lossy for spec in marked(specs, store, two, within_host=False)] == wanted
    assert [spec.lossy for spec in marked(specs, store, one, within_host=True)] == wanted
    assert not any(spec.lossy for spec in marked(specs, store, Place(1, True), within_host=True))
    with pytest.raises(NotImplementedError, match="that of p5 lies on a GPU"):
        marked({**specs, "f": Spec("p5", (4,), "float32", "cuda:0")}, store, two, within_host=False)


@pytest.mark.parametrize("within_host", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_host_has_one_memory_if_its_ranks_add_exactly(within_host: bool, shared: bool) -> None:
    """Otherwise each rank is a host of its own."""

    def main(transport: ThreadTransport) -> None:
        made = plan([Spec("a", (40, 40), "float16", lossy="a")], 1 << 20, 1 << 20)
        rounds = LossyRounds(Store(TopK(), lambda: 1.0), made, within_host)
        at: Any = SimpleNamespace(transport=transport, place=Place(4, True, hosts=HOSTS), workspace=Workspace())
        own = np.empty(0, np.uint8)
        rounds.allocate(at, [Arena(own, (own,) if shared else None)])
        hosts = shared and not within_host
        assert rounds.store.hosts == ((transport.rank // 2, 2) if hosts else (transport.rank, 4))
        rounds.store.before("a").residual[transport.rank] = 1
        transport.barrier()
        kept = rounds.store.before("a").residual
        assert kept.dtype == np.float32 and kept.sum() == (2 if hosts else 1)

    on_four(main)


def test_shapes_are_in_the_order_of_memory() -> None:
    assert shape_in_memory(Spec("w", (2, 3, 4, 5), "float32")) == (2, 3, 4, 5)
    assert shape_in_memory(Spec("w", (2, 3, 4, 5), "float32", strides=(60, 1, 15, 3))) == (2, 4, 5, 3)
    assert shape_in_memory(Spec("w", (2, 3), "float32", strides=(1, 2))) == (3, 2)


def test_values_of_another_order_of_memory_are_left_out() -> None:
    """As after model.to(memory_format=torch.channels_last)."""
    store = Store(TopK(), lambda: 1.0)
    store.allocate([("w", (2, 3, 4), "float32")], alone(), alone(), (0, 1))
    store.before("w").residual[...] = 1
    store.allocate([("w", (2, 4, 3), "float32")], alone(), alone(), (0, 1))
    assert not store.before("w").residual.any()


def test_ranks_that_know_less_get_the_names_and_rounds_of_others() -> None:
    """As after a restart with a new process."""

    def main(transport: ThreadTransport) -> None:
        store = trained(transport)
        if store.hosts[0] == 1:
            store = Store(PowerSGD(), lambda: 1.0)
        transport.barrier()
        host = allocate(store, transport, ONE)
        assert store.rounds == 1 and [*store.entries] == [*transport.allgather_object([*store.entries])[0]]
        assert (store.before("w").residual == (0 if host else 1)).all()

    on_four(main)


def test_an_empty_checkpoint_starts_anew() -> None:
    store = Store(TopK(), lambda: 1.0)
    store.allocate([("w", (2, 3), "float32")], alone(), alone(), (0, 1))
    store.before("w").residual[...] = 1
    store.commit([])
    store.load(EMPTY)
    store.allocate([], alone(), alone(), (0, 1))
    assert store.rounds == 0 and not store.before("w").residual.any()


def test_residuals_are_in_units_of_the_sum_of_gradients() -> None:
    """16-bit floats are divided before the exchange, so that they do not overflow."""
    values = np.full(10, 0.25, np.float16)
    store = Store(HalfSent(), lambda: 8.0)
    store.allocate([("a", (4,), "float32"), ("b", (3,), "float32")], alone(), alone(), (0, 1))
    part = Part(store, Column(alone()), Section(PIECES, values, Reduction(), 0.25, []))
    part()
    store.commit(["a", "b"])
    assert (store.before("b").residual == 0.125 / 8 / 0.25).all()
    assert part.norm == pytest.approx(0.25 * 5**0.5 / 8 / 0.25)
