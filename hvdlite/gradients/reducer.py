"""The reducer: fills the buckets of a plan, sends them, and waits for the results, once per round.

    mark_ready([i])   gradient i lies in its slot; a full bucket leaves once all earlier buckets have left
    mark_at_end       these gradients lie in their slots or are lent; no bucket leaves before the end
    finish_round()    load missing gradients, send all other buckets, wait for all ranks

In the walk of a gradient, the reducer stands between the framework's hook (or the `exchange`) and the lane. The hook
marks a gradient. The reducer sends each full `bucket` as a request. The lane runs it on all ranks, and the results
lie in the reducer's `views`.

If buckets leave early (`departure`), their communication overlaps with the rest of backward. By default, buckets of a
GPU leave early. Among the CPUs of one host all buckets leave at the end, in the caller's thread: a helper thread would
take a core from backward. Over a network a trial decides. In each case the plan gives the order of additions, so the
results are the same, bit for bit.

A bucket waits for its last gradient, and all later buckets wait for that bucket. So one gradient that comes later than
planned costs much. If buckets may leave early, the first round shows the real order. From it PyTorch's attachment makes
another plan (host memory only), as DDP does. The last bucket never leaves early: once it has left, all ranks know that
every backward has ended.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvdlite.algorithms import allreduce
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array, is_host
from hvdlite.compression.saved import Saved
from hvdlite.compression.store import Store
from hvdlite.errors import HvdliteError, VoidError
from hvdlite.gradients.bucket import Bucket
from hvdlite.gradients.departure import Departure
from hvdlite.gradients.overlap_trial import Trial
from hvdlite.gradients.plan import Bucket as PlannedBucket
from hvdlite.gradients.plan import BucketPlan
from hvdlite.gradients.progress import Flag, Progress, rank_of, void_of
from hvdlite.gradients.use import Use
from hvdlite.gradients.wire_trial import rounds_of
from hvdlite.lanes.gpu_side import Gpu, on_gpu, side_of
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Handle, Request
from hvdlite.lanes.signature import Round, Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.memory.arena import Arena
from hvdlite.ops.stand_in import Zeros


@dataclass(frozen=True)
class Memory:
    """The memory of a reducer's buckets.

    Attributes:
        gpu: The GPU for buckets that do not lie on the host. Gradients are packed on the caller's stream.
        name: The arenas' name, if arenas of the reducer's name must live on; None: the reducer's name, and the new
            arena replaces the last one.
        store: What a lossy compressor keeps from round to round; None without one.
        within_host: Whether that compressor treats each rank as a host.
    """

    gpu: Gpu | None = None
    name: str | None = None
    store: Store | None = None
    within_host: bool = False


class Reducer:
    """Reduces the gradients of one plan over the lane's ranks. Not thread-safe.

    Attributes:
        lane: The lane on which the ranks agree.
        name: The name of requests, the same on all ranks.
        plan: The layout of gradients.
        how: The arithmetic.
        departure: The time when buckets leave.
        arenas: The shared memory, by device.
        buckets: The plan's buckets, at work.
        requests: Requests of earlier rounds, by bucket, which are used again.
        views: For each parameter an array in its bucket, of the gradient's shape: for the gradient, then the result.
        all_dense: `Use.DENSE` for every parameter. `finish_round` returns this list if no gradient was missing.
        progress: The round under way.
        lossy: The buckets that are compressed between hosts; None without a lossy compressor.
    """

    def __init__(
        self, lane: Lane, plan: BucketPlan, how: Reduction, name: str, departure: Departure, memory: Memory = Memory()
    ) -> None:
        """Compare plans with all ranks, and allocate the buckets. Collective; waits for all ranks.

        Raises:
            MismatchError: The ranks' plans differ. Every rank raises it, with a diff.
        """
        self.lane, self.name = lane, name
        self.plan, self.how = plan, how
        self.departure = departure
        self.lossy = rounds_of(memory.store, plan, memory.within_host) if memory.store else None
        facts = (
            ("parameters", plan.lines), ("buckets", plan.buckets), ("parts", plan.borders), ("reduction", how),
            ("compression", repr(memory.store.compressor) if memory.store else ""),
        )  # fmt: skip
        # The name is that of a round's first bucket. If other ranks begin a round instead, all ranks raise, none hangs.
        self.arenas: dict[str, Arena] = lane.run(
            Request(
                Signature("plan", f"{name} bucket 0", facts),
                lambda at: self.allocate(at, memory),
            )
        )
        self.buckets = [self.bucket(number, planned) for number, planned in enumerate(plan.buckets)]
        self.requests: dict[int, Request[bool]] = {}
        self.views = [
            self.buckets[slot.bucket].buffer[slot.offset : slot.offset + slot.length].reshape(spec.shape)
            for spec, slot in zip(plan.specs, plan.slots, strict=True)
        ]
        self.all_dense = [Use.DENSE] * len(plan.specs)
        self.progress = Progress(plan)

    def bucket(self, number: int, planned: PlannedBucket) -> Bucket:
        """A bucket of the plan, at work."""
        arena, place = self.arenas[planned.device], (planned.start, planned.length, planned.dtype)
        scatters = self.plan.borders and not (self.lossy and self.lossy.names)  # `settle` needs whole results
        parts = self.plan.parts(planned, self.lane.transport.size) if scatters else None
        lossy = self.lossy.buckets.get(number) if self.lossy else None
        return Bucket(arena.view(*place), arena.peer_views(*place), self.how, self.lane, parts, lossy)

    def allocate(self, at: Workplace, memory: Memory) -> dict[str, Arena]:
        """Allocate all memory of the plan: an arena for each device. Collective."""
        arenas = {device: self.arena(at, device, memory) for device in self.plan.devices}
        if self.lossy:
            self.lossy.allocate(at, arenas.values())
        return arenas

    def take_loaded(self) -> None:
        """Have lossy compression go on with the values that all ranks have loaded. Collective."""
        if lossy := self.lossy:
            facts = (("a checkpoint's unsent gradients", True),)
            signature = Signature("plan", f"{self.name} bucket 0", facts)
            self.lane.run(Request(signature, lambda at: lossy.allocate(at, self.arenas.values())))

    def unsent(self) -> Saved | None:
        """The sum over hosts of what lossy compression has not sent; None if there is nothing. Collective."""
        if self.lossy is None or not self.lossy.store.entries:
            return None
        tag = Round("checkpoint {}", (self.lossy.store.rounds,))
        return self.lossy.store.summed(lambda values: self.combine("unsent", values, Reduction(), tag))

    def arena(self, host: Workplace, device: str, memory: Memory) -> Arena:
        """Allocate the arena for a device's buckets. Collective."""
        there: contextlib.AbstractContextManager[Workplace] = contextlib.nullcontext(host)
        if device != "host":
            assert memory.gpu is not None
            there = side_of(host.host, memory.gpu).working()
        with there as at:
            nbytes, place = self.plan.nbytes(device), at.place
            return at.workspace.allocate(memory.name or self.name, at.transport, nbytes, place.in_memory, place.hosts)

    @property
    def overlap(self) -> bool:
        """Whether buckets leave during backward in the round under way."""
        return self.departure.overlap

    @property
    def to_lend(self) -> list[tuple[int, int]]:
        """The elements of each gradient, from and to, that may be lent if all buckets leave at the end."""
        return [self.buckets[slot.bucket].to_lend(slot) for slot in self.plan.slots]

    # A round that fails

    def begin_round(self) -> None:
        """Forget all marks, requests and lent arrays of the last round."""
        for bucket in self.buckets:
            bucket.return_lent()
        self.progress.begin()

    def abandon_round(self, tag: Round, spare: Callable[[list[int]], object] | None = None) -> bool:
        """Forget a round that was begun and not finished, because its backward raised.

        If any bucket has left, this waits for all ranks to come to the round's end.

        Args:
            tag: The name of the round, the same on all ranks.
            spare: As for `void_round`.

        Returns:
            Whether any bucket was reduced: then all ranks know of the failure.
        """
        if not self.progress.begun:
            return False
        if self.progress.sent:
            self.void_round(tag, spare)
        return self.forget_round()

    @property
    def half_sent(self) -> bool:
        """Whether some buckets of a round have left, and others have not. Between rounds: the last round failed."""
        return self.overlap and self.progress.partly_sent

    @property
    def unresolved(self) -> bool:
        """Between rounds: whether the last round failed, and some ranks have not come to its end."""
        sent = self.progress.sent
        return bool(sent) and (self.half_sent or any(not handle.done for _, handle in sent))

    def void_round(self, tag: Round, spare: Callable[[list[int]], object] | None = None) -> None:
        """Send the round's other buckets, with a flag that no rank is to have results. Does not wait for other ranks.

        Args:
            tag: The name of the round.
            spare: Called first, with the parameters that were not marked. The caller may have other values in their
                views, which the reduction overwrites.
        """
        if spare:
            spare(self.progress.unmarked)
        with contextlib.suppress(HvdliteError):
            self.send_rest(tag, void_of(self.lane.transport.rank), self.lane.submit)

    def forget_round(self) -> bool:
        """Wait for all buckets that have left. Returns whether any was reduced."""
        left = self.progress.handles
        for handle in left:
            with contextlib.suppress(Exception):  # the lane's error has been raised once already
                handle.wait()
        self.begin_round()
        self.departure.forget()
        return any(handle.error is None for handle in left)

    # A round

    def mark_ready(self, indices: Iterable[int], tag: Round) -> None:
        """Mark gradients that lie in their views, and send full buckets. Never waits.

        A second mark of a parameter in the same round does nothing.

        Args:
            indices: The parameters.
            tag: The name of the round, the same on all ranks. All rounds of a reducer have the same words.

        Raises:
            HvdliteError: A parameter was marked again, after its bucket had left.
        """
        progress = self.progress
        progress.start()
        if self.departure.trial:
            self.departure.trial.begin()
        for index in indices:
            first = progress.mark(index)
            if not self.overlap:
                continue
            if first:
                if self.departure.learn:
                    progress.note_arrival(index)
                self.send_full(tag)
            elif progress.has_left(index):
                raise HvdliteError(too_late(self.plan.specs[index].name))

    def mark_at_end(self, indices: Sequence[int], lent: Mapping[int, Array]) -> None:
        """Mark gradients that lie in their views, or are lent. No bucket leaves before the end.

        Args:
            indices: The parameters, all or some, each at most once.
            lent: By parameter, the elements `to_lend`, flat. They must not change before the round has ended.
        """
        self.progress.mark_at_end(indices)
        for index, array in lent.items():
            slot = self.plan.slots[index]
            self.buckets[slot.bucket].lend(slot, array)

    def send_full(self, tag: Round) -> None:
        """Send the next buckets until one is not full."""
        while self.progress.next_is_full:
            request = self.request(len(self.progress.sent), tag)
            self.lane.submit(request)
            self.progress.note_sent(request)

    def is_marked(self, index: int) -> bool:
        """Whether gradient `index` is there."""
        return bool(self.progress.marked[index])

    def has_left(self, index: int) -> bool:
        """Whether gradient `index` is on its way to the other ranks."""
        return self.progress.has_left(index)

    def finish_round(self, load: Callable[[int], Use], tag: Round) -> list[Use]:
        """Complete the round. Collective; waits for all ranks.

        Afterwards the views hold the results. The view of a parameter without a gradient on any rank holds zeros.

        Args:
            load: Called with each parameter that was not marked. It writes the gradient, or zeros, to the view, and
                returns the kind of gradient. If it raises, call `abandon_round` before the next round.
            tag: The name of the round.

        Returns:
            For each parameter the largest use over all ranks.

        Raises:
            VoidError: A rank's backward raised after some of its buckets had left.
        """
        progress, departure = self.progress, self.departure
        progress.start()
        if departure.trial:
            departure.trial.begin()
        uses = self.all_dense
        if 0 in progress.marked:
            uses = [Use.DENSE if marked else load(index) for index, marked in enumerate(progress.marked)]
        flag: int = Flag.COMPLETE if uses == self.all_dense else Flag.COMPARE
        self.send_rest(tag, flag, self.lane.begin)
        all_there = True
        for _, handle in progress.sent:
            all_there = handle.wait() and all_there
        flag = progress.sent[-1][0].flag if progress.sent else Flag.COMPLETE
        if flag:
            uses = self.agreed_uses(uses, flag, tag)
        if self.lossy and all_there:  # otherwise the round was exact, and those who have joined do not count it
            unused = {spec.lossy for spec, use in zip(self.plan.specs, uses, strict=True) if use is Use.UNUSED}
            results = [bucket.buffer for bucket in self.buckets]
            self.lossy.settle(results, unused, lambda values: self.combine("wire", values, Reduction(), tag))
        if departure.trial or departure.learn:
            self.learn(all_there, tag)
        self.begin_round()
        return uses

    def learn(self, all_there: bool, tag: Round) -> None:
        """Use a round that has ended on all ranks for the trial, or for the order of gradients. Collective.

        Args:
            all_there: Whether no rank has joined.
            tag: The name of the round.
        """
        departure = self.departure
        if not all_there:
            departure.forget()
            return
        if departure.learn:
            departure.set_order(self.agreed_order(tag))
        if departure.trial:
            departure.trial.end()
            if departure.trial.over:
                departure.set_overlap(self.agreed_overlap(departure.trial, tag))
            departure.next_round()

    def send_rest(self, tag: Round, flag: int, send_last: Callable[[Request[bool]], Handle[bool]]) -> None:
        """Send all buckets that have not left.

        Args:
            tag: The name of the round.
            flag: This rank's flag, sent with the last bucket.
            send_last: Sends the last bucket: `Lane.submit`, or `Lane.begin` if the caller waits next. `begin` runs the
                request in this thread, which saves a change of threads.
        """
        last, send = len(self.buckets) - 1, self.lane.submit if self.departure.overlap else self.lane.run
        for number in range(len(self.progress.sent), last + 1):
            request = self.request(number, tag, flag if number == last else 0)
            send_last(request) if number == last else send(request)
            self.progress.note_sent(request)

    def request(self, number: int, tag: Round, flag: int = 0) -> Request[bool]:
        """The request that reduces a bucket in this round: the last round's request, if it can be used again."""
        bucket, before = self.buckets[number], self.requests.get(number)
        if before is not None and before.queued and before.handle.done:
            return before.again(tag, flag)
        signature = Signature("gradients", f"{self.name} bucket {number}", round=tag)
        request = Request(signature, bucket.reduce, flag=flag, stand_in=bucket.stand_in)
        if is_host(bucket.buffer):
            self.requests[number] = request
            if bucket.lossy:
                request.show(bucket.lossy.phases)
        else:
            on_gpu(self.lane, request, bucket.buffer)
        return request

    def combine(self, kind: str, values: np.ndarray, how: Reduction, tag: Round) -> None:
        """All-reduce a small array other than a gradient, in place. Waits for all ranks."""

        def work(at: Workplace) -> None:
            allreduce(at.transport, at.workspace, at.place, values, how)

        signature = Signature(kind, f"{self.name} bucket 0", round=tag)
        self.lane.run(Request(signature, work, stand_in=lambda: Zeros.like([values], how)))

    def agreed_uses(self, mine: Sequence[Use], flag: int, tag: Round) -> list[Use]:
        """Agree on the largest use of each parameter. Collective, if the round's flag is not COMPLETE.

        Raises:
            VoidError: The flag says that the round is void.
        """
        if (rank := rank_of(flag)) is not None:
            raise VoidError(why_void(f"rank {self.lane.members[rank]}"))
        uses = np.array(mine, np.uint8)
        self.combine("uses", uses, Reduction("max"), tag)
        return [Use(int(use)) for use in uses]

    def agreed_overlap(self, trial: Trial, tag: Round) -> bool:
        """Return whether early buckets were faster, on the average of all ranks. Collective."""
        seconds = np.array(trial.medians)
        self.combine("overlap", seconds, Reduction(divisor=self.lane.transport.size), tag)
        early, late = seconds.tolist()
        if self.lane.transport.rank == 0:
            text = "%s: backward takes %.1f ms with gradients that leave during it, %.1f with all at its end"
            logging.getLogger("hvdlite").info(text, self.lane.user or self.name, 1e3 * early, 1e3 * late)
        return bool(early <= late)

    def agreed_order(self, tag: Round) -> list[int]:
        """Return rank 0's gradients in the order in which they came, then all others in plan order. Collective."""

        def work(at: Workplace) -> list[int]:
            mine = self.progress.arrived if at.transport.rank == 0 else []
            return list(at.transport.allgather_object(mine)[0])

        first = self.lane.run(Request(Signature("order", f"{self.name} bucket 0", round=tag), work))
        return list(dict.fromkeys([*first, *(index for bucket in self.plan.buckets for index in bucket.members)]))


def why_void(rank: str) -> str:
    """The error text for a void round. rank: the rank with the failed backward, in words."""
    return (
        f"a backward of {rank} raised after some of its gradients had left: no rank has results of this backward. The "
        "next backward starts a new round [HVD307]"
    )


def too_late(name: str) -> str:
    """The error text for a gradient that changed after its bucket had left."""
    return (
        f"the gradient of {name} was added to after it had left: one backward() computed it twice, as reentrant "
        "checkpointing does for weights that several segments share. Use checkpoint(..., use_reentrant=False), or set "
        "HVDLITE_OVERLAP=0 [HVD308]"
    )
