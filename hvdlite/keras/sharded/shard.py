"""`Shard`: builds a sharded optimizer for this rank's pieces, and steps them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod

import keras
from keras.optimizers import Optimizer

from hvdlite.arrays import Array
from hvdlite.errors import HvdliteError
from hvdlite.gradients.lists import Gradients
from hvdlite.gradients.settings import Settings
from hvdlite.gradients.tensors import Gradient, Variable
from hvdlite.gradients.use import Use
from hvdlite.gradients.variables import common_name, fixed_shape, inside, is_one_of, name_of
from hvdlite.keras import private_api
from hvdlite.keras.backends import sharding
from hvdlite.keras.sharded.slots import mark, noting
from hvdlite.keras.sharded.stand_ins import Share, itemsize
from hvdlite.lanes.calls import calling
from hvdlite.lanes.signature import Round
from hvdlite.sharding.cuts import Parameter, cut
from hvdlite.sharding.gather import Gather, signature_of
from hvdlite.sharding.kinds import Kind

CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")


class Shard:
    """The pieces of one optimizer's variables, and the steps that move them.

    Attributes:
        optimizer: The optimizer; the inner one of a LossScaleOptimizer.
        gradients: What reduces its gradients.
        local: The variables that stay this rank's own, and are not divided.
        kind: How the other variables can be divided.
        lane: The lane on which the pieces travel.
        shares: All variables, in the optimizer's order; empty before build().
        places: For each model variable and each stand-in, its index in `shares`, by id().
        divided: The variables that are divided among the ranks.
        cut: Those of which several ranks own a part.
        lines: The same as text, for ranks to compare.
        gather: The way in which all ranks get all pieces.
        steps: The number of steps.
    """

    def __init__(self, optimizer: Optimizer, gradients: Gradients, local: Sequence[Variable], kind: Kind) -> None:
        self.optimizer = optimizer
        self.gradients = gradients
        self.local = local
        self.kind = kind
        self.lane = gradients.working_lane()
        self.shares: list[Share] = []
        self.places: dict[int, int] = {}
        self.divided: list[Share] = []
        self.cut: list[Share] = []
        self.lines: tuple[str, ...] = ()
        self.gather: Gather | None = None
        self.steps = 0

    @property
    def name(self) -> str:
        """The optimizer in messages."""
        return f"DistributedOptimizer({type(self.optimizer).__name__}, sharded=True)"

    @property
    def variables(self) -> list[Variable]:
        """The model's variables that the optimizer was built for."""
        return [share.whole for share in self.shares]

    # The methods that replace the optimizer's

    def methods(self) -> dict[str, Callable[..., object]]:
        """Return the methods by the optimizer's names, except apply(), which is called with reduced gradients."""
        return {
            "build": self.build, "stateless_apply": self.refuse_stateless,
            private_api.CLIP_GRADIENTS.attribute: self.clip,
            private_api.USE_WEIGHT_DECAY.attribute: self.use_weight_decay,
        }  # fmt: skip

    def build(self, variables: Iterable[Variable]) -> None:
        """Build the optimizer for this rank's pieces of the variables. Does not communicate.

        Raises:
            ValueError: The optimizer has an option that sharded=True cannot serve.
        """
        if self.optimizer.built:
            return
        require_served(self.optimizer)
        self.divide(list(variables))
        first = len(self.optimizer.variables)
        with noting(self.optimizer) as noted:
            private_api.own_method(self.optimizer, "build")([share.stand_in for share in self.shares])
        divided = {id(inside(share.stand_in)): share for share in self.divided}
        mark(self.optimizer, first, noted, divided, self.gradients.settings, self.name)

    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Variable] | None = None) -> None:
        """Step this rank's pieces with reduced gradients, and give all ranks all pieces. Waits for all ranks."""
        if not grads:
            return
        if trainable_variables is not None and not self.optimizer.built:
            with keras.name_scope(self.optimizer.name):
                self.build(trainable_variables)
        shares = [self.share_of(each) for each in trainable_variables or self.variables]
        self.require_in_place()
        pairs = list(self.to_step(self.clipped(grads), shares))
        for _, share in pairs:
            share.take()
        with self.unscaled():
            private_api.own_method(self.optimizer, "apply")(*map(list, zip(
                *((gradient, share.stand_in) for gradient, share in pairs), strict=True)))  # fmt: skip
        sharding().give(self.divided, self.run)
        for gradient, share in zip(grads, shares, strict=True):  # the class has constrained the others on their owners
            if gradient is not None and share in self.cut:
                constrain(share.whole)

    def clip(self, grads: Sequence[Gradient]) -> Sequence[Gradient]:
        """Return gradients as they are, in the class's own apply: they have been clipped whole."""
        return grads

    def use_weight_decay(self, variable: Variable) -> bool:
        """Return whether the class decays the model's variable, in whose place `variable` stands."""
        whole = self.shares[self.places[id(variable)]].whole
        return private_api.use_weight_decay(
            self.optimizer, whole if isinstance(variable, keras.Variable) else inside(whole)
        )

    def refuse_stateless(self, *args: object, **kwargs: object) -> None:
        """Raise NotImplementedError in place of stateless_apply."""
        raise NotImplementedError(f"{self.name} has no stateless_apply(): use apply()")

    # Parts of these

    def divide(self, variables: list[Variable]) -> None:
        """Divide the variables among the ranks."""
        group = self.gradients.group
        assert group is not None
        common = [variable for variable in variables if not is_one_of(variable, self.local)]
        lengths, sizes = [prod(fixed_shape(each)) for each in common], [itemsize(each) for each in common]
        elements = self.kind is Kind.ELEMENTS
        cuts = cut([Parameter(n, size, elements) for n, size in zip(lengths, sizes, strict=True)], group.size)
        pieces = {id(each): cuts.piece(index, group.rank) for index, each in enumerate(common)}
        for place, each in enumerate(variables):
            share = Share.of(each, *pieces.get(id(each), (0, prod(fixed_shape(each)))))
            self.shares.append(share)
            for key in (each, inside(each), share.stand_in, inside(share.stand_in)):
                self.places[id(key)] = place
            if id(each) in pieces:
                self.divided.append(share)
        several = [len(set(borders)) > 2 for borders in cuts.borders]
        self.cut = [share for share, is_cut in zip(self.divided, several, strict=True) if is_cut]
        self.gather = Gather(cuts, sizes, group.size)
        self.lines = tuple(f"{common_name(each)}: {each.dtype}{list(fixed_shape(each))}" for each in common)

    def share_of(self, variable: Variable) -> Share:
        """Return a model variable's share.

        Raises:
            ValueError: The optimizer was not built for the variable.
        """
        place = self.places.get(id(variable), self.places.get(id(inside(variable))))
        if place is None:
            raise ValueError(
                f"{self.name} was built without the variable {name_of(variable)}: build the optimizer with all "
                "variables that it will step (optimizer.build(model.trainable_variables)), or make another optimizer"
            )
        return self.shares[place]

    def require_in_place(self) -> None:
        """Raise unless the pieces lie where the other ranks expect them.

        Raises:
            RuntimeError: A divided variable has become local.
        """
        if own := [share.whole for share in self.divided if is_one_of(share.whole, self.local)]:
            raise RuntimeError(
                f"{self.name}: {name_of(own[0])} has been divided among the ranks. Call register_local_var() before "
                "the optimizer is built (before fit() or the first step)"
            )

    def clipped(self, grads: Sequence[Gradient]) -> list[Gradient]:
        """Return whole gradients as the class's update would use them: without the loss scale, and clipped."""
        scale = self.optimizer.loss_scale_factor
        values = [gradient if scale is None else gradient / scale for gradient in grads if gradient is not None]
        clipped = iter(private_api.clip_gradients(self.optimizer, values))
        return [None if gradient is None else next(clipped) for gradient in grads]

    def to_step(self, grads: Sequence[Gradient], shares: Sequence[Share]) -> Iterator[tuple[Gradient, Share]]:
        """Yield this rank's pieces with their gradients; also those without gradients, which the class reports.

        The first variable is always among them, if only as an empty piece. So the class counts an iteration and
        updates what is not a variable's, as without sharding.
        """
        first = True
        for gradient, share in zip(grads, shares, strict=True):
            if gradient is None:
                yield None, share
            elif first or not share.is_empty:
                yield share.piece_of(gradient), share
                first = False

    @contextlib.contextmanager
    def unscaled(self) -> Iterator[None]:
        """Return a context in which the class does not divide gradients by the loss scale factor."""
        attributes = vars(self.optimizer)
        before = attributes["loss_scale_factor"]
        attributes["loss_scale_factor"] = None
        try:
            yield
        finally:
            attributes["loss_scale_factor"] = before

    def run(self, memory: Sequence[Array]) -> None:
        """Overwrite the pieces of other ranks with theirs. Waits for all ranks.

        Args:
            memory: The bytes of all divided variables. Those of variables that this rank owns alone are only read.

        Raises:
            HvdliteError: The ranks have restarted communication since the optimizer was built.
            MismatchError: Another rank does something else, or divides other variables; on every rank.
        """
        gather = self.gather
        assert gather is not None
        if self.gradients.enrolment.lane is not self.lane:
            raise HvdliteError(
                f"{self.name}: communication has been restarted, and other ranks' parts of the state may be gone. "
                "Load a checkpoint (hvd.load) into a new optimizer [HVD414]"
            )
        self.steps += 1
        with calling(f"apply() of {self.name}"):
            signature = signature_of(self.gradients.name, self.lines, Round("step {}", (self.steps,)))
            self.lane.run(gather.request(self.lane, memory, signature))

    def refuse_sparse(self, grads: Sequence[Gradient], settings: Settings) -> None:
        """Raise NotImplementedError if a gradient is sparse, and is not to travel dense."""
        if not settings.sparse_as_dense and any(self.gradients.framework.use_of(g) is Use.SPARSE for g in grads):
            raise NotImplementedError(f"{self.name}: a gradient is sparse. Give sparse_as_dense=True")


