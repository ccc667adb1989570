"""Attaching to a torch optimizer: hooks on its parameters, nothing wrapped.

    backward():  each parameter's gradient is copied once into its slot of the arena, and `p.grad` becomes that view;
                 an end-of-backward callback completes the round, so that clipping, unscaling and closures all see
                 reduced gradients
    step():      nothing is left to do; for gradients set by hand, a hook before the step completes a round

The optimizer stays the same object: schedulers, isinstance, state_dict, deepcopy and pickling go on working. Rejected:
communicating in the step hook alone (GradScaler unscales before it, LBFGS calls it before its closure's backward).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from operator import is_not
from typing import Any
from weakref import WeakMethod

import torch

from hvdlite import ops, runtime
from hvdlite.buckets import Spec
from hvdlite.errors import HvdliteError, RemovedError
from hvdlite.reducer import Reducer, Use, planned
from hvdlite.torch import _cuda
from hvdlite.torch._backward import Backward, current_run
from hvdlite.torch._packing import Packing, Slots
from hvdlite.torch._settings import Settings
from hvdlite.torch._sparse import reduce_sparse
from hvdlite.torch._tensors import device_name, dtype_name

Parameter = torch.nn.Parameter


def strides_of_gradient(p: torch.Tensor) -> tuple[int, ...]:
    """Those that autograd gives p.grad: the parameter's own, if it lies densely in memory."""
    return torch.empty_like(p, device="meta").stride()


