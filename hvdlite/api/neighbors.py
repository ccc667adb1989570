"""Bluefog's names for averages among neighbours, on arrays, and the job's topology for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, cast

import numpy as np

from hvdlite.arrays import Array, accumulator, dtype_name, is_float
from hvdlite.arrays import module as module_of
from hvdlite.errors import MismatchError
from hvdlite.gpu_streams import on_host
from hvdlite.job import runtime
from hvdlite.job.groups import Group
from hvdlite.lanes.calls import UNNAMED, calling
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Facts, Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.ops.neighbors import Combining, Part, overwrite
from hvdlite.strategies.topology import ExponentialTwoGraph, Topology

Weights: TypeAlias = Mapping[int, float]
Dests: TypeAlias = "Mapping[int, float] | Sequence[int]"
"""Ranks to send to, perhaps with factors."""


@dataclass(frozen=True)
class Chosen:
    """The topology of `neighbor_allreduce` without weights.

    Attributes:
        topology: The topology.
        weighted: Whether its weights count. If not, a rank averages its array and its in-neighbours' evenly.
    """

    topology: Topology
    weighted: bool = False

    def part(self, rank: int) -> Part:
        """Return what a rank does."""
        topology = self.topology
        sources, dests = topology.weights(rank), dict.fromkeys(topology.out_neighbors(rank), 1.0)
        if self.weighted:
            return Part(topology.self_weight(rank), sources, dests)
        each = 1 / (1 + len(sources))
        return Part(each, dict.fromkeys(sources, each), dests)


def chosen() -> Chosen:
    """Return the job's topology: the one that was set, or an exponential-2 graph."""
    live = runtime.current()
    found = live.neighbors
    if not isinstance(found, Chosen):
        found = Chosen(ExponentialTwoGraph(live.everyone.size))
        live.set_neighbors(found)
    return found


def set_topology(topology: object = None, is_weighted: bool = False) -> bool:
    """Set the topology that `neighbor_allreduce` uses. Collective; waits for all ranks.

    It lasts until the next call, or `shutdown()`. Before the first call it is `ExponentialTwoGraph(size())`.

    Args:
        topology: A topology for all ranks, equal on every rank, or a matrix of weights: row i says how rank i combines.
            Default: `ExponentialTwoGraph(size())`.
        is_weighted: Whether `neighbor_allreduce` uses these weights. If not, as in Bluefog, each rank averages its own
            and its in-neighbours' arrays evenly. In a grid or a star, that does not keep the mean of all ranks.

    Returns:
        True.

    Raises:
        MismatchError: The ranks' topologies differ. Every rank raises it.
        ValueError: The topology is for another number of ranks, or the matrix is not square.
    """
    live = runtime.current()
    everyone = live.everyone
    given = ExponentialTwoGraph(everyone.size) if topology is None else topology
    found = given if isinstance(given, Topology) else Topology.of(given)
    if found.size != everyone.size:
        raise ValueError(f"the topology is for {found.size} ranks, and the job has {everyone.size}")
    facts = (("topology", found.digest), ("is_weighted", bool(is_weighted)))
    name = f"{UNNAMED}{everyone.serial('set_topology')}"
    everyone.eager.run(Request(Signature("set_topology", name, facts), lambda at: None))
    live.set_neighbors(Chosen(found, bool(is_weighted)))
    return True


def load_topology() -> Topology:
    """Return the topology that `neighbor_allreduce` uses. Waits for nobody.

    Returns:
        The topology.
    """
    return chosen().topology


def in_neighbor_ranks() -> list[int]:
    """Return the ranks that send to this rank in the job's topology. Waits for nobody.

    Returns:
        The ranks, ascending, without this one.
    """
    return chosen().topology.in_neighbors(runtime.rank())


def out_neighbor_ranks() -> list[int]:
    """Return the ranks that this rank sends to in the job's topology. Waits for nobody.

    Returns:
        The ranks, ascending, without this one.
    """
    return chosen().topology.out_neighbors(runtime.rank())


