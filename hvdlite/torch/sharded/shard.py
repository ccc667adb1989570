"""`Shard`: a sharded optimizer's step(). Each rank steps its pieces, then all ranks get all pieces.

before    the last hook before the step: reduce what is left, then narrow
after     the first hook after it: widen, and gather
leave     whatever happened: widen
"""

from __future__ import annotations

import contextlib
from functools import wraps
from typing import cast

import torch

from hvdlite.errors import HvdliteError, MismatchError, VoidError
from hvdlite.lanes.calls import calling
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Round
from hvdlite.sharding.gather import signature_of
from hvdlite.system.user_warnings import say_once
from hvdlite.torch.attach.attachment import Attachment
from hvdlite.torch.attach.parameters import flat
from hvdlite.torch.attach.steps import Arguments, Options, is_closure
from hvdlite.torch.private_api import step_is_nested
from hvdlite.torch.sharded.division import Division
from hvdlite.torch.sharded.pieces import Kept, narrow, widen
from hvdlite.torch.sharded.states import MARK, State, mark_of, packed, whole_state


class Shard:
    """The pieces of one optimizer's parameters, and the steps that move them.

    Attributes:
        attachment: What reduces the optimizer's gradients. It holds the optimizer weakly.
        division: The pieces.
        kept: The narrow parameters, during a step.
        stepping: Whether a step() is under way.
        steps: The number of steps.
        calls: How often the step under way has called its closure.
        sent: Whether the step under way has called the other ranks for its last part.
        saving: Whether state_dict() is called for a whole state.
    """

    def __init__(self, attachment: Attachment, division: Division) -> None:
        self.attachment, self.division = attachment, division
        self.kept: list[Kept] = []
        self.stepping, self.sent, self.saving = False, False, False
        self.steps, self.calls = 0, 0

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return self.attachment.optimizer

    @property
    def name(self) -> str:
        """The optimizer in messages."""
        return f"DistributedOptimizer({type(self.optimizer).__name__}, sharded={self.division.way.asked!r})"

    def whole(self, root_rank: int) -> State | None:
        """Return a state_dict() with the whole state on one rank. Collective if the state is in pieces.

        Args:
            root_rank: The global rank that gets the state.

        Returns:
            None if the optimizer's own state is whole.

        Raises:
            ValueError: `root_rank` is not among the ranks that reduce together.
            RuntimeError: Parameters have changed, so that the pieces no longer fit.
        """
        optimizer, process_set = self.optimizer, self.attachment.settings.process_set
        assert self.attachment.group
        if not self.division.in_pieces:
            return None
        if root_rank not in (ranks := self.attachment.group.ranks):
            raise ValueError(f"rank {root_rank} is none of the ranks {[*ranks]}, which have the state of {self.name}")
        self.division.adopt(optimizer)
        states = whole_state(optimizer, self.division, process_set, root_rank)
        found = self.unmarked()
        others = cast("State", found["state"])  # of frozen parameters, say: these are whole
        return {**found, "state": {**others, **packed(optimizer, self.division.parameters, states)}}

    def unmarked(self) -> State:
        """Return this rank's state_dict() without a mark."""
        self.saving = True
        try:
            return type(self.optimizer).state_dict(self.optimizer)
        finally:
            self.saving = False

    def add_mark(self, optimizer: torch.optim.Optimizer, state: dict[str, object]) -> None:
        """Mark the result of state_dict() as this rank's, unless it is whole, or hvd.save makes it whole."""
        if self.division.in_pieces and not self.saving:
            state[MARK] = mark_of(self.division)
            say_once(
                f"state_dict() of {self.name} has one rank's part of the state. hvd.save('file', optimizer=optimizer), "
                "called on all ranks, writes all of it [HVD411]"
            )

    # One step

    def enter(self) -> bool:
        """A step() begins. Returns False if it is a part of another step().

        Raises:
            RuntimeError: Ranks do not step together now.
        """
        if self.stepping:
            return False
        if not self.attachment.alive:
            raise RuntimeError(
                f"{self.name} no longer reduces gradients, and has a part of its state only: since it was attached, "
                "hvd.shutdown() was called, its process set was removed, or another optimizer with the same "
                "parameters was attached. Load a checkpoint (hvd.load) into a new optimizer [HVD414]"
            )
        if self.attachment.round.paused:
            raise RuntimeError(
                f"step() inside no_sync(): with {self.name} all ranks step together. Call it outside [HVD306]"
            )
        self.stepping, self.sent, self.calls = True, False, 0
        self.steps += 1
        return True

    def before(
        self, optimizer: torch.optim.Optimizer, args: Arguments, kwargs: Options
    ) -> tuple[Arguments, Options] | None:
        """The last hook before the optimizer's own step: narrow.

        Returns:
            Other arguments for it, if there is a closure.
        """
        if step_is_nested(optimizer):
            return None
        if not self.stepping:
            raise RuntimeError(f"{self.name}: call optimizer.step(), not the class's step")
        trainable = [p for p in flat(optimizer.param_groups) if p.requires_grad]
        self.division.divide(trainable)
        self.refuse_sparse()
        self.unscale()
        self.narrow()
        if any(map(is_closure, (*args[1:], *kwargs.values()))):
            return (args[0], *map(self.wrapped, args[1:])), {key: self.wrapped(each) for key, each in kwargs.items()}
        return None

    def wrapped(self, closure: object) -> object:
        """Return a closure that sees whole parameters, up to date; any other argument as it is."""
        if not is_closure(closure):
            return closure

        @wraps(closure)
        def call(*args: object, **kwargs: object) -> object:
            self.widen()
            if self.calls:  # the step has moved parameters since
                self.gather()
            self.sent = False
            self.calls += 1
            result = closure(*args, **kwargs)
            self.narrow()
            return result

        return call

    def after(self, optimizer: torch.optim.Optimizer, args: Arguments, kwargs: Options) -> None:
        """The first hook after the optimizer's own step: widen, and give all ranks all pieces. Waits for all ranks."""
        if not step_is_nested(optimizer):
            self.widen()
            self.gather()

    def fail(self, error: BaseException) -> None:
        """The step has raised an error: the other ranks, which wait for this rank's pieces, raise one as well."""
        self.widen()
        if not self.sent and not isinstance(error, MismatchError):  # which all ranks have raised
            with contextlib.suppress(HvdliteError):  # communication is broken: the step's error says why
                self.send(failed=True)

    def leave(self) -> None:
        """The step has ended."""
        self.widen()
        self.stepping = False

    # Its parts

    def refuse_sparse(self) -> None:
        """Raise NotImplementedError if a gradient is sparse."""
        if any(p.grad is not None and p.grad.layout is not torch.strided for p in self.division.parameters):
            raise NotImplementedError(f"{self.name}: a gradient is sparse. Make its layer with sparse=False")

    @torch.no_grad()
    def unscale(self) -> None:
        """Divide whole gradients by a GradScaler's scale: a fused optimizer would divide its pieces only."""
        values = vars(self.optimizer)
        if not self.division.way.gradients and (scale := values.get("grad_scale")) is not None:
            values["grad_scale"] = None
            for p in self.division.parameters:
                if p.grad is not None:
                    p.grad.div_(scale.to(p.grad.device))

    @torch.no_grad()
    def narrow(self) -> None:
        """Make each parameter its piece."""
        self.division.adopt(self.optimizer)
        for piece in self.division.pieces:
            if kept := narrow(piece):
                self.kept.append(kept)

    @torch.no_grad()
    def widen(self) -> None:
        """Make each parameter whole again."""
        while self.kept:
            widen(self.kept.pop())

    def gather(self) -> None:
        """Overwrite the other ranks' pieces with theirs. Collective; waits for all ranks.

        Raises:
            VoidError: The step has failed on a rank.
        """
        request = self.send()
        request.handle.wait()
        if request.flag:
            rank = self.attachment.lane.members[request.flag - 1]
            raise VoidError(
                f"{self.name}: step {self.steps} has raised an error on rank {rank}, so that no rank has all of the "
                "step. Weights may differ between ranks: load a checkpoint (hvd.load) [HVD307]"
            )
        torch.autograd.graph.increment_version(self.division.parameters)

    def send(self, failed: bool = False) -> Request[None]:
        """Send the request that gives all ranks all pieces. failed: whether there are none, since this rank failed."""
        self.sent = True
        division, lane = self.division, self.attachment.lane
        memory, round = division.in_memory(), Round("step {}, part {}", (self.steps, self.calls))
        with calling(f"step() of {self.name}"):
            signature = signature_of(self.attachment.name, division.lines, round)
            request = division.gather.request(lane, memory, signature, flag=division.rank + 1 if failed else 0)
            lane.submit(request) if failed else lane.begin(request)
        return request
