"""The cost model counts the same messages and bytes between hosts as the algorithms send, on threads."""

from __future__ import annotations

import numpy as np
import pytest

from hvdlite.algorithms import Place, prepared, prepared_in_arena
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array
from hvdlite.bench.model import CLUSTERS, RANKS, SIZES, cost, predict
from hvdlite.memory.workspace import Workspace
from hvdlite.transports.threads import ThreadTransport, run_ranks

LENGTH = 64 * 1024


class Counting(ThreadTransport):
    """Counts its messages, and the bytes of messages to another host. home: the host of each rank."""

    home: list[int]
    messages: list[int]
    far: list[int]

    def exchange(self, send: Array, dest: int, receive: Array, source: int) -> None:
        self.messages.append(1)
        if self.home[dest] != self.home[self.rank]:
            self.far.append(send.nbytes)
        super().exchange(send, dest, receive, source)


def count(algorithm: str, hosts: int, local: int) -> tuple[int, list[int]]:
    """The steps of the busiest rank, and the bytes that left each host, in an all-reduce of LENGTH float32."""
    place = Place(
        hosts * local, local > 1, algorithm, tuple(tuple(range(h * local, (h + 1) * local)) for h in range(hosts))
    )

    def main(transport: ThreadTransport) -> tuple[int, int, int]:
        workspace, buffer = Workspace(), np.ones(LENGTH, np.float32)
        levels, home = workspace.levels(transport, place.hosts), transport.rank // local
        messages: list[int] = []
        far: list[int] = []
        flat = [rank // local for rank in range(hosts * local)]
        for each, homes in ((transport, flat), (levels.cross, list(range(hosts)))):
            each.__class__ = Counting
            each.home, each.messages, each.far = homes, messages, far
        if algorithm == "hierarchical":
            run = prepared_in_arena(transport, workspace, place, levels.local.allgather_object(buffer), Reduction())
        else:
            run = prepared(transport, workspace, place, buffer, Reduction())
        transport.barrier()
        run()
        assert (buffer == hosts * local).all()
        return len(messages), sum(far), home

    found = run_ranks(hosts * local, main)
    return max(n for n, _, _ in found), [sum(sent for _, sent, home in found if home == h) for h in range(hosts)]


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "doubling", "hierarchical"])
def test_steps_and_bytes(algorithm: str, hosts: int, local: int) -> None:
    predicted = cost(algorithm, 4 * LENGTH, hosts, local)
    steps, sent = count(algorithm, hosts, local)
    assert steps == predicted.steps - (algorithm == "hierarchical")  # its barrier is not a message
    assert sent == [predicted.sent] * hosts


def test_the_hierarchical_wins_wherever_bytes_count() -> None:
    """So it is chosen: for a bucket of gradients no other algorithm is predicted to be faster."""
    for cluster in CLUSTERS:
        for ranks in RANKS:
            for nbytes in SIZES[1:]:
                ours = predict(cluster, "hierarchical", nbytes, ranks)
                assert ours <= min(predict(cluster, name, nbytes, ranks) for name in ("ring", "halving_doubling"))


def test_an_algorithm_without_a_model_has_no_cost() -> None:
    with pytest.raises(ValueError, match="native"):
        cost("native", 4 * LENGTH, 2, 2)