def neighbor_allreduce(
    array: object,
    *,
    self_weight: float | None = None,
    src_weights: Weights | None = None,
    dst_weights: Dests | None = None,
    enable_topo_check: bool = True,
    name: str | None = None,
) -> Array:
    """Average an array with those of neighbours: self_weight * own + sum of src_weights[j] * rank j's. Waits for these.

    Without weights, the job's topology (`set_topology`) says who sends to whom, and the weights. All ranks make the
    same calls in the same order. 16-bit floats are added in float32. A rank sends its array once to
    each out-neighbour.

    Args:
        array: A NumPy or CuPy array or a number, of a floating-point dtype; of the same shape and dtype on neighbours.
            It keeps its values.
        self_weight: The weight of this rank's array. Give it with `src_weights`.
        src_weights: By rank, the weight of what it sends. Without `dst_weights`: in-neighbours of the job's topology,
            and those left out have the weight 0.
        dst_weights: The ranks to send to in this call, instead of those of the topology: a list, or a dict of factors
            by which the array is multiplied for each. Then `src_weights` names the ranks to receive from in this call.
        enable_topo_check: Whether calls with `dst_weights` compare all ranks' lists first. That waits for all ranks.
            Without the check, a rank that waits for a message that nobody sends waits until the stall watch reports it.
        name: The call's name in messages; equal on neighbours.

    Returns:
        The average, as a new array.

    Raises:
        MismatchError: Neighbours' names, shapes, dtypes or ranks differ; on both.
        ShutdownError: A neighbour has shut down.
        TypeError: The dtype is not a floating-point dtype.
        ValueError: Some of the weights are missing, or are for impossible ranks.
    """
    everyone, known = runtime.current().everyone, chosen()
    facts: Facts = (
        ("name", name),
        ("topology", "given by the caller" if dst_weights is not None else known.topology.digest),
    )
    part = part_of(everyone, known, self_weight, src_weights, dst_weights)
    with calling(f"neighbor_allreduce '{name}'" if name else "neighbor_allreduce"):
        combining = Combining(everyone, part, [host_array(array)])
        if dst_weights is not None and enable_topo_check:
            require_matching(everyone, part)
        number = f"{UNNAMED}{everyone.serial('neighbor_allreduce')}"
        combining.start("neighbor_allreduce", number, facts, waits=True)
        return beside(array, combining.wait()[0])


def part_of(
    group: Group, known: Chosen, self_weight: float | None, src_weights: Weights | None, dst_weights: Dests | None
) -> Part:
    """Return what this rank does in a `neighbor_allreduce` with these arguments. Raises ValueError as that does."""
    usual = known.part(group.rank)
    if (self_weight is None) != (src_weights is None):
        raise ValueError("give self_weight and src_weights both, or neither")
    if self_weight is None or src_weights is None:
        if dst_weights is not None:
            raise ValueError("dst_weights needs self_weight and src_weights, too")
        return usual
    sources = {rank_of(group, "src_weights", rank): float(weight) for rank, weight in src_weights.items()}
    if dst_weights is None:
        if others := sorted(set(sources) - set(usual.sources)):
            raise ValueError(
                f"src_weights has rank {others[0]}, and the in-neighbours of rank {group.rank} are "
                f"{sorted(usual.sources)}: give dst_weights on all ranks, or call set_topology first"
            )
        return Part(float(self_weight), {source: sources.get(source, 0.0) for source in usual.sources}, usual.dests)
    return Part(float(self_weight), sources, dests_of(dst_weights, partial(rank_of, group, "dst_weights")))


def dests_of(given: Dests, place: Callable[[int], int]) -> dict[int, float]:
    """Return the factor for each receiver. Raises ValueError if one is listed twice. place: checks a rank."""
    ranks = [place(rank) for rank in given]
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"dst_weights={list(given)} names a rank twice")
    factors = given.values() if isinstance(given, Mapping) else [1.0] * len(ranks)
    return {rank: float(factor) for rank, factor in zip(ranks, factors, strict=True)}


def rank_of(group: Group, what: str, rank: int) -> int:
    """Return the rank. Raises ValueError if it is no other rank of the job."""
    if rank not in range(group.size) or rank == group.rank:
        raise ValueError(f"{what} has rank {rank!r}: it must be one of the other ranks of 0-{group.size - 1}")
    return int(rank)


def require_matching(group: Group, part: Part) -> None:
    """Compare who sends to whom. Collective; waits for all ranks. Raises MismatchError on all ranks if it differs."""

    def work(at: Workplace) -> None:
        everyone: list[tuple[Collection[int], Collection[int]]] = at.transport.allgather_object(
            (sorted(part.sources), sorted(part.dests))
        )
        for rank, (sources, dests) in enumerate(everyone):
            for wrong in (other for other in dests if rank not in everyone[other][0]):
                raise MismatchError(
                    f"neighbor_allreduce: rank {rank} sends to rank {wrong} (dst_weights), and rank {wrong} does not "
                    f"list rank {rank} in src_weights"
                )
            for wrong in (other for other in sources if rank not in everyone[other][1]):
                raise MismatchError(
                    f"neighbor_allreduce: rank {rank} waits for rank {wrong} (src_weights), and rank {wrong} does not "
                    f"list rank {rank} in dst_weights"
                )

    name = f"{UNNAMED}{group.serial('neighbors of all ranks')}"
    group.eager.run(Request(Signature("neighbors of all ranks", name), work))


