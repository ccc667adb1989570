"""Averages among neighbours on threads as ranks: topologies, weighted sums, disagreement, leaving, D-PSGD."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest

from hvdlite import gpu_streams
from hvdlite.algorithms import Place
from hvdlite.arrays import bfloat16
from hvdlite.errors import HvdliteError, MismatchError, ShutdownError
from hvdlite.job.groups import Group, leave
from hvdlite.lanes.calls import calling
from hvdlite.lanes.lane import Lane
from hvdlite.ops.neighbors import Combining, Part, overwrite
from hvdlite.strategies import Site
from hvdlite.strategies.neighbors import Neighbors
from hvdlite.strategies.topology import (
    ExponentialGraph,
    ExponentialTwoGraph,
    FullyConnectedGraph,
    GetDynamicOnePeerSendRecvRanks,
    MeshGrid2DGraph,
    OnePeerExponential,
    RingGraph,
    StarGraph,
    Topology,
    contraction,
    require_doubly_stochastic,
)
from hvdlite.transports.threads import ThreadTransport, run_ranks
from tests.pretend import cupy
from tests.pretend.lanes import stand_in  # noqa: F401

BUILDERS: tuple[Callable[[int], Topology], ...] = (
    ExponentialGraph, ExponentialTwoGraph, FullyConnectedGraph, MeshGrid2DGraph, RingGraph, StarGraph,
    lambda size: RingGraph(size, 1), lambda size: RingGraph(size, 2), lambda size: ExponentialGraph(size, 3),
)  # fmt: skip


def on_groups(size: int, function: Callable[[Group], Any], stay: bool = False) -> list[Any]:
    """Run function(group) on `size` ranks at once. Then all ranks leave, unless the function does (stay)."""

    everyone: list[Group] = []

    def rank_main(transport: ThreadTransport) -> Any:
        groups: list[Group] = []

        def family() -> list[Lane]:
            return [lane for group in groups for lane in (*group.lanes, *group.post.lanes.values())]

        groups.append(Group(tuple(range(size)), transport.duplicate(), Place(size, False), (), family))
        everyone.append(groups[0])
        try:
            result = function(groups[0])
        except BaseException as error:  # no other rank may wait for this one
            for group in everyone:
                group.eager.break_off(HvdliteError(f"rank {transport.rank} has failed: {error!r}"))
            raise
        if not stay:
            leave(groups)
        return result

    return run_ranks(size, rank_main)


def part_of(topology: Topology, rank: int) -> Part:
    """What a rank does in a round of this topology."""
    dests = dict.fromkeys(topology.out_neighbors(rank), 1.0)
    return Part(topology.self_weight(rank), topology.weights(rank), dests)


def combine(group: Group, part: Part, arrays: list[Any], name: str, *facts: tuple[str, object]) -> list[Any]:
    """One round."""
    combining = Combining(group, part, arrays)
    combining.start("combine", name, facts, waits=True)
    return combining.wait()


# Topologies


@pytest.mark.parametrize("size", range(1, 17))
def test_all_graphs_are_doubly_stochastic_and_bring_ranks_closer(size: int) -> None:
    for build in BUILDERS:
        topology = build(size)
        require_doubly_stochastic([topology])
        assert topology.size == size and abs(topology.matrix.sum(axis=0) - 1).max() < 1e-12
        for rank in range(size):
            assert all(rank in topology.out_neighbors(source) for source in topology.in_neighbors(rank))
    require_doubly_stochastic(OnePeerExponential().rounds(size))


def test_weights_are_those_of_bluefog() -> None:
    """Row i says how rank i combines."""
    third = 1 / 3
    ring = [[third, third, 0, third], [third, third, third, 0], [0, third, third, third], [third, 0, third, third]]
    assert np.allclose(RingGraph(4).matrix, ring) and RingGraph(2).matrix.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert RingGraph(4, 1).out_neighbors(2) == [1] and RingGraph(4, 2).out_neighbors(2) == [3]
    assert ExponentialTwoGraph(12).out_neighbors(10) == [0, 2, 6, 11]
    assert ExponentialTwoGraph(12).in_neighbors(0) == [4, 8, 10, 11] and ExponentialTwoGraph(12).self_weight(3) == 0.2
    assert ExponentialGraph(12, 3).out_neighbors(0) == [1, 3, 9]
    star = StarGraph(4, 1)
    assert np.allclose(star.matrix[1], 0.25) and np.allclose(star.matrix[0], [0.75, 0.25, 0, 0])
    grid = MeshGrid2DGraph(6)  # 2 rows of 3
    assert grid.in_neighbors(1) == [0, 2, 4] and grid.matrix[1, 0] == 0.25 and grid.matrix[0, 3] == third
    assert np.allclose(np.diag(grid.matrix), [5 / 12, 0.25, 5 / 12] * 2)
    assert MeshGrid2DGraph(6, (3, 2)).in_neighbors(2) == [0, 3, 4]


def test_one_peer_exponential_gives_the_exact_mean_of_a_power_of_two() -> None:
    for size in (1, 2, 4, 8, 16):
        whole = np.eye(size)
        rounds = OnePeerExponential().rounds(size)
        for topology in rounds:
            whole = topology.matrix @ whole
            assert all(len(topology.in_neighbors(rank)) <= 1 for rank in range(size))
        assert (whole == 1 / size).all() and len(rounds) == max(size.bit_length() - 1, 1)


def test_one_peer_turns_are_those_of_bluefog() -> None:
    turns = GetDynamicOnePeerSendRecvRanks(ExponentialTwoGraph(8), 6)
    assert list(islice(turns, 4)) == [([7], [5]), ([0], [4]), ([2], [2]), ([7], [5])]
    star = [list(islice(GetDynamicOnePeerSendRecvRanks(StarGraph(3), rank), 3)) for rank in range(3)]
    assert star[0] == [([1], [1, 2]), ([2], [1, 2]), ([1], [1, 2])] and star[2] == [([0], []), ([0], [0]), ([0], [])]
    assert next(GetDynamicOnePeerSendRecvRanks(RingGraph(1), 0)) == ([], [])
    for step in zip(*(islice(GetDynamicOnePeerSendRecvRanks(StarGraph(5), rank), 8) for rank in range(5)), strict=True):
        sent = {(rank, dest) for rank, (dests, _) in enumerate(step) for dest in dests}
        assert sent == {(source, rank) for rank, (_, sources) in enumerate(step) for source in sources}


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        ([[0.5, 0.5], [0.6, 0.5]], "row 1 sums to 1.1, "), ([[1.0, 0.0], [1.0, 0.0]], "column 0 sums to 2, column 1"),
        ([[1.5, -0.5], [-0.5, 1.5]], "weight [0, 1]"), (np.eye(3), "rank 0 never hears of rank 1"),
        ([[0.0, 1.0], [1.0, 0.0]], "in a circle"), ([[0.5, np.nan], [0.5, 0.5]], "row 0"), ([1.0], "square"),
    ],
)  # fmt: skip
def test_other_matrices_are_refused(matrix: object, words: str) -> None:
    with pytest.raises(ValueError) as error:
        require_doubly_stochastic([Topology.of(matrix)])
    assert words.strip(", ") in str(error.value)


def test_a_topology_does_not_change_and_is_known_by_its_digest() -> None:
    given = np.full((2, 2), 0.5)
    topology = Topology.of(given)
    given[0, 0] = 7
    assert topology == RingGraph(2) and topology.self_weight(0) == 0.5 and topology != RingGraph(3)
    with pytest.raises(ValueError, match="read-only"):
        topology.matrix[0, 0] = 1.0
    assert repr(Neighbors(RingGraph)) == "Neighbors(RingGraph, mode='combine-then-adapt')"
    assert repr(Neighbors([[0.5, 0.5], [0.5, 0.5]])) == repr(Neighbors(RingGraph(2))) != repr(Neighbors(RingGraph(3)))
    with pytest.raises(ValueError, match="adapt-then-combine"):
        Neighbors(RingGraph, mode="both")


# Weighted sums


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_combinations_equal_those_of_numpy(size: int) -> None:
    """200 random matrices with any weights, some of them 0; four dtypes at once, in any shapes."""
    rng = np.random.default_rng(size)
    exact = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, bfloat16: 1e-1}
    cases = [(Topology.of(rng.normal(size=(size, size)) * (rng.random((size, size)) < 0.7)), rng.normal(size=(size, 7)))
             for _ in range(200)]  # fmt: skip

    def rank_main(group: Group) -> None:
        for number, (topology, x) in enumerate(cases):
            arrays = [
                part.astype(dtype)
                for dtype in exact
                for part in (x[group.rank, :6].reshape(2, 3), np.array(x[group.rank, 6]))
            ]
            before = [array.copy() for array in arrays]
            found = combine(group, part_of(topology, group.rank), arrays, str(number))
            for array, kept, result in zip(arrays, before, found, strict=True):
                expected = topology.matrix[group.rank] @ (x[:, :6] if array.ndim else x[:, 6])
                assert result.dtype == array.dtype and result.shape == array.shape and (array == kept).all()
                tolerance = exact.get(array.dtype.name, 1e-1) * size
                assert abs(result.astype(float).reshape(-1) - expected).max() < tolerance

    on_groups(size, rank_main)


def test_factors_are_the_senders() -> None:
    def rank_main(group: Group) -> None:
        x = np.array([1.0, 10.0]) * (group.rank + 1)
        other = 1 - group.rank
        found = combine(group, Part(2.0, {other: 3.0}, {other: 0.5}), [x], "a")[0]
        assert found.tolist() == (2 * x + 3 * 0.5 * (other + 1) * np.array([1.0, 10.0])).tolist()

    on_groups(2, rank_main)


def test_half_precision_is_added_in_float32() -> None:
    """1 + 3 * 2^-12 rounds up in float16; each addend alone would be lost."""

    def rank_main(group: Group) -> None:
        part = Part(1.0, dict.fromkeys([i for i in range(4) if i != group.rank], 1.0),
                    dict.fromkeys([i for i in range(4) if i != group.rank], 1.0))  # fmt: skip
        x = np.array([1.0 if group.rank == 0 else 2.0**-12], np.float16)
        assert combine(group, part, [x], "a")[0][0] == np.float16(1 + 3 * 2.0**-12) != 1

    on_groups(4, rank_main)


def test_weights_of_0_leave_out_what_is_not_finite() -> None:
    def rank_main(group: Group) -> None:
        other = 1 - group.rank
        x = np.array([np.nan if group.rank else 1.0])
        part = Part(float(not group.rank), {other: float(group.rank)}, {other: 1.0})
        assert combine(group, part, [x], "a")[0].tolist() == [1.0]

    on_groups(2, rank_main)


def test_full_graphs_give_all_ranks_the_same_bits() -> None:
    x = np.random.default_rng(0).normal(size=(5, 100))
    topology = FullyConnectedGraph(5)
    found = on_groups(5, lambda group: combine(group, part_of(topology, group.rank), [x[group.rank]], "a")[0].tobytes())
    assert len(set(found)) == 1


def test_integers_are_refused() -> None:
    def rank_main(group: Group) -> None:
        for dtype in (np.int64, np.bool_, np.complex64):
            with pytest.raises(TypeError, match=f"{np.dtype(dtype).name} is not possible"):
                Combining(group, Part(1.0, {}, {}), [np.ones(3, dtype)])

    on_groups(1, rank_main)


def test_a_ring_contracts_by_exactly_3() -> None:
    """Weights of 1/3 on a ring of 4: the second eigenvalue is 1/3. x = (1, -1, 1, -1) and (1, 0, -1, 0) have it."""
    topology = RingGraph(4)
    assert abs(contraction(topology.matrix) - 1 / 3) < 1e-15

    def rank_main(group: Group) -> None:
        for number, start in enumerate(([1.0, -1.0, 1.0, -1.0], [1.0, 0.0, -1.0, 0.0])):
            x = np.array([5 + start[group.rank]])
            for step in range(1, 11):
                x = combine(group, part_of(topology, group.rank), [x], f"{number} {step}")[0]
                sign = (-1) ** step if number == 0 else 1
                assert abs(x[0] - (5 + sign * start[group.rank] / 3**step)) < 1e-12

    on_groups(4, rank_main)


# Ranks that are late, disagree, or leave


def test_a_late_rank_blocks_its_neighbours_alone() -> None:
    """A line of 4 ranks. The last comes late: rank 2 waits, and ranks 0 and 1 have ended their round."""
    topology, done = MeshGrid2DGraph(4, (1, 4)), [threading.Event() for _ in range(4)]

    def rank_main(group: Group) -> None:
        if group.rank == 3:
            assert done[0].wait(20) and done[1].wait(20)
            time.sleep(0.1)
            assert not done[2].is_set()
        combine(group, part_of(topology, group.rank), [np.ones(3)], "a")
        done[group.rank].set()

    on_groups(4, rank_main)


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        (lambda rank: ([np.ones(3 + rank)], ("name", "a")), "shape differs: rank 0 has (3,), rank 1 has (4,)"),
        (lambda rank: ([np.ones(3, [np.float32, np.float64][rank])], ("name", "a")), "dtype differs: rank 0 has float32"),
        (lambda rank: ([np.ones(3)], ("name", "ab"[rank])), "name differs: rank 0 has a, rank 1 has b"),
        (lambda rank: ([np.ones(3)], ("topology", RingGraph(2 + rank).digest)), "topology differs"),
        (lambda rank: ([np.ones(3)] * (2 + rank), ("name", "a")), "number of arrays differs: rank 0 has 2, rank 1 has 3"),
        (lambda rank: ([np.ones(3 + rank)] * 2, ("name", "a")), "elements differ: rank 0 has 6 of float64, rank 1 has 8 of"),
    ],
)  # fmt: skip
def test_disagreement_is_an_error_on_both(mine: Callable[[int], tuple[list[Any], Any]], words: str) -> None:
    """Afterwards the ranks can go on."""

    def rank_main(group: Group) -> str:
        arrays, fact = mine(group.rank)
        with pytest.raises(MismatchError) as error, calling("hvd.neighbor_allreduce"):
            combine(group, part_of(RingGraph(2), group.rank), arrays, "1", fact)
        after = combine(group, part_of(RingGraph(2), group.rank), [np.ones(1)], "2", ("name", "c"))
        assert after[0].tolist() == [1.0]
        return str(error.value)

    said = on_groups(2, rank_main)
    assert said[0] == said[1] and words in said[0] and said[0].startswith("hvd.neighbor_allreduce: "), said


def test_one_sided_messages_are_an_error_on_both() -> None:
    def rank_main(group: Group) -> None:
        other = 1 - group.rank
        part = Part(1.0, {other: 1.0}, {} if group.rank else {other: 1.0})
        with pytest.raises(MismatchError, match="messages differ: rank 0 has 0 to 1, 1 to 0, rank 1 has 0 to 1"):
            combine(group, part, [np.ones(3)], "a")

    on_groups(2, rank_main)


def test_a_neighbour_that_leaves_is_an_error() -> None:
    """Rank 0 of a ring of 3 leaves. Both others wait for it, in the first round or the second."""

    def rank_main(group: Group) -> None:
        topology = RingGraph(3)
        combine(group, part_of(topology, group.rank), [np.ones(3)], "1")
        if group.rank:
            with pytest.raises(ShutdownError, match="rank 0 shut down"):
                combine(group, part_of(topology, group.rank), [np.ones(3)], "2")
        leave([group])
        assert all(lane.closed for lane in (*group.lanes, *group.post.lanes.values()))

    on_groups(3, rank_main, stay=True)


# The strategy


def gradient(x: np.ndarray[Any, Any], rank: int, step: int) -> np.ndarray[Any, Any]:
    """The gradient of a rank's own problem, which differs from step to step."""
    return (1 + rank) * x - np.cos(np.arange(x.size) + rank + step)


