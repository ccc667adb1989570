"""DiLoCo: each rank trains alone for many updates; an outer optimizer moves the common weights by the average step.

    rank 0   u u u u u --+                                     +-> u u u u u --+
                         +- mean of (common - weights) - outer-+               +- ...
    rank 1   u u u u u --+   step: new common weights          +-> u u u u u --+

Source: Douillard et al., "DiLoCo: Distributed low-communication training of language models" (2023). Fragments:
Douillard et al., "Streaming DiLoCo with overlapping communication" (2025). Price: an all-reduce of the weights every
`sync_every` updates; memory for the common weights and the outer optimizer's velocity on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from hvdlite.arrays import Array, accumulator, is_host, module
from hvdlite.errors import HvdliteError
from hvdlite.gpu_streams import on_host
from hvdlite.strategies import Reach, Running, Site, Strategy
from hvdlite.strategies.averaging import Averages
from hvdlite.strategies.local_sgd import require_count
from hvdlite.strategies.outer import OuterOptimizer, OuterSGD
from hvdlite.strategies.traffic import of_allreduce

if TYPE_CHECKING:
    from hvdlite.strategies.compressed import CompressedAverages


@dataclass(frozen=True)
class DiLoCo(Strategy):
    """Train alone for `sync_every` updates; then all ranks continue from the result of an outer step.

    The user's optimizer is the inner one. Its state stays each rank's own. The outer step uses the average over ranks
    of (common weights - this rank's weights) as a gradient. Common weights and outer state are in the optimizer's
    state_dict() and in `hvd.save`.

    Args:
        sync_every: The number of updates between two outer steps, at least 1.
        outer_optimizer: An `OuterSGD`, or another `OuterOptimizer`.
        compression: What outer gradients travel as: None, or one of hvd.Compression. bf16 and fp16 cast them; the lossy
            ones (int8 and others) work between hosts, and send later what they leave out.
        warmup_steps: In so many first updates gradients are averaged over all ranks, as without a strategy.
        fragments: The number of parts of the parameters that are sent at different times, evenly spread over
            `sync_every` updates. So the largest traffic at one time is 1/fragments.
        overlap: The number of updates during which a fragment travels, while computing goes on. 0: each rank waits.
        mix: With `overlap`, the share of this rank's own weights in its new weights: the paper's alpha.

    Raises:
        ValueError: A number is out of its range.
    """

    sync_every: int
    outer_optimizer: OuterOptimizer = field(default_factory=OuterSGD)
    compression: object = None
    warmup_steps: int = 0
    fragments: int = 1
    overlap: int = 0
    mix: float = 0.5

    def __post_init__(self) -> None:
        for name, least in (("sync_every", 1), ("warmup_steps", 0), ("fragments", 1), ("overlap", 0)):
            require_count("DiLoCo", name, getattr(self, name), least)
        if self.fragments > self.sync_every or self.overlap >= self.sync_every:
            raise ValueError(
                f"hvd.DiLoCo: fragments={self.fragments} must be at most sync_every={self.sync_every}, and "
                f"overlap={self.overlap} below it"
            )
        if not 0 <= self.mix <= 1:
            raise ValueError(f"hvd.DiLoCo: mix={self.mix!r} must be from 0 to 1")
        if self.compression is not None and self.overlap:
            raise ValueError("hvd.DiLoCo: compression= works without overlap only: leave one of them out")

    def start(self, site: Site) -> Running:
        if self.compression is not None:
            from hvdlite.strategies.compressed import settings_of  # as below

            settings_of(site, self.compression)  # an error now, not at the first outer step
        return OuterSteps(self, site)

    def reach(self, step: int) -> Reach:
        return Reach.EVERYONE if step <= self.warmup_steps else Reach.NONE

    @property
    def reaches(self) -> frozenset[Reach]:
        return frozenset([self.reach(1), Reach.NONE])

    def fragment_due(self, step: int) -> int | None:
        """Return the fragment to send after an update.

        Args:
            step: The number of local updates so far.

        Returns:
            The fragment's number; None if there is none to send.
        """
        position = step % self.sync_every
        turns = [self.sync_every * (number + 1) // self.fragments % self.sync_every for number in range(self.fragments)]
        return turns.index(position) if position in turns else None


@dataclass
class Fragment:
    """Some neighbouring parameters, with their common weights.

    Attributes:
        part: Where they are in the list of parameters.
        common: The common weights, in float32 or wider.
        memories: For each parameter what the outer optimizer keeps.
        under_way: The averages of the outer gradients that travel; None if none do.
        due: The update after which these averages are applied.
    """

    part: slice
    common: list[Array]
    memories: list[list[Array]]
    under_way: Averages | None = None
    due: int = 0

    def follow(self, weights: Sequence[Array]) -> None:
        """Move everything to the device of the weights, if a checkpoint was loaded onto the host."""
        like = weights[self.part]
        if self.common and is_host(self.common[0]) and not is_host(like[0]):
            self.common = [module(like[0]).asarray(each) for each in self.common]
            self.memories = [[module(like[0]).asarray(each) for each in its] for its in self.memories]

    def leave(self, averages: Averages, due: int) -> None:
        """Outer gradients begin to travel."""
        self.under_way, self.due = averages, due

    def arrive(self) -> Averages | None:
        """The travel ends: return what was under way, and forget it."""
        averages, self.under_way = self.under_way, None
        return averages


class OuterSteps(Running):
    """DiLoCo for one optimizer.

    Attributes:
        how: The settings.
        site: The optimizer.
        step: The number of updates so far.
        fragments: All parameters in fragments; empty until the first local update.
        exchanges: What sends the outer gradients of each fragment, if compressed.
        sent: The bytes of outer gradients that this rank has sent to other hosts.
    """

    def __init__(self, how: DiLoCo, site: Site) -> None:
        self.how, self.site = how, site
        self.step, self.sent = 0, 0.0
        self.fragments: list[Fragment] = []
        self.exchanges: dict[int, CompressedAverages] = {}

    @property
    def sent_bytes(self) -> float:
        return self.sent

    def update_begins(self) -> bool:
        return not self.fragments and self.step >= self.how.warmup_steps

    def before_update(self, weights: Sequence[Array], gradients: Sequence[Array | None]) -> None:
        common = [weight.astype(accumulator(weight.dtype)) for weight in weights]
        memories = [[zeros_like(each) for _ in range(self.how.outer_optimizer.memories)] for each in common]
        self.fragments = fragments_of(common, memories, self.how.fragments)
        if self.how.compression is not None:  # now, since all ranks are here: later some may have joined
            for number, fragment in enumerate(self.fragments):
                if fragment.common:
                    self.exchange(number, fragment.common)

    def update_ends(self) -> bool:
        self.step += 1
        local = self.step - self.how.warmup_steps
        due = [fragment.due for fragment in self.fragments if fragment.under_way]
        return local > 0 and (self.how.fragment_due(local) is not None or local in due)

    def after_update(self, weights: Sequence[Array], state: Mapping[str, Array]) -> bool:
        local = self.step - self.how.warmup_steps
        self.require_same_parameters(weights)
        for fragment in self.fragments:
            fragment.follow(weights)
        for fragment in self.fragments:
            if fragment.under_way and fragment.due == local:
                self.arrive(fragment, weights)
        number = self.how.fragment_due(local)
        if number is not None and self.fragments[number].common:
            self.send(number, weights, local)
        return self.how.fragments == 1 and not self.how.overlap

    def require_same_parameters(self, weights: Sequence[Array]) -> None:
        """Raise HvdliteError if these are not the parameters that training began with."""
        known = [each.shape for fragment in self.fragments for each in fragment.common]
        if known != [weight.shape for weight in weights]:
            raise HvdliteError(
                f"hvd.DiLoCo, {self.site.title}: training began with {len(known)} parameters, and these {len(weights)} "
                "are others. Attach a new optimizer after parameters were added or replaced"
            )

    def send(self, number: int, weights: Sequence[Array], local: int) -> None:
        """Average a fragment's outer gradients: now, or while the next updates run."""
        fragment = self.fragments[number]
        outer = [common - weight for common, weight in zip(fragment.common, weights[fragment.part], strict=True)]
        if self.how.compression is not None:
            exchange = self.exchange(number, outer)
            exchange.average_(outer)
            self.sent += exchange.sent_bytes
            self.move(fragment, outer, weights, mix=0.0)
            return
        averages = Averages(self.site.group, outer, self.name(number))
        self.sent += of_allreduce(self.site.group, outer)
        if self.how.overlap:
            fragment.leave(averages.start(), local + self.how.overlap)
        else:
            averages.wait()
            self.move(fragment, outer, weights, mix=0.0)

    def name(self, number: int) -> str:
        """The name of a fragment's averages."""
        return f"{self.site.name} outer gradients {number}"

    def exchange(self, number: int, outer: Sequence[Array]) -> CompressedAverages:
        """Return what sends a fragment's outer gradients compressed. Collective at its first call."""
        from hvdlite.strategies.compressed import CompressedAverages  # importing hvdlite alone does not load gradients

        if number not in self.exchanges:
            known, count = self.site.names, sum(len(fragment.common) for fragment in self.fragments)
            added = [f"parameter.{index}" for index in range(len(known), count)]  # since the optimizer was attached
            names = [*known, *added][self.fragments[number].part]
            self.exchanges[number] = CompressedAverages(
                self.site, self.name(number), names, outer, self.how.compression
            )
        return self.exchanges[number]

    def arrive(self, fragment: Fragment, weights: Sequence[Array]) -> None:
        """Wait for the averages of a fragment that has travelled, and apply them."""
        if averages := fragment.arrive():
            averages.wait()
            self.move(fragment, averages.arrays, weights, self.how.mix)

    def move(self, fragment: Fragment, outer: Sequence[Array], weights: Sequence[Array], mix: float) -> None:
        """Do the outer step of a fragment, and change the weights.

        Args:
            fragment: The fragment.
            outer: Its average outer gradients.
            weights: All weights; those of the fragment change in place.
            mix: The share of this rank's own weights in the result.
        """
        for common, gradient, memories, weight in zip(
            fragment.common, outer, fragment.memories, weights[fragment.part], strict=True
        ):
            self.how.outer_optimizer.update(common, gradient, memories)
            weight[...] = common if mix == 0 else common * (1 - mix) + weight * mix

    def settle(self, weights: Sequence[Array]) -> None:
        for fragment in self.fragments:
            self.arrive(fragment, weights)

    def moved(self) -> None:
        self.fragments = []

    def start_over(self, step: int) -> None:
        self.step, self.fragments = step, []

    def state(self) -> dict[str, Array]:
        found: dict[str, Array] = {"step": np.array(self.step)}
        common = [each for fragment in self.fragments for each in fragment.common]
        memories = [each for fragment in self.fragments for each in fragment.memories]
        for index, (weight, its) in enumerate(zip(common, memories, strict=True)):
            found[f"common.{index}"] = on_host(weight)
            found |= {f"outer.{index}.{number}": on_host(each) for number, each in enumerate(its)}
        return found

    def load(self, state: Mapping[str, Array]) -> None:
        self.step = int(state["step"].item())
        count = sum(key.startswith("common.") for key in state)
        common = [state[f"common.{index}"].copy() for index in range(count)]
        numbers = range(self.how.outer_optimizer.memories)
        memories = [[state[f"outer.{index}.{number}"].copy() for number in numbers] for index in range(count)]
        self.fragments = fragments_of(common, memories, self.how.fragments) if count else []


def zeros_like(array: Array) -> Array:
    """Return zeros of the same shape and dtype, on the same device."""
    found: Array = module(array).zeros_like(array)
    return found


def fragments_of(common: Sequence[Array], memories: Sequence[list[Array]], number: int) -> list[Fragment]:
    """Divide parameters into so many fragments of about equal bytes, in order. Some may be empty.

    Args:
        common: The common weight of each parameter.
        memories: What the outer optimizer keeps for each parameter.
        number: The number of fragments.
    """
    total = sum(each.nbytes for each in common)
    ends = list(accumulate(each.nbytes for each in common))
    middles = [end - each.nbytes / 2 for end, each in zip(ends, common, strict=True)]
    borders = [sum(middle * number < total * cut for middle in middles) for cut in range(number)]
    parts = [slice(first, last) for first, last in zip(borders, [*borders[1:], len(common)], strict=True)]
    return [Fragment(part, list(common[part]), list(memories[part])) for part in parts]
