"""p.grad of a plan's parameters, on their way to where the peers can reach them, and back as results."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from hvdlite.arrays import Array
from hvdlite.errors import HvdliteError
from hvdlite.gradients.compression import unknown
from hvdlite.gradients.reducer import Reducer
from hvdlite.gradients.use import Use
from hvdlite.lanes.calls import calling
from hvdlite.system.user_warnings import warn
from hvdlite.torch.attach.parameters import Parameter, dtype_of_gradient, strides_of_gradient
from hvdlite.torch.attach.results import Results
from hvdlite.torch.attach.settings import Settings
from hvdlite.torch.attach.slots import Slots
from hvdlite.torch.private_api import copy_all, version
from hvdlite.torch.sparse import reduce_sparse

NO_GRAPH = (
    "backward(create_graph=True) with hvd.DistributedOptimizer: p.grad becomes the average over the ranks, which is no "
    "part of the graph, so that nothing flows back through it. What is to be differentiated again is had from "
    "torch.autograd.grad(loss, parameters, create_graph=True)"
)


class Gradients:
    """What one optimizer's parameters have in p.grad: each is copied at most once, and its place taken by a view."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.compressor = settings, unknown(settings.compression)
        self.contexts: dict[int, Any] = {}  # by index: what the compressor wants to know to restore a gradient
        self.results = Results(settings)
        self.parameters: Sequence[Parameter] = ()
        self.sparse: dict[int, Parameter] = {}  # by id(); all ranks know of them, and no plan has them
        self.densified: dict[int, Parameter] = {}  # by id(), likewise: sparse ones that travel dense
        self.taken: set[int] = set()  # in this round, by index, where results must not be taken again
        self.sent: dict[int, int] = {}  # in this round, by index: the version of p.grad that may have left

    def plan(self, parameters: Sequence[Parameter], arrays: Sequence[Array]) -> None:
        """These parameters' gradients lie in these arrays from now on."""
        if self.results.once:  # results stay results
            self.results.add_given(p for i, p in enumerate(self.parameters) if self.is_alias(i))
        self.sent.clear()
        self.parameters = parameters
        self.slots = Slots(arrays, [strides_of_gradient(p) for p in parameters])
        dtypes = [dtype_of_gradient(p) for p in parameters]
        self.cast = {i for i, dtype in enumerate(dtypes) if self.compressor or self.slots.views[i].dtype != dtype}

    @property
    def all_parameters(self) -> tuple[torch.Tensor, ...]:
        """Those of the plan, and those with sparse gradients."""
        return (*self.parameters, *self.sparse.values())

    @property
    def need_taking(self) -> bool:
        """Whether each gradient needs `take`, rather than only a copy into its view."""
        return bool(self.cast) or self.results.once

    def begin_round(self) -> None:
        """Nothing has been taken or sent yet."""
        self.sent.clear()
        self.taken.clear()

    def take(self, index: int) -> Use:
        """Put the parameter's gradient into its view, and the view in the gradient's place."""
        p = self.parameters[index]
        grad = p.grad
        if grad is None:
            self.slots.preserve((index,))
            self.put(index, None)
            return Use.UNUSED
        if self.results.once and index not in self.taken:  # reentrant checkpointing computes it once for each segment
            self.results.refuse(p, self.is_alias(index))
            self.taken.add(index)
        if grad.layout is not torch.strided:
            return self.take_sparse(index, grad)
        if not self.slots.holds(index, grad):
            self.slots.preserve((index,))
            if grad.requires_grad:
                warn(NO_GRAPH)
            self.put(index, grad.detach())
            found = self.slots.handed_over(index, grad)
            if index not in self.cast:
                p.grad = found
        return Use.DENSE

    def take_sparse(self, index: int, grad: torch.Tensor) -> Use:
        """The same for a sparse gradient, which travels dense where the user wants that."""
        self.slots.preserve((index,))
        if not self.settings.sparse_as_dense:
            self.put(index, None)
            return Use.SPARSE
        self.put(index, grad.to_dense())
        known = id(self.parameters[index]) in self.densified
        return Use.DENSE if known else Use.DENSIFIED  # which makes it known to all

    def put(self, index: int, grad: torch.Tensor | None) -> None:
        """A gradient, or zeros, into its view, in the view's dtype."""
        view = self.slots.views[index]
        if self.compressor:
            if grad is None:
                p = self.parameters[index]
                grad = torch.zeros_like(p, dtype=dtype_of_gradient(p), requires_grad=False)
            small, self.contexts[index] = self.compressor.compress(grad)
            view.copy_(small)
        elif grad is None:
            view.zero_()
        else:
            view.copy_(grad)

    def restored(self, index: int) -> torch.Tensor:
        """What is in the view, as a gradient."""
        p, view = self.parameters[index], self.slots.views[index]
        if self.compressor:
            grad: torch.Tensor = self.compressor.decompress(view.clone(), self.contexts[index])
            return grad
        dtype = dtype_of_gradient(p)
        return self.slots.alias(index) if view.dtype == dtype else view.to(dtype)

    def is_alias(self, index: int) -> bool:
        """Whether p.grad is what `take` or a result has put there."""
        return self.parameters[index].grad is self.slots.aliases[index]

    def replaced(self) -> list[int]:
        """The parameters in whose p.grad something else is than `take` put there, or would."""
        aliases, own = self.slots.aliases, self.slots.own
        elsewhere = [i for i, p in enumerate(self.parameters) if p.grad is not aliases[i]]
        if own:
            elsewhere = [i for i in elsewhere if self.parameters[i].grad is not own.get(i)]
        return [i for i in elsewhere if i not in self.cast and id(self.parameters[i]) not in self.densified]

    def note_sent(self, indices: Iterable[int]) -> None:
        """p.grad of these is on its way, and must not change any more."""
        for index in indices:
            grad = self.parameters[index].grad
            self.sent[index] = -1 if grad is None else version(grad)

    def has_aliases(self) -> bool:
        """Whether any p.grad lies in memory that peers write to."""
        return any(map(self.is_alias, range(len(self.parameters))))

    def changed(self, replaced: Collection[int]) -> list[int]:
        """The parameters whose p.grad has changed since, or is among those replaced."""
        grads = [(i, self.parameters[i].grad) for i in self.sent]
        return [i for i, grad in grads if i in replaced or (grad is not None and version(grad) != self.sent[i])]

    def take_again(self, reducer: Reducer) -> None:
        """Take what a hook of the user's has put in the place of a gradient that had been taken. Raises HvdliteError
        where that is too late."""
        replaced = self.replaced()
        for index in self.changed(set(replaced)) if self.sent else ():
            if reducer.has_left(index):
                raise HvdliteError(
                    f"the gradient of {reducer.plan.specs[index].name} was changed after it had left. Change it in a "
                    "hook of the parameter (p.register_post_accumulate_grad_hook), or set HVDLITE_OVERLAP=0"
                )
        for index in replaced:
            if reducer.is_marked(index):
                self.take(index)

    def give(self, uses: Sequence[Use], all_dense: bool) -> None:
        """Reduced gradients become p.grad. all_dense: they were dense on all ranks. Waits for all, where sparse ones
        are known."""
        some = all_dense or any(uses) or bool(self.sparse)  # else a hook may have applied them already
        if some:
            self.results.count()
        own = self.give_own(uses) if self.slots.own else ()
        dense: dict[int, torch.Tensor | None] = {}  # by id(): of ranks that had it dense, reduced
        if not all_dense or self.cast or self.densified:  # otherwise the views are there already
            for index, use in enumerate(uses):
                if use is Use.SPARSE:
                    dense[id(self.parameters[index])] = self.become_sparse(index)
                elif index not in own:
                    self.give_one(index, use)
        for key, p in self.sparse.items():
            with calling(f"sparse gradient of {self.settings.names.get(key, 'a parameter')}"):
                reduce_sparse(p, self.settings.terms.op, self.settings.process_set, dense.get(key))
        if self.results.once:
            others = [p for i, p in enumerate(self.parameters) if not self.is_alias(i)]
            self.results.note_given((*others, *self.sparse.values()))
            self.results.note_versions(self.all_parameters)

    def give_own(self, uses: Sequence[Use]) -> Collection[int]:
        """Copy results into gradients that stay what they are. Returns whose."""
        taken = {i: grad for i, grad in self.slots.own.items()
                 if grad is not None and grad is self.parameters[i].grad and uses[i] is Use.DENSE}  # fmt: skip
        if taken:
            found = [self.restored(i) if self.compressor else self.slots.views[i] for i in taken]
            if any(grad.is_conj() or grad.is_neg() for grad in taken.values()):  # which that function does not take
                for grad, result in zip(taken.values(), found, strict=True):
                    grad.copy_(result)
            else:
                copy_all(list(taken.values()), found)
        self.slots.forget_taken()
        return taken.keys()

    def become_sparse(self, index: int) -> torch.Tensor | None:
        """All ranks know now that this is sparse: the next plan is made without it. Returns, sparse, the reduction of
        what ranks had dense; None where none had any. Alike on all ranks."""
        p, dense = self.parameters[index], self.restored(index)
        self.sparse[id(p)] = p
        if p.grad is not None and p.grad.layout is torch.strided:
            p.grad = None  # it is in there
        return dense.to_sparse(1) if dense.any() else None  # type: ignore[call-overload,no-untyped-call,unused-ignore]

    def give_one(self, index: int, use: Use) -> None:
        p = self.parameters[index]
        if use is not Use.UNUSED:
            self.densified |= {id(p): p} if use is Use.DENSIFIED else {}
            dense = self.restored(index)
            p.grad = dense.to_sparse(1) if id(p) in self.densified else dense  # type: ignore[call-overload,no-untyped-call,unused-ignore]

    def let_go(self) -> None:
        """Of the memory that peers write to: in a forked child, and where no results came there."""
        for index, p in enumerate(self.parameters):
            if self.is_alias(index):
                p.grad = None
