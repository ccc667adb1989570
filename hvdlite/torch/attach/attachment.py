"""Attaching to a torch optimizer: hooks on its parameters, nothing wrapped.

    backward():  each parameter's gradient is copied once into its slot of the arena (of a large one only what other
                 ranks read), and `p.grad` becomes that view; an end-of-backward callback completes the round, so that
                 clipping, unscaling and closures all see reduced gradients
    step():      nothing is left to do; for gradients set by hand, a hook before the step completes a round

The optimizer stays the same object: schedulers, isinstance, state_dict, deepcopy and pickling go on working. Rejected:
communicating in the step hook alone (GradScaler unscales before it, LBFGS calls it before its closure's backward).
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from hvdlite.errors import HvdliteError, VoidError
from hvdlite.gradients.reducer import Reducer
from hvdlite.gradients.use import Use
from hvdlite.job.groups import Group
from hvdlite.lanes.lane import Lane
from hvdlite.system.weak_references import weakly
from hvdlite.torch import cuda, private_api
from hvdlite.torch.attach import compiled, several, sharing
from hvdlite.torch.attach.backward import Backward
from hvdlite.torch.attach.gradients import Gradients
from hvdlite.torch.attach.layout import Layout, lay_out
from hvdlite.torch.attach.methods import methods
from hvdlite.torch.attach.packing import Packing
from hvdlite.torch.attach.parameters import Hooks, Parameter, Planned, flat
from hvdlite.torch.attach.ranks import Ranks
from hvdlite.torch.attach.replica_check import alike
from hvdlite.torch.attach.round import ACCUMULATING, IDLE, OPEN, Round
from hvdlite.torch.attach.settings import Settings
from hvdlite.torch.attach.sharing import Sharing
from hvdlite.torch.attach.steps import Steps
from hvdlite.torch.private_api import current_run


class Attachment:
    """One optimizer's gradients, reduced. Lives as long as the optimizer, and works as long as the runtime that it was
    made under."""

    layout: Layout

    def __init__(
        self, optimizer: torch.optim.Optimizer, settings: Settings, passes_per_step: int, renewed: bool = False
    ) -> None:
        private_api.require()
        self.reference, self.settings = weakref.ref(optimizer), settings
        self.ranks = Ranks(settings.process_set)
        self.sharing = Sharing(renewed)
        if self.ranks.runtime.everyone.size > 1:
            sharing.refuse_some(self, self.others)
        self.gradients = Gradients(settings)
        self.results = self.gradients.results
        self.alike = alike(optimizer, settings.names, settings.replica_check)
        self.round = Round(passes_per_step, paused=self.ranks.alone)
        self.backward = Backward(partial(end_backward, weakref.ref(self)))
        self.hooks = Hooks(self, partial(on_gradient, weakref.ref(self)))
        self.steps = Steps()
        if not self.ranks.alone:
            self.begin_reducing()
        self.ranks.runtime.renewables.append(self)
        self.steps.hook(optimizer, self)

    def begin_reducing(self) -> None:
        """Plan, share memory, and take the place of earlier optimizers with the same parameters. Collective."""
        runtime = self.ranks.runtime
        runtime.attachments.disperse()  # models that are no more take memory
        self.ranks.open_lane(self, f"DistributedOptimizer({type(self.optimizer).__name__})")
        self.alike.enter(self.ranks.lane, self.ranks.name)
        self.alike.agree()
        self.make_plan(self.to_plan())
        sharing.take_over(self, lambda: runtime.attachments)
        runtime.attachments.append(self)
        if self.ranks.are_all:
            runtime.after_join.append(self)

    # What others see of it

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Not kept by what is attached to it: else only the collector of cycles would free a dropped one, on each rank
        at another time, and until then its hooks go on reducing."""
        optimizer = self.reference()
        assert optimizer is not None
        return optimizer

    @property
    def alive(self) -> bool:
        """Whether its hooks reduce."""
        return not self.sharing.detached and self.reference() is not None and self.ranks.in_use

    @property
    def apart(self) -> bool:
        """Whether weights may differ between ranks, since a step was made within no_sync()."""
        return self.steps.apart

    @property
    def renewed(self) -> bool:
        return self.sharing.renewed

    @property
    def name(self) -> str:
        return self.ranks.name

    @property
    def group(self) -> Group | None:
        return self.ranks.group

    @property
    def lane(self) -> Lane:
        return self.ranks.lane

    @property
    def planned(self) -> Planned:
        return self.layout.planned

    @property
    def reducer(self) -> Reducer:
        return self.layout.reducer

    @property
    def packing(self) -> Packing:
        return self.layout.packing

    @property
    def streams(self) -> cuda.Streams | None:
        return self.layout.streams

    @property
    def is_shared(self) -> bool:
        return self.sharing.shared

    @property
    def planned_ids(self) -> Collection[int]:
        return self.planned.index.keys()

    @property
    def planned_parameters(self) -> Iterable[torch.Tensor]:
        return self.gradients.parameters

    @property
    def reducer_of_gradients(self) -> Attachment | None:
        """The attachment that reduces this optimizer's gradients: usually this one."""
        return sharing.reducer_of(self)

    @property
    def way(self) -> tuple[Any, ...]:
        """How gradients are reduced."""
        return self.settings.terms, self.round.passes_per_step, self.group

    def refuse_other_way(self, reducer: Attachment) -> None:
        sharing.refuse_other_way(self, reducer)

    def others(self) -> Iterable[Attachment]:
        """All attachments, also those of ranks that are alone."""
        return (each for each in self.ranks.runtime.renewables if isinstance(each, Attachment))

    def members(self) -> set[int]:
        """The optimizer's parameters, trainable or not, by id(); none where it has been dropped."""
        optimizer = self.reference()
        return set(map(id, flat(optimizer.param_groups))) if optimizer else set()

    # The plan, made anew when the set of parameters changed

    def trainable(self) -> list[Parameter]:
        """What a step may move: frozen parameters, too, while they have a gradient."""
        sparse = self.gradients.sparse
        found = [p for p in flat(self.optimizer.param_groups) if p.requires_grad or p.grad is not None]
        return [p for p in found if id(p) not in sparse] if sparse else found

    def to_plan(self) -> list[Parameter]:
        """What ranks have alike: whether frozen parameters still have a gradient may differ between ranks."""
        return [p for p in self.trainable() if p.requires_grad]

    def fits(self) -> bool:
        """Whether the plan's parameters are those of the optimizer, and what they were."""
        planned = self.layout.planned
        if not self.gradients.sparse and planned.untouched(self.optimizer.param_groups):
            return True
        now = self.trainable()
        if not planned.are(now):
            return False
        if planned.moved(now):
            if planned.changed(now):
                return False
            planned.note_addresses()
            self.renew_hooks()
        return True

    def lacks_some(self) -> bool:
        """Whether there are parameters that no plan has yet: a backward that reached only these has told nothing of it.
        Alike on all ranks. Raises RuntimeError where they have gradients, and others' may not be reduced again."""
        if not self.planned.may_lack_some(self.optimizer.param_groups):
            return False
        self.refuse_those_of_others()
        index, now = self.planned_ids, self.trainable()
        lacking = {i: p for i, p in enumerate(now) if p.requires_grad and id(p) not in index}
        if not self.results.once:
            return bool(lacking)
        for i, p in lacking.items():
            if p.grad is not None:
                name = self.settings.names.get(id(p), f"parameter.{i}")
                raise RuntimeError(
                    f"the gradient of {name} has not been reduced: a backward() reached only parameters that were "
                    "added or unfrozen after another one before this step, whose results "
                    f"op={self.settings.terms.op.name} cannot reduce again. Add or unfreeze them between step() and "
                    "the first backward()"
                )
        return False

    def refuse_those_of_others(self) -> None:
        sharing.refuse_those_of_others(self, {id(p) for p in self.to_plan()}, self.ranks.runtime.attachments)

    def renew_hooks(self) -> None:
        self.hooks.renew(flat(self.optimizer.param_groups))

    def make_plan(self, now: Sequence[Parameter], order: list[int] | None = None) -> None:
        """Plan, allocate and hook; order: of gradients, if known. Collective. If it raises, the plan before stays."""
        to_be = Planned(now, self.settings, self.optimizer.param_groups)
        self.layout = lay_out(to_be, self.ranks, self.gradients, weakly(self.is_settled), order)
        self.renew_hooks()

    # One backward

    def begin_backward(self, first: torch.Tensor) -> None:
        """The first gradient of a run of autograd's has come, for the parameter `first`: a backward() has begun, or the
        run is nested in one. Waits for nobody."""
        run = current_run()
        with self.backward.lock:
            if self.backward.goes_on(run):
                return
            self.round.lose()  # a backward() that has failed
            if not self.alive:
                return
            if self.results.left_out_a_step and self.round.state is IDLE:
                self.results.look_for_zeros(first, self.gradients.all_parameters)
            if self.round.paused:
                self.round.note_local()
                return
            compiled.refuse_autograd()
            layout = self.layout
            if self.round.passes + 1 < self.round.passes_per_step:
                self.round.accumulate()
            elif layout.reducer.unresolved:
                self.round.open_void()
            elif layout.packing.at_end or self.fits():
                self.round.open()
                self.begin_round(first)
            else:
                self.round.defer()
            self.backward.begin(run)

    def note(self, p: torch.Tensor) -> None:
        """A gradient has been computed that may leave before backward ends, or is too large to wait. Called by two
        threads at once where some parameters lie on the host and some on a GPU."""
        layout = self.layout
        if layout.streams is None:
            if layout.packing.add(p):
                self.pack()
            return
        with self.backward.lock:
            layout.streams.join(self.pack)
            if layout.packing.add(p):
                self.pack()

    def is_settled(self, p: torch.Tensor) -> bool:
        """Whether no hook after hvdlite's may change its gradient; otherwise that is taken when backward ends."""
        return self.hooks.are_last(p, self.planned.name if self.reducer.overlap else None)

    def pack(self, ended: bool = False) -> None:
        """Bring the gradients noted so far to their views. ended: see `Packing.pack`."""
        packed = self.packing.pack(ended)
        self.reducer.mark_ready(packed, self.round.tag)
        if self.reducer.overlap:
            self.gradients.note_sent(packed)

    def begin_round(self, first: torch.Tensor | None = None) -> None:
        """A round begins. first: the parameter that has the first gradient of a backward() that has begun; then this
        waits for nobody. Otherwise all ranks make another plan where the plan does not fit."""
        compiled.pass_over()
        self.layout.packing.forget()  # not kept here: what is made anew must let go of the gradients that it handed out
        self.gradients.begin_round()
        if self.layout.reducer.abandon_round(self.round.tag, self.gradients.slots.preserve):
            self.round.retried(True)
            if self.gradients.has_aliases():
                raise HvdliteError(
                    "a backward has failed after some of its gradients had left; what came back lies where new ones "
                    "were to be added: call zero_grad(), and backward() again"
                )
        self.round.name(self.steps.number + 1, self.results.rounds + 1)
        if first is None and not self.fits():
            self.refuse_those_of_others()
            self.make_plan(self.trainable())
        self.gradients.slots.note_own(self.gradients.parameters, first)

    def finish_round(self) -> None:
        """The backward() has ended: reduce what is left, and hand out the results. Waits for all ranks."""
        self.complete(self.round.finish())

    def reduce(self) -> None:
        """A round for gradients that no backward() has reduced. Waits for all ranks."""
        self.renew_hooks()  # some may be gone, since no backward() has called them
        self.round.finish_now()
        self.complete(False)

    def complete(self, begun: bool) -> None:
        """From gradients to results. begun: the round has begun with the backward()."""
        try:
            if not begun or (self.layout.packing.at_end and not self.fits()):
                self.begin_round()
            uses = self.exchange()
        except BaseException:
            self.round.lose()
            raise
        self.round.reduced()
        reducer = self.layout.reducer
        self.gradients.give(uses, all_dense=uses is reducer.all_dense)
        if reducer.departure.order:
            self.make_plan(self.planned.parameters, reducer.departure.order)
        if not self.steps.apart:
            self.compare()

    def exchange(self) -> Sequence[Use]:
        """Bring all gradients to their views, and reduce them there. Returns what each was, over all ranks."""
        layout = self.layout
        if self.results.once:
            self.results.refuse_all(list(self.gradients.sparse.values()))
        if layout.streams:
            layout.streams.join(self.pack)
        if layout.packing.at_end:
            layout.packing.pack_rest(layout.reducer.mark_at_end)
        else:
            self.pack(ended=not layout.reducer.overlap)  # else buckets leave with it, before `take_again`
            self.gradients.take_again(layout.reducer)
        try:
            uses = layout.reducer.finish_round(self.gradients.take, self.round.tag)
        except VoidError:
            self.gradients.let_go()
            raise
        layout.packing.hand_over()
        return uses

    def compare(self) -> None:
        """Compare the ranks' weights, now and then. Collective."""
        self.alike.look()

    # A round that fails

    def give_up(self) -> None:
        """This rank is about to join, or to wait for others. If a backward has failed after buckets had left, the
        others learn that the round is void. Never waits: they may come to that round only when this rank has joined."""
        if self.reducer.half_sent:
            self.reducer.void_round(self.round.tag, self.gradients.slots.preserve)

    def void_round(self) -> None:
        """No rank is to have results of the round under way. Never waits."""
        self.round.lose()
        self.reducer.void_round(self.round.tag, self.gradients.slots.preserve)
        self.gradients.let_go()

    def forget_round(self) -> None:
        """Wait until all ranks have come to the end of a void round."""
        self.round.retried(self.reducer.forget_round())

    # Its life

    def start_over(self) -> None:
        """All ranks have joined: count steps from 0, since some have made more."""
        if self.reducer.forget_round():
            self.gradients.let_go()
        self.round.start_over()
        self.results.start_over()
        reducer = self.reducer_of_gradients
        self.steps.start_over({reducer.name: reducer.results.done} if reducer else {})
        self.alike.expect()

    def forget_passes(self) -> None:
        """The gradients accumulated so far are gone."""
        self.round.forget_passes()

    def name_root(self, rank: str) -> None:
        """The rank whose weights are the right ones, in words, for messages."""
        self.alike.name_root(rank)

    def renew(self) -> None:
        """Attach the same optimizer again, in the same way, under the present runtime. Collective."""
        if self.settings.process_set.process_set_id is None:  # it has been removed
            return
        self.detach()
        attach(self.optimizer, self.settings, self.round.passes_per_step, renewed=True)

    def detach(self, heir: torch.optim.Optimizer | None = None) -> None:
        """Take the hooks off; those around the step stay where the heir's attachment reduces its gradients from now
        on."""
        self.sharing.detach(heir)
        self.round.lose()  # what is under way is the heir's, too
        for each in (self.ranks.runtime.after_join, self.ranks.runtime.attachments, self.ranks.runtime.renewables):
            each.remove(self)
        self.ranks.runtime.last_looks.remove(self.alike)
        self.hooks.remove()
        if heir is None:
            self.steps.unhook()


def on_gradient(me: weakref.ref[Attachment], p: torch.Tensor) -> None:
    """A parameter's hook: autograd has added to p.grad. Runs cold, once per parameter: every line here costs
    microseconds."""
    attachment = me()
    if attachment is None:
        return
    if attachment.backward.run != current_run():
        attachment.begin_backward(p)
    if attachment.round.state is OPEN and not attachment.layout.packing.at_end:
        attachment.note(p)


def end_backward(me: weakref.ref[Attachment]) -> None:
    """autograd calls this when a backward() has ended: finish its rounds. Waits for all ranks."""
    attachment = me()
    if attachment is None:
        return
    attachment.backward.begin_anew()
    if attachment.round.state is ACCUMULATING:
        attachment.round.end_pass()
    try:
        several.end(attachment, attachment.ranks.runtime.attachments, current_run())
    finally:
        attachment.backward.forget()


def attach(
    optimizer: torch.optim.Optimizer, settings: Settings, passes_per_step: int, renewed: bool = False
) -> None:
    """Attach to the optimizer, and give it the methods that users call. Collective."""
    attachment = Attachment(optimizer, settings, passes_per_step, renewed)
    optimizer.__dict__.update(methods(attachment, lambda: attachment.optimizer), _hvdlite=attachment)