def weakly(hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """The same, as long as its object lives: the collector of cycles does not see the hooks of tensors."""
    reference = WeakMethod(hook)

    def call(p: torch.Tensor) -> None:
        method = reference()
        if method is not None:
            method(p)

    return call


class Attachment:
    """One optimizer's gradients, reduced. Lives as long as the runtime that it was made under."""

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings, passes_per_step: int) -> None:
        self.optimizer, self.settings, self.passes_per_step = optimizer, settings, passes_per_step
        self.runtime = runtime.current()
        self.group = self.runtime.groups.find(settings.process_set)
        self.name = f"optimizer.{self.group.serial('optimizer') if self.group else 0}"
        self.parameters: list[Parameter] = []
        self.sparse: dict[int, Parameter] = {}
        self.densified: set[int] = set()
        self.hooks: dict[int, tuple[Parameter, Any]] = {}  # by id()
        self.heir: torch.optim.Optimizer | None = None  # whose attachment reduces the parameters' gradients instead
        self.once = settings.op is not ops.Average  # the average of equal gradients is theirs: it may be taken again
        self.given: dict[int, torch.Tensor | None] = {}  # results that are not the slots' aliases, by id() of parameter
        self.paused = self.group is None or self.group.size == 1  # then there is nothing to reduce
        self.skipping = self.reducing = self.detached = False
        self.unreduced = False  # a backward since the last round or step has left gradients that are this rank's own
        self.passes = self.rounds = self.retries = self.steps = 0
        self.backward = Backward(self.end_backward)
        self.tag: tuple[int, ...] = ()  # names the round under way on all ranks
        self.addresses: list[int] = []  # of the plan's parameters
        self.run = -1  # the number of autograd's run that had the last gradient
        self.expected: dict[int, int] = {}  # the index, by id(), of each parameter whose gradient it will reduce
        if self.group is not None and not self.paused:
            if len(self.runtime.attachments) >= self.runtime.crowd:  # models that are no more take memory
                gc.collect()  # in a fifth of a second
                self.runtime.crowd = 2 * len(self.runtime.attachments) + 8
            self.lane, self.size = self.group.new_lane(self.name), self.group.size
            self.make_plan(self.trainable())
            self.take_over()
            if self.group is self.runtime.everyone:
                self.runtime.after_join.append(self.start_over)
        self.step_hook = optimizer.register_step_pre_hook(self.before_step)

    def take_over(self) -> None:
        """Detach earlier optimizers whose parameters are all among this one's: they were discarded, or share them, and
        one reduction serves both."""
        mine = self.members()
        for other in [other for other in self.runtime.attachments.values() if other.members() <= mine]:
            other.detach()
            other.heir = self.optimizer
            other.step_hook = other.optimizer.register_step_pre_hook(other.before_step)
        self.runtime.attachments[id(self)] = self
        self.runtime.renewals.append(self.renew)

    def members(self) -> set[int]:
        """The optimizer's parameters, trainable or not, by id()."""
        return {id(p) for group in self.optimizer.param_groups for p in group["params"]}

    @property
    def alive(self) -> bool:
        removed = self.group is not None and self.group.removed
        return not self.detached and not removed and runtime.is_initialized() and runtime.current() is self.runtime

    def trainable(self) -> list[Parameter]:
        groups = self.optimizer.param_groups
        return [p for group in groups for p in group["params"] if p.requires_grad and id(p) not in self.sparse]

    # The plan, made anew when the set of parameters changed

    def prepare(self) -> None:
        """Plan anew if the parameters are not those of the plan, or not what they were. Collective when it plans."""
        now = self.trainable()
        if len(now) != len(self.parameters) or any(map(is_not, now, self.parameters)):
            self.make_plan(now)
        elif self.addresses != (addresses := [p.data_ptr() for p in now]):  # some have been moved, cast, or reshaped
            self.addresses = addresses
            if self.devices != [p.device for p in now] or self.specs != [self.spec(i, p) for i, p in enumerate(now)]:
                self.make_plan(now)
            self.hook(now)

    def make_plan(self, now: list[Parameter], order: list[int] | None = None) -> None:
        """Plan, allocate and hook; order: of gradients, if known. Collective. If it raises, the plan before stays."""
        how = ops.reduction(self.settings.op, self.size, 1.0 / self.settings.predivide, self.settings.predivide)
        specs = [self.spec(i, p) for i, p in enumerate(now)]
        layout, overlap = planned(specs, self.runtime.config, self.lane.place, order)
        gpu = _cuda.gpu_of(now)
        self.reducer = Reducer(self.lane, layout, how, self.name, overlap, gpu, learn=order is None)
        self.streams = _cuda.Streams(gpu.number) if gpu else None
        self.parameters, self.specs, self.addresses = now, specs, [p.data_ptr() for p in now]
        self.devices = [p.device for p in now]
        self.slots = Slots(self.reducer.views, [strides_of_gradient(p) for p in now])
        self.index = {id(p): i for i, p in enumerate(now)}
        self.cast = {i for i, (p, view) in enumerate(zip(now, self.slots.views, strict=True)) if view.dtype != p.dtype}
        last = {bucket.members[-1] for bucket in layout.buckets if overlap}  # with them a bucket may leave
        singly = bool(self.cast) or self.settings.op is not ops.Average
        self.packing = Packing(now, self.slots, self.take, lambda i: self.reducer.mark_ready(i, self.tag), last, singly)
        self.hook(now)

    def hook(self, now: list[Parameter]) -> None:
        """Be called at the gradients of these parameters, and no more at those of others that are gone."""
        members = self.members()
        for p in [p for p, _ in self.hooks.values() if id(p) not in members]:
            self.hooks.pop(id(p))[1].remove()
        for p in now:
            known, there = self.hooks.get(id(p)), getattr(p, "_post_accumulate_grad_hooks", None) or {}
            if known is None or known[1].id not in there:  # torch.utils.swap_tensors takes them away
                handle = p.register_post_accumulate_grad_hook(weakly(self.on_gradient))  # type: ignore[no-untyped-call]
                self.hooks[id(p)] = p, handle

    def spec(self, index: int, p: Parameter) -> Spec:
        dtype = (p.is_floating_point() and self.settings.wire) or dtype_name(p)
        name = self.settings.names.get(id(p), f"parameter.{index}")
        strides = strides_of_gradient(p)
        order = () if torch.empty(p.shape, device="meta").stride() == strides else strides
        return Spec(name, tuple(p.shape), dtype, device_name(p), self.settings.groups.get(id(p)), order)

    # One backward

    def on_gradient(self, p: torch.Tensor) -> None:
        """Autograd has accumulated into p.grad. Runs cold, once per parameter: every line here costs microseconds."""
        if self.run != (run := current_run()):
            self.begin_run(run)
        index = self.expected.get(id(p))
        if index is not None:
            if self.streams:
                self.streams.join(self.packing.pack)
            self.packing.add(index)

    def begin_run(self, run: int) -> None:
        """The first gradient of one of autograd's runs: of a backward, or of one that is nested in it."""
        if self.backward.goes_on(run):
            self.run = run
            return
        self.expected, self.reducing = {}, False  # a backward that raised left marks behind: forget them
        if not self.alive:
            return
        self.unreduced = True
        if self.paused:
            return
        self.run = run
        self.passes += 1
        if self.passes >= self.passes_per_step:
            self.begin_round()
            self.expected, self.reducing = self.index, True
        self.backward.begin(run)

    def begin_round(self) -> None:
        # A retry on one rank must not be added to what the other ranks have begun: the tag tells them apart.
        self.packing.forget()
        self.retries += self.reducer.abandon_round()
        self.tag = (self.steps, self.rounds, self.retries)
        self.prepare()

    def end_backward(self) -> None:
        """Finish its rounds in the order in which the optimizers were attached; that of gradients may differ between
        ranks, which would wait for each other."""
        run, self.run = current_run(), -1
        for each in list(self.runtime.attachments.values()):
            if each.reducing and (each is self or each.backward.ends_with(run)):
                each.finish_round()

    def take(self, index: int) -> Use:
        """Put the parameter's gradient into its view, and the view in the gradient's place."""
        p, view = self.parameters[index], self.slots.views[index]
        grad = p.grad
        if grad is None:
            self.slots.preserve((index,))
            view.zero_()
            return Use.UNUSED
        if self.once:
            self.refuse_accumulated(p)
        if grad.layout is not torch.strided:
            return self.take_sparse(p, grad, view)
        if not self.slots.holds(index, grad):
            self.slots.preserve((index,))
            view.copy_(grad.detach() if grad.requires_grad else grad)  # it does after backward(create_graph=True)
            if index not in self.cast:
                p.grad = self.slots.alias(index)
        return Use.DENSE

    def take_sparse(self, p: Parameter, grad: torch.Tensor, view: torch.Tensor) -> Use:
        """The same for a sparse gradient, which travels dense where the user wants that."""
        if not self.settings.sparse_as_dense:
            view.zero_()
            return Use.SPARSE
        view.copy_(grad.to_dense())
        return Use.DENSE if id(p) in self.densified else Use.DENSIFIED  # which makes it known to all

    def refuse_accumulated(self, p: Parameter) -> None:
        """Raise where p.grad is a result that backward has added to, and reducing it again would be wrong."""
        if self.rounds and p.grad is not None and (p.grad is self.given.get(id(p)) or self.is_alias(p)):
            raise RuntimeError(
                f"a second backward() before step() with op={self.settings.op.name} would reduce the first one's "
                "result again. Use optimizer.no_sync() or backward_passes_per_step, zero_grad() in between (with "
                "set_to_none=True), or op=Average."
            )

    def is_alias(self, p: Parameter) -> bool:
        index = self.index.get(id(p))
        return index is not None and p.grad is self.slots.aliases[index]

    def finish_round(self) -> None:
        """Reduce what is left, and hand out the results. Waits for all ranks."""
        self.expected, self.reducing = {}, False
        if self.once:
            for p in self.sparse.values():
                self.refuse_accumulated(p)
        if self.streams:
            self.streams.join(self.packing.pack)
        self.packing.pack()
        self.take_again()
        uses = self.reducer.finish_round(self.take, self.tag)
        some = uses is self.reducer.all_dense or any(uses) or bool(self.sparse)  # a hook may have applied them already
        self.rounds += some
        self.passes, self.retries, self.unreduced = 0, 0, False
        if uses is not self.reducer.all_dense or self.cast or self.densified:  # else the views are there already
            for index, use in enumerate(uses):
                self.give(index, use)
        for p in self.sparse.values():
            reduce_sparse(p, self.settings.op, self.settings.process_set)
        if self.reducer.order:
            self.make_plan(self.parameters, self.reducer.order)
        if self.once:
            self.given = {id(p): p.grad for p in (*self.parameters, *self.sparse.values()) if not self.is_alias(p)}

    def take_again(self) -> None:
        """Take what a hook of the user's has put in the place of a gradient that had been taken."""
        aliases = self.slots.aliases
        elsewhere = [i for i, p in enumerate(self.parameters) if p.grad is not aliases[i]]
        for index in elsewhere:
            ever_there = index not in self.cast and id(self.parameters[index]) not in self.densified
            if self.reducer.marked[index] and ever_there:
                if self.reducer.has_left(index):
                    raise HvdliteError(
                        f"a hook replaced the gradient of {self.specs[index].name} (p.grad = ...) after it had left. "
                        "Change it in place (p.grad.mul_(...)), or set HVDLITE_OVERLAP=0"
                    )
                self.take(index)

    def give(self, index: int, use: Use) -> None:
        """The reduced gradient becomes p.grad."""
        p, view = self.parameters[index], self.slots.views[index]
        if use is Use.SPARSE:
            self.sparse[id(p)] = p  # known on all ranks now: the next plan is made without it
        elif use is not Use.UNUSED:
            self.densified.update([id(p)] if use is Use.DENSIFIED else [])
            dense = self.slots.alias(index) if view.dtype == p.dtype else view.to(p.dtype)
            p.grad = dense.to_sparse(1) if id(p) in self.densified else dense  # type: ignore[call-overload,no-untyped-call,unused-ignore]

    # Around the step

    def before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Complete a round for gradients that no backward has reduced; a closure's backward will do its own."""
        if not self.alive:
            heirs: Attachment | None = self.heir.__dict__["_hvdlite"] if self.heir else None
            if heirs is None or not heirs.alive:
                self.require_no_successor()
            elif not self.skipping:
                heirs.synchronize()
            return
        if not self.skipping and not any(map(callable, (*args, *kwargs.values()))):  # a closure's backward will do it
            self.synchronize()
        if not self.paused:
            self.steps, self.rounds = self.steps + 1, 0
        self.unreduced = False
        self.backward.forget()

    def synchronize(self) -> None:
        """Complete the round under way, if gradients are still unreduced. Waits for all ranks."""
        if self.alive and not self.paused and (self.rounds == 0 or self.unreduced):
            self.begin_round()
            self.finish_round()

    def require_no_successor(self) -> None:
        runtime.require_not_forked()
        if self.group is not None and self.group.removed:
            raise RemovedError(self.group.ranks)
        runtime.require_attached(self.alive)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes inside only accumulate locally; the next one outside reduces the sum."""
        return self.with_true("paused")

    def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
        """step() inside does not synchronize: the user has, with optimizer.synchronize()."""
        return self.with_true("skipping")

    @contextlib.contextmanager
    def with_true(self, flag: str) -> Iterator[None]:
        before = vars(self)[flag]
        setattr(self, flag, True)
        try:
            yield
        finally:
            setattr(self, flag, before)

    def set_passes(self, passes: int) -> None:
        self.passes_per_step, self.passes = passes, 0

    def renew(self) -> None:
        """Attach the same optimizer again, in the same way, under the present runtime. Collective."""
        self.detach()
        attach(self.optimizer, self.settings, self.passes_per_step)

    def start_over(self) -> None:
        """All ranks have joined: count steps from 0, since some have made more."""
        self.reducer.abandon_round()
        self.expected, self.reducing, self.given, self.unreduced = {}, False, {}, False
        self.passes = self.rounds = self.retries = self.steps = 0

    def detach(self) -> None:
        """Take the hooks off."""
        self.detached = True
        self.runtime.after_join.remove(self.start_over)
        self.runtime.attachments.pop(id(self), None)
        self.runtime.renewals.remove(self.renew)
        for _, hook in self.hooks.values():
            hook.remove()
        self.step_hook.remove()

    def let_go(self) -> None:
        """In a forked child, which would write into its parent's gradients: they lie in memory that is shared."""
        for index, p in enumerate(self.parameters):
            if p.grad is self.slots.aliases[index]:
                p.grad = None

    def methods(self) -> dict[str, Callable[..., Any]]:
        """What users call on the optimizer."""
        return {
            "synchronize": self.synchronize,
            "skip_synchronize": self.skip_synchronize,
            "no_sync": self.no_sync,
            "set_backward_passes_per_step": self.set_passes,
        }


def attach(optimizer: torch.optim.Optimizer, settings: Settings, passes_per_step: int) -> None:
    """Attach to the optimizer, and give it the methods that users call. Collective."""
    attachment = Attachment(optimizer, settings, passes_per_step)
    optimizer.__dict__.update(attachment.methods(), _hvdlite=attachment)
