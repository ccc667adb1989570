"""The reducer: replays a bucket plan, one round per backward.

    mark_ready([i])   gradient i lies in its slot; a bucket that is full, and whose predecessors have left, may leave
    mark_at_end       these gradients do, or are lent, and nothing leaves before the end
    finish_round()    what is missing is loaded, every bucket leaves, all are waited for

When buckets leave early (`Departure`), communication hides behind the rest of backward. On one host, where the ranks'
cores all compute gradients, a helper thread would only take a core from them, so all leave at the end, in the caller's
thread. Over a network the first rounds try both. Either way the order, and so every bit, is the plan's.

A bucket waits for its last gradient, and all later buckets wait for it, so that one gradient that comes later than
planned costs much. After its first round a reducer knows the real order, for a plan of it. (PyTorch's DDP does that,
too.) The last bucket never leaves early: that it is there tells all ranks that each one's backward has ended.
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
from hvdlite.errors import HvdliteError, VoidError
from hvdlite.gradients.bucket import Bucket
from hvdlite.gradients.departure import Departure
from hvdlite.gradients.overlap_trial import Trial
from hvdlite.gradients.plan import BucketPlan
from hvdlite.gradients.progress import Flag, Progress, rank_of, void_of
from hvdlite.gradients.use import Use
from hvdlite.lanes.gpu_side import Gpu, on_gpu, side_of
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Handle, Request
from hvdlite.lanes.signature import Round, Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.memory.arena import Arena
from hvdlite.ops.stand_in import Zeros


@dataclass(frozen=True)
class Memory:
    """Where a reducer's buckets lie.

    gpu: where those lie whose device is not the host; their gradients are packed on the caller's stream. name: of the
    arenas, where others of the reducer's name live on; None: the reducer's name, and a new arena takes the place of the
    last.
    """

    gpu: Gpu | None = None
    name: str | None = None


class Reducer:
    """Averages (or otherwise reduces) the gradients of one plan over the lane's ranks. Not thread-safe.

    Creating one is collective: the ranks compare plans. Raises MismatchError with a diff, on every rank, where they
    differ.
    """

    def __init__(
        self, lane: Lane, plan: BucketPlan, how: Reduction, name: str, departure: Departure, memory: Memory = Memory()
    ) -> None:
        self.lane, self.name = lane, name
        self.plan, self.how = plan, how
        self.departure = departure
        facts = (("parameters", plan.lines), ("buckets", plan.buckets), ("reduction", how))
        # Named like a round's first bucket: where other ranks begin a round instead, that is a mismatch, not a wait.
        self.arenas: dict[str, Arena] = lane.run(Request(
            Signature("plan", f"{name} bucket 0", facts),
            lambda at: {device: self.allocate(at, device, memory) for device in plan.devices},
        ))
        places = [(self.arenas[b.device], (b.start, b.length, b.dtype)) for b in plan.buckets]
        self.buckets = [Bucket(arena.view(*place), arena.peer_views(*place), how, lane) for arena, place in places]
        self.requests: dict[int, Request[bool]] = {}
        """Those of earlier rounds, by bucket, to be used again."""
        self.views = [
            self.buckets[slot.bucket].buffer[slot.offset : slot.offset + slot.length].reshape(spec.shape)
            for spec, slot in zip(plan.specs, plan.slots, strict=True)
        ]
        self.all_dense = [Use.DENSE] * len(plan.specs)
        """What `finish_round` returns, this very list, where every rank had every gradient."""
        self.progress = Progress(plan)

    def allocate(self, host: Workplace, device: str, memory: Memory) -> Arena:
        """The arena for a device's buckets. Collective."""
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
        """The elements of each gradient, from and to, that need not be copied where all leave at the end."""
        return [self.buckets[slot.bucket].to_lend(slot) for slot in self.plan.slots]

    # A round that fails

    def begin_round(self) -> None:
        """Forget what was marked, sent and lent."""
        for bucket in self.buckets:
            bucket.return_lent()
        self.progress.begin()

    def abandon_round(self, tag: Round, spare: Callable[[list[int]], object] | None = None) -> bool:
        """Forget a round that was begun and not finished (its backward raised). Waits for all ranks to come to its end.
        True where any of it was reduced, as all ranks then know. tag: the round's. spare: see `void_round`."""
        if not self.progress.begun:
            return False
        if self.progress.sent:
            self.void_round(tag, spare)
        return self.forget_round()

    @property
    def half_sent(self) -> bool:
        """Whether buckets of a round have left, and others have not. Between rounds: one that was begun has failed."""
        return self.overlap and self.progress.partly_sent

    @property
    def unresolved(self) -> bool:
        """Between rounds: whether one that was begun has failed, and not all ranks have come to its end."""
        sent = self.progress.sent
        return bool(sent) and (self.half_sent or any(not handle.done for _, handle in sent))

    def void_round(self, tag: Round, spare: Callable[[list[int]], object] | None = None) -> None:
        """What has not left of a round follows, with word that no rank is to have results of it. spare: called before
        with the parameters that were not marked, in whose views something else may lie."""
        if spare:
            spare(self.progress.unmarked)
        with contextlib.suppress(HvdliteError):
            self.send_rest(tag, void_of(self.lane.transport.rank), self.lane.submit)

    def forget_round(self) -> bool:
        """Wait for what has left; whether any was reduced."""
        left = self.progress.handles
        for handle in left:
            with contextlib.suppress(Exception):  # what broke the lane was raised once already
                handle.wait()
        self.begin_round()
        self.departure.forget()
        return any(handle.error is None for handle in left)

    # A round

    def mark_ready(self, indices: Iterable[int], tag: Round) -> None:
        """These gradients lie in their views. tag: names this round on all ranks, in a reducer's always the same words.
        Never waits. A second mark of the same parameter in a round does nothing; raises HvdliteError where its bucket
        has left, with what is now not true."""
        progress = self.progress
        progress.start()
        if self.departure.trial:
            self.departure.trial.begin()
        for index in indices:
            first = progress.mark(index)
            if not self.overlap:  # then nothing leaves before the end
                continue
            if first:
                if self.departure.learn:
                    progress.note_arrival(index)
                self.send_full(tag)
            elif progress.has_left(index):
                raise HvdliteError(too_late(self.plan.specs[index].name))

    def mark_at_end(self, indices: Sequence[int], lent: Mapping[int, Array]) -> None:
        """These gradients, all or some, lie in their views but for what is lent, and nothing leaves before the end.

        indices: each once. lent: by index, the elements `to_lend`, flat, where they lie; they must not change before
        the round has ended."""
        self.progress.mark_at_end(indices)
        for index, array in lent.items():
            slot = self.plan.slots[index]
            self.buckets[slot.bucket].lend(slot, array)

    def send_full(self, tag: Round) -> None:
        """The next buckets, as far as they are full."""
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
        """Complete the round; returns each parameter's use, the largest over all ranks. Blocks until all ranks did.

        load: called for each parameter not marked; puts what gradient there is into the view, else zeros, and says
        which. Afterwards the views hold the result; those of parameters used on no rank hold zeros. Where it raises,
        the round is left as it is: `abandon_round` before the next.
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
        if departure.trial or departure.learn:
            self.learn(all_there, tag)
        self.begin_round()
        return uses

    def learn(self, all_there: bool, tag: Round) -> None:
        """A round has ended on all ranks: what it tells for the next ones. all_there: no rank has joined."""
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
        """All buckets that have not left; the last, which never leaves early, with the flag: submitted, or, where it is
        waited for next, begun in this thread, which saves handing it over."""
        last, send = len(self.buckets) - 1, self.lane.submit if self.departure.overlap else self.lane.run
        for number in range(len(self.progress.sent), last + 1):
            request = self.request(number, tag, flag if number == last else 0)
            send_last(request) if number == last else send(request)
            self.progress.note_sent(request)

    def request(self, number: int, tag: Round, flag: int = 0) -> Request[bool]:
        bucket, before = self.buckets[number], self.requests.get(number)
        if before is not None and before.queued and before.handle.done:
            return before.again(tag, flag)
        signature = Signature("gradients", f"{self.name} bucket {number}", round=tag)
        request = Request(signature, bucket.reduce, flag=flag, stand_in=bucket.stand_in)
        if is_host(bucket.buffer):
            self.requests[number] = request
        else:
            on_gpu(self.lane, request, bucket.buffer)
        return request

    def combine(self, kind: str, values: np.ndarray, how: Reduction, tag: Round) -> None:
        """All-reduce what is no gradient, in place."""

        def work(at: Workplace) -> None:
            allreduce(at.transport, at.workspace, at.place, values, how)

        signature = Signature(kind, f"{self.name} bucket 0", round=tag)
        self.lane.run(Request(signature, work, stand_in=lambda: Zeros.like([values], how)))

    def agreed_uses(self, mine: Sequence[Use], flag: int, tag: Round) -> list[Use]:
        """The largest use over ranks, for each parameter. Raises VoidError where the flag says that there are no
        results. Only when some rank has something other than DENSE."""
        if (rank := rank_of(flag)) is not None:
            raise VoidError(
                f"a backward of rank {self.lane.members[rank]} raised after some of its gradients had left: no rank "
                "has results of this one. The next begins anew"
            )
        uses = np.array(mine, np.uint8)
        self.combine("uses", uses, Reduction("max"), tag)
        return [Use(int(use)) for use in uses]

    def agreed_overlap(self, trial: Trial, tag: Round) -> bool:
        """What was faster, over all ranks."""
        seconds = np.array(trial.medians)
        self.combine("overlap", seconds, Reduction(divisor=self.lane.transport.size), tag)
        early, late = seconds.tolist()
        if self.lane.transport.rank == 0:
            text = "%s: backward takes %.1f ms with gradients that leave during it, %.1f with all at its end"
            logging.getLogger("hvdlite").info(text, self.lane.user or self.name, 1e3 * early, 1e3 * late)
        return bool(early <= late)

    def agreed_order(self, tag: Round) -> list[int]:
        """The order in which rank 0's gradients arrived; then those that it did not have, in the plan's order."""

        def work(at: Workplace) -> list[int]:
            mine = self.progress.arrived if at.transport.rank == 0 else []
            return list(at.transport.allgather_object(mine)[0])

        first = self.lane.run(Request(Signature("order", f"{self.name} bucket 0", round=tag), work))
        return list(dict.fromkeys([*first, *(index for bucket in self.plan.buckets for index in bucket.members)]))


def too_late(name: str) -> str:
    """Why a gradient cannot be added to."""
    return (
        f"the gradient of {name} was added to after it had left: one backward() computed it twice, as reentrant "
        "checkpointing does for weights that several segments share. Use checkpoint(..., use_reentrant=False), or set "
        "HVDLITE_OVERLAP=0"
    )
