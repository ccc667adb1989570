"""The reducer: replays a bucket plan, one round per backward.

    mark_ready([i])   gradient i lies in its slot; a bucket that is full, and whose predecessors have left, may leave
    finish_round()    what is missing is loaded, every bucket leaves, all are waited for

When buckets leave early (`overlap`), communication hides behind the rest of backward; on one host, where the ranks'
cores all compute gradients, a helper thread would only take a core from them, so all leave at the end, in the
caller's thread; over a network the first rounds try both (`trial`). Either way the order, and so every bit, is the
plan's. A bucket waits for its last gradient, and all behind it wait, so that one gradient that comes later than planned
costs much: after its first round a reducer knows the real order, for a plan of it. (PyTorch's DDP does that, too.) The
last bucket never leaves early: that it is there tells all ranks that each one's backward has come to its end.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from hvdlite.algorithms import allreduce
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array, is_host
from hvdlite.errors import HvdliteError, VoidError
from hvdlite.gradients.bucket import Bucket
from hvdlite.gradients.overlap_trial import Trial
from hvdlite.gradients.plan import BucketPlan
from hvdlite.gradients.use import Use
from hvdlite.lanes.gpu_side import Gpu, on_gpu, side_of
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Handle, Request
from hvdlite.lanes.signature import Round, Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.memory.arena import Arena
from hvdlite.ops.stand_in import Zeros

VOID = 2  # the flag of a round's last bucket, 0 where all have all: 1: compare uses; 2 + r: rank r's backward raised


class Reducer:
    """Averages (or otherwise reduces) the gradients of one plan over the lane's ranks. Not thread-safe.

    Creating one is collective: the ranks compare plans. Raises MismatchError with a diff, on every rank, where they
    differ. gpu: where the buckets whose device is not the host lie; their gradients are packed on the caller's stream.
    memory: the name of its arenas, where others of its name live on; a new one takes the place of the last.
    overlap: whether buckets leave during backward; None: to be tried. learn: whether to find out `order`, if it
    matters; then what is to be tried is the next reducer's.
    """

    def __init__(
        self, lane: Lane, plan: BucketPlan, how: Reduction, name: str, overlap: bool | None, gpu: Gpu | None = None,
        memory: str | None = None, learn: bool = False,
    ) -> None:
        self.lane, self.plan, self.how, self.name, self.overlap = lane, plan, how, name, overlap is not False
        self.memory, self.learn = memory or name, learn and self.overlap and gpu is None
        self.trial = Trial() if overlap is None and not self.learn else None
        self.order: list[int] | None = None
        """For a better plan: the order in which rank 0's gradients were marked, in the first round of all ranks."""
        facts = (("parameters", plan.lines), ("buckets", plan.buckets), ("reduction", how))
        # Named like a round's first bucket: where other ranks begin a round instead, that is a mismatch, not a wait.
        self.arenas: dict[str, Arena] = lane.run(Request(
            Signature("plan", f"{name} bucket 0", facts),
            lambda at: {device: self.allocate(at, device, gpu) for device in plan.devices},
        ))
        places = [(self.arenas[b.device], (b.start, b.length, b.dtype)) for b in plan.buckets]
        self.buckets = [Bucket(arena.view(*place), arena.peer_views(*place), how, lane) for arena, place in places]
        self.requests: dict[int, Request[bool]] = {}
        """Those of earlier rounds, by bucket, to be used again."""
        self.views = [
            self.buckets[slot.bucket].buffer[slot.offset : slot.offset + slot.length].reshape(spec.shape)
            for spec, slot in zip(plan.specs, plan.slots, strict=True)
        ]
        self.to_lend = [self.buckets[slot.bucket].to_lend(slot) for slot in plan.slots]
        """The elements of each gradient, from and to, that need not be copied where all leave at the end."""
        self.bucket_of = [slot.bucket for slot in plan.slots]
        self.lengths = [len(bucket.members) for bucket in plan.buckets]
        self.all_dense = [Use.DENSE] * len(plan.specs)
        """What `finish_round` returns, this very list, where every rank had every gradient."""
        self.begin_round()

    def allocate(self, host: Workplace, device: str, gpu: Gpu | None) -> Arena:
        """The arena for a device's buckets. Collective."""
        there: contextlib.AbstractContextManager[Workplace] = contextlib.nullcontext(host)
        if device != "host":
            assert gpu is not None
            there = side_of(host.host, gpu).working()
        with there as at:
            nbytes, place = self.plan.nbytes(device), at.place
            return at.workspace.allocate(self.memory, at.transport, nbytes, place.in_memory, place.hosts)

    def begin_round(self) -> None:
        self.begun = self.trial is not None
        """Whether anything of this round has been marked or has left. Looked at ahead of calls that would find out, as
        is done around step(), too: each costs some 3 us where caches are cold, and without such looks a small CNN's
        step takes a twentieth more over none. (Medians of ten runs in turns.)"""
        self.marked = bytearray(len(self.plan.specs))
        self.missing = self.lengths.copy()
        for bucket in self.buckets:
            bucket.lent.clear()
        self.sent: list[tuple[Request[bool], Handle[bool]]] = []
        self.arrived: list[int] = []

    def abandon_round(self, tag: Round, spare: Callable[[list[int]], object] | None = None) -> bool:
        """Forget a round that was begun and not finished (its backward raised). Waits for all ranks to come to its end.
        True where any of it was reduced, as all ranks then know. tag: the round's. spare: see `void_round`."""
        if not self.begun:
            return False
        if self.sent:
            self.void_round(tag, spare)
        return self.forget_round()

    @property
    def half_sent(self) -> bool:
        """Whether buckets of a round have left, and others have not. Between rounds: one that was begun has failed."""
        return self.overlap and 0 < len(self.sent) < len(self.missing)

    @property
    def unresolved(self) -> bool:
        """Between rounds: whether one that was begun has failed, and not all ranks have come to its end."""
        return bool(self.sent) and (self.half_sent or any(not handle.done for _, handle in self.sent))

    def void_round(self, tag: Round, spare: Callable[[list[int]], object] | None = None) -> None:
        """What has not left of a round follows, with word that no rank is to have results of it. spare: called before
        with the parameters that were not marked, in whose views something else may lie."""
        if spare:
            spare([index for index, marked in enumerate(self.marked) if not marked])
        with contextlib.suppress(HvdliteError):
            self.send_rest(tag, VOID + self.lane.transport.rank, self.lane.submit)

    def forget_round(self) -> bool:
        """Wait for what has left; whether any was reduced."""
        left = [handle for _, handle in self.sent]
        for handle in left:
            with contextlib.suppress(Exception):  # what broke the lane was raised once already
                handle.wait()
        self.begin_round()
        if self.trial:
            self.trial.forget()
        return any(handle.error is None for handle in left)

    def mark_ready(self, indices: Iterable[int], tag: Round) -> None:
        """These gradients lie in their views. tag: names this round on all ranks, in a reducer's always the same words.
        Never waits. A second mark of the same parameter in a round does nothing; raises HvdliteError where its bucket
        has left, with what is now not true."""
        self.begun = True
        if self.trial:
            self.trial.begin()
        for index in indices:
            if not self.overlap:  # then nothing leaves before the end
                self.marked[index] = True
            elif not self.marked[index]:
                self.marked[index] = True
                if self.learn:
                    self.arrived.append(index)
                self.missing[self.bucket_of[index]] -= 1
                self.send_full(tag)
            elif self.has_left(index):
                raise HvdliteError(too_late(self.plan.specs[index].name))

    def mark_all(self, lent: Mapping[int, Array]) -> None:
        """All gradients lie in their views but for what is lent, and nothing leaves before the end. lent: by index, the
        elements `to_lend`, flat, where they lie; they must not change before the round has ended."""
        self.begun = True  # first: such a round is to be forgotten
        self.marked = bytearray(b"\1") * len(self.marked)
        for index, array in lent.items():
            self.buckets[self.bucket_of[index]].lend(self.plan.slots[index].offset + self.to_lend[index][0], array)

    def send_full(self, tag: Round) -> None:
        """The next buckets, as far as they are full."""
        while len(self.sent) < len(self.missing) - 1 and self.missing[len(self.sent)] == 0:
            request = self.request(len(self.sent), tag)
            self.sent.append((request, self.lane.submit(request)))

    def has_left(self, index: int) -> bool:
        """Whether gradient `index` is on its way to the other ranks."""
        return self.bucket_of[index] < len(self.sent)

    def finish_round(self, load: Callable[[int], Use], tag: Round) -> list[Use]:
        """Complete the round; returns each parameter's use, the largest over all ranks. Blocks until all ranks did.

        load: called for each parameter not marked; puts what gradient there is into the view, else zeros, and says
        which. Afterwards the views hold the result; those of parameters used on no rank hold zeros. Where it raises,
        the round is left as it is: `abandon_round` before the next.
        """
        self.begun = True
        if self.trial:
            self.trial.begin()
        uses = self.all_dense
        if 0 in self.marked:
            uses = [Use.DENSE if marked else load(index) for index, marked in enumerate(self.marked)]
        self.send_rest(tag, int(uses != self.all_dense), self.lane.begin)
        all_there = True
        for _, handle in self.sent:
            all_there = handle.wait() and all_there
        flag = self.sent[-1][0].flag if self.sent else 0
        if flag >= VOID:
            who = self.lane.members[flag - VOID]
            raise VoidError(
                f"a backward of rank {who} raised after some of its gradients had left: no rank has results of this "
                "one. The next begins anew"
            )
        if flag:
            uses = self.agreed_uses(uses, tag)
        if self.learn and all_there:
            self.order, self.learn = self.agreed_order(tag), False
        if self.trial and all_there:
            self.go_on(self.trial, tag)
        elif self.trial:
            self.trial.forget()
        self.begin_round()
        return uses

    def go_on(self, trial: Trial, tag: Round) -> None:
        """A round of the trial has ended, on all ranks: how the next one goes."""
        trial.end()
        self.overlap = self.agreed_overlap(trial, tag) if trial.over else trial.early
        if trial.over:
            self.trial = None

    def send_rest(self, tag: Round, flag: int, send_last: Callable[[Request[bool]], Handle[bool]]) -> None:
        """All buckets that have not left; the last, which never leaves early, with the flag: submitted, or, where it is
        waited for next, begun in this thread, which saves handing it over."""
        last, send = len(self.plan.buckets) - 1, self.lane.submit if self.overlap else self.lane.run
        for number in range(len(self.sent), last + 1):
            request = self.request(number, tag, flag if number == last else 0)
            send_last(request) if number == last else send(request)
            self.sent.append((request, request.handle))

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

    def agreed_uses(self, mine: Sequence[Use], tag: Round) -> list[Use]:
        """The largest use over ranks, for each parameter. Only when some rank has something other than DENSE."""
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
        """Rank 0's order of arrival; behind it what it had not, in the plan's."""

        def work(at: Workplace) -> list[int]:
            mine = self.arrived if at.transport.rank == 0 else []
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
