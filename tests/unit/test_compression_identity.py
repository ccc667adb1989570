"""A thousand rounds between hosts: nothing is lost, whatever happens on the way; and ratio 1 loses nothing at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdlite.algorithms.reduction import Reduction
from hvdlite.compression import Column, Piece
from hvdlite.compression.part import Part, Section, is_finite
from hvdlite.compression.powersgd import PowerSGD
from hvdlite.compression.quantize import Int8, OneBit
from hvdlite.compression.randomk import RandomK
from hvdlite.compression.saved import as_arrays, of_arrays
from hvdlite.compression.store import Store
from hvdlite.compression.topk import TopK
from hvdlite.transports.threads import ThreadTransport, alone, run_ranks

HOSTS, ROUNDS = 2, 1000
SHAPES = {"a": (24, 40), "b": (33, 7)}
PIECES = [Piece("a", SHAPES["a"], 0, 0, 960), Piece("b", SHAPES["b"], 976, 0, 231)]
LENGTH = 1216
INSIDE = np.concatenate([np.arange(LENGTH)[piece.here] for piece in PIECES])
COMPRESSORS = (
    TopK(0.05), TopK(0.05, algorithm="oktopk"), RandomK(0.05), Int8(), Int8(4), OneBit(), PowerSGD(2, start_step=3),
)  # fmt: skip


class Scale:
    """A loss scale that grows."""

    value = 1.0

    def __call__(self) -> float:
        return self.value


def made(how: Any, transport: ThreadTransport, memory: np.ndarray, scale: Scale) -> tuple[Store, Part]:
    """The store and the part of one host."""
    store = Store(how, scale)
    wanted = [(name, shape, "float32") for name, shape in SHAPES.items()]
    store.allocate(wanted, transport, alone(), (transport.rank, HOSTS))
    return store, Part(store, Column(transport), Section(PIECES, memory, Reduction(), 1.0, []))


def renewed(store: Store, how: Any, transport: ThreadTransport, memory: np.ndarray, scale: Scale) -> tuple[Store, Part]:
    """A store of another job that has loaded the sum over hosts from a file."""

    def add(array: np.ndarray) -> None:
        array[...] = np.sum(transport.allgather_object(array.copy()), axis=0)

    saved = of_arrays(as_arrays(store.summed(add)))
    fresh, part = made(how, transport, memory, scale)
    fresh.load(saved)
    fresh.allocate([], transport, alone(), (transport.rank, HOSTS))
    assert fresh.rounds == store.rounds
    return fresh, part


@pytest.mark.parametrize("how", COMPRESSORS, ids=str)
def test_nothing_is_lost_in_a_thousand_rounds(how: Any) -> None:
    """results + residuals = gradients, through skipped steps, a growing loss scale, and a checkpoint."""

    def main(transport: ThreadTransport) -> tuple[np.ndarray, np.ndarray, int]:
        memory, scale = np.zeros(LENGTH, np.float32), Scale()
        store, part = made(how, transport, memory, scale)
        rng = np.random.default_rng(transport.rank)
        steady = rng.normal(size=LENGTH).astype(np.float32)
        computed, given = np.zeros(LENGTH), np.zeros(LENGTH)
        for number in range(ROUNDS):
            if number == ROUNDS // 2:
                store, part = renewed(store, how, transport, memory, scale)
            scale.value = 2.0 ** (number // 100)
            gradient = (steady + rng.normal(size=LENGTH)).astype(np.float32)
            memory[...] = 0
            memory[INSIDE] = gradient[INSIDE] * np.float32(scale.value)
            skipped = number % 37 == 5
            if skipped and transport.rank == 1:
                memory[7] = np.inf
            part()
            assert is_finite(memory) is not skipped
            if not skipped:
                computed[INSIDE] += gradient[INSIDE]
                given += memory.astype(np.float64) / scale.value
                store.commit(SHAPES)
            transport.barrier()
        kept = np.zeros(LENGTH)
        for piece in PIECES:
            kept[piece.here] = store.before(piece.name).residual
        return computed - kept, given, store.rounds

    found = run_ranks(HOSTS, main)
    owed, given = sum(each for each, _, _ in found), found[0][1]
    assert all((each == given).all() for _, each, _ in found)
    assert [rounds for _, _, rounds in found] == [ROUNDS - len(range(5, ROUNDS, 37))] * HOSTS
    assert np.linalg.norm(given - owed) < 1e-6 * np.linalg.norm(given)


@pytest.mark.parametrize("how", [TopK(1.0), TopK(1.0, algorithm="oktopk"), RandomK(1.0)], ids=str)
def test_a_ratio_of_one_is_exact(how: Any) -> None:
    """The sum of two hosts has the same bits as without compression, and nothing is left."""

    def main(transport: ThreadTransport) -> tuple[np.ndarray, np.ndarray]:
        memory = np.zeros(LENGTH, np.float32)
        store, part = made(how, transport, memory, Scale())
        for number in range(3):
            memory[INSIDE] = np.random.default_rng([number, transport.rank]).normal(size=len(INSIDE))
            exact = memory.copy()
            Column(transport).sum(exact)
            part()
            store.commit(SHAPES)
            assert not any(store.before(name).residual.any() for name in SHAPES)
            assert (memory == exact).all()
        return memory, exact

    run_ranks(HOSTS, main)
