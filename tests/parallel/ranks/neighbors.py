"""Averages among neighbours: Bluefog's names on arrays, with the job's topology or with weights."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import hvdlite as hvd
from hvdlite.api import neighbors
from hvdlite.job import runtime
from hvdlite.strategies import Site
from tests.parallel.common import at_sizes, require_error, require_mismatch


def neighbor_allreduce(*args: Any, **kwargs: Any) -> Any:
    return neighbors.neighbor_allreduce(*args, **kwargs)


def hierarchical_neighbor_allreduce(*args: Any, **kwargs: Any) -> Any:
    return neighbors.hierarchical_neighbor_allreduce(*args, **kwargs)


def column(x: np.ndarray, dtype: str = "float64") -> np.ndarray:
    """This rank's row of the matrix x."""
    return x[hvd.rank()].astype(dtype)


def check_defaults_are_those_of_bluefog() -> None:
    p, r = hvd.size(), hvd.rank()
    assert hvd.load_topology() == hvd.ExponentialTwoGraph(p)
    hops = {2**k % p for k in range(8) if 2**k < p}
    assert hvd.in_neighbor_ranks() == sorted((r - hop) % p for hop in hops)
    assert hvd.out_neighbor_ranks() == sorted((r + hop) % p for hop in hops)
    found = neighbor_allreduce(np.array([float(r)]))
    assert abs(found[0] - np.mean([r, *hvd.in_neighbor_ranks()])) < 1e-12


def check_combinations_equal_those_of_numpy() -> None:
    """200 random matrices with any weights, by `set_topology` or by the arguments."""
    p, r = hvd.size(), hvd.rank()
    rng = np.random.default_rng(p)
    for number in range(200):
        w, x = rng.normal(size=(p, p)) * (rng.random((p, p)) < 0.7), rng.normal(size=(p, 5))
        if number % 2:
            assert hvd.set_topology(w, is_weighted=True) is True
            found = neighbor_allreduce(column(x), name=str(number))
        else:
            sources = {j: w[r, j] for j in range(p) if j != r and w[r, j]}
            dests = [i for i in range(p) if i != r and w[i, r]]
            found = neighbor_allreduce(
                column(x),
                self_weight=w[r, r],
                src_weights=sources,
                dst_weights=dests,
                enable_topo_check=number % 4 == 0,
            )
        assert abs(found - (w @ x)[r]).max() < 1e-12
    hvd.set_topology()


def check_unweighted_topologies_average_evenly() -> None:
    p, r = hvd.size(), hvd.rank()
    hvd.set_topology(hvd.StarGraph(p))
    x = np.arange(p * 2.0).reshape(p, 2)
    found = neighbor_allreduce(column(x))
    assert abs(found - (x.mean(axis=0) if r == 0 else x[[0, r]].mean(axis=0))).max() < 1e-12
    hvd.set_topology(hvd.StarGraph(p), is_weighted=True)
    assert abs(neighbor_allreduce(column(x)) - (hvd.StarGraph(p).matrix @ x)[r]).max() < 1e-12
    some = neighbor_allreduce(column(x), self_weight=0.5, src_weights={} if r else {1: 2.0} if p > 1 else {})
    assert abs(some - (0.5 * x[r] + (2 * x[1] if r == 0 and p > 1 else 0))).max() < 1e-12
    hvd.set_topology()


def check_large_arrays_and_all_dtypes() -> None:
    """In many pieces, and not contiguous."""
    p, r = hvd.size(), hvd.rank()
    for dtype in ("float64", "float32", "float16"):
        x = np.arange(600_000).reshape(2, -1).T % 7 + r
        found = neighbor_allreduce(x.astype(dtype).T)
        mean = np.mean([r, *hvd.in_neighbor_ranks()])
        assert found.dtype == dtype and found.shape == (2, 300_000)
        assert abs(found.astype(float) - (x.T - r + mean)).max() < 1e-2
    assert neighbor_allreduce(float(r)).shape == ()
    require_error(TypeError, lambda: neighbor_allreduce(np.ones(3, int)), "int64 is not possible")
    require_error(TypeError, lambda: hierarchical_neighbor_allreduce(np.ones(3, bool)), "bool is not possible")
    assert p == hvd.size()