def require_served(optimizer: Optimizer) -> None:
    """Raise if sharded=True cannot serve the optimizer's options.

    Raises:
        NotImplementedError: An option needs whole variables, or the backend is JAX.
        ValueError: The optimizer has state already.
    """
    name = type(optimizer).__name__
    if keras.backend.backend() == "jax":
        raise NotImplementedError(
            "sharded=True works for Keras on TensorFlow and on PyTorch, not on JAX: set KERAS_BACKEND"
        )
    if hasattr(optimizer, "optimizers"):
        raise NotImplementedError(f"sharded=True cannot serve {name}: it has several optimizers [HVD412]")
    if optimizer.use_ema:
        raise NotImplementedError(
            f"sharded=True cannot serve {name}(use_ema=True): averages are of whole weights [HVD412]"
        )
    if (optimizer.gradient_accumulation_steps or 1) > 1 and any(getattr(optimizer, each) for each in CLIPPING):
        raise NotImplementedError(
            f"sharded=True cannot serve {name} with gradient_accumulation_steps and clipping: Keras would clip sums "
            "of pieces. Use backward_passes_per_step of hvd.DistributedOptimizer, and clipping [HVD412]"
        )
    if optimizer.built:
        raise ValueError(
            f"sharded=True: {name} has state for whole variables already. Call hvd.DistributedOptimizer before the "
            "first fit(), build() or step; hvd.load restores a checkpoint afterwards"
        )


def constrain(variable: Variable) -> None:
    """Apply a variable's constraint, if it has one. All ranks do so, with the same values."""
    constraint = getattr(variable, "constraint", None)
    if constraint is not None:
        variable.assign(constraint(variable))
