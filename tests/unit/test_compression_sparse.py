"""Top-K and Random-K on threads as hosts: right sums, equal bits, bytes sent, and nothing lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from hvdlite.arrays import DType
from hvdlite.compression import Column, Compressor, Piece, RoundMemory, selection
from hvdlite.compression.oktopk import REGIONS_LAST, OkTopK
from hvdlite.compression.randomk import RandomK
from hvdlite.compression.selection import largest
from hvdlite.compression.topk import Gather, TopK, faster
from hvdlite.transports.threads import ThreadTransport, alone, run_ranks

HOSTS = (1, 2, 3, 4, 5, 8)
DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
GATHER, OKTOPK = TopK(0.1, algorithm="gather"), TopK(0.1, algorithm="oktopk")
RANDOM, SCALED = RandomK(0.1), RandomK(0.1, error_feedback=False)
ALL = (GATHER, OKTOPK, RANDOM, SCALED)
LAYOUTS = {
    "one": ([(0, 1001)], 1001),
    "gaps": ([(3, 700), (717, 1), (720, 301)], 1040),
    "adjacent": ([(0, 33), (33, 500)], 533),
    "tiny": ([(1, 2)], 5),
    "none": ([], 16),
}


def pieces_of(spans: Sequence[tuple[int, int]]) -> list[Piece]:
    """Parameters that lie at these starts and have these lengths."""
    return [Piece(f"p{number}", (2, length), start, length, length) for number, (start, length) in enumerate(spans)]


def inside(spans: Sequence[tuple[int, int]], length: int) -> np.ndarray:
    """Which elements of the part belong to a parameter."""
    mask = np.zeros(length, bool)
    for start, count in spans:
        mask[start : start + count] = True
    return mask


def random_parts(hosts: int, layout: str, dtype: DType, seed: int = 0) -> list[np.ndarray]:
    """Each host's values of a part, of which some are large."""
    spans, length = LAYOUTS[layout]
    rng = np.random.default_rng(seed)
    parts = rng.standard_normal((hosts, length)) ** 3 * inside(spans, length)
    return [part.astype(dtype) for part in parts]


def exchanged(
    compressor: Compressor,
    parts: Sequence[np.ndarray],
    spans: Sequence[tuple[int, int]],
    numbers: Sequence[int] = (0,),
) -> list[tuple[list[np.ndarray], list[np.ndarray], list[int]]]:
    """For each host its results, what it has sent, and the bytes, of exchanges of the same values in some rounds."""
    dtype, length = parts[0].dtype, len(parts[0])

    def main(transport: ThreadTransport) -> tuple[list[np.ndarray], list[np.ndarray], list[int]]:
        column = Column(transport)
        exchange = compressor.prepare(column, pieces_of(spans), length, dtype)
        assert column.sent_bytes == 0
        results, contributions, counts = [], [], []
        for number in numbers:
            values, sent, before = parts[column.rank].copy(), np.full(length, np.nan, dtype), column.sent_bytes
            exchange(values, sent, RoundMemory(number, [], []))
            results.append(values)
            contributions.append(sent)
            counts.append(column.sent_bytes - before)
        return results, contributions, counts

    return run_ranks(len(parts), main)


