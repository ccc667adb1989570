"""`join()`: a rank without further data waits until all ranks have joined, and takes part in their sums with zeros.

Each lane of the global set gets a request. Otherwise a rank could still stand in for itself with zeros on one lane,
while the others start the next epoch there. The other ranks keep numbering calls that a joined rank does not make. So
all ranks finally continue from the largest number of each kind.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from functools import partial

from hvdlite.job import runtime
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import JOIN
from hvdlite.lanes.workplace import Workplace


@dataclass(frozen=True)
class Card:
    """What a rank brings to the join: how far it got, and its counters.

    Attributes:
        calls: How many operations the rank has called.
        seconds: When the rank joined, in seconds of `time.time()`.
        rank: The global rank.
        serials: The rank's numbers for names, by kind.
        unnamed: The rank's next number for a call without a name.
        changes: The rank's next number for a change of process sets.
    """

    calls: int
    seconds: float
    rank: int
    serials: Counter[str]
    unnamed: int
    changes: int


def join() -> int:
    """Wait until every rank of the global process set has joined.

    While some ranks have joined, all-reduces and optimizers of the other ranks go on. Ranks that have joined take part
    with zeros, and in sums of sparse gradients with no rows. Average still divides by the number of all ranks. Other
    collectives, and new or changed optimizers, raise MismatchError on the ranks that call them. These ranks may join
    afterwards.

    Returns:
        The global rank that joined last, the same on all ranks.

    Raises:
        ShutdownError: A rank shut down instead of joining.
    """
    live = runtime.current()
    for each in live.registries.joining():
        each.give_up()
    group, lanes = live.everyone, list(live.everyone.lanes)
    calls, seconds = sum(lane.queue.calls for lane in lanes), time.time()

    def meet(lane: Lane, at: Workplace) -> list[Card]:
        lane.queue.count_anew()
        if lane is not group.eager:
            return []
        mine = Card(calls, seconds, live.topology.rank, group.serials, next(group.unnamed), next(live.groups.changes))
        return list(at.transport.allgather_object(mine))

    handles = [lane.submit(Request(JOIN, partial(meet, lane))) for lane in lanes]
    cards: list[Card] = [card for handle in handles for card in handle.wait()]
    count_on(live, cards)
    return max(cards, key=lambda card: (card.calls, card.seconds, card.rank)).rank


def count_on(live: runtime.Runtime, cards: list[Card]) -> None:
    """Continue from the largest number of each kind."""
    live.everyone.go_on_from((card.serials for card in cards), max(card.unnamed for card in cards))
    live.groups.go_on_from(max(card.changes for card in cards))
    for each in live.registries.joining():
        each.start_over()