def simulated(topologies: list[Topology], x: np.ndarray[Any, Any], steps: int, mode: str) -> np.ndarray[Any, Any]:
    """Both modes with SGD, for all ranks at once: a row of x for each rank."""
    for step in range(steps):
        w = topologies[step % len(topologies)].matrix
        update = -0.05 * np.stack([gradient(row, rank, step) for rank, row in enumerate(x)])
        x = w @ x + update if mode == "combine-then-adapt" else w @ (x + update)
    return x


@pytest.mark.parametrize("mode", ["combine-then-adapt", "adapt-then-combine"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("topology", [RingGraph, StarGraph, OnePeerExponential(), ExponentialTwoGraph])
def test_training_equals_the_simulation(mode: str, size: int, topology: Any) -> None:
    """Ranks begin differently. All of them settle now and then, which changes nothing."""
    first = np.random.default_rng(3).normal(size=(size, 5))
    rounds = topology.rounds(size) if isinstance(topology, OnePeerExponential) else [topology(size)]

    def rank_main(group: Group) -> np.ndarray[Any, Any]:
        strategy = Neighbors(topology, mode=mode)
        running = strategy.start(Site(group, "optimizer.1", "SGD", ["a", "b"]))
        flat = first[group.rank].copy()
        weights = [flat[:2], flat[2:].reshape(1, 3)]
        for step in range(20):
            g = gradient(flat, group.rank, step)
            gradients = [g[:2], g[2:].reshape(1, 3)]
            if running.update_begins():
                running.before_update(weights, gradients)
            for w, d in zip(weights, gradients, strict=True):
                w -= 0.05 * d
            if running.update_ends():
                assert not running.after_update(weights, {})
            if step % 7 == 3:
                before = flat.copy()
                running.settle(weights)
                assert (flat == before).all()
            if step == 12:
                saved = running.state()
                running = strategy.start(Site(group, "optimizer.2", "SGD", ["a", "b"]))
                running.load(saved)
        running.settle(weights)
        running.close()
        return flat

    found = np.stack(on_groups(size, rank_main))
    assert abs(found - simulated(rounds, first, 20, mode)).max() < 1e-12


def test_d_psgd_exchanges_while_ranks_compute() -> None:
    """A neighbour's `before_update` returns although this rank still computes its gradient."""
    ready = threading.Event()

    def rank_main(group: Group) -> None:
        running = Neighbors(RingGraph).start(Site(group, "optimizer.1", "SGD", ["a"]))
        weights = [np.array([float(group.rank)])]
        running.after_update(weights, {})
        if group.rank:
            assert ready.wait(20)
        running.before_update(weights, [None])
        assert weights[0].tolist() == [0.5]
        ready.set()

    on_groups(2, rank_main)


@pytest.mark.parametrize("mode", ["combine-then-adapt", "adapt-then-combine"])
def test_weights_on_a_gpu(mode: str, stand_in: None) -> None:  # noqa: F811
    """The exchange waits for the work that computes weights, and later work sees the result."""

    def rank_main(group: Group) -> None:
        running = Neighbors(RingGraph, mode=mode).start(Site(group, "optimizer.1", "SGD", ["a", "b"]))
        for dtype in ("float32", bfloat16):
            weights: list[Any] = [cupy.zeros((2, 2), dtype), cupy.zeros(3, dtype)]
            for step in range(4):
                for w in weights:
                    w[...] = np.full(w.shape, group.rank + step)
                running.after_update(weights, {})
                running.before_update(weights, [None, None])
                assert all((w.get().astype(float) == step + 0.5).all() for w in weights)

    on_groups(2, rank_main)


def test_work_on_another_stream_still_reads_the_old_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may train on a stream of its own."""
    other, weights = cupy.Stream(), cupy.zeros(3)
    cupy.get_current_stream().synchronize()
    monkeypatch.setattr(gpu_streams, "FOLLOWED", [lambda number: other.ptr])
    with other:
        copy = weights.copy()
    overwrite(weights, np.full(3, 2.0))
    with other:
        assert copy.get().tolist() == [0.0] * 3
    assert weights.get().tolist() == [2.0] * 3


def test_moved_weights_are_exchanged_anew() -> None:
    def rank_main(group: Group) -> None:
        running = Neighbors(RingGraph).start(Site(group, "optimizer.1", "SGD", ["a"]))
        weights = [np.array([float(group.rank)])]
        running.after_update(weights, {})
        weights[0][:] = 7.0
        running.moved()
        running.before_update(weights, [None])
        assert weights[0].tolist() == [7.0]

    on_groups(2, rank_main)


def test_ranks_compare_their_strategies_at_the_start() -> None:
    def rank_main(group: Group) -> None:
        site = Site(group, "optimizer.1", "SGD", ["a"])
        graphs = [RingGraph, StarGraph, RingGraph]
        with pytest.raises(MismatchError, match=r"strategy=hvd.Neighbors.* of SGD: topology differs"):
            Neighbors(graphs[group.rank]).start(site)
        with pytest.raises(MismatchError, match="mode differs"):
            Neighbors(RingGraph, mode="adapt-then-combine" if group.rank else "combine-then-adapt").start(site)
        with pytest.raises(ValueError, match="for 4 ranks, and 3 ranks train"):
            Neighbors(RingGraph(4)).start(site)
        with pytest.raises(ValueError, match="not connected"):
            Neighbors(np.eye(3)).start(site)

    on_groups(3, rank_main)
