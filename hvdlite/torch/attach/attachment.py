"""An attachment to a torch optimizer: hooks on its parameters and around step(). Nothing is wrapped.

    backward():  each gradient is copied once into its slot of the arena (of a large gradient only the part that other
                 ranks read). When the backward() ends, the round is completed, and p.grad is the result. Clipping,
                 unscaling and closures therefore see reduced gradients.
    step():      has nothing left to do, except for gradients set by hand: a hook before step() makes a round for these.

The optimizer stays the same object, so schedulers, isinstance, state_dict, deepcopy and pickling work as before.
Rejected: to communicate only in the hook before step(). A GradScaler unscales gradients earlier, and LBFGS calls the
hook before its closure's backward().
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from functools import partial

import torch

from hvdlite.compression.saved import Saved
from hvdlite.compression.store import Store
from hvdlite.errors import HvdliteError, VoidError
from hvdlite.gradients.attaching import can_renew
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
from hvdlite.torch.attach.settings import TorchSettings
from hvdlite.torch.attach.sharing import Sharing
from hvdlite.torch.attach.steps import Steps
from hvdlite.torch.attach.unsent import keep_in_state_dict
from hvdlite.torch.private_api import current_run


class Attachment:
    """An attachment to one optimizer, which reduces the optimizer's gradients.

    It lives as long as the optimizer, and works as long as the runtime that it was made under.

    Attributes:
        reference: The optimizer, held weakly.
        settings: What the user asked for.
        ranks: The ranks that reduce together.
        sharing: Whether another optimizer reduces the gradients instead.
        gradients: p.grad of the plan's parameters.
        results: The results that rounds have given.
        alike: The comparison of the ranks' weights.
        round: The state of the round.
        backward: Where one backward() ends and the next begins.
        hooks: The hooks on the parameters.
        steps: The steps of the optimizer, and the hooks around them.
        layout: The plan, and all that is replaced with it.
    """

    layout: Layout

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        settings: TorchSettings,
        passes_per_step: int,
        renewed: bool = False,
        hooked: bool = True,
    ) -> None:
        private_api.require()
        self.reference, self.settings = weakref.ref(optimizer), settings
        self.ranks = Ranks(settings.process_set)
        self.sharing = Sharing(renewed)
        if self.ranks.runtime.everyone.size > 1:
            sharing.refuse_some(self, self.others)
        self.gradients = Gradients(settings)
        self.results = self.gradients.results
        self.alike = alike(optimizer, settings, state=not settings.sharded)
        self.round = Round(passes_per_step, paused=self.ranks.alone)
        self.backward = Backward(partial(end_backward, weakref.ref(self)))
        self.hooks = Hooks(self, partial(on_gradient, weakref.ref(self)))
        self.steps = Steps()
        if self.gradients.store:
            keep_in_state_dict(optimizer)
        if not self.ranks.alone:
            self.begin_reducing()
        self.ranks.runtime.registries.renew_later(self)
        if hooked:
            self.steps.hook(optimizer, self)

    def begin_reducing(self) -> None:
        """Plan, share memory, and take over from earlier optimizers with the same parameters. Collective."""
        registries = self.ranks.runtime.registries
        registries.attachments.disperse()  # frees the memory of models that are gone
        self.ranks.open_lane(self, f"DistributedOptimizer({type(self.optimizer).__name__})")
        self.alike.enter(self.ranks.lane, self.ranks.name)
        self.alike.agree()
        self.make_plan(self.to_plan())
        sharing.take_over(self, lambda: registries.attachments)
        registries.attach(self)
        if self.ranks.are_all:
            registries.count_in_join(self)

    # What other objects ask

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer.

        The attachment holds it weakly. Otherwise only the garbage collector would free a dropped optimizer, at another
        time on each rank, and its hooks would reduce gradients until then.
        """
        optimizer = self.reference()
        assert optimizer is not None
        return optimizer

    @property
    def alive(self) -> bool:
        """Whether this attachment reduces gradients."""
        return not self.sharing.detached and self.reference() is not None and self.ranks.in_use

    @property
    def apart(self) -> bool:
        """Whether weights may differ between ranks until the next step, since no_sync() was used."""
        return self.steps.apart

    @property
    def renewed(self) -> bool:
        """Whether `elastic.run` attached the optimizer again."""
        return self.sharing.renewed

    @property
    def name(self) -> str:
        """The name of the rounds on the lane."""
        return self.ranks.name

    @property
    def group(self) -> Group | None:
        """The ranks that reduce together; None if this rank is not among them."""
        return self.ranks.group

    @property
    def lane(self) -> Lane:
        """The optimizer's lane."""
        return self.ranks.lane

    @property
    def planned(self) -> Planned:
        """The parameters as they were when the plan was made."""
        return self.layout.planned

    @property
    def reducer(self) -> Reducer:
        """The reducer of the plan's buckets."""
        return self.layout.reducer

    @property
    def reducers(self) -> Iterable[Reducer]:
        """The reducer, if this rank has one."""
        return () if self.ranks.alone or self.sharing.detached else (self.reducer,)

    @property
    def packing(self) -> Packing:
        """The way from p.grad into the views."""
        return self.layout.packing

    @property
    def streams(self) -> cuda.Streams | None:
        """The streams of the parameters' GPU; None for parameters on the host."""
        return self.layout.streams

    @property
    def is_shared(self) -> bool:
        """Whether other optimizers with the same parameters may still step."""
        return self.sharing.shared

    @property
    def planned_ids(self) -> Collection[int]:
        """The plan's parameters, by id()."""
        return self.planned.index.keys()

    @property
    def planned_parameters(self) -> Iterable[torch.Tensor]:
        """The plan's parameters."""
        return self.gradients.parameters

    @property
    def reducer_of_gradients(self) -> Attachment | None:
        """The attachment that reduces this optimizer's gradients: usually this one. None if there is none."""
        return sharing.reducer_of(self)

    @property
    def way(self) -> tuple[object, ...]:
        """How gradients are reduced, to be compared with another optimizer's."""
        return self.settings.terms, self.round.passes_per_step, self.group, self.settings.sharded

    def others(self) -> Iterable[Attachment]:
        """Return all attachments of this process, whatever their process sets."""
        return (each for each in self.ranks.runtime.registries.renewables() if isinstance(each, Attachment))

    def members(self) -> set[int]:
        """Return the optimizer's parameters, trainable or not, by id(). Empty once the optimizer is gone."""
        optimizer = self.reference()
        return set(map(id, flat(optimizer.param_groups))) if optimizer else set()

    # The plan, which is replaced when the parameters change

    def trainable(self) -> list[Parameter]:
        """Return the parameters that a step may move: also frozen ones that have a gradient.

        Parameters with sparse gradients are left out.
        """
        sparse = self.gradients.sparse
        found = [p for p in flat(self.optimizer.param_groups) if p.requires_grad or p.grad is not None]
        return [p for p in found if id(p) not in sparse] if sparse else found

    def to_plan(self) -> list[Parameter]:
        """Return the trainable parameters that are the same on all ranks.

        Frozen parameters are left out: whether they still have a gradient may differ between ranks.
        """
        return [p for p in self.trainable() if p.requires_grad]

    def fits(self) -> bool:
        """Whether the plan fits the optimizer's present parameters."""
        planned, store = self.layout.planned, self.gradients.store
        if store and store.loaded:  # on all ranks: the next plan takes the values
            return False
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
        """Whether the optimizer has parameters that are not in the plan. The same on all ranks.

        A backward() that reached only such parameters has called no hook.

        Raises:
            RuntimeError: These parameters have gradients, and there is a round whose results must not be reduced again.
        """
        if not self.planned.may_lack_some(self.optimizer.param_groups):
            return False
        self.refuse_those_of_others()
        index, now = self.planned_ids, self.trainable()
        lacking = {i: p for i, p in enumerate(now) if p.requires_grad and id(p) not in index}
        if not self.results.once:
            return bool(lacking)
        for i, p in lacking.items():
            if p.grad is not None:
                name, op = self.settings.name(p, f"parameter.{i}"), self.settings.terms.op.name
                raise RuntimeError(
                    f"the gradient of {name} has not been reduced: the parameter was added or unfrozen after the first "
                    f"backward() of this step, and op={op} cannot reduce that backward()'s results again. Add or "
                    "unfreeze parameters between step() and the first backward()"
                )
        return False

    def refuse_those_of_others(self) -> None:
        """Raise ValueError if a parameter that was added belongs to another attached optimizer, too."""
        sharing.refuse_those_of_others(self, {id(p) for p in self.to_plan()}, self.ranks.runtime.registries.attachments)

    def renew_hooks(self) -> None:
        """Have the hook on all present parameters of the optimizer."""
        self.hooks.renew(flat(self.optimizer.param_groups))

    def make_plan(self, now: Sequence[Parameter], order: list[int] | None = None) -> None:
        """Plan, allocate and hook. Collective. If this raises, the last plan stays.

        Args:
            now: The parameters.
            order: The order in which their gradients come, as indices; None if it is not known.
        """
        to_be = Planned(now, self.settings, self.optimizer.param_groups)
        self.layout = lay_out(to_be, self.ranks, self.gradients, weakly(self.is_settled), order)
        self.renew_hooks()

    # One backward()

    def begin_backward(self, first: torch.Tensor) -> None:
        """The first gradient of a run of autograd's has come. Waits for nobody.

        A backward() has begun, unless the run is nested in the backward() under way.

        Args:
            first: The parameter whose gradient has come.
        """
        run = current_run()
        with self.backward.lock:
            if self.backward.goes_on(run):
                return
            self.round.lose()  # if a backward() was under way, it has failed
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
        """A parameter's gradient has been computed, and may leave or be copied before the backward() ends.

        Two threads call this at once if some parameters lie on the host and some on a GPU.
        """
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
        """Whether no later hook may change a parameter's gradient. If one may, it is taken when backward() ends."""
        return self.hooks.are_last(p, self.planned.name if self.reducer.overlap else None)

    def pack(self, ended: bool = False) -> None:
        """Copy the noted gradients into their views, and send full buckets. ended: whether the backward() has ended."""
        packed = self.packing.pack(ended)
        self.reducer.mark_ready(packed, self.round.tag)
        if self.reducer.overlap:
            self.gradients.note_sent(packed)

    def begin_round(self, first: torch.Tensor | None = None) -> None:
        """Begin a round.

        Args:
            first: The parameter with the first gradient of the backward() under way; then this waits for nobody. None:
                all ranks make another plan if the present one does not fit.

        Raises:
            HvdliteError: A round has failed after some of it was reduced, and the user has not called zero_grad().
        """
        compiled.pass_over()
        self.layout.packing.forget()  # no local variable keeps `packing`: a new plan must free the old one's aliases
        self.gradients.begin_round()
        if self.layout.reducer.abandon_round(self.round.tag, self.gradients.slots.preserve):
            self.round.retried(True)
            if self.gradients.has_aliases():
                raise HvdliteError(
                    "a backward() has failed after some of its gradients had left, and p.grad holds results of the "
                    "failed round: call zero_grad(), and backward() again [HVD307]"
                )
        self.round.name(self.steps.number + 1, self.results.rounds + 1)
        if first is None and not self.fits():
            self.refuse_those_of_others()
            self.make_plan(self.trainable())
        self.gradients.slots.note_own(self.gradients.parameters, first)

    def finish_round(self) -> None:
        """The backward() has ended: reduce the remaining gradients, and hand out the results. Waits for all ranks."""
        self.complete(self.round.finish())

    def reduce(self) -> None:
        """Make a round for gradients that no backward() has reduced. Waits for all ranks."""
        self.renew_hooks()  # torch.utils.swap_tensors may have removed some, and no backward() has noticed it
        self.round.finish_now()
        self.complete(False)

    def complete(self, begun: bool) -> None:
        """Turn gradients into results. Waits for all ranks. begun: whether the round began with the backward()."""
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
        """Copy all gradients into their views, and reduce them there. Waits for all ranks.

        Returns:
            What each gradient was, over all ranks.
        """
        layout = self.layout
        if self.results.once:
            self.results.refuse_all(list(self.gradients.sparse.values()))
        if layout.streams:
            layout.streams.join(self.pack)
        if layout.packing.at_end:
            layout.packing.pack_rest(layout.reducer.mark_at_end)
        else:
            self.pack(ended=not layout.reducer.overlap)  # with overlap, buckets leave before `take_again`
            self.gradients.take_again(layout.reducer)
        try:
            uses = layout.reducer.finish_round(self.gradients.take, self.round.tag)
        except VoidError:
            self.gradients.let_go()
            raise
        layout.packing.hand_over()
        return uses

    def compare(self) -> None:
        """Compare the ranks' weights, if it is time to. Collective."""
        self.alike.look()

    # A round that fails

    def give_up(self) -> None:
        """This rank is about to join, or to wait for others: end a failed round if some of its buckets have left.

        The other ranks learn that the round has no results. Never waits: the others may come to that round only after
        this rank has joined.
        """
        if self.reducer.half_sent:
            self.reducer.void_round(self.round.tag, self.gradients.slots.preserve)

    def void_round(self) -> None:
        """End the round under way without results on any rank. Never waits."""
        self.round.lose()
        self.reducer.void_round(self.round.tag, self.gradients.slots.preserve)
        self.gradients.let_go()

    def forget_round(self) -> None:
        """Wait until all ranks have come to the end of a round without results."""
        self.round.retried(self.reducer.forget_round())

    @property
    def store(self) -> Store | None:
        """What lossy compression keeps from round to round; None without it."""
        return self.gradients.store

    def unsent(self) -> Saved | None:
        """Return the sum over hosts of what lossy compression has not sent; None if there is nothing. Collective."""
        return next((reducer.unsent() for reducer in self.reducers), None)

    # Its life

    def start_over(self) -> None:
        """All ranks have joined: count steps from 0 again, since some ranks have taken more than others."""
        if self.reducer.forget_round():
            self.gradients.let_go()
        self.round.start_over()
        self.results.start_over()
        reducer = self.reducer_of_gradients
        self.steps.start_over({reducer.name: reducer.results.done} if reducer else {})
        self.alike.expect()

    def let_go(self) -> None:
        """In a forked child: gradients must not be views of memory that other ranks write to."""
        self.gradients.let_go()

    def forget_passes(self) -> None:
        """The accumulated gradients are gone."""
        self.round.forget_passes()

    def name_root(self, rank: str) -> None:
        """Name, in messages, the rank with the right weights."""
        self.alike.name_root(rank)

    def renew(self) -> None:
        """Attach the same optimizer again, in the same way, under the present runtime. Collective."""
        if not can_renew(self.settings.process_set):
            return
        self.detach()
        attach(self.optimizer, self.settings, self.round.passes_per_step, renewed=True)

    def detach(self, heir: torch.optim.Optimizer | None = None) -> None:
        """Remove the hooks on the parameters, and those around step() unless there is an heir.

        Args:
            heir: An optimizer that reduces the gradients from now on.
        """
        self.sharing.detach(heir)
        self.round.lose()  # the heir reduces the gradients of a backward() under way, too
        self.ranks.runtime.registries.forget(self, self.alike)
        self.hooks.remove()
        if heir is None:
            self.steps.unhook()