def hierarchical_neighbor_allreduce(
    array: object,
    *,
    self_weight: float | None = None,
    src_machine_weights: Weights | None = None,
    dst_machine_weights: Dests | None = None,
    enable_topo_check: bool = False,
    name: str | None = None,
) -> Array:
    """Average an array within each host, then with the averages of neighbouring hosts. Waits for these hosts.

    The first rank of each host takes its host's average, exchanges it with first ranks of other hosts, and gives the
    result to its host. So each host sends one array per neighbouring host. Hosts are numbered by their lowest ranks.

    Args:
        array: A NumPy or CuPy array or a number, of a floating-point dtype; of the same shape and dtype on all ranks.
            It keeps its values.
        self_weight: The weight of this host's average. Give all three weights, or none: then hosts form an
            exponential-2 graph with equal weights.
        src_machine_weights: By host, the weight of its average. Equal on all ranks of a host, as are the others.
        dst_machine_weights: The hosts to send to, or a dict of factors, as in `neighbor_allreduce`.
        enable_topo_check: Whether to compare all hosts' lists first. That waits for all ranks.
        name: The call's name in messages; equal on all ranks.

    Returns:
        The average, as a new array.

    Raises:
        MismatchError: Ranks' names, shapes, dtypes or hosts differ; on both.
        ShutdownError: A rank that this one waits for has shut down.
        TypeError: The dtype is not a floating-point dtype.
        ValueError: Some of the weights are missing, or are for impossible hosts.
    """
    live = runtime.current()
    everyone, hosts = live.everyone, live.topology.hosts
    given = (self_weight, src_machine_weights, dst_machine_weights)
    if None in given and given != (None, None, None):
        raise ValueError("give self_weight, src_machine_weights and dst_machine_weights, or none of them")
    mine = next(place for place, host in enumerate(hosts) if everyone.rank in host)
    leader = hosts[mine][0]
    if self_weight is None or src_machine_weights is None or dst_machine_weights is None:
        between = Chosen(ExponentialTwoGraph(len(hosts))).part(mine)
    else:
        place = partial(host_of, len(hosts), mine)
        sources = {place(host): float(weight) for host, weight in src_machine_weights.items()}
        between = Part(float(self_weight), sources, dests_of(dst_machine_weights, place))
    sources = {hosts[host][0]: weight for host, weight in between.sources.items()}
    firsts = Part(between.own, sources, {hosts[host][0]: factor for host, factor in between.dests.items()})
    others, nobody = [rank for rank in hosts[mine] if rank != leader], Part(1.0, {}, {})
    even = 1 / len(hosts[mine])
    if everyone.rank == leader:
        parts = [Part(even, dict.fromkeys(others, even), {}), firsts, Part(1.0, {}, dict.fromkeys(others, 1.0))]
    else:
        parts = [Part(1.0, {}, {leader: 1.0}), nobody, Part(0.0, {leader: 1.0}, {})]
    title = "hierarchical_neighbor_allreduce"
    with calling(f"{title} '{name}'" if name else title):
        found, number = host_array(array), everyone.serial(title)
        dtype = found.dtype
        facts = (("name", name), ("dtype of the tensor", dtype_name(dtype)))
        if is_float(dtype):  # sums have several steps
            found = found.astype(accumulator(dtype))
        if enable_topo_check:
            require_matching(everyone, parts[1])
        failed: MismatchError | None = None
        for step, part in enumerate(parts):
            combining, so_far = Combining(everyone, part, [found]), (("error so far", str(failed)),)
            combining.start(title, f"{UNNAMED}{number}.{step}", (*facts, *so_far), waits=failed is None)
            if failed is None:
                try:
                    found = combining.wait()[0]
                except MismatchError as error:  # go on without waiting: other ranks count on the next steps, and get it
                    failed = error
        if failed is not None:
            raise failed
    return beside(array, found.astype(dtype))


def host_array(value: object) -> Array:
    """Return the values as an array on the host."""
    on_gpu = hasattr(value, "__cuda_array_interface__")
    return on_host(cast(Array, value)) if on_gpu else np.asarray(value)


def beside(value: object, found: Array) -> Array:
    """Return a result where the value lies: on the host, or on a GPU."""
    if not hasattr(value, "__cuda_array_interface__"):
        return found
    like = cast(Array, value)
    result: Array = module_of(like).empty(found.shape, found.dtype)
    overwrite(result, found)
    return result


def host_of(count: int, mine: int, host: int) -> int:
    """Return the host's number. Raises ValueError if it is no other host of the job."""
    if host not in range(count) or host == mine:
        raise ValueError(f"host {host!r} must be one of the other hosts of 0-{count - 1}")
    return int(host)
