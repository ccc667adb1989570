"""p.grad of a plan's parameters: on the way into the views, and as results on the way back.

Dense gradients of the usual kind pass through `packing` alone. This module also handles the others: sparse gradients,
gradients with another dtype on the wire, compressed ones, and gradients that users keep.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from hvdlite.arrays import Array
from hvdlite.compression.store import Store
from hvdlite.errors import HvdliteError
from hvdlite.gradients.compression import lossy_of, unknown
from hvdlite.gradients.reducer import Reducer
from hvdlite.gradients.use import Use
from hvdlite.lanes.calls import calling
from hvdlite.system.user_warnings import warn
from hvdlite.torch.attach.parameters import Parameter, dtype_of_gradient, strides_of_gradient
from hvdlite.torch.attach.part import PartOfGradient, Parts, refuse
from hvdlite.torch.attach.results import Results
from hvdlite.torch.attach.settings import TorchSettings
from hvdlite.torch.attach.slots import Slots
from hvdlite.torch.private_api import copy_all, version
from hvdlite.torch.sparse import reduce_sparse

NO_GRAPH = (
    "backward(create_graph=True) with hvd.DistributedOptimizer: p.grad becomes the average over the ranks, which is "
    "not part of the graph, so nothing flows back through it. To differentiate gradients again, compute them by "
    "torch.autograd.grad(loss, parameters, create_graph=True)"
)


def is_finite(p: torch.Tensor) -> bool:
    """Whether a sparse gradient is finite; all ranks have the same one."""
    return p.grad is None or bool(p.grad.coalesce().values().isfinite().all())


class Gradients:
    """The gradients of one optimizer's parameters. Each is copied at most once, and an alias becomes p.grad.

    Attributes:
        settings: The optimizer's settings.
        store: What a lossy compressor keeps from round to round; None without one.
        compressor: The user's own compressor; None if the compressor only casts, or does nothing.
        contexts: The compressor's contexts of this round, by index.
        results: The results that rounds have given.
        parameters: The plan's parameters.
        slots: The views and aliases of the plan.
        cast: The indices of gradients whose views have another dtype, or of all if there is a compressor.
        sparse: The parameters with sparse gradients, by id(). All ranks know them, and no plan has them.
        densified: The parameters with sparse gradients that travel dense, by id(). All ranks know them.
        taken: The indices of gradients taken in this round, if results must not be taken again.
        sent: The versions of gradients that may have left in this round, by index.
    """

    def __init__(self, settings: TorchSettings) -> None:
        self.settings, self.compressor = settings, unknown(settings.compression)
        how = lossy_of(settings.compression)
        self.store = Store(how, settings.scale) if how else None
        self.contexts: dict[int, object] = {}
        self.results = Results(settings)
        self.parameters: Sequence[Parameter] = ()
        self.sparse: dict[int, Parameter] = {}
        self.densified: dict[int, Parameter] = {}
        self.taken: set[int] = set()
        self.sent: dict[int, int] = {}

    def plan(self, parameters: Sequence[Parameter], arrays: Sequence[Array], parts: Parts | None) -> None:
        """Have the gradients of these parameters lie in these arrays from now on.

        Args:
            parameters: The plan's parameters.
            arrays: The memory of their gradients.
            parts: This rank's pieces, if it gets no whole results.
        """
        if self.results.once:  # results remain results
            self.results.add_given(p for i, p in enumerate(self.parameters) if self.is_alias(i))
        self.sent.clear()
        self.parameters = parameters
        self.slots = Slots(arrays, [strides_of_gradient(p) for p in parameters], parts)
        dtypes = [dtype_of_gradient(p) for p in parameters]
        self.cast = {i for i, dtype in enumerate(dtypes) if self.compressor or self.slots.views[i].dtype != dtype}

    @property
    def all_parameters(self) -> tuple[torch.Tensor, ...]:
        """The plan's parameters, and those with sparse gradients."""
        return (*self.parameters, *self.sparse.values())

    @property
    def need_taking(self) -> bool:
        """Whether every gradient needs `take`. Otherwise it only has to be copied into its view."""
        return bool(self.cast) or self.results.once

    def begin_round(self) -> None:
        """Forget what was taken and sent in the previous round."""
        self.sent.clear()
        self.taken.clear()
        for p in self.parameters if self.slots.parts else ():
            if isinstance(p.grad, PartOfGradient):
                refuse(f"a backward() or step() after the last backward(): {self.settings.name(p)}")

    def take(self, index: int) -> Use:
        """Copy a gradient into its view, make the alias p.grad, and return what the gradient was.

        Raises:
            RuntimeError: The gradient is a result that must not be reduced again.
        """
        p = self.parameters[index]
        grad = p.grad
        if grad is None:
            self.slots.preserve((index,))
            self.put(index, None)
            return Use.UNUSED
        if self.results.once and index not in self.taken:  # reentrant checkpointing computes it for each segment
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
        """`take` for a sparse gradient. It travels dense if the user asked for that."""
        self.slots.preserve((index,))
        if not self.settings.sparse_as_dense:
            self.put(index, None)
            return Use.SPARSE
        self.put(index, grad.to_dense())
        known = id(self.parameters[index]) in self.densified
        return Use.DENSE if known else Use.DENSIFIED  # DENSIFIED makes it known to all ranks

    def put(self, index: int, grad: torch.Tensor | None) -> None:
        """Write a gradient, or zeros, into its view, compressed and in the view's dtype."""
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
        """Return the result in a view as a gradient, decompressed and in the gradient's dtype."""
        p, view = self.parameters[index], self.slots.views[index]
        if self.compressor:
            return self.compressor.decompress(view.clone(), self.contexts[index])
        dtype = dtype_of_gradient(p)
        if view.dtype == dtype:
            return self.slots.alias(index)
        return self.slots.parts.of(index, view.to(dtype)) if self.slots.parts else view.to(dtype)

    def is_alias(self, index: int) -> bool:
        """Whether p.grad is the alias."""
        return self.parameters[index].grad is self.slots.aliases[index]

    def replaced(self) -> list[int]:
        """Return the indices of gradients that are neither the alias nor a user's own gradient that was taken."""
        aliases, own = self.slots.aliases, self.slots.own
        elsewhere = [i for i, p in enumerate(self.parameters) if p.grad is not aliases[i]]
        if own:
            elsewhere = [i for i in elsewhere if self.parameters[i].grad is not own.get(i)]
        return [i for i in elsewhere if i not in self.cast and id(self.parameters[i]) not in self.densified]

    def note_sent(self, indices: Iterable[int]) -> None:
        """Remember that these gradients may have left: they must not change any more."""
        for index in indices:
            grad = self.parameters[index].grad
            self.sent[index] = -1 if grad is None else version(grad)

    def has_aliases(self) -> bool:
        """Whether any p.grad lies in memory that other ranks use."""
        return any(map(self.is_alias, range(len(self.parameters))))

    def changed(self, replaced: Collection[int]) -> list[int]:
        """Return the indices of sent gradients that have changed since, or that were replaced."""
        grads = [(i, self.parameters[i].grad) for i in self.sent]
        return [i for i, grad in grads if i in replaced or (grad is not None and version(grad) != self.sent[i])]

    def take_again(self, reducer: Reducer) -> None:
        """Take the gradients that a user's hook has put in place of gradients taken before.

        Raises:
            HvdliteError: The gradient has left already.
        """
        replaced = self.replaced()
        for index in self.changed(set(replaced)) if self.sent else ():
            if reducer.has_left(index):
                raise HvdliteError(
                    f"the gradient of {reducer.plan.specs[index].name} was changed after it had left. Change it in a "
                    "hook of the parameter (p.register_post_accumulate_grad_hook), or set HVDLITE_OVERLAP=0 [HVD308]"
                )
        for index in replaced:
            if reducer.is_marked(index):
                self.take(index)

    def give(self, uses: Sequence[Use], all_dense: bool) -> None:
        """Make the results p.grad. Waits for all ranks if some parameters have sparse gradients.

        Args:
            uses: What each gradient was, over all ranks.
            all_dense: Whether every gradient was dense on all ranks.
        """
        some = all_dense or any(uses) or bool(self.sparse)  # else a hook may have applied them already
        if some:
            self.results.count()
        if self.slots.parts and self.slots.own:
            name = self.settings.name(self.parameters[next(iter(self.slots.own))])
            refuse(f"a tensor besides p.grad of {name} that you keep, in a flat buffer for instance")
        own = self.give_own(uses) if self.slots.own else ()
        dense: dict[int, torch.Tensor | None] = {}  # by id(): what other ranks had dense, reduced
        if not all_dense or self.cast or self.densified:  # otherwise each p.grad is the alias already
            for index, use in enumerate(uses):
                if use is Use.SPARSE:
                    dense[id(self.parameters[index])] = self.become_sparse(index)
                elif index not in own:
                    self.give_one(index, use)
        for key, p in self.sparse.items():
            with calling(f"sparse gradient of {self.settings.name(p)}"):
                reduce_sparse(p, self.settings.terms.op, self.settings.process_set, dense.get(key))
        if self.store and self.store.committed and not all(map(is_finite, self.sparse.values())):
            self.store.take_back()
        if self.results.once:
            others = [p for i, p in enumerate(self.parameters) if not self.is_alias(i)]
            self.results.note_given((*others, *self.sparse.values()))
            self.results.note_versions(self.all_parameters)

    def give_own(self, uses: Sequence[Use]) -> Collection[int]:
        """Copy results into the gradients that users keep. Returns the indices of these."""
        taken = {i: grad for i, grad in self.slots.own.items()
                 if grad is not None and grad is self.parameters[i].grad and uses[i] is Use.DENSE}  # fmt: skip
        if taken:
            found = [self.restored(i) if self.compressor else self.slots.views[i] for i in taken]
            if any(grad.is_conj() or grad.is_neg() for grad in taken.values()):  # copy_all refuses these
                for grad, result in zip(taken.values(), found, strict=True):
                    grad.copy_(result)
            else:
                copy_all(list(taken.values()), found)
        self.slots.forget_taken()
        return taken.keys()

    def become_sparse(self, index: int) -> torch.Tensor | None:
        """All ranks have learned that a gradient is sparse: leave it out of the next plan.

        Returns:
            The sum or average of the gradients that ranks had dense, as a sparse tensor; None if there were none. The
            same on all ranks.
        """
        p, dense = self.parameters[index], self.restored(index)
        self.sparse[id(p)] = p
        if p.grad is not None and p.grad.layout is torch.strided:
            p.grad = None  # `dense` contains it
        return dense.to_sparse(1) if dense.any() else None  # type: ignore[call-overload,no-untyped-call,unused-ignore]

    def give_one(self, index: int, use: Use) -> None:
        """Make one result p.grad, unless no rank had a gradient."""
        p = self.parameters[index]
        if use is not Use.UNUSED:
            self.densified |= {id(p): p} if use is Use.DENSIFIED else {}
            dense = self.restored(index)
            p.grad = dense.to_sparse(1) if id(p) in self.densified else dense  # type: ignore[call-overload,no-untyped-call,unused-ignore]

    def let_go(self) -> None:
        """Set p.grad to None wherever it lies in memory that other ranks use. For a forked child and a failed round."""
        for index, p in enumerate(self.parameters):
            if self.is_alias(index):
                p.grad = None
