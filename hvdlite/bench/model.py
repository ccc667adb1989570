"""The predicted time of an all-reduce on large clusters, by the cost model of `algorithms.choice`.

The model has no congestion, no other jobs and no overlap. It shows which algorithm is the fastest on a cluster, and how
far it is from the bytes alone. A unit test counts the steps and bytes of the code. Latency and bandwidths are
assumptions, printed with the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

import numpy as np
from rich.console import Console

from hvdlite.algorithms.choice import across

LOCAL = 8
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SIZES = (64 << 10, 1 << 20, 25 << 20, 256 << 20)


@dataclass(frozen=True)
class Cluster:
    """A cluster.

    Attributes:
        name: Its name in tables.
        latency: Seconds per message, Python's part included.
        network: Bytes per second of a host's network card, each way.
        memory: Bytes per second at which a host copies.
    """

    name: str
    latency: float
    network: float
    memory: float


CLUSTERS = (
    Cluster("25 Gbit/s, TCP", 40e-6, 25e9 / 8, 20e9),
    Cluster("100 Gbit/s", 12e-6, 100e9 / 8, 100e9),
    Cluster("400 Gbit/s", 12e-6, 400e9 / 8, 200e9),
)


@dataclass(frozen=True)
class Cost:
    """The cost of one all-reduce.

    Attributes:
        steps: Messages one after another.
        sent: Bytes that each host sends.
        passes: How often a host reads or writes all buffers of its ranks.
    """

    steps: int
    sent: float
    passes: float

    def seconds(self, cluster: Cluster, nbytes: int, local: int) -> float:
        return (
            self.steps * cluster.latency + self.sent / cluster.network + self.passes * local * nbytes / cluster.memory
        )


def cost(algorithm: str, nbytes: int, hosts: int, local: int) -> Cost:
    """The cost of an all-reduce of nbytes with one algorithm.

    Args:
        algorithm: The algorithm's name, as in `config.ALGORITHMS`.
        nbytes: The size of each rank's array.
        hosts: The number of hosts. With halving-doubling and doubling, hosts and local are powers of two.
        local: The number of ranks on each host.

    Raises:
        ValueError: The model does not know the algorithm.
    """
    ranks = hosts * local
    near = (local - 1) / local
    if algorithm == "ring":
        return Cost(2 * (ranks - 1), 2 * nbytes * (ranks - 1) / ranks if hosts > 1 else 0, 6 if local > 1 else 3)
    if algorithm == "halving_doubling":
        return Cost(2 * ceil(log2(ranks)), 2 * nbytes * (hosts - 1) / hosts, 6 * near)
    if algorithm == "doubling":
        return Cost(ceil(log2(ranks)), nbytes * local * ceil(log2(hosts)), 3 * ceil(log2(local)))
    if algorithm not in ("shared", "hierarchical"):
        raise ValueError(f"the cost of the algorithm {algorithm!r} is not known")
    if algorithm == "shared" or hosts == 1:
        return Cost(1, 0, 2)
    between = cost(across(hosts, ceil(nbytes / local), np.dtype(np.float32)), nbytes, hosts, 1)
    return Cost(1 + between.steps, between.sent, 2)


def predict(cluster: Cluster, algorithm: str, nbytes: int, ranks: int) -> float:
    """The predicted seconds of an all-reduce of nbytes, with LOCAL ranks per host."""
    local = min(LOCAL, ranks)
    return cost(algorithm, nbytes, ranks // local, local).seconds(cluster, nbytes, local)


SHOWN = {"ring": "flat ring", "halving_doubling": "halving-doubling", "hierarchical": "hierarchical"}


def print_model(out: Console) -> None:
    """Print a table for each cluster: predicted milliseconds by size, ranks and algorithm."""
    from hvdlite.bench.report import new_table, significant  # imports MPI, which the model does not need

    for cluster in CLUSTERS:
        table = new_table(
            f"{cluster.name}: predicted ms, {LOCAL} ranks per host (latency {cluster.latency * 1e6:.0f} us, "
            f"{cluster.network / 1e9:.1f} GB/s per card, {cluster.memory / 1e9:.0f} GB/s of memory)",
            ["size", "algorithm", *(f"p={ranks}" for ranks in RANKS)],
        )
        for nbytes in SIZES:
            for algorithm, title in SHOWN.items():
                times = (significant(predict(cluster, algorithm, nbytes, ranks) * 1e3) for ranks in RANKS)
                table.add_row(f"{nbytes / (1 << 20):g} MiB", title, *times)
        out.print(table)


def plot_model(path: str) -> None:
    """Plot the predicted time of one bucket against the number of ranks, with a panel for each cluster."""
    from hvdlite.bench import style

    nbytes = 25 << 20
    looks = {
        "ring": style.Look(style.ORANGE, marker="s"),
        "halving_doubling": style.Look(style.GREEN, marker="^"),
        "hierarchical": style.HVDLITE,
    }
    figure, panels = style.canvas(len(CLUSTERS), size=(4.6, 3.6), share="xy")
    every = []
    for axes, cluster in zip(panels, CLUSTERS, strict=True):
        lines = [
            style.Line(
                title.replace("hier", "hvdlite: hier"),
                looks[algorithm],
                RANKS,
                [predict(cluster, algorithm, nbytes, r) for r in RANKS],
            )
            for algorithm, title in SHOWN.items()
        ]
        floor = [2 * nbytes * (1 - LOCAL / r) / cluster.network for r in RANKS[1:]]
        lines.append(style.Line("the bytes alone", style.Look(style.GREY, ":"), RANKS[1:], floor))
        style.draw_lines(axes, lines)
        axes.set(xscale="log", yscale="log")
        style.describe(axes, cluster.name, f"ranks, {LOCAL} on each host")
        axes.set_xticks(RANKS[::3], [str(ranks) for ranks in RANKS[::3]])
        axes.minorticks_off()
        style.in_seconds(axes, "y")
        every.append(lines)
    for axes, lines in zip(panels, every, strict=True):
        style.label_ends(figure, axes, lines)
    latencies = ", ".join(f"{cluster.latency * 1e6:.0f}" for cluster in CLUSTERS)
    title = f"Predicted time of an all-reduce of {nbytes >> 20} MiB (lower is better)"
    note = (
        f"A model's prediction, not a measurement: a message takes {latencies} µs and the time of its bytes; there "
        "is no congestion and no other job. hvdlite chooses the hierarchical algorithm."
    )
    style.save(figure, path, title, note)
