"""`OkTopK`: sums of hosts' largest elements, in bytes that do not grow with the hosts (Ok-Topk).

After Li & Hoefler, PPoPP 2022, arXiv:2201.07598:

    1. The part is divided into h regions, one for each host, that hold about equally many selected elements.
    2. Each host sends what it has selected to the regions' owners.       at most k elements
    3. Each owner adds up, and keeps the ceil(k/h) largest of its sums.
    4. All hosts gather what the owners have kept.                        ceil(k/h) (h-1) elements

Price: an element is a value and an index, 8 bytes for float32. With regions that are balanced on each host, a driver
sends 8 (k + ceil(k/h) h) (h-1)/h, about 16k(h-1)/h bytes; never more than 8k + 8 ceil(k/h) (h-1), less than 16k + 8h.
Steps 2 and 4 take 3(h-1) messages, and h-1 more send the lengths, h(h-1) integers.

Unlike Ok-Topk, step 3 needs no threshold for all regions: each owner keeps an equal number. So all hosts know all
lengths of step 4 beforehand. Since regions hold equally many selected elements, the kept ones are nearly the largest of
all; residuals keep the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdlite.arrays import Array, DType, module
from hvdlite.compression import Column, RoundMemory
from hvdlite.compression.selection import Selection, largest

REGIONS_LAST = 64
"""The rounds for which regions stay the same. New ones cost an all-reduce of h-1 numbers."""
NOTHING = 2**32 - 1
"""The place of no element."""


@dataclass
class OkTopK:
    """The exchange.

    Attributes:
        column: One driver of each host.
        selection: Which elements each host selects.
        length: The part's length.
        inner: The begins of all regions but the first; empty before the first round. Equal on all hosts.
    """

    column: Column
    selection: Selection
    length: int
    inner: tuple[int, ...] = ()

    def __call__(self, values: Array, sent: Array, now: RoundMemory) -> None:
        """See `Exchange`. Owners add up in host order."""
        places = self.selection(values, sent, now.number)
        mine = values[places]
        quota = -(-self.selection.count(now.number) // self.column.size)
        if not self.inner or now.number % REGIONS_LAST == 0:
            self.inner = self.divided(places, quota)
        kept_places, kept = self.kept(*self.owned(places, mine), quota)
        sent[...] = 0
        sent[kept_places] = 1
        own = sent[places] != 0
        sent[kept_places] = 0
        sent[places[own]] = mine[own]
        values[...] = 0
        values[kept_places] = kept

    def divided(self, places: Array, quota: int) -> tuple[int, ...]:
        """New begins of regions: the averages over hosts of those that would give each region `quota` elements.

        If all hosts have selected the same elements, no region has more. If hosts differ, owners receive more or less
        than the average; no host sends more than it has selected.
        """
        hosts = self.column.size
        inside = places[quota : quota * hosts : max(quota, 1)].tolist()
        begins = np.array([*inside, *[self.length] * hosts][: hosts - 1], np.float64)
        self.column.sum(begins)
        return tuple(round(begin / hosts) for begin in begins.tolist())

    def owned(self, places: Array, mine: Array) -> tuple[Array, Array]:
        """The sums of what all hosts have selected in this host's region: places, ascending, and values."""
        xp = module(mine)
        cuts = [0, *xp.searchsorted(places, xp.array(self.inner, places.dtype)).tolist(), len(places)]
        regions = [slice(cuts[host], cuts[host + 1]) for host in range(self.column.size)]
        incoming = self.column.deliver([packed(mine[here], places[here]) for here in regions])
        addends = [unpacked(each, mine.dtype) for each in incoming]
        found, targets = xp.unique(xp.concatenate([each for _, each in addends]), return_inverse=True)
        sums, start = xp.zeros(len(found), mine.dtype), 0
        for each, _ in addends:
            sums[targets[start : start + len(each)]] += each  # a host's places are all different
            start += len(each)
        return found, sums

    def kept(self, places: Array, sums: Array, quota: int) -> tuple[Array, Array]:
        """The `quota` largest sums of each owner: places and values, the same on all hosts."""
        xp = module(sums)
        best = largest(xp.abs(sums), min(quota, len(sums)))
        mine, mine_places = xp.zeros(quota, sums.dtype), xp.full(quota, NOTHING, xp.uint32)
        mine[: len(best)], mine_places[: len(best)] = sums[best], places[best]
        all_values, all_places = self.column.gather(mine).reshape(-1), self.column.gather(mine_places).reshape(-1)
        there = all_places != NOTHING
        return all_places[there], all_values[there]


def packed(values: Array, places: Array) -> Array:
    """Values and their places as one array of bytes, so that they travel in one message."""
    xp = module(values)
    both: Array = xp.concatenate((values.view(xp.uint8), places.view(xp.uint8)))
    return both


def unpacked(both: Array, dtype: DType) -> tuple[Array, Array]:
    """The values and the places of `packed`."""
    count = len(both) // (dtype.itemsize + 4)
    return both[: count * dtype.itemsize].view(dtype), both[count * dtype.itemsize :].view(np.uint32)
