"""The overlap trial decides whether buckets leave during backward."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from hvdlite.algorithms import Place
from hvdlite.algorithms.reduction import Reduction
from hvdlite.gradients import reducer as reducers
from hvdlite.gradients.departure import Departure
from hvdlite.gradients.overlap_trial import EACH, WARM_UP, Trial
from hvdlite.gradients.plan import Spec, plan
from hvdlite.gradients.reducer import Reducer
from hvdlite.gradients.use import Use
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.signature import Round
from hvdlite.transports.threads import ThreadTransport, alone, run_ranks

ALL = WARM_UP + 2 * EACH


def test_medians_of_rounds_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow first rounds, failed rounds, and user code between rounds do not count."""
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    trial, ways = Trial(), []
    for number in range(ALL):
        assert not trial.over
        now += 1000.0
        trial.begin()
        now += 7.0
        trial.forget()
        ways.append(trial.early)
        trial.begin()
        now += 50.0 if number < WARM_UP else 1.0 if trial.early else 2.0
        trial.begin()
        now += 0.5
        trial.end()
    assert trial.over and ways.count(True) == ways.count(False) and ways[:2] == [True, False]
    assert trial.medians == [1.5, 2.5] and [len(each) for each in trial.seconds.values()] == [EACH, EACH]


@pytest.mark.parametrize("early_seconds, faster", [((1.0, 4.0, 2.0), False), ((1.0, 3.0, 2.0), True)])
def test_all_ranks_go_on_the_way_that_is_faster_over_all(
    monkeypatch: pytest.MonkeyPatch, early_seconds: tuple[float, ...], faster: bool
) -> None:
    """Each rank alone would decide otherwise. The sums are correct all the time."""
    specs = [Spec(f"p{i}", (40, i + 1), "float32") for i in range(6)]

    def rank_main(transport: ThreadTransport) -> list[bool]:
        lane = Lane(transport, Place(transport.size, False))
        reducer = Reducer(lane, plan(specs, 2048, 1024), Reduction(), "r", Departure(None))
        assert reducer.departure.trial is not None
        reducer.departure.trial = Scripted(early_seconds[transport.rank], 2.2)
        ways = []
        for step in range(ALL + 3):
            ways.append(reducer.overlap)
            for i in reversed(range(len(specs))):
                reducer.views[i][...] = i + step + transport.rank
                reducer.mark_ready([i], Round("step {}", (step,)))
            assert bool(reducer.progress.sent) == reducer.overlap
            reducer.finish_round(lambda index: Use.DENSE, Round("step {}", (step,)))
            for i, view in enumerate(reducer.views):
                np.testing.assert_array_equal(view, np.full(specs[i].shape, 3 * (i + step) + 3))
        assert reducer.departure.trial is None
        lane.leave()
        return ways

    for ways in run_ranks(3, rank_main):
        assert ways == [number % 2 == 0 for number in range(ALL)] + [faster] * 3


class Scripted(Trial):
    def __init__(self, *medians: float) -> None:
        super().__init__()
        self.found = list(medians)

    @property
    def medians(self) -> list[float]:
        return self.found


def test_who_learns_the_order_leaves_the_trial_to_the_next() -> None:
    def rank_main(transport: ThreadTransport) -> Any:
        lane = Lane(transport, Place(transport.size, False))
        layout = plan([Spec("p", (4,), "float32")], 1024, 1024)
        found = [(r.overlap, r.departure.trial is not None) for overlap in (None, True, False) for learn in (False, True)
                 for r in [reducers.Reducer(lane, layout, Reduction(), "r", Departure(overlap, learn))]]  # fmt: skip
        lane.leave()
        return found

    tried = [(True, True), (True, False)]
    assert run_ranks(2, rank_main) == [tried + [(True, False)] * 2 + [(False, False)] * 2] * 2


def test_rounds_without_all_ranks_do_not_count() -> None:
    """The time between them does not count in the next round of all ranks either."""
    reducer = Reducer(
        lane := Lane(alone(), Place(1, False)),
        plan([Spec("p", (4,), "float32")], 64, 64),
        Reduction(),
        "r",
        Departure(None),
    )
    assert (trial := reducer.departure.trial) is not None
    lane.host.some_joined = True
    reducer.mark_ready([0], Round("step {}", (0,)))
    reducer.finish_round(lambda index: Use.DENSE, Round("step {}", (0,)))
    assert trial.rounds == 0 and trial.began is None