@at_sizes(2, 4)
def check_one_peer_rounds_give_the_exact_mean() -> None:
    p, r = hvd.size(), hvd.rank()
    x, turns = np.array([2.0**r]), hvd.GetDynamicOnePeerSendRecvRanks(hvd.ExponentialTwoGraph(p), r)
    for _ in range(p.bit_length() - 1):
        dests, sources = next(turns)
        x = neighbor_allreduce(x, self_weight=0.5, src_weights=dict.fromkeys(sources, 0.5), dst_weights=dests)
    assert x[0] == (2.0**p - 1) / p


@at_sizes(4)
def check_ring_contracts_by_exactly_3() -> None:
    hvd.set_topology(hvd.RingGraph(4), is_weighted=True)
    x = np.array([(-1.0) ** hvd.rank()])
    for step in range(1, 11):
        x = neighbor_allreduce(x)
        assert abs(abs(x[0]) - 3.0**-step) < 1e-12
    hvd.set_topology()


@at_sizes(2, 3, 4)
def check_disagreement_is_an_error() -> None:
    p, r = hvd.size(), hvd.rank()
    require_mismatch(lambda: hvd.set_topology(hvd.RingGraph(p) if r else np.eye(p)), "set_topology", "topology differs")
    hvd.set_topology(hvd.FullyConnectedGraph(p))
    one = np.ones(3 + (r == 1))
    for call, words in (
        (lambda: neighbor_allreduce(one), "shape differs"),
        (lambda: neighbor_allreduce(np.ones(3, "f4" if r == 1 else "f8")), "dtype differs"),
        (lambda: neighbor_allreduce(np.ones(3), name="a" if r == 1 else "b"), "name differs"),
    ):
        hvd.barrier()
        began = time.monotonic()
        if r < 2:  # the others agree with all but rank 1, and may have an error from rank 1 alone
            require_error(hvd.MismatchError, call, words)
        else:
            try:
                call()
            except hvd.MismatchError:
                pass
        assert time.monotonic() - began < 5
        hvd.barrier()
    said = require_error(
        hvd.MismatchError,
        lambda: hierarchical_neighbor_allreduce(np.ones(3, "f4" if r == 1 else "f2")),
        "dtype of the tensor differs: rank 0 has float16, rank 1 has float32",
    )
    assert ("error so far differs" in said) == (r > 1)  # these get it from the first rank of the host
    hvd.barrier()
    lonely = {} if r else {1: 1.0}
    require_mismatch(lambda: neighbor_allreduce(np.ones(3), self_weight=1.0, src_weights=lonely, dst_weights=[]),
                     "rank 0 waits for rank 1 (src_weights)")  # fmt: skip
    require_mismatch(lambda: neighbor_allreduce(np.ones(3), self_weight=1.0, src_weights={}, dst_weights=list(lonely)),
                     "rank 0 sends to rank 1 (dst_weights)")  # fmt: skip
    assert (neighbor_allreduce(np.ones(3)) == 1).all()
    hvd.set_topology()


@at_sizes(3)
def check_impossible_arguments_are_errors_of_one_rank() -> None:
    r = hvd.rank()
    for words, arguments in (
        ("both, or neither", {"self_weight": 0.5}),
        ("both, or neither", {"src_weights": {}}),
        ("dst_weights needs", {"dst_weights": [0]}),
        ("src_weights has rank 7", {"self_weight": 1.0, "src_weights": {7: 1.0}}),
        ("dst_weights has rank", {"self_weight": 1.0, "src_weights": {}, "dst_weights": [r]}),
        ("names a rank twice", {"self_weight": 1.0, "src_weights": {}, "dst_weights": [(r + 1) % 3] * 2}),
    ):
        require_error(ValueError, partial(neighbor_allreduce, np.ones(2), **arguments), words)
    require_error(ValueError, lambda: hvd.set_topology(hvd.RingGraph(2)), "for 2 ranks, and the job has 3")
    require_error(ValueError, lambda: hierarchical_neighbor_allreduce(1.0, self_weight=1.0), "or none of them")
    every = {"self_weight": 1.0, "src_machine_weights": {1: 1.0}, "dst_machine_weights": [1]}
    require_error(ValueError, lambda: hierarchical_neighbor_allreduce(1.0, **every), "host 1 must be")
    hvd.set_topology(hvd.RingGraph(3, 2))
    require_error(ValueError, lambda: neighbor_allreduce(1.0, self_weight=1.0, src_weights={(r + 1) % 3: 1.0}), "are [")
    hvd.set_topology()


