"""Attaching to a torch optimizer: hooks on its parameters, nothing wrapped.

    backward():  each parameter's gradient is copied once into its slot of the arena (of a large one only what other
                 ranks read), and `p.grad` becomes that view; an end-of-backward callback completes the round, so that
                 clipping, unscaling and closures all see reduced gradients
    step():      nothing is left to do; for gradients set by hand, a hook before the step completes a round

The optimizer stays the same object: schedulers, isinstance, state_dict, deepcopy and pickling go on working. Rejected:
communicating in the step hook alone (GradScaler unscales before it, LBFGS calls it before its closure's backward).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial

import torch

from hvdlite.errors import HvdliteError, VoidError
from hvdlite.gradients.policy import planned
from hvdlite.gradients.reducer import Reducer
from hvdlite.gradients.use import Use
from hvdlite.job import runtime
from hvdlite.lanes.calls import numbered
from hvdlite.lanes.signature import Round
from hvdlite.system.weak_references import weakly
from hvdlite.torch import cuda
from hvdlite.torch.attach import compiled, sharing, steps
from hvdlite.torch.attach.backward import ROUND, Backward, current_run, outermost_node
from hvdlite.torch.attach.gradients import Gradients
from hvdlite.torch.attach.methods import methods
from hvdlite.torch.attach.packing import Packing
from hvdlite.torch.attach.parameters import Hooks, Parameter, Planned, flat
from hvdlite.torch.attach.replica_check import alike
from hvdlite.torch.attach.settings import Settings
from hvdlite.torch.attach.usual import ended, heard, packed


class Attachment:
    """One optimizer's gradients, reduced. Lives as long as the optimizer, and works as long as the runtime that it was
    made under."""

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings, passes_per_step: int) -> None:
        self.reference, self.settings, self.passes_per_step = weakref.ref(optimizer), settings, passes_per_step
        self.runtime = runtime.current()
        self.together = self.runtime.attachments.members  # with this one, as long as it is attached
        self.group = self.runtime.groups.find(settings.process_set)
        sharing.refuse_other_ranks(self)
        self.gradients = Gradients(settings)
        self.alike = alike(optimizer, settings.names, settings.replica_check)
        self.heir: torch.optim.Optimizer | None = None  # whose attachment reduces the parameters' gradients instead
        self.given: dict[int, Attachment] = {}  # who reduces those of some parameters instead, by id()
        self.kept: list[torch.optim.Optimizer] = []  # whose these are
        self.seen: dict[str, int] = {}  # by name: how many rounds this one, and those, had completed at the last step
        self.synchronized: dict[str, int] = {}  # likewise at the user's last synchronize(), of those that average
        self.shared = False  # some of its parameters are others', too
        self.alone = self.paused = self.group is None or self.group.size == 1  # then there is nothing to reduce
        self.skipping = self.reducing = self.taking = self.accumulating = self.detached = self.apart = False
        self.renewed = self.stepping = False  # made in another one's place; a round that is no backward's is under way
        self.depth = 0  # of the optimizer's step()s under way: a subclass's calls another; more where one has raised
        self.void = False  # a backward under way began before all ranks had come to the end of a round that has failed
        self.late = False  # its round begins when it ends, for that or since a plan is to be made
        self.unreduced = False  # since the last round or step a backward may have left gradients that are a rank's own
        self.passes = self.retries = self.steps = 0
        self.backward = Backward(partial(ended, weakref.ref(self)), partial(heard, weakref.ref(self)))
        self.hooks, self.lock = Hooks(self, self.backward.hook), threading.RLock()  # for autograd's threads
        self.tag = Round(ROUND, (0, 0, 0))  # names the round under way on all ranks
        self.number = self.group.serial("optimizer") if self.group else 0
        self.name = f"optimizer.{self.number}"
        if self.group is not None and not self.paused:
            self.runtime.attachments.disperse()  # models that are no more take memory
            title = numbered(f"DistributedOptimizer({type(optimizer).__name__})", self.number)
            self.lane, self.size = self.group.new_lane(self.name, self, title), self.group.size
            self.alike.enter(self.lane, self.name)
            self.alike.agree()
            self.make_plan(self.to_plan())
            sharing.take_over(self)
            self.runtime.attachments.append(self)
            if self.group is self.runtime.everyone:
                self.runtime.after_join.append(self)
        self.runtime.renewables.append(self)
        self.step_hooks = steps.hooks(self)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Not kept by what is attached to it: else only the collector of cycles would free a dropped one, on each rank
        at another time, and until then its hooks go on reducing."""
        optimizer = self.reference()
        assert optimizer is not None
        return optimizer

    def members(self) -> set[int]:
        """The optimizer's parameters, trainable or not, by id(); none where it has been dropped."""
        optimizer = self.reference()
        return set(map(id, flat(optimizer.param_groups))) if optimizer else set()

    @property
    def alive(self) -> bool:
        in_use = self.runtime.live and not self.detached and self.reference() is not None
        return in_use and (self.group is None or self.group.eager.closed is None or not self.group.removed)

    def trainable(self) -> list[Parameter]:
        """What a step may move: frozen parameters, too, while they have a gradient."""
        sparse, given = self.gradients.sparse, self.given
        found = [p for p in flat(self.optimizer.param_groups) if p.requires_grad or p.grad is not None]
        return [p for p in found if id(p) not in sparse and id(p) not in given] if sparse or given else found

    # The plan, made anew when the set of parameters changed

    def to_plan(self) -> list[Parameter]:
        """What ranks have alike: whether frozen parameters still have a gradient may differ between ranks."""
        return [p for p in self.trainable() if p.requires_grad]

    def fits(self) -> bool:
        """Whether the plan's parameters are those of the optimizer, and what they were."""
        if not (self.gradients.sparse or self.given) and self.planned.untouched(self.optimizer.param_groups):
            return True
        now = self.trainable()
        if not self.planned.are(now):
            return False
        if self.planned.moved(now):
            if self.planned.changed(now):
                return False
            self.planned.note_addresses()
            self.renew_hooks()
        return True

    def renew_hooks(self) -> None:
        self.hooks.renew([p for p in flat(self.optimizer.param_groups) if id(p) not in self.given])

    def make_plan(self, now: Sequence[Parameter], order: list[int] | None = None) -> None:
        """Plan, allocate and hook; order: of gradients, if known. Collective. If it raises, the plan before stays."""
        to_be = Planned(now, self.settings, self.optimizer.param_groups)
        layout, overlap = planned(to_be.specs, self.runtime.config, self.lane.place, order)
        gpu, how = cuda.gpu_of(now), self.settings.terms.reduction(self.size)
        self.reducer = Reducer(self.lane, layout, how, self.name, overlap, gpu, learn=order is None)
        self.streams = cuda.Streams(gpu.number) if gpu else None
        self.planned = to_be
        self.gradients.plan(now, self.reducer.views)
        last = {bucket.members[-1] for bucket in layout.buckets if self.reducer.overlap}  # with them a bucket may leave
        singly = bool(self.gradients.cast) or self.gradients.once
        slots, take, settled = self.gradients.slots, self.gradients.take, weakly(self.is_settled)
        self.packing = Packing(now, slots, take, settled, last, singly, self.reducer.to_lend, overlap is False)
        self.renew_hooks()

    # One backward

    def on_gradient(self, p: torch.Tensor) -> None:
        """Autograd has accumulated into p.grad. Runs cold, once per parameter: every line here costs microseconds. From
        two threads at once where some parameters lie on the host and some on a GPU."""
        if self.backward.run != (run := current_run()):
            self.begin_run(run, p)
        if self.taking and self.streams:
            with self.lock:
                self.streams.join(self.pack)
                if self.packing.add(p):
                    self.pack()
        elif self.taking and self.packing.add(p):
            self.pack()

    def is_settled(self, p: torch.Tensor) -> bool:
        """Whether no hook behind ours may change its gradient; otherwise that is taken when backward ends."""
        return self.hooks.are_last(p, self.planned.name if self.reducer.overlap else None)

    def pack(self, ended: bool = False) -> None:
        """Bring the gradients computed so far to their views. ended: see `Packing.pack`."""
        packed = self.packing.pack(ended)
        self.reducer.mark_ready(packed, self.tag)
        if self.reducer.overlap:
            self.gradients.note_sent(packed)

    def begin_run(self, run: int, first: torch.Tensor) -> None:
        """The first gradient, and whose, of a run of autograd's: a backward, or nested in one. Waits for nobody."""
        with self.lock:
            if self.backward.latest and self.backward.goes_on(run):
                self.backward.run = run
                return
            self.taking = self.reducing = self.accumulating = False  # marks of a backward that has raised
            if not self.alive:
                return
            before, self.unreduced = self.unreduced, True
            if self.gradients.once and self.gradients.rounds and not before:  # a GradScaler has left out a step
                self.gradients.look_for_zeros(first)
            if self.paused:
                return
            compiled.refuse_autograd()
            self.accumulating = self.passes + 1 < self.passes_per_step
            if not self.accumulating:
                self.void, self.reducing = self.reducer.begun and self.reducer.unresolved, True
                self.late = self.void or not (self.packing.unnoted or self.fits())
                if not self.late:
                    self.begin_round(first)
                    self.taking = not self.packing.unnoted
            self.backward.begin(run, outermost_node(), deaf=self.packing.unnoted)

    def begin_round(self, first: torch.Tensor | None = None) -> None:
        """first: whose gradient is the first of a backward that has begun, where the plan is known to fit. Otherwise
        waits for all ranks, where it does not."""
        compiled.pass_over()
        self.packing.forget()
        self.gradients.sent.clear()
        self.gradients.taken.clear()
        abandoned = self.reducer.abandon_round(self.tag, self.gradients.slots.preserve)
        self.retries += abandoned
        if abandoned and self.gradients.has_aliases():
            raise HvdliteError(
                "a backward has failed after some of its gradients had left; what came back lies where new ones were "
                "to be added: call zero_grad(), and backward() again"
            )
        self.tag = Round(ROUND, (self.steps + 1, self.gradients.rounds + 1, self.retries + 1))  # tells retries apart
        self.void = self.late = False
        if first is None and not self.fits():
            sharing.leave_to_others(self)
            self.make_plan(self.trainable())
        self.gradients.slots.note_own(self.planned.parameters, first)

    def finish_round(self) -> None:
        """Reduce what is left, and hand out the results. Waits for all ranks."""
        self.taking = self.reducing = False
        whole = packed(self)
        uses = self.finish_slowly(whole)
        if whole:
            self.packing.hand_over()
        self.passes, self.retries, self.unreduced = 0, 0, False
        self.gradients.give(uses, all_dense=uses is self.reducer.all_dense)
        if self.reducer.order:
            self.make_plan(self.planned.parameters, self.reducer.order)
        if not self.apart:
            self.alike.look()

    def finish_slowly(self, whole: bool) -> list[Use]:
        """The same round where not all is as usual. whole: whether all are packed. Returns each parameter's use."""
        if not whole and (self.late or (self.packing.unnoted and not self.fits())):
            self.begin_round()
        if self.gradients.once:
            self.gradients.refuse_sparse_results()
        if self.streams:
            self.streams.join(self.pack)
        if not whole:
            self.pack(ended=not self.reducer.overlap)  # else buckets leave with it, before `take_again`
        if not self.packing.unnoted:  # then all have been looked at just now
            self.gradients.take_again(self.reducer)
        try:
            return self.reducer.finish_round(self.gradients.take, self.tag)
        except VoidError:
            self.gradients.let_go()
            raise

    def reduce(self) -> None:
        """A round for gradients that no backward has reduced. Waits for all ranks."""
        self.stepping = True
        self.renew_hooks()  # some may be gone, since no backward has called them
        try:
            self.begin_round()
            self.finish_round()
        finally:
            self.stepping = False

    # Its life

    def renew(self) -> None:
        """Attach the same optimizer again, in the same way, under the present runtime. Collective."""
        if self.settings.process_set.process_set_id is None:  # it has been removed
            return
        self.detach()
        attach(self.optimizer, self.settings, self.passes_per_step)
        self.optimizer.__dict__["_hvdlite"].renewed = True

    def give_up(self) -> None:
        """This rank is about to join, or to wait for others: they learn that a round is void of which a part has left
        here, since a backward has failed. Never waits: they may come to that round only when this rank has joined."""
        if self.reducer.half_sent:
            self.reducer.void_round(self.tag, self.gradients.slots.preserve)

    def start_over(self) -> None:
        """All ranks have joined: count steps from 0, since some have made more."""
        if self.reducer.forget_round():
            self.gradients.let_go()
        self.taking = self.reducing = self.accumulating = self.unreduced = False
        self.passes = self.gradients.rounds = self.retries = self.steps = 0
        self.seen = {each.name: each.gradients.done for each in sharing.reducers(self)}
        self.alike.expect()

    def detach(self, heir: torch.optim.Optimizer | None = None) -> None:
        """Take the hooks off; those around the step stay where the heir's attachment reduces its gradients from now
        on."""
        self.detached, self.heir, self.reducing = True, heir, False  # what is under way is the heir's, too
        for each in (self.runtime.after_join, self.runtime.attachments, self.runtime.renewables):
            each.remove(self)
        self.runtime.last_looks.remove(self.alike)
        self.hooks.remove()
        if heir is None:
            for hook in self.step_hooks:
                hook.remove()


def attach(optimizer: torch.optim.Optimizer, settings: Settings, passes_per_step: int) -> None:
    """Attach to the optimizer, and give it the methods that users call. Collective."""
    attachment = Attachment(optimizer, settings, passes_per_step)
    optimizer.__dict__.update(methods(attachment), _hvdlite=attachment)
