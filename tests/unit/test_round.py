"""The states of a round: every transition of the table in `round`, and no others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.torch.attach import round as rounds  # noqa: E402
from hvdlite.torch.attach.round import (  # noqa: E402
    ACCUMULATING,
    DEFERRED,
    FINISHING,
    IDLE,
    OPEN,
    UNREDUCED,
    VOID,
    Round,
    State,
)  # fmt: skip

WAYS: dict[State, tuple[str, ...]] = {
    IDLE: (),
    UNREDUCED: ("note_local",),
    ACCUMULATING: ("note_local", "accumulate"),
    OPEN: ("note_local", "open"),
    DEFERRED: ("note_local", "defer"),
    VOID: ("note_local", "open_void"),
    FINISHING: ("finish_now",),
}
"""The events that lead to each state."""

ALL = frozenset(State)
BETWEEN = frozenset((IDLE, UNREDUCED))
TABLE: dict[str, tuple[frozenset[State], Callable[[State], State]]] = {
    "expect_local": (ALL, lambda state: UNREDUCED if state is IDLE else state),
    "note_local": (BETWEEN, lambda state: UNREDUCED),
    "accumulate": (BETWEEN, lambda state: ACCUMULATING),
    "open": (BETWEEN, lambda state: OPEN),
    "defer": (BETWEEN, lambda state: DEFERRED),
    "open_void": (BETWEEN, lambda state: VOID),
    "end_pass": (frozenset((ACCUMULATING,)), lambda state: UNREDUCED),
    "finish": (frozenset((OPEN, DEFERRED, VOID)), lambda state: FINISHING),
    "finish_now": (ALL - {FINISHING}, lambda state: FINISHING),
    "reduced": (frozenset((FINISHING,)), lambda state: IDLE),
    "lose": (ALL, lambda state: IDLE if state is IDLE else UNREDUCED),
    "applied": (ALL - {FINISHING}, lambda state: IDLE),
    "start_over": (ALL, lambda state: IDLE),
}


def in_state(state: State, passes_per_step: int = 2) -> Round:
    found = Round(passes_per_step, paused=False)
    for event in WAYS[state]:
        getattr(found, event)()
    assert found.state is state
    return found


@pytest.mark.parametrize(("event", "state"), list(itertools.product(TABLE, State)), ids=str)
def test_every_transition(event: str, state: State) -> None:
    """It leads where the table says, or is an error that names both states and changes nothing."""
    sources, target = TABLE[event]
    found = in_state(state)
    call: Callable[[], Any] = getattr(found, event)
    if state in sources:
        call()
        assert found.state is target(state)
    else:
        with pytest.raises(AssertionError, match=f"{event}: a round in the state {state.name} cannot become"):
            call()
        assert found.state is state


def test_the_docstring_has_every_state_and_event() -> None:
    lines = [line.split() for line in str(rounds.__doc__).splitlines()]
    assert {state.name for state in State} <= {words[0] for words in lines if words}
    assert set(TABLE) <= {word for words in lines for word in words}


def test_a_round_begun_with_its_backward_is_told_from_one_that_begins_when_that_ends() -> None:
    assert [in_state(state).finish() for state in (OPEN, DEFERRED, VOID)] == [True, False, False]


def test_passes_are_counted_until_a_round_has_been_reduced() -> None:
    found = Round(3, paused=False)
    for last in (False, False, True):
        assert (found.passes + 1 >= found.passes_per_step) is last
        found.note_local()
        if not last:
            found.accumulate()
            found.end_pass()
    found.open()
    found.finish()
    assert found.passes == 2
    found.reduced()
    assert found.passes == 0


def test_a_pass_that_fails_does_not_count() -> None:
    found = in_state(ACCUMULATING)
    found.lose()
    assert found.passes == 0 and found.state is UNREDUCED


def test_other_passes_per_step_count_from_now_on() -> None:
    found = in_state(ACCUMULATING)
    found.end_pass()
    found.set_passes_per_step(3)
    assert found.passes == 0 and found.passes_per_step == 3


def test_attempts_at_the_same_round_have_other_names() -> None:
    found = Round(1, paused=False)
    found.name(4, 1)
    before = found.tag
    found.retried(False)
    found.name(4, 1)
    assert found.tag == before and str(found.tag) == "step 4, backward 1, attempt 1"
    found.retried(True)
    found.name(4, 1)
    assert str(found.tag) == "step 4, backward 1, attempt 2"
    found.finish_now()
    found.reduced()
    assert found.retries == 0


def test_pausing_ends_also_where_something_is_raised() -> None:
    found = Round(1, paused=False)
    with pytest.raises(KeyError), found.pausing():
        with found.pausing():
            pass
        assert found.paused
        raise KeyError
    assert not found.paused