def check_one_host_averages_all_its_ranks() -> None:
    for dtype in ("float64", "float16"):
        found = hierarchical_neighbor_allreduce(np.arange(3, dtype=dtype) + hvd.rank(), name="x")
        assert found.dtype == dtype
        assert abs(found.astype(float) - (np.arange(3) + (hvd.size() - 1) / 2)).max() < 1e-3


@at_sizes(4)
def check_hosts_exchange_their_averages() -> None:
    """Two hosts of two ranks, by a topology that says so."""
    live = runtime.current()
    before = live.topology
    r, host = hvd.rank(), hvd.rank() // 2
    try:
        live.topology = replace(before, hosts=((0, 1), (2, 3)))
        x = np.array([float(10**r)])
        assert abs(hierarchical_neighbor_allreduce(x)[0] - 1111 / 4) < 1e-9
        weights = {"self_weight": 0.75, "src_machine_weights": {1 - host: 0.25}, "dst_machine_weights": {1 - host: 2.0}}
        found = hierarchical_neighbor_allreduce(x, enable_topo_check=True, **weights)
        assert abs(found[0] - (0.75 * [5.5, 550][host] + 0.5 * [5.5, 550][1 - host])) < 1e-9
    finally:
        live.topology = before


@at_sizes(3)
def check_neighbour_that_shuts_down() -> None:
    """Each rank in turn leaves. The others get an error that names it. Then all start again."""
    for early in range(3):
        neighbor_allreduce(np.ones(3))
        if hvd.rank() != early:
            words = "neighbor_allreduce 'x'", f"rank {early} shut down"
            require_error(hvd.ShutdownError, lambda: neighbor_allreduce(np.ones(3), name="x"), *words)
        hvd.shutdown()
        hvd.init()


@at_sizes(3, 4)
def check_nothing_is_left_after_shutdown() -> None:
    """An exchange that nobody waits for ends by itself, on all ranks. No thread stays."""
    for _ in range(3):
        running = hvd.Neighbors(hvd.RingGraph).start(Site(runtime.current().everyone, "o", "SGD", ["a"]))
        running.after_update([np.ones(100_000)], {})
        hvd.shutdown()
        began = time.monotonic()
        while any(thread.name == "hvdlite-lane" for thread in threading.enumerate()):
            assert time.monotonic() - began < 10
            time.sleep(0.01)
        hvd.init()


@at_sizes(2, 3, 4)
def check_d_psgd_equals_the_simulation() -> None:
    p, r = hvd.size(), hvd.rank()
    for mode in ("combine-then-adapt", "adapt-then-combine"):
        x = np.random.default_rng(0).normal(size=(p, 7))
        mine, w = x[r].copy(), hvd.RingGraph(p).matrix
        running = hvd.Neighbors(hvd.RingGraph, mode=mode).start(Site(runtime.current().everyone, mode, "SGD", ["a"]))
        for step in range(20):
            update = np.cos(x + np.arange(p)[:, None] + step) * 0.1
            x = w @ x - update if mode == "combine-then-adapt" else w @ (x - update)
            own = np.cos(mine + r + step) * 0.1
            if running.update_begins():
                running.before_update([mine], [None])
            mine -= own
            if running.update_ends():
                running.after_update([mine], {})
        running.settle([mine])
        assert abs(mine - x[r]).max() < 1e-12
