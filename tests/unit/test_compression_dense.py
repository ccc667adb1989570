"""Int8, OneBit and PowerSGD on threads as hosts: same bits, nothing lost, exact prices; PowerSGD does as PyTorch's.

Run as a program, this file is one of two ranks that train with PyTorch's own PowerSGD hook.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from hvdlite.compression import Column, Compressor, Exchange, Piece, RoundMemory, powersgd, quantize
from hvdlite.compression.powersgd import PowerSGD, orthogonalize, total
from hvdlite.compression.quantize import Int8, OneBit
from hvdlite.transports.threads import ThreadTransport, run_ranks

HOSTS = [1, 2, 3, 4, 5, 8]
QUANTIZED: list[Compressor] = [Int8(), Int8(4, block=64), Int8(8, block=8), OneBit(), OneBit(block=64)]
COMPRESSORS = [*QUANTIZED, PowerSGD(rank=1), PowerSGD(rank=3)]
SHAPES = [(31, 7), (5, 3, 11), (40, 40), (1, 9)]
TORCH_CASES = [((24, 40), 1), ((12, 5, 3, 3), 2), ((30, 20), 3)]
TORCH_STEPS, TORCH_START = 50, 2


@dataclass
class Outcome:
    """What one host has after one round."""

    result: Any
    sent: Any
    nbytes: int
    after: list[Any]


class Host:
    """One host's exchange, for many rounds."""

    def __init__(self, transport: ThreadTransport, compressor: Compressor, pieces: Sequence[Piece], like: Any) -> None:
        self.column = Column(transport)
        self.exchange: Exchange = compressor.prepare(self.column, pieces, len(like), like.dtype)
        self.kept = [np.zeros(compressor.extra(piece.shape), like.dtype) for piece in pieces]

    def __call__(self, values: Any, number: int) -> Outcome:
        result, sent = values.copy(), np.full_like(values, np.nan)
        after = [np.full_like(each, np.nan) for each in self.kept]
        before = self.column.sent_bytes
        self.exchange(result, sent, RoundMemory(number, self.kept, after))
        self.kept = after
        return Outcome(result, sent, self.column.sent_bytes - before, after)


def laid_out(shapes: Sequence[tuple[int, ...]], gap: int = 3) -> tuple[list[Piece], int]:
    """Parameters of these shapes one after another, each between gaps; and the part's length."""
    pieces, start = [], gap
    for number, shape in enumerate(shapes):
        length = int(np.prod(shape))
        pieces.append(Piece(f"p{number}", shape, start, 0, length))
        start += length + gap
    return pieces, start


def inside(pieces: Sequence[Piece], length: int) -> Any:
    """Which elements of a part belong to a piece."""
    mask = np.zeros(length, bool)
    for piece in pieces:
        mask[piece.here] = True
    return mask


def drawn(hosts: int, pieces: Sequence[Piece], length: int, dtype: Any = np.float32, seed: int = 0) -> list[Any]:
    """Normal numbers for each host, and zeros outside of pieces."""
    rng = np.random.default_rng([seed, hosts])
    return [np.where(inside(pieces, length), rng.standard_normal(length), 0).astype(dtype) for _ in range(hosts)]


def exchanged(
    compressor: Compressor, pieces: Sequence[Piece], values: Sequence[Any], number: int = 20
) -> list[Outcome]:
    """Every host's outcome of one round."""

    def main(transport: ThreadTransport) -> Outcome:
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            mine = values[transport.rank]
            return Host(transport, compressor, pieces, mine)(mine, number)

    return run_ranks(len(values), main)


