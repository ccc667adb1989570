"""The states of a round: what an optimizer's gradients have come to, between one step and the next.

A round is one reduction of all gradients. Usually a backward() opens it, and it is finished when that ends. step() and
synchronize() make a round, too, for gradients that no backward() has reduced.

    state          what it means
    IDLE           every gradient there is has been reduced, or step() has applied it
    UNREDUCED      a backward() may have left gradients of this rank alone: accumulated, in no_sync(), or it failed
    ACCUMULATING   a backward() is under way that only adds to p.grad (backward_passes_per_step)
    OPEN           a backward() is under way, and its gradients are taken: as they come, or all when it ends
    DEFERRED       a backward() is under way, but the plan no longer fits: the round begins when the backward() ends
    VOID           a backward() is under way, but the round before has failed, and other ranks may still be in that one:
                   the round begins when the backward() ends
    FINISHING      this rank sends what is left, and waits for all ranks

    event          method        from                                            to
    no_sync()      expect_local  any                                             UNREDUCED from IDLE, else the same
    paused         note_local    IDLE, UNREDUCED                                 UNREDUCED
    accumulates    accumulate    IDLE, UNREDUCED                                 ACCUMULATING
    begins         open          IDLE, UNREDUCED                                 OPEN
    plan is old    defer         IDLE, UNREDUCED                                 DEFERRED
    others wait    open_void     IDLE, UNREDUCED                                 VOID
    pass ends      end_pass      ACCUMULATING                                    UNREDUCED
    backward ends  finish        OPEN, DEFERRED, VOID                            FINISHING
    by hand        finish_now    any but FINISHING                               FINISHING
    all have it    reduced       FINISHING                                       IDLE
    it failed      lose          any                                             UNREDUCED, or the same from IDLE
    step()         applied       any but FINISHING                               IDLE
    join()         start_over    any                                             IDLE

No hook waits for another rank, for several optimizers' gradients may come in another order there. So a round that needs
all ranks to begin (DEFERRED, VOID) begins when backward() ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum, auto

from hvdlite.lanes.signature import Round as Name

WORDS = "step {}, backward {}, attempt {}"


class State(Enum):
    """See the table above."""

    IDLE = auto()
    UNREDUCED = auto()
    ACCUMULATING = auto()
    OPEN = auto()
    DEFERRED = auto()
    VOID = auto()
    FINISHING = auto()


IDLE, UNREDUCED = State.IDLE, State.UNREDUCED
ACCUMULATING, OPEN = State.ACCUMULATING, State.OPEN
DEFERRED, VOID = State.DEFERRED, State.VOID
FINISHING = State.FINISHING
BETWEEN = frozenset((IDLE, UNREDUCED))
"""No backward() is under way."""
TO_FINISH = frozenset((OPEN, DEFERRED, VOID))
"""When the backward() under way ends, its round is finished."""


def illegal(event: str, state: State, target: State) -> AssertionError:
    """The error of an event that is not in the table."""
    return AssertionError(f"{event}: a round in the state {state.name} cannot become {target.name}")


class Round:
    """The state of one optimizer's round, its name, and what it counts.

    paused: gradients stay this rank's own, as within no_sync(). passes_per_step: backward() calls for one round.
    """

    def __init__(self, passes_per_step: int, paused: bool) -> None:
        self.state = IDLE
        self.passes_per_step, self.paused = passes_per_step, paused
        self.passes = 0
        """How many backward() calls have been accumulated for the next round."""
        self.retries = 0
        """How many rounds in a row have failed after parts of them were reduced, on all ranks alike."""
        self.tag = Name(WORDS, (0, 0, 0))
        """The round's name, by which ranks compare what they are about to do."""

    # A backward() begins

    def note_local(self) -> None:
        """A backward() has begun whose gradients stay this rank's own, as in no_sync()."""
        if self.state not in BETWEEN:
            raise illegal("note_local", self.state, UNREDUCED)
        self.state = UNREDUCED

    def accumulate(self) -> None:
        """A backward() has begun that only adds to p.grad."""
        if self.state not in BETWEEN:
            raise illegal("accumulate", self.state, ACCUMULATING)
        self.state = ACCUMULATING

    def open(self) -> None:
        """A backward() has begun, and its gradients are taken."""
        if self.state not in BETWEEN:
            raise illegal("open", self.state, OPEN)
        self.state = OPEN

    def defer(self) -> None:
        """A backward() has begun, and all ranks must make another plan."""
        if self.state not in BETWEEN:
            raise illegal("defer", self.state, DEFERRED)
        self.state = DEFERRED

    def open_void(self) -> None:
        """A backward() has begun, and other ranks may still be in the round before, which has failed."""
        if self.state not in BETWEEN:
            raise illegal("open_void", self.state, VOID)
        self.state = VOID

    # It ends

    def end_pass(self) -> None:
        """A backward() that only added to p.grad has ended."""
        if self.state is not ACCUMULATING:
            raise illegal("end_pass", self.state, UNREDUCED)
        self.state = UNREDUCED
        self.passes += 1

    def finish(self) -> bool:
        """The backward() has ended. Returns whether the round has begun already."""
        begun = self.state is OPEN
        if self.state not in TO_FINISH:
            raise illegal("finish", self.state, FINISHING)
        self.state = FINISHING
        return begun

    def finish_now(self) -> None:
        """A round begins for what no backward() has reduced, also in the middle of one."""
        if self.state is FINISHING:
            raise illegal("finish_now", self.state, FINISHING)
        self.state = FINISHING

    def reduced(self) -> None:
        """All ranks have the results."""
        if self.state is not FINISHING:
            raise illegal("reduced", self.state, IDLE)
        self.state = IDLE
        self.passes = self.retries = 0

    def lose(self) -> None:
        """What was under way has failed, or is not to be finished: its gradients are this rank's own."""
        if self.state is not IDLE:
            self.state = UNREDUCED

    # step() and others

    def expect_local(self) -> None:
        """Gradients may come, on this rank or others, that stay a rank's own."""
        if self.state is IDLE:
            self.state = UNREDUCED

    def applied(self) -> None:
        """step() has applied the gradients, reduced or not."""
        if self.state is FINISHING:
            raise illegal("applied", self.state, IDLE)
        self.state = IDLE

    def start_over(self) -> None:
        """All ranks count from 0, and have no gradients to reduce."""
        self.state = IDLE
        self.passes = self.retries = 0

    def forget_passes(self) -> None:
        """The gradients accumulated so far are gone."""
        self.passes = 0

    def set_passes_per_step(self, passes: int) -> None:
        """Reduce after that many backward() calls, counted from now on."""
        self.passes_per_step = passes
        self.forget_passes()

    def retried(self, partly_reduced: bool) -> None:
        """A round that failed has been given up. partly_reduced: some of it was reduced, as all ranks know."""
        self.retries += partly_reduced

    def name(self, step: int, backward: int) -> None:
        """Name the round that begins: attempts at the same step and backward() are told apart."""
        self.tag = Name(WORDS, (step, backward, self.retries + 1))

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Inside, gradients stay this rank's own."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before
