"""`join()`: a rank whose data have come to an end waits until all have, and helps the others meanwhile.

It is a request on every lane of the global set: on one lane alone, a request of the next epoch could meet a rank that
has joined for this one elsewhere, and would be averaged with silent zeros. The ranks that go on count calls and steps
that the others have not seen, so when all have joined they agree to count on from the largest.
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
    """What a rank brings: how far it got (calls, then time), and its counters."""

    calls: int
    seconds: float
    rank: int
    serials: Counter[str]
    unnamed: int
    changes: int


def join() -> int:
    """Wait until every rank has joined. Returns the global rank that joined last, the same on all.

    While some ranks have joined, all-reduces (and optimizers) of the others go on: the ranks that have joined take
    part with zeros, in sums of sparse gradients with none, and Average still divides by the number of all ranks. Other
    collectives, and new or changed optimizers, are a MismatchError on the ranks that call them, who may join
    afterwards. The global set only. Raises ShutdownError where a rank shuts down instead.
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
    """Go on from the largest number of each kind."""
    live.everyone.go_on_from((card.serials for card in cards), max(card.unnamed for card in cards))
    live.groups.go_on_from(max(card.changes for card in cards))
    for each in live.registries.joining():
        each.start_over()