def assert_consistent(found: Sequence[Outcome], pieces: Sequence[Piece]) -> None:
    """All hosts have the same bits, contributions add up to the sum, and what is outside of pieces is zero."""
    result = found[0].result
    assert np.isfinite(result).all()
    assert len({each.result.tobytes() for each in found}) == 1
    assert {each.result.dtype for each in found} == {each.sent.dtype for each in found} == {result.dtype}
    contributed = sum(each.sent.astype(np.float64) for each in found)
    size = max(np.abs(each.sent.astype(np.float64)).max(initial=0) for each in found)
    np.testing.assert_allclose(contributed, result, rtol=1e-6, atol=1e-6 * size + 1e-44)
    outside = ~inside(pieces, len(result))
    assert not result[outside].any()
    assert not any(each.sent[outside].any() for each in found)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_all_hosts_have_the_same_bits_and_nothing_is_lost(compressor: Compressor, hosts: int, dtype: Any) -> None:
    pieces, length = laid_out(SHAPES)
    values = drawn(hosts, pieces, length, dtype)
    found = exchanged(compressor, pieces, values)
    assert_consistent(found, pieces)
    if hosts == 1:
        np.testing.assert_array_equal(found[0].result, values[0])
        np.testing.assert_array_equal(found[0].sent, values[0])
        assert found[0].nbytes == 0
    elif not isinstance(compressor, PowerSGD):
        assert (found[0].result != sum(values)).any()