def in_host_order(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The exact algorithm's sum: hosts are added one after another."""
    total = np.zeros_like(parts[0])
    for part in parts:
        total += part
    return total


def bits(array: np.ndarray) -> bytes:
    """The array's bytes; zeros have no sign."""
    return (array + 0).tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("compressor", ALL, ids=repr)
def test_all_hosts_get_the_sum_of_what_was_sent(compressor: Compressor, hosts: int, layout: str, dtype: DType) -> None:
    """The same bits on all hosts, in every call of the same round too; padding stays zero."""
    spans, length = LAYOUTS[layout]
    parts = random_parts(hosts, layout, dtype)
    found = exchanged(compressor, parts, spans, numbers=(7, 8, 7))
    for number in range(3):
        results, sent = [each[0][number] for each in found], np.array([each[1][number] for each in found])
        assert len({result.tobytes() for result in results}) == 1
        largest_addend = np.max(np.abs(sent), initial=0)
        np.testing.assert_allclose(sent.sum(0), results[0], rtol=1e-6, atol=1e-6 * largest_addend)
        outside = ~inside(spans, length)
        assert not results[0][outside].any() and not sent[:, outside].any()
        assert results[0].dtype == dtype
    assert found[0][0][0].tobytes() == found[0][0][2].tobytes()


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("algorithm", ["gather", "oktopk"])
def test_top_k_sends_the_largest(algorithm: str, hosts: int) -> None:
    """If all hosts have the same values, both algorithms send the k largest, wherever they lie."""
    spans, count = LAYOUTS["gaps"][0], math.ceil(0.1 * 1002)
    part = random_parts(1, "gaps", DTYPES[0])[0]
    wanted = np.zeros_like(part)
    top = np.argsort(-np.abs(part), kind="stable")[:count]
    wanted[top] = part[top]
    for results, sent, _ in exchanged(TopK(0.1, algorithm=algorithm), [part] * hosts, spans):
        assert np.array_equal(sent[0], wanted)
        np.testing.assert_allclose(results[0], hosts * wanted, rtol=1e-6)


def test_an_owner_keeps_the_largest_sums() -> None:
    """Two hosts that select different elements: in each region the largest sums are kept, others stay here."""
    parts = [np.zeros(8), np.zeros(8)]
    parts[0][[0, 1, 4, 5]] = 1, 3, 4, -9
    parts[1][[1, 2, 5, 6]] = 3, 5, 2, 8
    for results, sent, _ in (found := exchanged(TopK(0.5, algorithm="oktopk"), parts, [(0, 8)])):
        assert results[0].tolist() == [0, 6, 5, 0, 0, -7, 8, 0]
        assert not np.isnan(sent[0]).any()
    assert found[0][1][0].tolist() == [0, 3, 0, 0, 0, -9, 0, 0]
    assert found[1][1][0].tolist() == [0, 3, 5, 0, 0, 2, 8, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("algorithm", ["gather", "oktopk"])
def test_a_ratio_of_one_gives_the_exact_sum(algorithm: str, hosts: int, layout: str, dtype: DType) -> None:
    """The bits of a sum in host order, and nothing is left, even if some values are zeros, or add up to zero."""
    parts = random_parts(hosts, layout, dtype)
    for rank, part in enumerate(parts):
        part[rank::5] = 0
    if hosts > 1:
        parts[1][::4] = -parts[0][::4]
    for results, _, _ in (found := exchanged(TopK(1.0, algorithm=algorithm), parts, LAYOUTS[layout][0], (0, 1))):
        assert bits(results[0]) == bits(results[1]) == bits(in_host_order(parts))
    for (_, sent, _), part in zip(found, parts, strict=True):
        assert np.array_equal(sent[1], part)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hosts", HOSTS)
def test_random_k_with_a_ratio_of_one_is_an_exact_sum(hosts: int, dtype: DType) -> None:
    """The bits of the all-reduce of these elements, in the drawn order."""
    parts = random_parts(hosts, "gaps", dtype)
    exchange = RandomK(1.0).prepare(Column(alone()), pieces_of(LAYOUTS["gaps"][0]), 1040, dtype)
    order = np.asarray(exchange.places(3))

    def main(transport: ThreadTransport) -> np.ndarray:
        values = parts[transport.rank][order]
        Column(transport).sum(values)
        return values

    for wanted, (results, sent, _), part in zip(
        run_ranks(hosts, main), exchanged(RandomK(1.0), parts, LAYOUTS["gaps"][0], (3,)), parts, strict=True
    ):
        assert results[0][order].tobytes() == wanted.tobytes()
        assert np.array_equal(sent[0], part)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hosts", HOSTS)
def test_bytes_of_gather(hosts: int, dtype: DType) -> None:
    count = math.ceil(0.1 * 1002)
    for _, _, nbytes in exchanged(GATHER, random_parts(hosts, "gaps", dtype), LAYOUTS["gaps"][0], (0, 5)):
        assert nbytes == [(dtype.itemsize + 4) * count * (hosts - 1)] * 2


@pytest.mark.parametrize("hosts", range(2, 10))
def test_bytes_of_oktopk_do_not_grow(hosts: int) -> None:
    """At most 16k + 8h bytes and the lengths, even with all large values in one corner; less than gather from 3 on."""
    length, count = 50_000, 500
    rng = np.random.default_rng(1)
    for corner in (length, 3 * count):
        parts = [np.zeros(length, np.float32) for _ in range(hosts)]
        for part in parts:
            part[:corner] = rng.standard_normal(corner)
        numbers = range(1, 4)
        found = exchanged(TopK(0.01, algorithm="oktopk"), parts, [(0, length)], numbers)
        lengths, regions = 8 * hosts * (hosts - 1), 8 * hosts * 2
        quota = -(-count // hosts)
        for _, _, nbytes in found:
            for number, each in enumerate(nbytes):
                assert each <= 8 * count + 8 * quota * (hosts - 1) + lengths + (regions * 4 if number == 0 else 0)
        average = np.mean([each[1:] for _, _, each in found])
        wanted = 8 * count * (hosts - 1) / hosts + 8 * quota * (hosts - 1) + lengths  # regions are balanced
        assert abs(average - wanted) < 0.03 * wanted


@pytest.mark.parametrize("hosts", [2, 3, 4, 5, 8])
def test_bytes_of_random_k(hosts: int) -> None:
    """2 * 4k(h-1)/h: the parts of a ring are whole cache lines, and it is chosen for long arrays."""
    count = 16 * hosts * 2048
    parts = [np.ones(2 * count, np.float32)] * hosts
    for _, _, nbytes in exchanged(RandomK(0.5), parts, [(0, 2 * count)], (0, 1)):
        assert nbytes == [8 * count * (hosts - 1) // hosts] * 2


def test_regions_follow_the_elements() -> None:
    """Regions stay for REGIONS_LAST rounds, and are made anew then, and by a new exchange at any number."""
    length = 4000

    def main(transport: ThreadTransport) -> list[tuple[int, ...]]:
        column = Column(transport)
        seen = []
        exchange = TopK(0.1, algorithm="oktopk").prepare(column, pieces_of([(0, length)]), length, DTYPES[0])
        for number, offset in ((5, 0), (6, 3000), (REGIONS_LAST - 1, 3000), (REGIONS_LAST, 3000)):
            values = np.zeros(length, np.float32)
            values[offset : offset + 400] = 1 + np.arange(400) + transport.rank
            exchange(values, np.empty_like(values), RoundMemory(number, [], []))
            assert isinstance(exchange, OkTopK)
            seen.append(exchange.inner)
        return seen

    for seen in run_ranks(4, main):
        assert seen == [(100, 200, 300)] * 3 + [(3100, 3200, 3300)]


def test_regions_are_averages() -> None:
    def main(transport: ThreadTransport) -> tuple[int, ...]:
        exchange = TopK(0.1, algorithm="oktopk").prepare(Column(transport), pieces_of([(0, 1000)]), 1000, DTYPES[0])
        values = np.zeros(1000, np.float32)
        values[200 * transport.rank :][:100] = 1
        exchange(values, np.empty_like(values), RoundMemory(0, [], []))
        assert isinstance(exchange, OkTopK)
        return exchange.inner

    assert run_ranks(2, main) == [(150,)] * 2


@pytest.mark.parametrize("hosts", [1, 3, 8])
@pytest.mark.parametrize("compressor", ALL, ids=repr)
@pytest.mark.parametrize("what", ["ties", "zeros", "few"])
def test_values_that_choose_nothing(what: str, compressor: Compressor, hosts: int) -> None:
    """All equal, all zero, and fewer that are not zero than are sent."""
    spans, length = LAYOUTS["gaps"]
    part = inside(spans, length) * np.float32(what != "zeros")
    if what == "few":
        part[:700] = part[720:] = 0
    scale = 1002 / 101 if compressor is SCALED else 1
    for results, sent, _ in exchanged(compressor, [part] * hosts, spans):
        picked = np.flatnonzero(sent[0])
        np.testing.assert_allclose(sent[0][picked], scale, rtol=1e-6)
        np.testing.assert_allclose(results[0], hosts * sent[0], rtol=1e-6)
        if isinstance(compressor, TopK):
            assert len(picked) == {"ties": 101, "zeros": 0, "few": 4}[what]
        else:
            assert len(picked) <= {"ties": 101, "zeros": 0, "few": 4}[what]


@pytest.mark.parametrize("compressor", [replace(each, ratio=0.02) for each in (GATHER, OKTOPK, RANDOM)], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_is_lost(compressor: Compressor, dtype: DType) -> None:
    """Over 200 rounds: results and what is left add up to all gradients; what is left does not grow forever."""
    hosts, length, rounds = 3, 1001, 200
    gradients = np.random.default_rng(2).standard_normal((rounds, hosts, length)).astype(dtype)

    def main(transport: ThreadTransport) -> tuple[np.ndarray, np.ndarray, list[float]]:
        column = Column(transport)
        exchange = compressor.prepare(column, pieces_of([(0, length)]), length, dtype)
        residual, total, norms, sent = np.zeros(length, dtype), np.zeros(length), [], np.empty(length, dtype)
        for number in range(rounds):
            values = gradients[number, column.rank] + residual
            residual = values.copy()
            exchange(values, sent, RoundMemory(number, [], []))
            residual -= sent
            total += values
            norms.append(float(np.linalg.norm(residual)))
        return total, residual, norms

    found = run_ranks(hosts, main)
    wanted = gradients.sum((0, 1), dtype=np.float64)
    left = np.sum([residual for _, residual, _ in found], axis=0)
    for total, _, norms in found:
        assert np.linalg.norm(total + left - wanted) <= 1e-6 * np.linalg.norm(gradients.astype(np.float64))
        assert max(norms[150:]) < 1.3 * max(norms[100:150])
    assert np.linalg.norm(found[0][0]) > 0.3 * np.linalg.norm(wanted)


def test_random_k_is_unbiased() -> None:
    """The mean of 10 000 results is within 4 standard deviations of the exact sum, for each element."""
    spans, length, draws = [(2, 7), (12, 16)], 30, 10_000
    parts = [inside(spans, length) * np.arange(1.0, length + 1) * (rank + 1) for rank in range(2)]
    exact, share = parts[0] + parts[1], 5 / 23
    for results, _, _ in exchanged(RandomK(0.2, error_feedback=False), parts, spans, range(draws)):
        deviation = exact * math.sqrt((1 / share - 1) / draws)
        assert (np.abs(np.mean(results, 0) - exact) <= 4 * deviation).all()
        assert all(np.count_nonzero(result) == 5 for result in results)


def test_each_element_is_drawn_equally_often() -> None:
    """Blocks of different lengths: 7 of 10 elements; also all pairs occur, though not equally often."""
    spans = [(1, 4), (6, 6)]
    exchange = RandomK(0.7).prepare(Column(alone()), pieces_of(spans), 12, DTYPES[0])
    drawn = np.zeros((20_000, 12))
    for number, row in enumerate(drawn):
        row[np.asarray(exchange.places(number))] = 1
    assert (drawn.sum(1) == 7).all()
    assert (np.abs(drawn.mean(0) - 0.7 * inside(spans, 12)) < 4 * math.sqrt(0.21 / 20_000)).all()
    assert ((drawn.T @ drawn)[np.ix_(*[np.flatnonzero(inside(spans, 12))] * 2)] > 0).all()


def test_draws_depend_on_seed_round_and_pieces() -> None:
    def drawn(seed: int, number: int, piece: Piece) -> tuple[int, ...]:
        return tuple(RandomK(0.1, seed).prepare(Column(alone()), [piece], 900, DTYPES[0]).places(number).tolist())

    piece = Piece("w", (30, 30), 0, 0, 900)
    others = [(1, 0, piece), (0, 1, piece), (0, 0, replace(piece, name="v")), (0, 0, replace(piece, first=900))]
    assert len({drawn(0, 0, piece), *(drawn(*other) for other in others)}) == 5
    assert drawn(0, 0, piece) == drawn(0, 0, piece)


def test_draws_never_change() -> None:
    """All processes draw the same, whatever their hash seed, and a later version goes on as an earlier one."""
    exchange = RandomK(0.01, 5).prepare(Column(alone()), [Piece("w", (30, 30), 4, 0, 900)], 904, DTYPES[0])
    assert exchange.places(2).tolist() == [606, 723, 827, 901, 159, 293, 337, 489, 503]


@pytest.mark.parametrize("size", [10, 40_000, 100_003])
@pytest.mark.parametrize("what", ["random", "ties", "zeros", "steps", "unlucky"])
def test_largest(what: str, size: int) -> None:
    """The same numbers as by sorting, whether the sample's guess is good, or too high."""
    numbers = np.abs(np.random.default_rng(3).standard_normal(size)).astype(np.float32)
    if what == "ties":
        numbers = np.round(numbers)
    elif what == "zeros":
        numbers[5:] = 0
    elif what == "steps":
        numbers = np.arange(size, dtype=np.float32)
    elif what == "unlucky":
        numbers[:: selection.STRIDE] += 100
    for count in (0, 1, 7, 400, 2000, 9000, size - 1, size, size + 1):
        found = np.asarray(largest(numbers, count))
        assert found.dtype == np.uint32 and (np.diff(found.astype(np.int64)) > 0).all()
        assert np.array_equal(np.sort(numbers[found]), np.sort(numbers)[max(size - count, 0) :])


def test_a_sample_shortens_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among 100 000 random numbers, the 1000 largest are looked for among a few thousand."""
    looked: list[int] = []
    search = np.argpartition
    monkeypatch.setattr(np, "argpartition", lambda array, place: looked.append(len(array)) or search(array, place))
    largest(np.random.default_rng(4).standard_normal(100_000), 1000)
    assert len(looked) == 1 and 1000 <= looked[0] < 4000


def test_the_ratio_of_a_warm_up() -> None:
    """Exponentially from 25 % to the ratio; never below it."""
    warm = selection.Selection(10_000, (), 0.0025, 4)
    assert [warm.count(number) for number in (*range(6), 10**6)] == [2500, 791, 250, 80, 25, 25, 25]
    assert selection.Selection(100, (), 0.5, 4).count(0) == 50
    assert selection.Selection(100, (), 0.001).count(0) == 1
    assert selection.Selection(0, (), 0.001).count(0) == 0
    parts = random_parts(2, "one", DTYPES[0])
    for algorithm in ("gather", "oktopk"):
        found = exchanged(TopK(0.01, warmup_rounds=2, algorithm=algorithm), parts, [(0, 1001)], (0, 1, 2))
        if algorithm == "gather":
            assert [np.count_nonzero(sent) for sent in found[0][1]] == [251, 51, 11]
        else:
            assert [np.count_nonzero(result) for result in found[0][0]] == [252, 52, 12]


def test_the_faster_algorithm_is_chosen() -> None:
    """Gather for two hosts and for short messages; Ok-Topk for many hosts and long ones."""
    assert [faster(hosts, 1 << 20) for hosts in (1, 2, 3, 4, 64)] == ["gather"] * 2 + ["oktopk"] * 3
    assert [faster(64, nbytes) for nbytes in (1000, 30_000, 40_000)] == ["gather", "gather", "oktopk"]

    def main(transport: ThreadTransport) -> list[bool]:
        column = Column(transport)
        shapes = [(TopK(0.01), 1_000), (TopK(0.01), 2_000_000), (TopK(0.01, warmup_rounds=9), 200_000),
                  (TopK(0.01, algorithm="gather"), 2_000_000), (TopK(0.01, algorithm="oktopk"), 1000)]  # fmt: skip
        return [
            isinstance(compressor.prepare(column, pieces_of([(0, length)]), length, DTYPES[0]), Gather)
            for compressor, length in shapes
        ]

    assert run_ranks(4, main) == [[True, False, True, True, False]] * 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(0), "ratio"),
        (lambda: TopK(1.01), "ratio"),
        (lambda: TopK(float("nan")), "ratio"),
        (lambda: TopK(momentum=1), "momentum"),
        (lambda: TopK(momentum=-0.1), "momentum"),
        (lambda: TopK(clip=-1), "clip"),
        (lambda: TopK(clip=float("inf")), "clip"),
        (lambda: TopK(warmup_rounds=-1), "warmup_rounds"),
        (lambda: TopK(warmup_rounds=1.5), "warmup_rounds"),  # type: ignore[arg-type]
        (lambda: TopK(algorithm="ring"), "algorithm is one of 'auto', 'gather', 'oktopk', not 'ring'"),
        (lambda: RandomK(0), "ratio"),
        (lambda: RandomK(2), "ratio"),
        (lambda: RandomK(seed=-1), "seed"),
        (lambda: RandomK(seed=0.5), "seed"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


def test_compressors_are_values() -> None:
    """They can be compared, hashed and printed, and say what they need."""
    assert repr(TopK()) == "topk(ratio=0.01)" and repr(RandomK(0.5, 3)) == "randomk(ratio=0.5, seed=3)"
    assert repr(TopK(0.1, False, 0.9, 1.0, 5, "gather")) == (
        "topk(ratio=0.1, error_feedback=False, momentum=0.9, clip=1.0, warmup_rounds=5, algorithm='gather')"
    )
    assert len({TopK(), TopK(0.01), TopK(0.02), RandomK(), RandomK(0.01)}) == 3
    compressors: list[Compressor] = [TopK(), TopK(clip=1.0), RandomK()]
    assert [each.whole for each in compressors] == [False, True, False]
    for each in compressors:
        assert each.fits((32, 32)) and not each.fits((2048,)) and not each.fits((31, 33)) and not each.extra((99, 99))
    assert (RandomK().momentum, RandomK().clip) == (0, 0)