def on_gradient(me: weakref.ref[Attachment], p: torch.Tensor) -> None:
    """Autograd has added to a parameter's gradient: the hook of each parameter.

    Runs once per parameter with cold caches, so that each line takes microseconds.
    """
    attachment = me()
    if attachment is None:
        return
    if attachment.backward.run != current_run():
        attachment.begin_backward(p)
    if attachment.round.state is OPEN and not attachment.layout.packing.at_end:
        attachment.note(p)


def end_backward(me: weakref.ref[Attachment]) -> None:
    """A backward() has ended: finish its rounds. Autograd calls this. Waits for all ranks."""
    attachment = me()
    if attachment is None:
        return
    attachment.backward.expect_another()
    if attachment.round.state is ACCUMULATING:
        attachment.round.end_pass()
    try:
        several.end(attachment, attachment.ranks.runtime.registries.attachments, current_run())
    finally:
        attachment.backward.forget()


def attach(
    optimizer: torch.optim.Optimizer,
    settings: TorchSettings,
    passes_per_step: int,
    renewed: bool = False,
    hooked: bool = True,
) -> Attachment:
    """Attach to an optimizer, and add the methods that users call. Collective.

    Args:
        optimizer: The optimizer.
        settings: What the user asked for.
        passes_per_step: How many backward() calls one round sums up.
        renewed: Whether `elastic.run` attaches the optimizer again.
        hooked: Whether hooks around step() call `steps.before` and `steps.after`. Otherwise the caller calls them.

    Returns:
        The attachment.
    """
    attachment = Attachment(optimizer, settings, passes_per_step, renewed, hooked)
    optimizer.__dict__.update(methods(attachment, lambda: attachment.optimizer), _hvdlite=attachment)
    return attachment
