"""The states of a round: how far the gradients of one optimizer have come between two steps.

A round is one reduction of all gradients. Usually a backward() opens the round, and hvdlite finishes the round when the
backward() ends. If some gradients were set by hand, or accumulated, step() and synchronize() make a round for these.

    state          meaning
    IDLE           every gradient has been reduced, or step() has applied it
    UNREDUCED      some gradients may be this rank's own: accumulated, made in no_sync(), or left by a failed backward()
    ACCUMULATING   a backward() is under way that only adds to p.grad (backward_passes_per_step)
    OPEN           a backward() is under way, and its gradients are taken as they come, or when it ends
    DEFERRED       a backward() is under way, and the plan no longer fits: the round begins when the backward() ends
    VOID           a backward() is under way, and the previous round has failed, but other ranks may still be in it: the
                   round begins when the backward() ends
    FINISHING      this rank sends the remaining gradients and waits for all ranks

    event                       method        from                  to
    no_sync() begins            expect_local  any                   UNREDUCED from IDLE, else the same
    a backward() begins,
      within no_sync()          note_local    IDLE, UNREDUCED       UNREDUCED
      not the last pass         accumulate    IDLE, UNREDUCED       ACCUMULATING
      as usual                  open          IDLE, UNREDUCED       OPEN
      the plan no longer fits   defer         IDLE, UNREDUCED       DEFERRED
      the last round has failed open_void     IDLE, UNREDUCED       VOID
    a backward() ends,
      not the last pass         end_pass      ACCUMULATING          UNREDUCED
      the last pass             finish        OPEN, DEFERRED, VOID  FINISHING
    step() has to reduce        finish_now    any but FINISHING     FINISHING
    all ranks have results      reduced       FINISHING             IDLE
    something failed            lose          any                   IDLE from IDLE, else UNREDUCED
    step() applies gradients    applied       any but FINISHING     IDLE
    all ranks have joined       start_over    any                   IDLE

A hook never waits for another rank, since the gradients of several optimizers may come in another order on that rank.
A round that needs all ranks in order to begin (DEFERRED, VOID) therefore begins when the backward() ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum, auto

from hvdlite.lanes.signature import Round as Name

WORDS = "step {}, backward {}, attempt {}"


class State(Enum):
    """The state of a round; see the table above."""

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
"""The states in which no backward() is under way."""
TO_FINISH = frozenset((OPEN, DEFERRED, VOID))
"""The states from which a round is finished when its backward() ends."""


def illegal(event: str, state: State, target: State) -> AssertionError:
    """Return the error for a transition that is not in the table."""
    return AssertionError(f"{event}: a round in the state {state.name} cannot become {target.name}")


class Round:
    """The state, the name and the counts of one optimizer's round.

    Attributes:
        state: The present state.
        passes_per_step: How many backward() calls one round sums up.
        paused: Whether gradients stay this rank's own, as within no_sync().
        passes: How many backward() calls have been accumulated for the next round.
        retries: How many attempts at this round have failed after parts of it were reduced. The same on all ranks.
        tag: The round's name. Ranks compare it before each operation.
    """

    def __init__(self, passes_per_step: int, paused: bool) -> None:
        self.state = IDLE
        self.passes_per_step = passes_per_step
        self.paused = paused
        self.passes = 0
        self.retries = 0
        self.tag = Name(WORDS, (0, 0, 0))

    # A backward() begins

    def note_local(self) -> None:
        """A backward() begins, and its gradients stay this rank's own, as within no_sync()."""
        if self.state not in BETWEEN:
            raise illegal("note_local", self.state, UNREDUCED)
        self.state = UNREDUCED

    def accumulate(self) -> None:
        """A backward() begins, and only adds to p.grad."""
        if self.state not in BETWEEN:
            raise illegal("accumulate", self.state, ACCUMULATING)
        self.state = ACCUMULATING

    def open(self) -> None:
        """A backward() begins, and its gradients are taken."""
        if self.state not in BETWEEN:
            raise illegal("open", self.state, OPEN)
        self.state = OPEN

    def defer(self) -> None:
        """A backward() begins, and all ranks must make another plan when it ends."""
        if self.state not in BETWEEN:
            raise illegal("defer", self.state, DEFERRED)
        self.state = DEFERRED

    def open_void(self) -> None:
        """A backward() begins, while other ranks may still be in the previous round, which has failed."""
        if self.state not in BETWEEN:
            raise illegal("open_void", self.state, VOID)
        self.state = VOID

    # A backward() ends

    def end_pass(self) -> None:
        """A backward() that only added to p.grad has ended."""
        if self.state is not ACCUMULATING:
            raise illegal("end_pass", self.state, UNREDUCED)
        self.state = UNREDUCED
        self.passes += 1

    def finish(self) -> bool:
        """The backward() has ended. Return whether the round began with the backward()."""
        begun = self.state is OPEN
        if self.state not in TO_FINISH:
            raise illegal("finish", self.state, FINISHING)
        self.state = FINISHING
        return begun

    def finish_now(self) -> None:
        """A round begins for gradients that no backward() has reduced. A backward() may be under way."""
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
        """The round or the backward() under way has failed or was given up: its gradients are this rank's own."""
        if self.state is not IDLE:
            self.state = UNREDUCED

    # Other events

    def expect_local(self) -> None:
        """A rank, this one or another, may soon have gradients of its own."""
        if self.state is IDLE:
            self.state = UNREDUCED

    def applied(self) -> None:
        """step() has applied the gradients, reduced or not."""
        if self.state is FINISHING:
            raise illegal("applied", self.state, IDLE)
        self.state = IDLE

    def start_over(self) -> None:
        """All ranks count from 0 again, and have no gradients to reduce."""
        self.state = IDLE
        self.passes = self.retries = 0

    def forget_passes(self) -> None:
        """Forget the accumulated backward() calls, since their gradients are gone."""
        self.passes = 0

    def set_passes_per_step(self, passes: int) -> None:
        """Reduce after this many backward() calls, counted from now on."""
        self.passes_per_step = passes
        self.forget_passes()

    def retried(self, partly_reduced: bool) -> None:
        """An attempt was given up. partly_reduced: whether some gradients were reduced; the same on all ranks."""
        self.retries += partly_reduced

    def name(self, step: int, backward: int) -> None:
        """Name the round that begins. The name counts attempts at the same step and backward()."""
        self.tag = Name(WORDS, (step, backward, self.retries + 1))

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Within this context, gradients stay this rank's own."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before