def in_blocks(values: Any, hosts: int, block: int) -> Any:
    """A row of values as (chunk, block, element), padded with zeros."""
    blocks = -(-len(values) // (block * hosts))
    return np.concatenate([values, np.zeros(hosts * blocks * block - len(values))]).reshape(hosts, blocks, block)


def signs(blocks: Any, length: int, first: int) -> Any:
    """What one bit says of a chunk's blocks, the part having `length` elements and the chunk beginning at `first`."""
    decoded = np.zeros_like(blocks)
    for number, row in enumerate(blocks):
        real = min(max(length - first - number * len(row), 0), len(row))
        if real:
            decoded[number, :real] = np.where(row[:real] >= 0, 1, -1) * np.abs(row[:real]).mean()
    return decoded


@pytest.mark.parametrize("hosts", [2, 3, 8])
@pytest.mark.parametrize("block", [8, 64, 512])
def test_one_bit_is_the_sign_and_the_mean_magnitude(block: int, hosts: int) -> None:
    """Compared with a plain program of both stages: sums and contributions."""
    pieces, length = laid_out(SHAPES)
    mask, values = inside(pieces, length), drawn(hosts, pieces, length, np.float64)
    rows = [in_blocks(each[mask], hosts, block) for each in values]
    count, chunk = int(mask.sum()), rows[0][0].size
    sent = [np.stack([rows[host][owner] if owner == host else signs(rows[host][owner], count, owner * chunk)
                      for owner in range(hosts)]) for host in range(hosts)]  # fmt: skip
    result = np.empty_like(rows[0])
    for owner in range(hosts):
        exact = sum(each[owner] for each in sent)
        result[owner] = signs(exact, count, owner * chunk)
        sent[owner][owner] += result[owner] - exact
    for host, found in enumerate(exchanged(OneBit(block), pieces, values)):
        np.testing.assert_allclose(found.result[mask], result.reshape(-1)[:count], rtol=1e-12)
        np.testing.assert_allclose(found.sent[mask], sent[host].reshape(-1)[:count], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("hosts", [2, 3, 8])
@pytest.mark.parametrize("bits, block", [(8, 256), (4, 64)])
def test_an_integer_is_off_by_less_than_a_step(bits: int, block: int, hosts: int) -> None:
    """Each host's values by less than its block's step, its own chunk excepted; the sum by less than all steps."""
    pieces, length = laid_out(SHAPES)
    mask, values = inside(pieces, length), drawn(hosts, pieces, length, np.float64)
    found = exchanged(Int8(bits, block), pieces, values)
    levels, steps = 2 ** (bits - 1) - 1, []
    for host, each in enumerate(found):
        rows = in_blocks(values[host][mask], hosts, block)
        steps.append(np.broadcast_to(np.abs(rows).max(axis=2, keepdims=True), rows.shape) * (1.0001 / levels))
        off = np.abs(in_blocks(each.sent[mask], hosts, block) - rows)
        for owner in range(hosts):
            assert owner == host or (off[owner] <= steps[host][owner]).all()
    exact, result = (in_blocks(each[mask], hosts, block) for each in (sum(values), found[0].result))
    before = sum(steps) - np.stack([steps[owner][owner] for owner in range(hosts)])
    last = (np.abs(exact).max(axis=2, keepdims=True) + before) * (1.0001 / levels)
    assert (np.abs(result - exact) <= before + last).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize(
    "compressor, per_block", [(Int8(), 256), (Int8(4), 128), (Int8(4, 8), 4), (OneBit(), 64), (OneBit(8), 1)], ids=repr
)
def test_the_price_of_bits_is_as_stated(compressor: Any, per_block: int, hosts: int, dtype: Any) -> None:
    pieces, length = laid_out([(100, 33), (7, 11)])
    blocks = math.ceil(math.ceil((3300 + 77) / compressor.block) / hosts)
    price = 2 * (hosts - 1) * blocks * (per_block + np.dtype(dtype).itemsize)
    found = exchanged(compressor, pieces, drawn(hosts, pieces, length, dtype))
    assert [each.nbytes for each in found] == [price] * hosts


@pytest.mark.parametrize("hosts", [2, 4])
def test_the_price_of_factors_is_as_stated(hosts: int) -> None:
    """With lengths that hosts divide; longer than 2 KiB, since shorter arrays cross in other steps."""
    pieces, length = laid_out([(256, 512), (128, 4, 16)])
    found = exchanged(PowerSGD(rank=2), pieces, drawn(hosts, pieces, length))
    price = 4 * 2 * (2 * (256 + 512) + 2 * (128 + 64)) * (hosts - 1) // hosts
    assert [each.nbytes for each in found] == [price] * hosts


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_short_and_empty_parts(compressor: Compressor) -> None:
    """Fewer elements than hosts, zeros only, no pieces, nothing."""
    for shapes in ([(1, 1)], [(1, 3)], [(2, 1), (1, 2)], []):
        for gap in (0, 2):
            pieces, length = laid_out(shapes, gap)
            values = drawn(5, pieces, length)
            assert_consistent(exchanged(compressor, pieces, values), pieces)
            nothing = exchanged(compressor, pieces, [np.zeros_like(each) for each in values])
            assert not any(each.result.any() or each.sent.any() for each in nothing)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@pytest.mark.parametrize("size", [1e-44, 1e-40, 1e-37, 1e-20, 1e20, 3e38])
def test_no_size_of_numbers_gives_nan(compressor: Compressor, size: float) -> None:
    """One host has numbers of this size, the other zeros: sums are no larger, and errors follow the size."""
    pieces, length = laid_out([(20, 30)])
    if isinstance(compressor, PowerSGD) and size > 1e30:
        size = 1e30  # products of a matrix have larger numbers than the matrix
    values = np.where(inside(pieces, length), np.random.default_rng(0).uniform(-1, 1, length) * size, 0)
    found = exchanged(compressor, pieces, [values.astype(np.float32), np.zeros(length, np.float32)])
    assert_consistent(found, pieces)
    assert np.abs(found[0].result.astype(np.float64)).max() <= max(4 * size, 2.4e-38)
    if size > 1e-30:
        assert np.abs(found[0].result.astype(np.float64)).max() > size / 10


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_integers_are_unbiased(bits: int, dtype: Any) -> None:
    """10 000 equal blocks on each of 2 hosts are as many draws, in both stages. A draw is off by at most 3 steps."""
    blocks, block, rng = 20_000, 8, np.random.default_rng(1)
    pieces, _ = laid_out([(blocks, block)], gap=0)
    rows = [rng.standard_normal(block).astype(dtype) for _ in range(2)]
    rows[0][3] = 0.1 * 2**-6  # far below a step
    compressor = Int8(bits, block, error_feedback=False)
    found = exchanged(compressor, pieces, [np.tile(row, blocks) for row in rows])
    step = sum(np.abs(row).max() for row in rows) / (2 ** (bits - 1) - 1)
    exact = rows[0].astype(np.float64) + rows[1]
    for chunk in found[0].result.astype(np.float64).reshape(2, blocks // 2, block):
        off = chunk - exact
        sigma = off.std(axis=0)
        assert (sigma > 0.1 * step / 4).all()
        assert np.abs(off).max() <= 3 * step
        assert (np.abs(off.mean(axis=0)) <= 4 * sigma / np.sqrt(blocks // 2) + 2.0**-15 * step).all()


def test_draws_depend_on_seed_round_host_and_pieces_alone() -> None:
    pieces, length = laid_out([(64, 40)], gap=0)
    other = [Piece("other", (64, 40), 0, 0, length)]
    later = [Piece("p0", (128, 40), 0, length, length)]
    values = [drawn(1, pieces, length)[0]] * 3

    def bits(compressor: Compressor = QUANTIZED[0], pieces: Sequence[Piece] = pieces, number: int = 7) -> bytes:
        return bytes(exchanged(compressor, pieces, values, number)[0].result.tobytes())

    assert bits() == bits()
    assert len({bits(), bits(Int8(seed=1)), bits(pieces=other), bits(pieces=later), bits(number=8)}) == 5
    first, second = (each.sent.reshape(-1)[2048:] for each in exchanged(Int8(), pieces, values)[:2])
    assert (first != second).any()  # elements that belong to neither host's own chunk


@pytest.mark.parametrize("compressor", [Int8(4, block=8), OneBit(block=8), PowerSGD(rank=3)], ids=repr)
def test_the_size_of_tiles_changes_nothing(compressor: Compressor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles, the last one shorter, and one tile: the same bits. Padding begins in the middle of a tile."""
    pieces, length = laid_out(SHAPES)
    values = drawn(3, pieces, length)
    found = []
    for elements in (1, 56, 10**6):
        monkeypatch.setattr(quantize, "TILE", elements)
        monkeypatch.setattr(powersgd, "TILE", elements)
        found.append([(each.result.tobytes(), each.sent.tobytes()) for each in exchanged(compressor, pieces, values)])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("bits", [8, 4])
def test_the_largest_draw_leads_to_the_largest_integer(bits: int) -> None:
    """Not to the next, although the quotient of a block's largest element may be rounded up."""

    class Largest:
        def random_raw(self, count: int) -> Any:
            return np.full(count, 2**64 - 1, np.uint64)

    most, random = 2 ** (bits - 1) - 1, cast("np.random.SFC64", Largest())
    rows = np.random.default_rng(0).uniform(1, 2, (100_000, 1)).astype(np.float32) * np.array([1, -1] * 4, np.float32)
    code, kept = quantize.Integers(bits, 8), rows.copy()
    codes = np.empty((len(rows), code.width), np.uint8)
    steps = code.encode(rows, np.ones(0, np.float32), codes, random)
    code.decode(codes, steps, rows)
    integers = np.rint(rows / steps[:, None])
    assert (integers == np.array([most, 1 - most] * 4)).all() and (np.sign(rows) == np.sign(kept)).all()


def with_feedback(compressor: Compressor, hosts: int, rounds: int, dtype: Any) -> tuple[Any, Any, Any, float]:
    """Sums over rounds, in float64: of all results, and of all gradients; the last residuals' sum, and largest norm."""
    pieces, length = laid_out([(30, 41), (20, 33)])
    steady = drawn(hosts, pieces, length, np.float64, seed=1)

    def main(transport: ThreadTransport) -> tuple[Any, Any, Any]:
        host = Host(transport, compressor, pieces, np.zeros(length, dtype))
        residual = np.zeros(length, dtype)
        results, gradients = np.zeros(length), np.zeros(length)
        for number in range(rounds):
            noise = drawn(hosts, pieces, length, np.float64, seed=number + 2)[transport.rank]
            gradient = (steady[transport.rank] + noise).astype(dtype)
            values = gradient + residual
            found = host(values, number)
            residual = values - found.sent
            results += found.result
            gradients += gradient
        return results, gradients, residual.astype(np.float64)

    found = run_ranks(hosts, main)
    gradients, residuals = (sum(each[which] for each in found) for which in (1, 2))
    return found[0][0], gradients, residuals, max(float(np.linalg.norm(each[2])) for each in found)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("compressor", [Int8(), Int8(4), OneBit(block=64), PowerSGD(rank=4)], ids=repr)
def test_error_feedback_loses_nothing_in_200_rounds(compressor: Compressor, dtype: Any) -> None:
    """Results + residuals = gradients. Residuals do not grow, so that results follow the gradients."""
    results, gradients, residuals, norm = with_feedback(compressor, 3, 200, dtype)
    off = np.linalg.norm(results + residuals - gradients)
    assert off <= (1e-6 if dtype is np.float32 else 1e-13) * np.linalg.norm(gradients)
    _, _, _, early = with_feedback(compressor, 3, 100, dtype)
    assert norm <= 1.3 * early
    assert np.linalg.norm(results - gradients) <= 0.2 * np.linalg.norm(gradients)


def test_arguments_out_of_range_are_refused() -> None:
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: Int8(bits=2), "8 or 4 bits, not bits=2"),
        (lambda: Int8(block=12), "multiple of 8, not block=12"),
        (lambda: Int8(block=0), "multiple of 8, not block=0"),
        (lambda: Int8(seed=-1), "at least 0, not seed=-1"),
        (lambda: OneBit(block=-8), "block of onebit .* not block=-8"),
        (lambda: PowerSGD(rank=0), "rank >= 1, not rank=0"),
        (lambda: PowerSGD(start_step=-1), "start_step >= 0, not start_step=-1"),
        (lambda: PowerSGD(seed=-3), "seed >= 0, not seed=-3"),
        (lambda: PowerSGD(min_compression_rate=0), "min_compression_rate > 0, not min_compression_rate=0"),
        (lambda: PowerSGD(min_compression_rate=float("nan")), "min_compression_rate=nan"),
    ]
    for make, message in wrong:
        with pytest.raises(ValueError, match=message):
            make()


def test_compressors_have_names_and_can_be_compared() -> None:
    assert repr(Int8(4)) == "int8(bits=4)" and repr(Int8(seed=1)) == "int8(bits=8, seed=1)"
    assert repr(OneBit()) == "onebit(block=512)"
    assert repr(PowerSGD()) == "powersgd(rank=2)"
    assert len({Int8(), Int8(8), Int8(4), OneBit(), OneBit(512), PowerSGD(), PowerSGD(2)}) == 4
    compressors: list[Compressor] = [Int8(error_feedback=False), OneBit(), PowerSGD()]
    assert [each.error_feedback for each in compressors] == [False, True, True]
    assert [each.whole for each in compressors] == [False, False, True]
    assert [(each.momentum, each.clip) for each in compressors] == [(0, 0)] * 3


def test_what_is_compressed() -> None:
    for compressor in (Int8(), OneBit()):
        assert compressor.fits((32, 32)) and not compressor.fits((31, 33)) and not compressor.fits((5000,))
        assert compressor.extra((32, 32)) == 0
    assert PowerSGD(2).fits((9, 9)) and not PowerSGD(2).fits((8, 8))  # 72 < 81, 64 = 64
    assert PowerSGD(2).fits((16, 2, 8)) and not PowerSGD(2, min_compression_rate=5).fits((16, 2, 8))
    assert not PowerSGD(2).fits((5000,)) and not PowerSGD(1).fits((1, 5000)) and not PowerSGD(1).fits((0, 9))
    assert not any(PowerSGD(1, min_compression_rate=0.1).fits(shape) for shape in ((), (5000,)))
    assert (PowerSGD(2).extra((16, 3, 8)), PowerSGD(9).extra((5, 7)), PowerSGD(9).extra((7, 5))) == (48, 35, 25)


# PowerSGD


@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 3e-6), (np.float64, 1e-14)])
def test_full_rank_is_exact(hosts: int, dtype: Any, tolerance: float) -> None:
    for shape in ((6, 17), (17, 6), (5, 2, 3)):
        pieces, length = laid_out([shape])
        values = drawn(hosts, pieces, length, dtype)
        exact = sum(values)
        for found in exchanged(PowerSGD(rank=min(shape[0], length)), pieces, values):
            np.testing.assert_allclose(found.result, exact, atol=tolerance * np.abs(exact).max())


def test_a_sum_of_lower_rank_is_exact() -> None:
    """Columns of P that depend on others become zero, and add nothing."""
    pieces, _ = laid_out([(30, 40)], gap=0)
    rng = np.random.default_rng(3)
    left, right = rng.standard_normal((30, 1)), rng.standard_normal((1, 40))
    values = [(left @ right * factor).astype(np.float32).reshape(-1) for factor in (1, 3)]
    for found in exchanged(PowerSGD(rank=4), pieces, values):
        np.testing.assert_allclose(found.result, values[0] * 4, atol=1e-5 * np.abs(values[1]).max())


def test_a_lost_column_comes_back() -> None:
    """After zeros, and after a sum of rank 1, the next rounds' sums have the full rank again."""
    pieces, length = laid_out([(30, 40)], gap=0)
    rng = np.random.default_rng(3)
    low = [rng.standard_normal((30, rank)) @ rng.standard_normal((rank, 40)) for rank in (3, 1)]
    for lost in (np.zeros((30, 40)), low[1]):

        def main(transport: ThreadTransport, lost: Any = lost) -> Any:
            host = Host(transport, PowerSGD(rank=3), pieces, np.zeros(length))
            for number in (10, 11):
                host(lost.reshape(-1), number)
            for number in (12, 13):
                found = host(low[0].reshape(-1), number)
            return found.result

        for result in run_ranks(2, main):
            np.testing.assert_allclose(result, 2 * low[0].reshape(-1), atol=1e-9)


def test_the_first_rounds_are_exact() -> None:
    pieces, length = laid_out([(30, 40), (20, 9)])
    values = drawn(3, pieces, length, np.float64)

    def main(transport: ThreadTransport) -> tuple[Outcome, Outcome]:
        host = Host(transport, PowerSGD(rank=1, start_step=4), pieces, values[0])
        host.kept = [each + 5.0 for each in host.kept]
        return host(values[transport.rank], 3), host(values[transport.rank], 4)

    for rank, (exact, lossy) in enumerate(run_ranks(3, main)):
        np.testing.assert_allclose(exact.result, sum(values), atol=1e-14)
        np.testing.assert_array_equal(exact.sent, values[rank])
        assert [set(each) for each in exact.after] == [{5.0}, {5.0}]
        assert np.abs(lossy.result - sum(values)).max() > 0.1
        assert all(len(set(each)) == len(each) for each in lossy.after)


def test_a_warm_start_finds_the_largest_directions() -> None:
    """With the same matrix in all rounds, sums approach the best of their rank (Eckart-Young). First Qs are random."""
    pieces, length = laid_out([(30, 40)], gap=0)
    values = drawn(2, pieces, length, np.float64)
    u, s, vt = np.linalg.svd((values[0] + values[1]).reshape(30, 40))
    best = (u[:, :2] * s[:2]) @ vt[:2]

    def main(transport: ThreadTransport, seed: int = 0) -> list[Any]:
        host = Host(transport, PowerSGD(rank=2, seed=seed), pieces, values[0])
        return [host(values[transport.rank], 10 + number).result for number in range(300)]

    first, *_, last = run_ranks(2, main)[0]
    np.testing.assert_allclose(last, best.reshape(-1), atol=1e-4)
    assert np.abs(first - best.reshape(-1)).max() > 0.1
    assert (first != run_ranks(2, lambda transport: main(transport, seed=1))[0][0]).any()
    renamed = [Piece("other", (30, 40), 0, 0, length)]
    assert (first != exchanged(PowerSGD(rank=2), renamed, values, number=10)[0].result).any()


def test_hosts_whose_blas_rounds_differently_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = np.matmul

    def rough(a: Any, b: Any, out: Any) -> None:
        matmul(a, b, out=out)
        out *= 1 + 3e-7 * (threading.get_ident() % 9973 / 9973)

    pieces, length = laid_out(SHAPES)
    values = drawn(3, pieces, length)
    monkeypatch.setattr(np, "matmul", rough)
    assert_consistent(exchanged(PowerSGD(rank=2), pieces, values), pieces)


@pytest.mark.parametrize("dtype, size", [(np.float32, 1.0), (np.float32, 1e-30), (np.float32, 1e30), (np.float64, 1.0)])
def test_columns_become_orthonormal(dtype: Any, size: float) -> None:
    """Also if they are nearly parallel: to 1000 roundings. The same space, in the same order."""
    rng = np.random.default_rng(0)
    for rows, columns in ((7, 1), (50, 4), (5, 5)):
        matrix = (size * (1 + 1e-3 * rng.standard_normal((rows, columns)))).astype(dtype)
        kept = matrix.astype(np.float64) / size
        orthogonalize(matrix)
        eps = float(np.finfo(dtype).eps)
        np.testing.assert_allclose(matrix.T @ matrix, np.eye(columns), atol=10 * eps)
        wanted, _ = np.linalg.qr(kept)
        np.testing.assert_allclose(np.abs((wanted * matrix).sum(axis=0)), 1, atol=1e5 * eps)


def test_dependent_columns_are_replaced() -> None:
    rng = np.random.default_rng(0)
    first, third = rng.standard_normal((2, 30)).astype(np.float32)
    given = np.stack([first, 3 * first, third, np.zeros(30, np.float32)], axis=1)
    zeroed, filled = given.copy(), given.copy()
    orthogonalize(zeroed)
    orthogonalize(filled, [1])
    np.testing.assert_allclose(zeroed.T @ zeroed, np.diag([1, 0, 1, 0]), atol=1e-6)
    assert not zeroed[:, [1, 3]].any()
    np.testing.assert_allclose(filled.T @ filled, np.eye(4), atol=1e-6)


def test_sums_are_added_in_one_order_on_all_cpus() -> None:
    def folded(terms: list[Any]) -> Any:
        half = len(terms) // 2
        if not half:
            return terms[0]
        upper = terms[len(terms) - half :]
        return folded([a + b for a, b in zip(terms, upper, strict=False)] + terms[half : len(terms) - half])

    for length in (1, 2, 3, 5, 100, 1001):
        terms = np.random.default_rng(length).standard_normal(length).astype(np.float32)
        assert total(terms.copy()) == folded(list(terms))


def gradient(case: int, rank: int, step: int) -> Any:
    """A rank's gradient, the same in both programs: noise, and a steady matrix with singular values far apart.

    If singular values come close, roundings grow from round to round, by error feedback.
    """
    shape, columns = TORCH_CASES[case]
    left, right = (np.random.default_rng([case, side]).standard_normal((size, columns))
                   for side, size in enumerate((shape[0], math.prod(shape[1:]))))  # fmt: skip
    steady = (left * 0.5 ** np.arange(columns)) @ right.T
    return steady.reshape(shape) + 0.01 * np.random.default_rng([case, rank, step]).standard_normal(shape)


def test_powersgd_does_as_torchs_hook(tmp_path: Path) -> None:
    """50 steps of 2 hosts, from the same Q, in float64. float32 agrees less: orthogonalization amplifies roundings."""
    import torch

    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path)], env=environment) for rank in (0, 1)]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for each in ranks:
            each.kill()
    for case, (shape, rank) in enumerate(TORCH_CASES):
        pieces, length = laid_out([shape], gap=0)
        columns = length // shape[0]
        torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
        first = torch.randn(1, columns, rank, dtype=torch.float64).numpy().reshape(-1)

        def main(transport: ThreadTransport, case: int = case, rank: int = rank, first: Any = first) -> list[Any]:
            host = Host(transport, PowerSGD(rank, start_step=TORCH_START), pieces, np.zeros(length))
            host.kept = [first]
            residual, results = np.zeros(length), []
            for step in range(TORCH_STEPS):
                values = gradient(case, transport.rank, step).reshape(-1) + residual
                found = host(values, step)
                residual = values - found.sent
                results.append(found.result / 2)
            return results

        wanted = np.load(tmp_path / f"{case}.npy")
        for results in run_ranks(2, main):
            np.testing.assert_allclose(np.array(results), wanted.reshape(TORCH_STEPS, -1), atol=1e-12, rtol=0)
        exact = (gradient(case, 0, 49) + gradient(case, 1, 49)).reshape(-1) / 2
        assert np.abs(wanted[49].reshape(-1) - exact).max() > 0.01


def train_with_torch(rank: int, folder: Path) -> None:
    """One of 2 ranks: the hook's averages in all steps."""
    import torch
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    class Model(torch.nn.Module):
        """A model with any gradient."""

        def __init__(self, shape: tuple[int, ...]) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))

        def forward(self, wanted: torch.Tensor) -> torch.Tensor:
            return (self.weight * wanted).sum()

    init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for case, (shape, columns) in enumerate(TORCH_CASES):
        model = Model(shape)
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(PowerSGDState(None, columns, TORCH_START, min_compression_rate=0.1), powerSGD_hook)
        averages: list[Any] = []
        for step in range(TORCH_STEPS):
            model.zero_grad()
            wrapped(torch.from_numpy(gradient(case, rank, step))).backward()
            averages.append(model.weight.grad.numpy().copy())
        if rank == 0:
            np.save(folder / f"{case}.npy", np.array(averages))
    destroy_process_group()
    os._exit(0)  # Python's own end aborts now and then: gloo's threads still want to drop the hook's Python objects


if __name__ == "__main__":
    train_with_torch(int(sys.argv[1]), Path(sys.argv[2]))
